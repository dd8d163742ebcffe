"""Life signs, judged by the reader's own clock: what counts is when a record was last seen to change.

A time that another machine wrote is never compared with ours, so clock skew cannot make a node look dead or young.
Pure: who reads the records keeps the sightings.
"""

from __future__ import annotations

import enum

import msgspec
from msgspec.structs import replace

from prime_rl.contract.nodes import LIMITS

# The same for the nodes themselves as for everybody who looks at them.
SUSPECT_AFTER_BEATS = LIMITS.suspect_after_beats


class Health(enum.StrEnum):
    """What a reader thinks of a node. STALLED: it beats, and its work does not go on."""

    ALIVE = "alive"
    STALLED = "stalled"
    SUSPECT = "suspect"
    DEAD = "dead"


class Sighting(msgspec.Struct, frozen=True):
    """What one reader remembers of one record. Times are of the reader's monotonic clock.

    `has_moved` says that it changed under our eyes: a record that was there before us may be a dead node's last.
    """

    incarnation: str
    seq: int
    moved_at: float
    has_moved: bool = False
    progress: int = 0
    progressed_at: float = 0.0

    def age_s(self, now: float) -> float:
        return now - self.moved_at


def sight(before: Sighting | None, incarnation: str, seq: int, progress: int, now: float) -> Sighting:
    """Take note of a record. An older one than what was seen already (a cache that lags) changes nothing."""
    if before is None:
        return Sighting(incarnation, seq, now, progress=progress, progressed_at=now)
    if before.incarnation != incarnation:
        return Sighting(incarnation, seq, now, has_moved=True, progress=progress, progressed_at=now)
    if seq <= before.seq:
        return before
    moved = replace(before, seq=seq, moved_at=now, has_moved=True)
    return moved if progress == before.progress else replace(moved, progress=progress, progressed_at=now)


def health(sighting: Sighting, now: float, *, heartbeat_s: float, dead_after_s: float, stall_s: float) -> Health:
    """What the last sighting says now."""
    age_s = sighting.age_s(now)
    if age_s > dead_after_s:
        return Health.DEAD
    if age_s > SUSPECT_AFTER_BEATS * heartbeat_s:
        return Health.SUSPECT
    return Health.STALLED if now - sighting.progressed_at > stall_s else Health.ALIVE
