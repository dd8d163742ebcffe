"""`python -m benchmarks.multinode_node RANK NUM_NODES FOLDER NUM_ITERATIONS HOLD`: one node whose work takes no time.

With HOLD 1 the last rank never ends its rollouts, so all others wait for it. The master prints the seconds of each
iteration. Also makes the members of a group that runs in one process.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import sys
import time
from pathlib import Path

from prime_rl.contract.layout import OutputDir
from prime_rl.multinode.decide import MASTER_RANK
from prime_rl.multinode.member import Member, Report
from prime_rl.multinode.node import drive
from prime_rl.multinode.records import (
    DiskStore,
    GroupRecord,
    GroupSetting,
    NodeRecord,
    Phase,
    Position,
    RlPhase,
    first_position,
)
from prime_rl.utils.process import StopFlag
from prime_rl.utils.watch import Watcher


class NoWork:
    """Done at once, but for the phase in which it is held."""

    def __init__(self, held_in: Phase | None) -> None:
        self._held_in = held_in
        self._phase = Phase.START
        self.began: dict[int, float] = {}

    def resume(self) -> Position:
        """Begin with iteration 1, whatever is on disk."""
        return first_position(RlPhase.BOTH, 1)

    def begin(self, position: Position, group: GroupRecord) -> None:
        """Take the phase, and the moment if it is the first of its iteration."""
        self._phase = position.phase
        self.began.setdefault(position.iteration, time.perf_counter())

    def look(self) -> Report:
        """Report the phase as done, unless it is the one that is held."""
        return Report(done=self._phase is not self._held_in)

    def stop(self) -> None:
        """Do nothing: no process was started."""
        pass

    @property
    def has_ended(self) -> bool:
        """Always True: no process was started."""
        return True

    def iterations_s(self) -> list[float]:
        """Seconds from the beginning of each iteration to that of the next."""
        began = list(self.began.values())
        return [after - before for before, after in itertools.pairwise(began)]


def make_member(rank: int, num_nodes: int, output: OutputDir, num_iterations: int, work: NoWork) -> Member:
    fingerprint = {"--num-nodes": str(num_nodes)}
    setting = GroupSetting(rank, num_nodes, RlPhase.BOTH, fingerprint, max_iterations=num_iterations)
    own = NodeRecord(rank, secrets.token_hex(8), 0, fingerprint=fingerprint, host=socket.gethostname(), pid=os.getpid())
    ranks = None if rank == MASTER_RANK else frozenset({MASTER_RANK, rank})
    store = DiskStore(output, setting, weight=1.0, ranks=ranks)
    return Member(setting, own, store, work, clock=time.monotonic)


def main(argv: list[str]) -> int:
    rank, num_nodes, num_iterations, hold = int(argv[0]), int(argv[1]), int(argv[3]), argv[4] == "1"
    output = OutputDir(Path(argv[2]))
    is_held = hold and rank == num_nodes - 1
    work = NoWork(Phase.TRAIN_ROLLOUT if is_held else None)
    member = make_member(rank, num_nodes, output, num_iterations, work)
    with Watcher([output.multinode if rank == MASTER_RANK else output.group_status.parent], rescan_s=60.0) as watcher:
        exit = drive(member, watcher, StopFlag().install(), say=lambda words: None)
    if rank == MASTER_RANK:
        print(*work.iterations_s())
    return exit.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
