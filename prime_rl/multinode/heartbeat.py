"""Signs of life: how a node gives them (`Heartbeat`), and how a reader judges them (`sight`, `health`).

A node's record has two signs. That it moves shows that the process is alive: a thread writes it once a beat, so long
work is not death. How long ago the main loop last came round (`still_s`) shows that it makes progress. What
counts is when a record was last seen to change, by the reader's own clock: a time that another machine wrote is never
compared with ours, so clock skew cannot make a node look dead or young.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
from msgspec.structs import replace

from prime_rl.contract.nodes import LIMITS
from prime_rl.multinode.records import GroupRecord, NodeRecord

logger = logging.getLogger("node")

# The same for nodes and for readers.
SUSPECT_AFTER_BEATS = LIMITS.suspect_after_beats


class Health(enum.StrEnum):
    """A node's health for a reader. STALLED: it beats, but its work does not go on."""

    ALIVE = "alive"
    STALLED = "stalled"
    SUSPECT = "suspect"
    DEAD = "dead"


class Sighting(msgspec.Struct, frozen=True):
    """What one reader remembers of one record. Times are of the reader's monotonic clock.

    `has_moved`: it changed since we first read it; a record that has not may be a dead node's last.
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
    """The health of a node at `now`, by when its record last moved and when its work last progressed.

    Args:
        heartbeat_s: one beat of the node.
        dead_after_s: a record that has not moved for longer is of a dead node.
        stall_s: a node without progress for longer is stalled.
    """
    age_s = sighting.age_s(now)
    if age_s > dead_after_s:
        return Health.DEAD
    if age_s > SUSPECT_AFTER_BEATS * heartbeat_s:
        return Health.SUSPECT
    return Health.STALLED if now - sighting.progressed_at > stall_s else Health.ALIVE


class Records(Protocol):
    """Where the records of this node are written."""

    def write_node(self, record: NodeRecord) -> None: ...

    def write_group(self, record: GroupRecord) -> None: ...


class Heartbeat:
    """Writes this node's records: at each change that the loop makes, and once a beat whatever the loop does.

    A loop that has stood still for `silent_after_s` is given up: nothing more is written until it comes round again, so
    that another process may take this rank.

    Args:
        clock: seconds; never jumps.
        every_s: one beat.
    """

    def __init__(self, records: Records, *, clock: Callable[[], float], every_s: float, silent_after_s: float) -> None:
        self._records = records
        self._clock = clock
        self._every_s = every_s
        self._silent_after_s = silent_after_s
        self._lock = threading.Lock()
        self._node: NodeRecord | None = None
        self._group: GroupRecord | None = None
        self._seq = 0
        self._looks = 0
        self._looked_at = clock()
        self._given_up_at: int | None = None

    def look(self) -> None:
        """The loop came round."""
        self._looks += 1
        self._looked_at = self._clock()

    def say(self, node: NodeRecord) -> None:
        """This node's record from now on. What only grows (`progress`) is written with the next beat."""
        with self._lock:
            before, self._node = self._node, node
            if before is None or replace(before, progress=node.progress) != node:
                self._write_node(node)

    def say_group(self, group: GroupRecord) -> None:
        """The group's record from now on. For the master only."""
        with self._lock:
            before, self._group = self._group, group
            if group != before:
                self._write_group(group)

    def silence(self) -> None:
        """Stop writing."""
        with self._lock:
            self._node = self._group = None

    def beat(self) -> None:
        with self._lock:
            if self._given_up_at == self._looks:
                return
            if self._node is not None:
                self._write_node(self._node)
            if self._group is not None:
                self._write_group(self._group)
            # Only after this record is written: the other nodes give the reason from it.
            if self._clock() - self._looked_at > self._silent_after_s:
                self._given_up_at = self._looks

    def _write_node(self, node: NodeRecord) -> None:
        self._seq += 1
        still_s = self._clock() - self._looked_at
        self._records.write_node(replace(node, seq=self._seq, looks=self._looks, still_s=still_s))

    def _write_group(self, group: GroupRecord) -> None:
        self._seq += 1
        self._records.write_group(replace(group, seq=self._seq))

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """A thread beats until the end of the block."""
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(self._every_s):
                try:
                    self.beat()
                except OSError as error:  # a full disk, a shared folder that is gone for a while: a beat is missed
                    logger.warning("a sign of life was not written: %s", error)

        thread = threading.Thread(target=run, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            self.silence()
