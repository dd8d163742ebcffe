"""Runs that are evicted: the reason, in one line, in `control/evicted.txt` (rank 0).

A reason that cannot be written (the disk is full) still counts, and is written again at every look. A run whose
folder was deleted meanwhile is not made again.
"""

from __future__ import annotations

import logging
from pathlib import Path

from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import RunDir
from prime_rl.trainer.runs.hooks import printable

logger = logging.getLogger(__name__)

# A reason may quote what a run wrote; people read one line.
MAX_REASON_CHARS = 2_000


class Evictions:
    """What was decided and is not on disk yet."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._unwritten: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._unwritten)

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._unwritten

    def add(self, run_id: str, reason: str) -> None:
        self._unwritten[run_id] = printable(" ".join(reason.split()))[:MAX_REASON_CHARS]
        logger.warning("evicting %s: %s", run_id, self._unwritten[run_id])
        self.write()

    def write(self) -> None:
        for run_id, reason in list(self._unwritten.items()):
            run = RunDir(self._output_dir / run_id)
            try:
                if run.path.is_dir():
                    write_atomic(run.evicted, reason)
            except OSError as error:
                logger.error("%s: cannot write the reason of its eviction: %s", run_id, error)
                continue
            del self._unwritten[run_id]
