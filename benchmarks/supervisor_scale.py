"""The supervisor of a workspace on a thousand nodes: how fast it places, decides and looks, and which files it reads.

Supervisor, decisions, and the Slurm launcher with its placement are the real ones, over a real folder. Simulated are
Slurm's own programs, the agents and the daemons: of each daemon there is only what it and its agents would write, as
from other machines. Seconds are those of the CPU, over a folder in memory: disks and networks come on top.

    python -m benchmarks.supervisor_scale [NODES RUNS]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from benchmarks.supervisor_idle import RUN_TOML
from daemons.decide import Daemon, Seen, Snapshot, State, decide
from daemons.launchers.agent import AgentRecord
from daemons.launchers.base import place_all
from daemons.launchers.slurm import Allocation, Slurm
from daemons.pidfile import SupervisorLock
from daemons.specs import DaemonSpec, orchestrator_spec, service_specs, write_component_configs
from daemons.supervisor import IDLE_S, Supervisor
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import InferenceStatus, RunStatus, Status, TrainerRunStatus, TrainerStatus
from prime_rl.utils.process import StopFlag

GPUS = 8
NUM_TRAINER_NODES = 128
# Between two looks at a workspace where nothing happens all daemons have written their status, and all agents theirs.
NUM_LOOKS = 5
KINDS = ("read", "written", "folders", "asked")


class Running:
    """The srun of a step that runs."""

    returncode: int | None = None

    def poll(self) -> int | None:
        """Return None: the step never ends."""
        return None


@dataclass(frozen=True)
class Job(Allocation):
    """A job of nodes that do not exist: a step only leaves its command."""

    nodes: tuple[str, ...] = ()
    commands: list[Sequence[str]] = field(default_factory=list)

    def usable_nodes(self, timeout_s: float | None = None) -> list[str]:
        """All nodes of the job."""
        return list(self.nodes)

    def address(self, node: str) -> str:
        """The name of the node itself; nothing connects to it."""
        return node

    def start_step(
        self, command: Sequence[str], keys: Mapping[str, str], environ: Mapping[str, str], log: Path
    ) -> Running:
        """Keep the command and start nothing."""
        self.commands.append(command)
        return Running()


class World:
    """A workspace whose runs are all in slots, and what its daemons and their agents write."""

    def __init__(self, folder: Path, num_nodes: int, num_runs: int) -> None:
        self.output = OutputDir(folder)
        self.job = Job("1", "0", tuple(f"node{number + 1}" for number in range(num_nodes)))
        self.runs = [f"run_{number:04}" for number in range(num_runs)]
        self.system = _system(folder, num_nodes, num_runs)
        self.beats = 0
        for run_id in self.runs:
            run = self.output.run(run_id)
            run.log.parent.mkdir(parents=True)
            run.control.mkdir()
            run.orch_toml.write_text(RUN_TOML, encoding="utf-8")
        self.output.logs.mkdir()
        write_component_configs(self.system, self.output)

    def specs(self) -> list[DaemonSpec]:
        """The services, then the orchestrators of all runs."""
        orchestrators = [orchestrator_spec(self.output.run(run_id), self.system) for run_id in self.runs]
        return [*service_specs(self.output, self.system), *orchestrators]

    def beat(self) -> None:
        """A record of each agent, a status of each daemon."""
        self.beats += 1
        now = time.time()
        for pid, command in enumerate(self.job.commands, start=1000):
            nodes = command[command.index("-w") + 1].split(",")
            module = command.index("daemons.launchers.agent")
            name, start_id = command[module + 2 : module + 4]
            for number, node in enumerate(nodes):
                record = AgentRecord(
                    name=name, start_id=start_id, node=number, host=node, boot_id=node, beat=self.beats
                )
                record.pid, record.start, record.updated_at = pid, f"{node}/1", now
                write_atomic(
                    self.output.agent_record(name, start_id, number), msgspec.json.encode(record), durable=False
                )
            path, status = self._status(name)
            status.pid, status.pid_start, status.host, status.updated_at = pid, f"{nodes[0]}/1", nodes[0], now
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(path, status)

    def _write(self, path: Path, record: msgspec.Struct) -> None:
        write_atomic(path, msgspec.json.encode(record), durable=False)

    def _status(self, name: str) -> tuple[Path, Status]:
        if name == "trainer":
            slots = {run_id: TrainerRunStatus(run_idx=run_idx) for run_idx, run_id in enumerate(self.runs)}
            return self.output.trainer_status, TrainerStatus(state="training", runs=slots)
        if name.startswith("inference"):
            number = int(name.partition("-")[2] or 0)
            path = self.output.replica_status(number) if number else self.output.inference_status
            return path, InferenceStatus(state="serving")
        return self.output.run(name).status, RunStatus(run_id=name, state="running", waiting_on="inference")


def _system(folder: Path, num_nodes: int, num_runs: int) -> SystemConfig:
    """A trainer on up to 128 nodes, an inference server on each of the others."""
    num_trainer_nodes = min(NUM_TRAINER_NODES, num_nodes // 2)
    deployment: dict[str, Any] = {
        "engine": "slurm",
        "trainer": {"nodes": num_trainer_nodes, "gpus_per_node": GPUS},
        "inference": {"replicas": num_nodes - num_trainer_nodes, "gpus_per_replica": GPUS},
        "slurm": {"gpus_per_node": GPUS},
    }
    data = {"output_dir": str(folder), "model": {"name": "m"}, "deployment": deployment}
    return SystemConfig.model_validate({**data, "supervisor": {"max_starting": max(1, num_runs // 10)}})


@dataclass
class Files:
    """Calls of this process since the count began: what it opened, and what it asked for by `stat` and `lstat`."""

    read: int = 0
    written: int = 0
    folders: int = 0
    asked: int = 0

    def opens(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit hook (PEP 578): sees every file that Python opens."""
        if event == "open" and not isinstance(args[0], int):
            flags = args[2]
            self.folders += bool(flags & os.O_DIRECTORY)
            self.written += bool(flags & (os.O_WRONLY | os.O_RDWR))
            self.read += not flags & (os.O_DIRECTORY | os.O_WRONLY | os.O_RDWR)

    def asking(self, call: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        """`call`, with every call of it counted."""

        def count(*args: Any, **options: Any) -> os.stat_result:
            self.asked += 1
            return call(*args, **options)

        return count


@contextmanager
def counted() -> Iterator[Files]:
    files = Files()
    _hooks.append(files.opens)
    with (
        mock.patch.object(os, "stat", files.asking(os.stat)),
        mock.patch.object(os, "lstat", files.asking(os.lstat)),
    ):
        yield files
    _hooks.clear()


_hooks: list[Callable[[str, tuple[Any, ...]], None]] = []


def _hear(event: str, args: tuple[Any, ...]) -> None:
    for hook in _hooks:
        hook(event, args)


sys.addaudithook(_hear)  # it stays until the process ends


def placing_s(world: World) -> float:
    """To place all daemons, one after another."""
    began = time.process_time()
    place_all(world.specs(), world.job.nodes, GPUS)
    return time.process_time() - began


def deciding_s(world: World) -> float:
    """To decide about all daemons, which all run."""
    wanted = {spec.name: spec for spec in world.specs()}
    daemons = {name: Daemon(spec, State.RUNNING) for name, spec in wanted.items()}
    seen = dict.fromkeys(wanted, Seen(lives=True, ready=True, heartbeat_age_s=1.0))
    snapshot = Snapshot(wanted, daemons, seen, frozenset(), world.system.supervisor)
    began = time.process_time()
    assert decide(snapshot, 10.0) == []
    return time.process_time() - began


def measure(num_nodes: int, num_runs: int) -> dict[str, float]:
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        world = World(Path(folder), num_nodes, num_runs)
        lock = SupervisorLock.acquire(world.output)
        assert lock is not None
        launcher = Slurm(world.output, world.job, GPUS)
        supervisor = Supervisor(world.output, world.system.supervisor, launcher, lock, StopFlag())
        try:
            return _measured(world, supervisor)
        finally:
            lock.release()


def _measured(world: World, supervisor: Supervisor) -> dict[str, float]:
    num_daemons = len(world.specs())
    starting: list[float] = []
    while len(world.job.commands) < num_daemons:
        starting.append(_time_s(supervisor.tick))
        world.beat()
    supervisor.tick()
    looks, counts = [], []
    for _ in range(NUM_LOOKS):
        world.beat()
        looks.append(_time_s(supervisor.tick))
        world.beat()
        with counted() as files:
            supervisor.tick()
        counts.append(files)
    look_s = statistics.median(looks)
    per_look = {f"files_{kind}_per_look": statistics.median(getattr(each, kind) for each in counts) for kind in KINDS}
    return {
        "daemons": num_daemons,
        "placed_per_s": num_daemons / placing_s(world),
        "decisions_per_s": num_daemons / deciding_s(world),
        "started_per_s": num_daemons / sum(starting),
        "longest_look_with_starts_s": max(starting),
        "look_s": look_s,
        "looked_at_per_s": num_daemons / look_s,
        **per_look,
        "files_read_per_s": per_look["files_read_per_look"] / (IDLE_S + look_s),
    }


def _time_s(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.supervisor_scale", description=__doc__)
    parser.add_argument("nodes", nargs="?", type=int, default=1000)
    parser.add_argument("runs", nargs="?", type=int, default=5000)
    asked = parser.parse_args()
    for name, value in measure(asked.nodes, asked.runs).items():
        print(f"{name:<28} {value:.4g}")
