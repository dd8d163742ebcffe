"""The health of the nodes of a multi-node group: alive, suspect, stalled or dead. One judgement, for all readers.

A node's record has two signs of life. That it moves shows that the process is alive: a thread writes it once a beat, so
long work is not death. That its work moves shows progress. `sight` remembers, by the reader's own monotonic clock, when
each last moved, and `judge` judges those two ages: a time that another machine wrote is never compared with ours, so
clock skew cannot make a node look dead or young. `prl` and the TUI, which are no members of the group, look with one
`NodeWatch` a thread, and add what they cannot tell yet and how a node ended (`node_health`).
"""

from __future__ import annotations

import enum
import socket
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import NodeStatus, read_status, stalled_since
from prime_rl.utils.text import clean_strings, one_line

# Phases 0 to 13 in short. `rollout` goes through 0 to 6, `update` through 7 to 13, `both` through all.
PHASE_NAMES = (
    "sync",
    "rollout",
    "rollout done",
    "files ready",
    "aggregate",
    "eval rollout",
    "eval aggregate",
    "stop inference",
    "prepare data",
    "config ready",
    "train",
    "copy checkpoint",
    "restart inference",
    "final sync",
)
NUM_PHASES = len(PHASE_NAMES)
RL_PHASES = {"both": range(NUM_PHASES), "rollout": range(7), "update": range(7, NUM_PHASES)}


SUSPECT_AFTER_BEATS = 3
# On top of the missed beats: what a file may take through a shared file system's attribute cache.
DEAD_GRACE_S = 2.0
# A phase's work that counts nothing for so long is stuck: longer than a step, a generation or a checkpoint takes.
STALLED_AFTER_S = 300.0


class NodeHealth(enum.StrEnum):
    """The health of a node, as far as the reader can prove it.

    `stalled`: it beats, and its work does not go on. Only for readers that are no members of the group: `unproven` (its
    file is there, and the reader has not looked for long enough to see it move), `left` and `done`.
    """

    ALIVE = "alive"
    UNPROVEN = "unproven"
    SUSPECT = "suspect"
    STALLED = "stalled"
    DEAD = "dead"
    LEFT = "left"
    DONE = "done"


class Sighting(msgspec.Struct, frozen=True):
    """One reader's memory of one record. Times are of the reader's clock, which never jumps.

    `has_moved`, `has_worked`: the record, and the work in it, changed since it was first read; a record that has not
    moved may be a dead node's last.
    """

    writer: Hashable
    seq: tuple[int, ...]
    work: Hashable
    moved_at: float
    worked_at: float
    has_moved: bool = False
    has_worked: bool = False

    def silent_s(self, now: float) -> float:
        """Seconds since the record last moved."""
        return now - self.moved_at

    def still_s(self, now: float) -> float:
        """Seconds since the work in the record last moved."""
        return now - self.worked_at


def sight(before: Sighting | None, writer: Hashable, seq: tuple[int, ...], work: Hashable, now: float) -> Sighting:
    """Take note of a record. An older one than what was seen already (a cache that lags) changes nothing.

    Args:
        writer: the process that wrote it; one of another process has moved, whatever its `seq`.
        seq: grows with every write.
        work: changes as the work goes on.
    """
    if before is None:
        return Sighting(writer, seq, work, now, now)
    is_other = writer != before.writer
    if not is_other and seq <= before.seq:
        return before
    if is_other or work != before.work:
        return Sighting(writer, seq, work, now, now, True, True)
    return Sighting(writer, seq, work, now, before.worked_at, True, before.has_worked)


def dead_after_s(heartbeat_s: float) -> float:
    """A record that has not moved for longer is a dead node's."""
    return SUSPECT_AFTER_BEATS * heartbeat_s + DEAD_GRACE_S


def judge(silent_s: float, still_s: float, heartbeat_s: float) -> NodeHealth:
    """A node's health by its silence, then by its lack of progress.

    Args:
        silent_s: since its record last moved.
        still_s: since its work last moved; 0 of one that has none.
        heartbeat_s: one beat of the node.
    """
    if silent_s > dead_after_s(heartbeat_s):
        return NodeHealth.DEAD
    if silent_s > SUSPECT_AFTER_BEATS * heartbeat_s:
        return NodeHealth.SUSPECT
    return NodeHealth.STALLED if still_s > STALLED_AFTER_S else NodeHealth.ALIVE


# -- readers that are no members of the group ----


@dataclass(frozen=True)
class SeenNode:
    """A node's status and what a reader has observed of it.

    `silent_s`, `still_s`, `has_moved`, `has_worked`: of its `Sighting`; `is_gone`: it ran on the reader's machine, and
    the process no longer exists.
    """

    status: NodeStatus
    silent_s: float
    still_s: float
    has_moved: bool
    is_gone: bool = False
    has_worked: bool = False

    @property
    def phase_s(self) -> float:
        """Seconds in its phase: as the node wrote it, plus the time since."""
        return self.status.phase_s + self.silent_s

    @property
    def waited_s(self) -> float:
        """The time that it waits at the end of its phase; 0 while it works."""
        return self.status.waited_s + self.silent_s if self.status.arrived else 0.0


def node_health(seen: SeenNode) -> NodeHealth:
    """Left or done for a node that wrote how it ended; else as `judge` finds it, and unproven until it has moved."""
    status = seen.status
    if status.state in ("done", "stopped", "failed"):
        return NodeHealth.DONE if status.state == "done" else NodeHealth.LEFT
    if seen.is_gone:
        return NodeHealth.DEAD
    health = judge(seen.silent_s, seen.still_s if _has_work(status) else 0.0, status.heartbeat_s)
    if health in (NodeHealth.DEAD, NodeHealth.SUSPECT):
        return health
    if not seen.has_moved:
        return NodeHealth.UNPROVEN
    return health if stalled_since(status) is None else NodeHealth.STALLED


@dataclass(frozen=True)
class Stall:
    """The part that has stopped in a stalled node, and for how long."""

    what: str
    for_s: float


def stall(seen: SeenNode) -> Stall | None:
    """The part of a stalled node that stands still: its main loop, by its own clock, or its phase's work. Else None."""
    if node_health(seen) is not NodeHealth.STALLED:
        return None
    if stalled_since(seen.status) is not None:
        return Stall("its loop", seen.status.loop_still_s + seen.silent_s)
    return Stall("its work", seen.still_s)


def is_at_work(seen: SeenNode) -> bool:
    """True when the reader has looked for long enough to tell that the work of a living node does not stand still."""
    return seen.has_worked or not _has_work(seen.status)


def _has_work(status: NodeStatus) -> bool:
    """True when it is in a phase's work that is counted."""
    return not status.arrived and status.progress is not None


def place(status: NodeStatus) -> tuple[int, int, int, bool]:
    """The place that a node has reached: two nodes compare by it."""
    return (status.epoch, status.iteration, status.phase, status.arrived)


def waited_for(statuses: Iterable[NodeStatus]) -> list[int]:
    """The ranks that hold up the others, ascending: those behind a node that has arrived. [] when no node waits.

    Ranks that have no status at all are named too, once any node has arrived anywhere.
    """
    known = {status.rank: status for status in statuses}
    waiting = [place(status) for status in known.values() if status.arrived and status.state == "waiting"]
    if not waiting:
        return []
    num_nodes = max(status.num_nodes for status in known.values())
    behind = {rank for rank, status in known.items() if place(status) < max(waiting) and status.state != "done"}
    return sorted(behind | (set(range(num_nodes)) - known.keys()))


class BeatWatch:
    """A reader's memory of each node, by its own monotonic clock."""

    def __init__(self) -> None:
        self._sightings: dict[int, Sighting] = {}

    def see(self, status: NodeStatus, now_s: float, *, is_gone: bool = False) -> SeenNode:
        """Take one look; `now_s` on any clock of the reader's that never jumps."""
        work = (status.epoch, status.iteration, status.phase, status.progress)
        seq = (status.epoch, status.seq)
        seen = sight(self._sightings.get(status.rank), (status.host, status.writer), seq, work, now_s)
        self._sightings[status.rank] = seen
        return SeenNode(status, seen.silent_s(now_s), seen.still_s(now_s), seen.has_moved, is_gone, seen.has_worked)

    def forget(self, ranks: Iterable[int]) -> None:
        """Keep only `ranks`."""
        kept = set(ranks)
        self._sightings = {rank: sighting for rank, sighting in self._sightings.items() if rank in kept}


MAX_FILE_BYTES = 1_000_000


class NodeReader:
    """The nodes of one workspace. `clock` is any that never jumps, in seconds."""

    def __init__(self, output_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._output = OutputDir(output_dir)
        self._clock = clock
        self._watch = BeatWatch()
        self._host = socket.gethostname()
        self._known: dict[int, NodeStatus] = {}

    def read(self) -> list[SeenNode]:
        """Return what is known of each node, its text clean; a file that cannot be read just now counts as before."""
        ranks = self._output.list_nodes()
        self._watch.forget(ranks)
        self._known = {rank: status for rank, status in self._known.items() if rank in ranks}
        for rank in ranks:
            status = self._status(rank)
            if status is not None and status.rank == rank:
                self._known[rank] = status
        now_s = self._clock()
        return [self._watch.see(status, now_s, is_gone=self._is_gone(status)) for status in self._known.values()]

    def _status(self, rank: int) -> NodeStatus | None:
        path = self._output.node_status(rank)
        try:
            if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
                return None
            return clean_strings(read_status(path, NodeStatus), one_line)
        except (OSError, RecursionError):
            return None

    def _is_gone(self, status: NodeStatus) -> bool:
        """True when it ran here and its process no longer exists: found at once, without waiting for beats."""
        return status.host == self._host and status.pid > 0 and not status.writer.is_running()
