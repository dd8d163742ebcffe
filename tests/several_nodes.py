"""A workspace of real daemons on several nodes: a trainer of two ranks, two inference servers and three runs.

The nodes are all on this host. The runs train without end, a step every few seconds that costs little, so that there is
time for faults; `finish` ends them, and `check_weights` compares what they reached with what one machine reaches.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from daemons.launchers.agent import START_MARK
from daemons.process import DAEMON_MARK
from daemons.records import recorded
from prime_rl.contract.layout import list_rollout_steps, list_steps
from prime_rl.contract.status import DaemonStatus, read_status
from tests.system_support import ROOT, Workspace, make_workspace

RUNS = ("run_a", "run_b", "run_c")
NUM_RANKS = NUM_SERVERS = 2
TABLES = """\
grace_s = 2.0
# The tests kill, and not the runs.
max_deaths_of_run = 1000
drain_s = 30.0
backoff_s = 0.1
max_backoff_s = 2.0
[deployment]
engine = "{engine}"
[deployment.trainer]
nodes = 2
min_nodes = {min_nodes}
[deployment.inference]
replicas = 2
"""
RUN_TOML = """\
batch_size = 4
rollouts_per_example = 2
max_steps = 100_000
max_async_level = 1
seed = {seed}
[model]
name = "{model}"
[optim]
lr = 0.0005
[sampling]
max_tokens = 8
[ckpt]
interval = 2
keep_rollouts = true
[[env]]
id = "plugin:paced"
"""
PACED = '''
import asyncio
from prime_rl.orchestrator.envs import Example, Outcome

class Paced:
    """Takes any answer, and time; rewards many different letters."""

    id = "paced"

    def __init__(self, args, seed):
        pass

    def examples(self, split):
        return [Example(str(number), [{"role": "user", "content": f"Say {number}"}], "") for number in range(64)]

    async def rollout(self, example, policy):
        answer = await policy.complete(example.messages)
        await asyncio.sleep(3)
        return Outcome(len(set(answer)) / 8)
'''


def install_paced(folder: Path) -> None:
    """The environment `plugin:paced`, for every process with `folder` in its PYTHONPATH."""
    info = folder / "paced-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paced\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[prime_rl.environments]\npaced = paced_env:Paced\n")
    (folder / "paced_env.py").write_text(PACED)


@dataclass(frozen=True)
class SeveralNodes:
    workspace: Workspace

    @classmethod
    def make(cls, folder: Path, model: Path, engine: str, tables: str, *, min_nodes: int = 1) -> SeveralNodes:
        workspace = make_workspace(folder, model, slots=len(RUNS))
        ours = TABLES.format(engine=engine, min_nodes=min_nodes) + tables
        workspace.system_toml.write_text(workspace.system_toml.read_text() + ours)
        for seed, run_id in enumerate(RUNS):
            path = folder / f"{run_id.removeprefix('run_')}.toml"
            path.write_text(RUN_TOML.format(model=model, seed=seed))
            workspace.prl("runs", "add", str(path))
        return cls(workspace)

    def record(self, name: str) -> DaemonStatus:
        status = read_status(self.workspace.paths.daemon_status(name), DaemonStatus)
        assert status is not None, f"no record of {name}"
        return status

    def published(self) -> dict[str, int]:
        """The newest version of each run."""
        folders = {run_id: self.workspace.run_dir(run_id).broadcast for run_id in RUNS}
        return {run_id: max(list_steps(path, stable_only=True), default=0) for run_id, path in folders.items()}

    def all_train(self) -> None:
        """Wait until each run has made a step from now on."""
        before = self.published()
        self.wait(
            lambda: all(step > before[run_id] for run_id, step in self.published().items()),
            f"all runs to train beyond {before}",
        )

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        self.workspace.wait(condition, what)

    def restart(self, name: str, act: Callable[[], object]) -> None:
        """Do what ends a daemon, and wait until the supervisor has started it again, and all runs train."""
        before = self.record(name).handle
        act()

        def runs_again() -> bool:
            # A supervisor that starts removes the record of a daemon that never crashed, and writes a new one.
            now = read_status(self.workspace.paths.daemon_status(name), DaemonStatus)
            return now is not None and now.state == "running" and now.handle not in (None, before)

        self.wait(runs_again, f"{name} to run again")
        self.all_train()
        self.no_strays()

    def crash(self, name: str, process: psutil.Process) -> None:
        """kill -9 of a process of a daemon, which is written down as a crash, and all goes on."""
        before = len(self.record(name).crashes)
        self.restart(name, process.kill)
        assert len(self.record(name).crashes) > before

    def no_strays(self) -> None:
        """Wait until each process of a daemon belongs to the start that is recorded; each rank is there once."""
        self.wait(lambda: not self._strays(), "all processes of earlier starts to be gone")
        self.ranks()

    def _strays(self) -> set[int]:
        records = recorded(self.workspace.paths).values()
        starts = {(each.name, each.handle.start_id) for each in records if each.handle}
        found = set()
        for process in self.workspace.processes():
            with contextlib.suppress(psutil.Error):
                marks = process.environ()
                if START_MARK in marks and (marks[DAEMON_MARK], marks[START_MARK]) not in starts:
                    found.add(process.pid)
        return found

    def process(self, name: str) -> psutil.Process:
        """A daemon's first process."""
        child = self.record(name).child
        assert child is not None, name
        return psutil.Process(child.pid)

    def ranks(self) -> dict[int, psutil.Process]:
        """The trainer's processes, without torchrun. No rank is there twice."""
        found: dict[int, psutil.Process] = {}
        for process in self.workspace.processes():
            with contextlib.suppress(psutil.Error):
                if "prime_rl.trainer.train" in process.cmdline() and "RANK" in (environ := process.environ()):
                    rank = int(environ["RANK"])
                    assert rank not in found, f"rank {rank} is process {found[rank].pid} and {process.pid}"
                    found[rank] = process
        return found

    def serve_all(self) -> bool:
        """Whether every inference server serves an adapter of each run."""
        servers = self.workspace.json("status")["inference"]
        served = [{name.split("@")[0] for name in server["adapters"]} for server in servers]
        return served == [set(RUNS)] * NUM_SERVERS

    def finish(self) -> None:
        """Let all runs end, by using up their budget."""
        for run_id in RUNS:
            self.workspace.prl("runs", "set", run_id, "budget.max_tokens=1")
        self.wait(lambda: all(self.workspace.state(run_id) == "finished" for run_id in RUNS), "all runs to finish")

    def check_weights(self) -> None:
        """No step of any run is missing, and one process that trains on their batches reaches what they published."""
        versions = self.published()
        for run_id, step in versions.items():
            assert list_rollout_steps(self.workspace.run_dir(run_id)) == list(range(1, step + 1)), run_id
        found = {run_id: each["reached"] for run_id, each in self.workspace.selfcheck().items()}
        assert {run_id: (each["version"], each["ok"]) for run_id, each in found.items()} == {
            run_id: (step, True) for run_id, step in versions.items()
        }, found


def path_with(folder: Path) -> str:
    """PYTHONPATH with `folder` before what it has now."""
    return os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
