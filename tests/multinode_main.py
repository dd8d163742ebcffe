"""A node that is killed in the phase that `PRL_TEST_KILL_AT` names, once it has said that it is there.

Where the work of a phase takes time it dies half way through; in training as soon as that begins, for a few updates may
be done before the test looks. In phases of an odd number all that it has started is killed with it, and the last task
of its rank file is torn; in the others only the node itself. With `PRL_TEST_HOLD=1` it lives on, but never reports that
it is done, so that it can be cut off in that phase; with `PRL_TEST_HOLD=loop` its main loop stands still there forever.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil
from msgspec.structs import replace

from prime_rl.multinode import node
from prime_rl.multinode.member import Report
from prime_rl.multinode.records import DiskStore, NodeRecord, Phase
from prime_rl.multinode.work import PhaseWork
from tests.multinode_support import HOLD, KILL_AT

PHASE = Phase(int(os.environ[KILL_AT]))
IS_HELD = os.environ[HOLD] != ""
LOOP_HANGS = os.environ[HOLD] == "loop"
IS_LONG = PHASE in (Phase.TRAIN_ROLLOUT, Phase.EVAL_ROLLOUT, Phase.TRAIN)


def die(torn: Sequence[Path] = ()) -> None:
    if PHASE % 2:
        children = psutil.Process().children(recursive=True)
        for process in children:
            process.kill()
        psutil.wait_procs(children)
        for path in torn:
            os.truncate(path, path.stat().st_size - 1)
    os.kill(os.getpid(), signal.SIGKILL)


class DoomedStore(DiskStore):
    def write_node(self, record: NodeRecord) -> None:
        is_there = record.position is not None and record.position.phase is PHASE
        if not IS_HELD and is_there and (record.arrived or not IS_LONG):
            # It never reports that it is done, so the group cannot leave the phase before its death is seen.
            super().write_node(replace(record, arrived=False))
            die()
        super().write_node(record)


class DoomedWork(PhaseWork):
    # In PHASE: after the first look there this node's record has its place.
    was_seen_here = False

    def rank_files(self) -> list[Path]:
        """Those that it writes to now."""
        setting = self.place.setting
        files = self.place.iteration.rank_files("*", rank=setting.rank)
        return [path for path in files if path.stem.endswith(setting.incarnation)]

    def look(self) -> Report:
        report = super().look()
        if self.place.position.phase is not PHASE:
            return report
        was_seen, self.was_seen_here = self.was_seen_here, True
        if LOOP_HANGS and was_seen:
            threading.Event().wait()
        if IS_LONG and not IS_HELD and was_seen and (report.progress or PHASE is Phase.TRAIN):
            die(self.rank_files())
        return replace(report, done=report.done and not IS_HELD)


if __name__ == "__main__":
    node.PhaseWork = DoomedWork  # type: ignore[misc]
    node.DiskStore = DoomedStore  # type: ignore[misc]
    sys.exit(node.main())
