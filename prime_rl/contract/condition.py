"""The condition of the writer of a status file: its own state, lost or stalled. One judgement, for all readers.

Lost: the file is older than three heartbeats, or the process is gone. Stalled: the process is alive, for its heartbeat
thread writes, and its main loop has not turned for longer than it may. The writer measures that itself, by a clock that
never jumps, so a reader needs no memory and no clock of the writer's. Pure but for a look at the process table.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from prime_rl.contract.status import Status, is_alive

LOST = "lost"
STALLED = "stalled"
# States that a writer leaves behind when it ends.
_LAST_STATES = frozenset({"stopped", "failed", "done", "finished", "evicted", "paused"})


@dataclass(frozen=True)
class Condition:
    """The condition of the writer of a status: its own state, `lost` or `stalled`.

    `since`: when a lost one last wrote, or a stalled one's loop last turned (Unix seconds on the writer's clock).
    """

    state: str
    since: float | None = None


def condition(status: Status, now: float) -> Condition:
    """The condition of the writer of `status` at `now` (Unix seconds)."""
    if status.state in _LAST_STATES:
        return Condition(status.state)
    if not is_alive(status, now):
        return Condition(LOST, status.updated_at)
    since = stalled_since(status)
    return Condition(status.state) if since is None else Condition(STALLED, since)


def stalled_since(status: Status) -> float | None:
    """When the main loop of a living writer last turned, if one turn takes longer than it may; None: it turns."""
    if status.loop is None or status.loop_still_s <= status.loop_limit_s:
        return None
    return status.updated_at - status.loop_still_s


def stall_text(since: float) -> str:
    """Such as "its main loop has not turned since 2026-01-31 12:00:00 UTC"."""
    return f"its main loop has not turned since {utc(since)}"


def utc(at: float) -> str:
    """Unix seconds for people, such as "2026-01-31 12:00:00 UTC"."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
