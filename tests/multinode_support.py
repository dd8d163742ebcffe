"""A group of real nodes over one folder: started like people start them, killed where a test asks, looked at."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from safetensors.numpy import load_file

from prime_rl.contract.files import WaitTimeout, wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import NodeStatus, read_status
from prime_rl.contract.types import read_rank_file
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parent.parent
# A death is seen after eleven seconds of silence: a thread that does nothing but beat is not held up for so long.
HEARTBEAT_S = 3.0
MARK = "PRL_TEST_GROUP"
KILL_AT = "PRL_TEST_KILL_AT"
HOLD = "PRL_TEST_HOLD"
TOLERANCE = 1e-4
CONFIG = """\
groups_per_iteration = {groups}
updates_per_iteration = {updates}
seq_len = 64
heartbeat_s = {heartbeat_s}
rendezvous_port = {port}
[model]
name = "{model}"
[lora]
rank = 8
alpha = 16.0
[run]
rollouts_per_example = {rollouts}
seed = 0
# In proportion to the gradient: Adam would turn a last bit of it into a whole step.
[run.optim]
type = "sgd"
lr = 0.02
[run.ckpt]
keep_rollouts = true
[run.sampling]
max_tokens = 12
[[run.env]]
id = "reverse-text"
args = {{ wording = "short" }}
[run.eval]
num_examples = {examples}
[trainer]
num_threads = 1
[inference]
engine = "embedded"
num_threads = 1
"""


class Nodes:
    """`num_nodes` processes of one group. `prefixes` are put before a rank's command (to enter a namespace)."""

    def __init__(
        self, folder: Path, config: str, flags: str, *, num_nodes: int = 3, prefixes: Mapping[int, Sequence[str]] = {}
    ) -> None:
        self.output = OutputDir(folder / "logs")
        self.mark = uuid.uuid4().hex
        self.num_nodes = num_nodes
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.own_flags: dict[int, list[str]] = {}
        self._folder = folder
        self._prefixes = prefixes
        (folder / "data").mkdir(parents=True)
        (folder / "multinode.toml").write_text(config)
        self.use(flags)

    def use(self, flags: str) -> None:
        """What the nodes are started with from now on. The master has twice the weight of each other."""
        weights = ",".join(["2", *["1"] * (self.num_nodes - 1)])
        self._flags = f"--num-nodes {self.num_nodes} --rank-weights {weights} {flags}".split()

    def start(self, *, kill: tuple[int, int] | None = None, hold: str = "") -> None:
        """All nodes. `kill` is (rank, phase): that node ends by SIGKILL in that phase, or is held in it.

        `hold` is "1", or "loop" for one whose main loop stands still there.
        """
        for rank in range(self.num_nodes):
            self.running[rank] = self.start_one(rank, kill[1] if kill and kill[0] == rank else None, hold)

    def start_one(self, rank: int, kill_at: int | None = None, hold: str = "") -> subprocess.Popen[bytes]:
        module = "prime_rl.multinode.node" if kill_at is None else "tests.multinode_main"
        paths = ["--data-path", str(self._folder / "data"), "--log-path", str(self.output.path)]
        who = ["--master"] if rank == 0 else ["--worker", str(rank)]
        toml = [*self.own_flags.get(rank, ()), "@", str(self._folder / "multinode.toml")]
        with self.log(rank).open("ab") as log:
            return subprocess.Popen(
                [*self._prefixes.get(rank, ()), sys.executable, "-m", module, *paths, *self._flags, *who, *toml],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self.mark, KILL_AT: str(kill_at), HOLD: hold},
            )

    def log(self, rank: int) -> Path:
        return self._folder / f"node_{rank}.log"

    def last_line(self, rank: int) -> str:
        return self.log(rank).read_text().splitlines()[-1]

    def wait(self, timeout_s: float = PATIENCE_S) -> dict[int, int]:
        """The exit codes of all nodes."""

        def ended() -> bool:
            return all(process.poll() is not None for process in self.running.values())

        wait_for(ended, "all nodes to end", timeout_s=timeout_s)
        return {rank: process.returncode for rank, process in self.running.items()}

    def wait_phase(self, rank: int, phase: int, iteration: int = 1) -> None:
        """Until the process that runs now is there, or further."""
        goal = (iteration, phase)
        what = f"node {rank} in phase {phase} of iteration {iteration}"
        wait_for(lambda: self._place(rank) >= goal, what, timeout_s=PATIENCE_S)

    def status(self, rank: int) -> NodeStatus | None:
        return read_status(self.output.node_status(rank), NodeStatus)

    def _place(self, rank: int) -> tuple[int, int]:
        status = self.status(rank)
        return (status.iteration, status.phase) if status and status.pid == self.running[rank].pid else (0, 0)

    def left(self) -> list[str]:
        """What a node has started, or a node, and still runs."""
        found = []
        for process in processes(self.mark):
            with contextlib.suppress(psutil.Error):  # it has ended since
                found.append(" ".join(process.cmdline()))
        return found

    def check_nothing_is_left(self) -> None:
        with contextlib.suppress(WaitTimeout):
            wait_for(lambda: not self.left(), "every process to end", timeout_s=PATIENCE_S)
        assert self.left() == []

    def kill_all(self) -> None:
        for process in processes(self.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for child in self.running.values():
            child.wait()

    def proof(self, iteration: int, name: str) -> Any:
        return msgspec.json.decode(self.output.iteration(iteration).proof(name).read_bytes())

    def results(self, iteration: int, split: str = "train") -> dict[str, Any]:
        """What was sampled and its reward, of each task of the aggregate."""
        found = {}
        for task, path in self.proof(iteration, split)["sources"].items():
            entries = read_rank_file(self.output.iteration(iteration).path / path)
            (entry,) = [entry for entry in entries if entry.task == task]
            group = msgspec.msgpack.decode(entry.result)
            found[task] = [
                ([branch["token_ids_T"] for branch in rollout["branches"]], rollout["reward"])
                for rollout in group["rollouts_G"]
            ]
        return found

    def rewards(self, iteration: int, split: str) -> dict[str, float]:
        """The mean reward of each task in the rank files."""
        found = {}
        for path in self.output.iteration(iteration).rank_files(split):
            for entry in read_rank_file(path):
                rollouts = msgspec.msgpack.decode(entry.result)["rollouts_G"]
                found[entry.task] = sum(rollout["reward"] for rollout in rollouts) / len(rollouts)
        return found

    def made(self, iteration: int, split: str = "train") -> list[str]:
        """Every task that was made, as often as it was."""
        files = self.output.iteration(iteration).rank_files(split)
        return sorted(entry.task for path in files for entry in read_rank_file(path))


def check_same_adapter(ours: Nodes, theirs: Nodes) -> None:
    """Of the first iteration. What was sampled is the same; the order in which ranks add up is not.

    The difference is measured by B, which began at zero: A has large random numbers that hardly move.
    """
    found, expected = (
        load_file(each.output.iteration(1).path / "adapter" / "adapter_model.safetensors") for each in (ours, theirs)
    )
    assert found.keys() == expected.keys()
    difference = sum(np.square(found[name] - weight).sum() for name, weight in expected.items())
    norm = sum(np.square(weight).sum() for name, weight in expected.items() if ".lora_B." in name)
    assert math.sqrt(difference / norm) <= TOLERANCE


def processes(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def interrupt(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
