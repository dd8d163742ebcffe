"""The trainer's state by its status file, and the message of a run that waits for its next policy.

A look costs one `stat` as long as the heartbeat comes: fifty runs that wait look several times a second. The file is
read when it changed, and the process is looked for only when a heartbeat is late. Starts nothing: the
supervisor does that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import HEARTBEAT_S, TrainerStatus, is_alive, read_status, stall_text, stalled_since
from prime_rl.orchestrator.guard import MAX_LOOK_S

# A heartbeat that is later than this is looked into; below it the writer lived a moment ago.
LATE_AFTER_S = HEARTBEAT_S + 1.0


async def trainer_status(run: RunDir, say: Callable[[str | None], None], what: str) -> TrainerStatus:
    """The trainer's status, once it has what it trains. `what` is needed of it; `say` gets what is waited for."""
    path = OutputDir(run.path.parent).trainer_status
    while (status := read_status(path, TrainerStatus)) is None or not status.max_seq_len:
        say(f"{path} (for {what})")
        await asyncio.sleep(MAX_LOOK_S)
    return status


class TrainerWatch:
    """The trainer's state, by its status file at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._status: TrainerStatus | None = None

    def is_known(self) -> bool:
        """True when a trainer ever started in this workspace."""
        return self._read() is not None

    def trouble(self, now: float) -> str | None:
        """Why no update will come, e.g. "the trainer is down: it stopped 40 s ago"; None while it runs.

        `now` is Unix seconds. A workspace without a status file has no trainer that could be down.
        """
        status = self._read()
        if status is None:
            return None
        age_s = now - status.updated_at
        if status.state == "stopped":
            return f"the trainer is down: it stopped {ago(age_s)}"
        if age_s <= LATE_AFTER_S or is_alive(status, now):
            since = stalled_since(status)
            return None if since is None else f"the trainer is stalled: {stall_text(since)}"
        return f"the trainer is down: process {status.pid} gave its last sign of life {ago(age_s)}"

    def _read(self) -> TrainerStatus | None:
        try:
            info = self._path.stat()
        except OSError:
            self._stamp = self._status = None
            return None
        stamp = (info.st_mtime_ns, info.st_ino)  # a clock of files may tick only every 10 ms
        if stamp != self._stamp:
            self._status = read_status(self._path, TrainerStatus) or self._status  # None for another format version
            self._stamp = stamp
        return self._status


def describe_policy_wait(
    needed: int, have: int, published_at: float | None, now: float, trouble: str | None = None, *, started: bool = True
) -> str:
    """E.g. "policy version 7 (have 6), trainer last updated 40 s ago"; `trouble` is from `TrainerWatch`."""
    sentence = f"policy version {needed} (have {have if have >= 0 else 'none'})"
    if trouble is not None:
        return f"{sentence}; {trouble}"
    if published_at is None:
        return f"{sentence}, trainer has not {'updated' if started else 'started'} yet"
    return f"{sentence}, trainer last updated {ago(now - published_at)}"


def ago(age_s: float) -> str:
    """Coarse, and coarser the longer it is, as every new sentence is a write and a line of log."""
    if age_s < 10:
        return "under 10 s ago"
    return f"{int(age_s) // 10 * 10} s ago" if age_s < 120 else f"{int(age_s) // 60} min ago"
