"""What fourteen barriers cost without work, what waiting costs, and how soon a dead node ends the group."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from benchmarks.multinode_node import NoWork, make_member
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import NodeStatus, read_status
from prime_rl.multinode.records import EXIT_TRY_AGAIN, Phase

NUM_NODES, NUM_IN_ONE_PROCESS = 8, 64
NUM_ITERATIONS = 7
IDLE_S = 20.0
TIMEOUT_S = 120.0


def run() -> dict[str, float]:
    idle, detect_s = idle_and_detect()
    return {
        "iteration_8_nodes_s": iteration_s(),
        "iteration_64_simulated_s": iteration_in_one_process_s(),
        "idle_wait_cpu": idle,
        "detect_dead_s": detect_s,
    }


@contextmanager
def group(folder: Path, *, hold: bool) -> Iterator[list[subprocess.Popen[str]]]:
    words = [str(folder), str(NUM_ITERATIONS), str(int(hold))]
    command = [sys.executable, "-m", "benchmarks.multinode_node"]
    nodes = [
        subprocess.Popen([*command, str(rank), str(NUM_NODES), *words], stdout=subprocess.PIPE, encoding="utf-8")
        for rank in range(NUM_NODES)
    ]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            node.communicate()


def iteration_s() -> float:
    """Median over the iterations of one group of eight processes, from first phase to first phase."""
    with tempfile.TemporaryDirectory() as folder, group(Path(folder), hold=False) as nodes:
        output, _ = nodes[0].communicate(timeout=TIMEOUT_S)
        return statistics.median(map(float, output.split()))


def iteration_in_one_process_s() -> float:
    """The same of 64 nodes with their real records on disk, each looked after in turn by one process."""
    with tempfile.TemporaryDirectory() as folder:
        works = [NoWork(None) for _ in range(NUM_IN_ONE_PROCESS)]
        output = OutputDir(Path(folder))
        members = [make_member(rank, len(works), output, 3, work) for rank, work in enumerate(works)]
        with ExitStack() as beats:
            for member in members:
                beats.enter_context(member.heartbeat.beating())
            while members:
                members = [member for member in members if member.tick() is None]
        return statistics.median(works[0].iterations_s())


def idle_and_detect() -> tuple[float, float]:
    """Share of a core of the node that takes most while all wait for one; then that one is killed."""
    with tempfile.TemporaryDirectory() as folder, group(Path(folder), hold=True) as nodes:
        output = OutputDir(Path(folder))
        wait_for(lambda: all_wait(output), "all nodes to wait for the last", timeout_s=TIMEOUT_S)
        waiting = [psutil.Process(node.pid) for node in nodes[:-1]]
        before_s, start_s = cpu_s(waiting), time.monotonic()
        time.sleep(IDLE_S)
        used_s = [after - before for after, before in zip(cpu_s(waiting), before_s, strict=True)]
        idle = max(used_s) / (time.monotonic() - start_s)
        nodes[-1].kill()
        killed_s = time.monotonic()
        codes = [node.wait(TIMEOUT_S) for node in nodes[:-1]]
        assert codes == [EXIT_TRY_AGAIN] * (NUM_NODES - 1), codes
        return idle, time.monotonic() - killed_s


def all_wait(output: OutputDir) -> bool:
    statuses = [read_status(output.node_status(rank), NodeStatus) for rank in range(NUM_NODES)]
    held = int(Phase.TRAIN_ROLLOUT)
    return all(status is not None and status.phase == held for status in statuses) and all(
        status is not None and status.arrived for status in statuses[:-1]
    )


def cpu_s(processes: Sequence[psutil.Process]) -> list[float]:
    return [times.user + times.system for times in (process.cpu_times() for process in processes)]
