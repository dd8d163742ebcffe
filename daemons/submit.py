"""A workspace as a Slurm job of its own: `prl up` outside an allocation submits it, `prl down` ends it.

The job's script becomes `prl up --foreground` on the first node, with the settings that were saved here; from there
on all is as inside an allocation. The job's comment is the path of its workspace: by that it is found again.

`plan_of` has what a start would do on any engine (`prl up --dry-run`): which daemon goes where, with which command, by
the code that a start uses. Nodes that are not known yet are called node1, node2 and so on; starts that do not exist
have the number 000000000000.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from daemons.launchers.base import LaunchError, Place, compact, nodes_needed, place_all
from daemons.launchers.slurm import PATIENT_TIMEOUT_S, Allocation, run_slurm, step_command
from daemons.logs import JOB_LOG
from daemons.specs import (
    UP,
    DaemonSpec,
    all_keys,
    on_nodes,
    orchestrator_spec,
    saved_devices,
    service_specs,
    settle_devices,
)
from daemons.supervisor_process import (
    Look,
    Say,
    check_writable,
    down_timeout_s,
    is_ready,
    waits,
    with_log,
)
from daemons.workspace_reader import WorkspaceReader, read_workspace
from prime_rl.configs.system import SlurmConfig, SystemConfig
from prime_rl.contract.files import make_folder, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir

# Between Slurm's warning of the time limit and its SIGKILL, beside what the daemons may take. The warning comes early
# rather than late.
_MARGIN_S = 60.0
_LOOK_EVERY_S = 1.0

_START = "0" * 12
# Stands for the name of a run.
EACH_RUN = "run_ID"


@dataclass(frozen=True)
class Job:
    """`state`: as Slurm has it (PENDING, RUNNING, COMPLETING). `reason`: why it waits, or its nodes."""

    job: str
    state: str
    reason: str

    def __str__(self) -> str:
        return f"job {self.job} ({self.state}{f', {self.reason}' if self.reason else ''})"


def is_for_a_job(system: SystemConfig) -> bool:
    """True when `prl up` has to submit a job: the engine is Slurm, and this process is in no allocation."""
    return system.deployment.engine == "slurm" and Allocation.of() is None


def submission(system: SystemConfig, output: OutputDir) -> list[str]:
    """argv of sbatch. Raises LaunchError when no number of nodes has enough GPUs."""
    table = system.deployment.slurm or SlurmConfig()
    specs = service_specs(output, system)
    num_nodes = table.nodes or nodes_needed(specs, table.gpus_per_node)
    gpus = table.gpus_per_node or max(spec.gpus for spec in specs)
    limits = system.supervisor
    warning_s = 2 * limits.drain_s + 5 * limits.grace_s + _MARGIN_S
    given = {"partition": table.partition, "account": table.account, "time": table.time, "constraint": table.constraint}
    return [
        *("sbatch", "--parsable", f"--job-name=prl {output.path.name}", f"--comment={output.path.resolve()}"),
        *(f"--nodes={num_nodes}", "--ntasks-per-node=1", "--exclusive", "--no-kill", "--requeue"),
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        *(f"--signal=B:TERM@{warning_s:.0f}", "--open-mode=append", f"--output={output.log(JOB_LOG).resolve()}"),
        *(f"--{name}={value}" for name, value in given.items() if value),
        *table.extra_args,
        str(script_file(output)),
    ]


def script_file(output: OutputDir) -> Path:
    """The absolute path of the batch script."""
    return output.component_config("job").with_suffix(".sh").resolve()


def script(output: OutputDir) -> str:
    """The batch script. Slurm's signals go to it, so it becomes the supervisor."""
    command = [sys.executable, "-m", "daemons.cli", "up", "--foreground", "--output-dir", str(output.path.resolve())]
    return f"#!/bin/sh\ncd {shlex.quote(os.getcwd())} || exit 1\nexec {shlex.join(command)}\n"


def start_job(
    system: SystemConfig,
    said: Mapping[str, Any],
    output: OutputDir,
    *,
    stop: Callable[[], bool],
    say: Say,
    on_look: Look,
) -> bool:
    """Submit a workspace's job and wait until all daemons answer; if `stop()` comes first, end it and return false.

    Raises LaunchError.
    """
    if (workspace := read_workspace(output.path)).supervisor_alive:
        raise LaunchError(f"already running: {workspace.output_dir}; stop it with prl down")
    check_writable(output)
    job = submit(system, said, output)
    say(f"submitted job {job}; its log: {output.log(JOB_LOG)}")
    return _wait(system, job, output, stop=stop, say=say, on_look=on_look)


def submit(
    system: SystemConfig, said: Mapping[str, Any], output: OutputDir, environ: Mapping[str, str] = os.environ
) -> str:
    """Submit the job of a workspace, with the settings `said`; returns its number. Raises LaunchError."""
    if found := find_job(output):
        raise LaunchError(f"already submitted: {found}; end it with prl down")
    key = system.inference.api_key_var
    if environ.get(key):
        raise LaunchError(
            f"{key} is set: Slurm would keep the key with the job. Write it to a file of mode 0600 that all nodes see, "
            f"set {key}_FILE to its path, and unset {key}"
        )
    command = submission(system, output)
    make_folder(output.logs)
    script_file(output).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output.component_config(UP), tomli_w.dumps(dict(said)))
    write_atomic(script_file(output), script(output))
    keys = {*all_keys(output), key}
    clean = {name: value for name, value in environ.items() if name not in keys and not value.startswith("/dev/fd/")}
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", env=clean, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        complaint = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise LaunchError(f"Slurm refuses the job: {complaint[-1]}")
    return done.stdout.strip().partition(";")[0]


def _wait(
    system: SystemConfig, number: str, output: OutputDir, *, stop: Callable[[], bool], say: Say, on_look: Look
) -> bool:
    reader, last, deadline = WorkspaceReader(output.path), "", None
    limits = system.supervisor
    while not stop():
        job = find_job(output)
        if job is None:
            raise LaunchError(with_log(f"job {number} ended before the workspace was ready", output, JOB_LOG))
        if str(job) != last:
            say(str(job))
        last = str(job)
        workspace = reader.read()
        if job.state == "RUNNING":
            deadline = deadline or time.monotonic() + limits.start_timeout_s + limits.grace_s + _MARGIN_S
            on_look(workspace)
            if is_ready(workspace):
                return True
        if deadline is not None and time.monotonic() > deadline:
            raise LaunchError(f"{job} is not ready in time; {' '.join(waits(workspace))}: see prl logs, and prl down")
        time.sleep(_LOOK_EVERY_S)
    end_job(output, down_timeout_s(limits), say)
    return False


def has_job(output: OutputDir) -> bool:
    """True when the workspace was ever submitted, and this process is in no allocation."""
    return Allocation.of() is None and script_file(output).exists()


def find_job(output: OutputDir) -> Job | None:
    """The job of a workspace that waits, runs or ends. Raises LaunchError when Slurm does not answer."""
    wanted = str(output.path.resolve())
    listed = run_slurm("squeue", "-h", "--me", "-o", "%A|%T|%R|%k", timeout_s=PATIENT_TIMEOUT_S)
    for line in listed.splitlines():
        job, state, reason, comment = line.split("|", 3)
        if comment == wanted:
            return Job(job, state, "" if reason == "(None)" else reason.strip("()"))
    return None


def end_job(output: OutputDir, timeout_s: float, say: Say, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Have a workspace's job drain and end, and prove it; false without one. Raises LaunchError."""
    job = find_job(output)
    if job is None:
        return False
    say(f"ending {job}")
    is_running = job.state == "RUNNING"
    cancel = ("scancel", "--batch", "--signal=TERM") if is_running else ("scancel",)
    run_slurm(*cancel, job.job, timeout_s=PATIENT_TIMEOUT_S)
    deadline = time.monotonic() + timeout_s
    while (job := find_job(output)) is not None:
        if time.monotonic() > deadline:
            if not is_running:
                raise LaunchError(f"{job} does not end: Slurm still has it")
            say(f"{job} did not stop within {timeout_s:g} s: cancelled")
            run_slurm("scancel", job.job, timeout_s=PATIENT_TIMEOUT_S)
            is_running, deadline = False, time.monotonic() + timeout_s
        sleep(_LOOK_EVERY_S)
    return True


@dataclass(frozen=True)
class Planned:
    """One daemon: its nodes (none where the engine chooses), their number, GPUs on each, ranks in all, and argv."""

    name: str
    nodes: tuple[str, ...]
    num_nodes: int
    gpus: tuple[int, ...]
    ranks: int
    command: tuple[str, ...]

    @property
    def where(self) -> str:
        """The nodes as Slurm writes them, such as `node[1-4]`; `any` or `any 3` where the engine chooses them."""
        return compact(self.nodes) if self.nodes else f"any {self.num_nodes}" if self.num_nodes > 1 else "any"


@dataclass(frozen=True)
class Plan:
    """`submit` and `script`: of the job that would be submitted, empty where there is none."""

    engine: str
    nodes: tuple[str, ...]
    submit: tuple[str, ...]
    script: str
    daemons: tuple[Planned, ...]

    def as_json(self) -> dict[str, Any]:
        """All fields as plain data, for `prl up --dry-run --json`."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people: the job, the table, the commands."""
        size = f", {len(self.nodes)} node{'s' if len(self.nodes) > 1 else ''}" if self.nodes else ""
        found = [f"engine {self.engine}{size}"]
        if self.submit:
            found += ["", f"job: {shlex.join(self.submit)}", *(f"  {line}" for line in self.script.splitlines())]
        cells = [("daemon", "nodes", "GPUs of each", "ranks")]
        for each in self.daemons:
            gpus = compact([str(number) for number in each.gpus]).strip("[]")
            cells.append((each.name, each.where, gpus or "-", str(each.ranks)))
        widths = [max(len(row[column]) for row in cells) for column in range(4)]
        found += [
            "",
            *("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells),
            "",
        ]
        return [*found, *(f"{each.name}: {shlex.join(each.command)}" for each in self.daemons)]


def plan_of(system: SystemConfig, output: OutputDir) -> Plan:
    """Raises LaunchError where the daemons do not fit onto the nodes."""
    output = OutputDir(output.path.resolve())  # as a start names it
    specs = service_specs(output, system, settle_devices(saved_devices(output), os.environ))
    run = orchestrator_spec(RunDir(output.path / EACH_RUN), system)
    if system.deployment.engine == "slurm":
        return _on_slurm(system, output, specs, run)
    if system.deployment.engine == "ray":
        daemons = []
        for spec in (*specs, run):  # Ray chooses the node where ranks meet, and a port there
            argv = on_nodes(spec.argv, spec.num_nodes, "NODE:PORT", _START) if spec.num_nodes > 1 else spec.argv
            daemons.append(_planned(spec, Place((), tuple(range(spec.gpus))), argv))
        return Plan("ray", (), (), "", tuple(daemons))
    here = (socket.gethostname(),)
    daemons = [_planned(spec, Place(here, spec.devices), spec.argv) for spec in (*specs, run)]
    return Plan("local", here, (), "", tuple(daemons))


def _on_slurm(system: SystemConfig, output: OutputDir, specs: Sequence[DaemonSpec], run: DaemonSpec) -> Plan:
    table, here = system.deployment.slurm or SlurmConfig(), Allocation.of()
    is_submitted = is_for_a_job(system)
    if here is None:
        nodes = [f"node{number + 1}" for number in range(table.nodes or nodes_needed(specs, table.gpus_per_node))]
    else:
        nodes = here.usable_nodes()
    job = here.job if here else "JOB"
    daemons = []
    places = place_all(specs, nodes, table.gpus_per_node) | {run.name: Place((nodes[0],))}
    for spec in (*specs, run):
        place = places[spec.name]
        several = len(place.nodes) > 1
        address = (here.address(place.nodes[0]) if here else place.nodes[0]) if several else ""
        command = step_command(output, spec, job, _START, place, address)
        daemons.append(_planned(spec, place, tuple(command)))
    submit = tuple(submission(system, output)) if is_submitted else ()
    return Plan("slurm", tuple(nodes), submit, script(output) if is_submitted else "", tuple(daemons))


def _planned(spec: DaemonSpec, place: Place, command: Sequence[str]) -> Planned:
    num_nodes = len(place.nodes) or spec.num_nodes
    return Planned(spec.name, place.nodes, num_nodes, place.devices, spec.ranks * num_nodes, tuple(command))
