"""Daemons as steps of one Slurm job: `srun` starts an agent on each node of a step, which starts the daemon.

A step is judged by the records of its agents, because srun exits with 0 when it loses a node, and Slurm shows a step
whose daemon was orphaned as running. Where srun itself ends, its step is over, and that is seen at once. Steps share
the CPUs and the memory of the job; GPUs are dealt out here, by number, so that no two daemons have the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from daemons.launchers.agent import (
    ORPHANED,
    START_MARK,
    AgentLauncher,
    AgentRecord,
    ask_to_stop,
    forget_starts,
    left_of,
    lost_node,
    read_starts,
    worst_of,
)
from daemons.launchers.base import Alive, Ended, Handle, LaunchError, Place, find_place, new_start_id
from daemons.logs import SRUN_LOG
from daemons.process import daemon_environment
from daemons.specs import MEETING_PORTS, DaemonSpec, keys_of, on_nodes, trainer_spec
from prime_rl.contract.files import make_folder, open_append
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.secrets import handed_over, nameless_file, read_secret

ENGINE = "slurm"
# A controller that is busy answers within moments; one that is away must not stop the supervisor's loop for long.
COMMAND_TIMEOUT_S = 5.0
# The first question decides whether `prl up` succeeds; the loop still turns before the supervisor counts as stalled.
FIRST_TIMEOUT_S = 12.0
# A command of a person waits longer: a controller may be restarting, and the job waits in its queue meanwhile.
PATIENT_TIMEOUT_S = 60.0
# After srun has ended, what its agents wrote last may still be on its way through a shared folder.
SETTLE_S = 4.0
# An agent kills within moments; later the step itself is cancelled.
LAST_RESORT_S = 5.0
# A node that has lost a start is not chosen again before Slurm must have noticed that it is gone.
AVOID_S = 60.0
# Daemons that start together ask Slurm for the job's nodes once.
NODES_KNOWN_S = 5.0
# States (as sinfo shows them) of nodes that still run steps of our own job.
_USABLE = frozenset({"alloc", "mix", "idle", "comp", "drng", "plnd", "resv"})


class Step(Protocol):
    """The srun of one step, as `subprocess` has it."""

    returncode: int | Any

    def poll(self) -> int | None:
        """The exit code of srun, or None while it runs."""


@dataclass(frozen=True)
class Allocation:
    """The job that this process runs in. `restart` counts how often it was requeued: its steps ended with each."""

    job: str
    restart: str

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> Allocation | None:
        """None outside a job."""
        job = environ.get("SLURM_JOB_ID")
        return cls(job, environ.get("SLURM_RESTART_COUNT", "0")) if job else None

    def usable_nodes(self, timeout_s: float | None = None) -> list[str]:
        """The nodes that the job has now and that can run a step, in its order. Raises LaunchError.

        A node that was lost is not the job's any more, also when it is back. `timeout_s`: of each command, as in
        `run_slurm`.
        """
        nodelist = run_slurm("squeue", "-h", "-j", self.job, "-o", "%N", timeout_s=timeout_s).strip()
        names = run_slurm("scontrol", "show", "hostnames", nodelist, timeout_s=timeout_s).split()
        lines = run_slurm("sinfo", "-h", "-N", "-n", nodelist, "-o", "%N %t", timeout_s=timeout_s).splitlines()
        states = dict(line.split()[:2] for line in lines if " " in line)
        return [name for name in names if states.get(name) in _USABLE]

    def address(self, node: str) -> str:
        """Where others reach a node, as Slurm's configuration has it. Raises LaunchError."""
        match = re.search(r"\bNodeAddr=(\S+)", run_slurm("scontrol", "show", "node", "-o", node))
        return match[1] if match else node

    def start_step(
        self, command: Sequence[str], keys: Mapping[str, str], environ: Mapping[str, str], log: Path
    ) -> Step:
        """Run srun, which hands `keys` on to the agents; `log` gets what it complains about. Raises OSError."""
        with nameless_file() as stdin, handed_over(environ, []) as (clean, _), open_append(log) as file:
            stdin.write(json.dumps(keys).encode() + b"\n")
            stdin.seek(0)
            return subprocess.Popen(
                command, stdin=stdin, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=clean
            )


@dataclass(frozen=True)
class Start:
    """A start of one daemon in one life of a job: `Handle.ref`, as text."""

    job: str
    restart: str
    place: Place

    def __str__(self) -> str:
        return " ".join([self.job, self.restart, ",".join(self.place.nodes), ",".join(map(str, self.place.devices))])

    @classmethod
    def parse(cls, ref: str) -> Start | None:
        """The start that `str` has written; None for any other text."""
        match = re.fullmatch(r"(\d+) (\d+) ([\w.,-]+) ([\d,]*)", ref)
        if match is None:
            return None
        devices = tuple(int(number) for number in match[4].split(",") if number)
        return cls(match[1], match[2], Place(tuple(match[3].split(",")), devices))


class Slurm(AgentLauncher):
    """Launcher in one allocation.

    Args:
        allocation: the job whose steps the daemons are. None, outside a job: it starts none, and ends what is left.
        gpus_per_node: GPUs that each node has, None if that is not known.
    """

    def __init__(self, output: OutputDir, allocation: Allocation | None, gpus_per_node: int | None = None) -> None:
        super().__init__(output, ENGINE)
        self._allocation = allocation
        self._gpus_per_node = gpus_per_node
        self._sruns: dict[str, Step] = {}
        self._ended_at: dict[str, float] = {}
        self._started: dict[str, tuple[str, Place]] = {}
        self._lost: dict[str, float] = {}
        self._usable: tuple[float, list[str]] | None = None
        self._has_asked = False
        self._last_resorts: dict[str, threading.Thread] = {}

    def start(self, spec: DaemonSpec) -> Handle:
        """`Launcher.start`. Raises LaunchError outside a job, for want of nodes or GPUs, and when Slurm fails."""
        here, place = self._place(spec)
        start_id = new_start_id()
        forget_starts(self.output, spec.name, but=self._started)
        make_folder(self.output.starts)
        make_folder(self.output.logs)
        address = here.address(place.nodes[0]) if len(place.nodes) > 1 else ""
        command = step_command(self.output, spec, here.job, start_id, place, address)
        environ = daemon_environment(self.output.path, spec.name) | {START_MARK: start_id}
        keys = {each: key for each in keys_of(spec, self.output) if (key := read_secret(each, os.environ))}
        self._sruns[start_id] = here.start_step(command, keys, environ, self.output.log(SRUN_LOG))
        self._started[start_id] = (spec.name, place)
        return Handle(engine=ENGINE, name=spec.name, start_id=start_id, ref=str(Start(here.job, here.restart, place)))

    def look(self, handle: Handle) -> Alive | Ended:
        """`Launcher.look`: by the records of the agents and by srun.

        A start of another job, or from before this one was requeued, has ended.
        """
        start = Start.parse(handle.ref)
        here = self._allocation
        if start is None or here is None or (start.job, start.restart) != (here.job, here.restart):
            return Ended(None, "the Slurm job that it ran in is over")
        records = read_starts(self.output, handle.name, handle.start_id, len(start.place.nodes))
        seen = self._judge(handle, start.place, records)
        if isinstance(seen, Alive):
            self._started.setdefault(handle.start_id, (handle.name, start.place))
            return seen
        self._usable = None  # its nodes may have ended with it
        if left := left_of(records.values(), self._beats):
            return replace(seen, left=left)
        self._started.pop(handle.start_id, None)
        self._beats.forget(handle.start_id)
        return seen

    def has_news(self) -> bool:
        """`Launcher.has_news`: whether an srun has ended whose start `look` has not settled yet."""
        return any(srun.poll() is not None for start, srun in self._sruns.items() if start in self._started)

    def stop(self, handle: Handle, grace_s: float) -> None:
        """`Launcher.stop`: asks the agents. With 0 a thread cancels the step if it still runs after LAST_RESORT_S."""
        ask_to_stop(self.output, handle.name, handle.start_id, grace_s)
        running = self._last_resorts.get(handle.start_id)
        if grace_s <= 0 and (running is None or not running.is_alive()):
            thread = threading.Thread(target=self._cancel_later, args=(handle,), name=f"scancel {handle.name}")
            self._last_resorts[handle.start_id] = thread
            thread.start()

    def _judge(self, handle: Handle, place: Place, records: Mapping[int, AgentRecord]) -> Alive | Ended:
        ended = [record for record in records.values() if record.state == "ended"]
        failed = [record for record in ended if record.exit_code != 0]
        if failed or len(ended) == len(place.nodes):
            self._avoid(place.nodes[record.node] for record in ended if record.reason == ORPHANED)
            worst = worst_of(ended)
            return Ended(worst.exit_code, worst.reason, node=worst.node)
        srun = self._sruns.get(handle.start_id)
        if srun is not None and srun.poll() is not None:  # its agents are killed: their silence says nothing of nodes
            since = self._ended_at.setdefault(handle.start_id, time.monotonic())
            if time.monotonic() - since > SETTLE_S:
                self._avoid(node for number, node in enumerate(place.nodes) if number not in records)
                silent = [number for number in range(len(place.nodes)) if records.get(number) not in ended]
                names = ", ".join(place.nodes[number] for number in silent)
                code = f"srun exit code {srun.returncode}, see {self.output.log(SRUN_LOG)}"
                reason = f"its step on {names} ended, and its agent left no final record: {code}"
                return Ended(None, reason, node=silent[0])
        elif (lost := lost_node(handle.start_id, len(place.nodes), records, self._beats)) is not None:
            self._avoid([place.nodes[lost]])
            return Ended(None, f"node {place.nodes[lost]} is lost: its agent is silent", node=lost)
        first = records.get(0)
        return Alive(first.process if first else None)

    def _avoid(self, nodes: Iterable[str]) -> None:
        self._lost |= dict.fromkeys(nodes, time.monotonic())

    def _place(self, spec: DaemonSpec) -> tuple[Allocation, Place]:
        here = self._allocation
        if here is None:
            raise LaunchError('deployment.engine = "slurm" outside a Slurm job: start the workspace with prl up')
        now = time.monotonic()
        self._lost = {node: at for node, at in self._lost.items() if now - at < AVOID_S}
        if self._usable is None or now - self._usable[0] > NODES_KNOWN_S:
            limit_s, self._has_asked = None if self._has_asked else FIRST_TIMEOUT_S, True
            self._usable = (now, here.usable_nodes(limit_s))
        usable = self._usable[1]
        up = [node for node in usable if node not in self._lost] or usable
        taken, trainer = dict(self._started.values()), trainer_spec(self.output)
        return here, find_place(spec, up, taken, trainer, self._gpus_per_node)

    def _cancel_later(self, handle: Handle) -> None:
        """SIGKILL by Slurm, to a step whose agents do not answer."""
        deadline = time.monotonic() + LAST_RESORT_S
        srun, start = self._sruns.get(handle.start_id), Start.parse(handle.ref)
        num_nodes = len(start.place.nodes) if start else 0
        while time.monotonic() < deadline:
            records = read_starts(self.output, handle.name, handle.start_id, num_nodes).values()
            all_ended = sum(each.state == "ended" for each in records) == num_nodes
            if all_ended and (srun is None or srun.poll() is not None):
                return
            time.sleep(0.1)
        with contextlib.suppress(LaunchError):  # Slurm is away, and the agents were asked
            if start is not None and (step := find_step(start.job, handle.start_id)):
                run_slurm("scancel", step)


def step_command(output: OutputDir, spec: DaemonSpec, job: str, start_id: str, place: Place, address: str) -> list[str]:
    """argv of srun: an agent on each node of `place`, in a step that is named after its start.

    Steps overlap, and each has all CPUs of its nodes: with `--exact` it would have one CPU a task.
    `address`: where other nodes reach the first one, for the ranks' rendezvous.
    """
    argv = spec.argv
    if len(place.nodes) > 1:
        endpoint = f"{address}:{MEETING_PORTS[int(start_id, 16) % len(MEETING_PORTS)]}"
        argv = on_nodes(argv, len(place.nodes), endpoint, start_id)
    num_nodes = str(len(place.nodes))
    devices = ["--devices", ",".join(map(str, place.devices))] if place.devices else []
    agent = [sys.executable, "-m", "daemons.launchers.agent", str(output.path.resolve()), spec.name, start_id]
    return [
        *("srun", "--jobid", job, "--job-name", start_id, "--overlap", "--mem=0", "--cpu-bind=none"),
        *("-N", num_nodes, "-n", num_nodes, "--ntasks-per-node=1", "-w", ",".join(place.nodes)),
        *("--kill-on-bad-exit=0", "--distribution=block", "--unbuffered"),
        *(*agent, "--node", "SLURM_PROCID", *devices, "--", *argv),
    ]


def find_step(job: str, start_id: str) -> str | None:
    """JOB.STEP of a start that Slurm still shows, or None. Raises LaunchError."""
    for line in run_slurm("squeue", "-h", "-s", "-j", job, "-o", "%i %j").splitlines():
        step, _, name = line.partition(" ")
        if name.strip() == start_id:
            return step
    return None


def run_slurm(*command: str, timeout_s: float | None = None) -> str:
    """Standard output of one of Slurm's commands. Raises LaunchError, also after `timeout_s` (COMMAND_TIMEOUT_S)."""
    limit_s = COMMAND_TIMEOUT_S if timeout_s is None else timeout_s
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=limit_s, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{command[0]} did not answer within {limit_s:g} s: see whether slurmctld runs") from error
    except OSError as error:
        raise LaunchError(f"cannot run {command[0]}: {error}") from error
    if done.returncode:
        output = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise LaunchError(f"{' '.join(command)} failed: {output.splitlines()[0]}")
    return done.stdout
