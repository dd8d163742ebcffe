"""The nodes of a multi-node group as a reader sees them: alive, suspect, stalled, dead, or waited for.

A node's record changes while its process is alive and holds how long its main loop has stood still. Pure.
Shared by the nodes, `prl` and the TUI, so that all three agree. Clocks of different machines are never compared:
`BeatWatch` notes, by the reader's own monotonic clock, when a node's sequence and its work last moved, and
`node_health` judges those two ages.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from prime_rl.contract.condition import stalled_since
from prime_rl.contract.status import NodeStatus
from prime_rl.utils.process import ProcessId

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


class NodeHealth(enum.StrEnum):
    """How a node is, as far as the reader can prove it.

    `unproven`: its file is there, and the reader has not looked for long enough to see it move.
    """

    ALIVE = "alive"
    UNPROVEN = "unproven"
    SUSPECT = "suspect"
    STALLED = "stalled"
    DEAD = "dead"
    LEFT = "left"
    DONE = "done"


@dataclass(frozen=True)
class HealthLimits:
    """When silence is what. In beats, and in seconds on top of them."""

    suspect_after_beats: int = 3
    # On top of the missed beats: what a file may take through a shared file system's attribute cache.
    dead_grace_s: float = 2.0
    # A phase's work that counts nothing for so long is stuck: longer than a step, a generation or a checkpoint takes.
    stalled_after_s: float = 300.0
    # Of `loop_timeout_s`, after which a node whose loop stands still counts as lost.
    loop_stalled_share: float = 0.25


LIMITS = HealthLimits()


@dataclass(frozen=True)
class Sighting:
    """A node's status and what a reader has observed of it.

    `silent_s`: since its sequence last moved while the reader looked (or since it was first seen); `still_s`: the same
    for its phase and progress; `has_moved`, `has_worked`: whether the sequence, and phase or progress, were seen to
    move; `is_gone`: it ran on the reader's machine, and the process no longer exists.
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
        """How long it waits at the end of its phase; 0 while it works."""
        return self.status.waited_s + self.silent_s if self.status.arrived else 0.0


def node_health(seen: Sighting, limits: HealthLimits = LIMITS) -> NodeHealth:
    """Left or done for a node that wrote how it ended; else by its silence, then by its lack of progress."""
    status = seen.status
    if status.state in ("done", "stopped", "failed"):
        return NodeHealth.DONE if status.state == "done" else NodeHealth.LEFT
    suspect_s = limits.suspect_after_beats * status.heartbeat_s
    if seen.is_gone or seen.silent_s > suspect_s + limits.dead_grace_s:
        return NodeHealth.DEAD
    if seen.silent_s > suspect_s:
        return NodeHealth.SUSPECT
    if not seen.has_moved:
        return NodeHealth.UNPROVEN
    return NodeHealth.ALIVE if _stands_still(seen, limits) is None else NodeHealth.STALLED


@dataclass(frozen=True)
class Stall:
    """What has stopped in a stalled node, and for how long."""

    what: str
    for_s: float


def stall(seen: Sighting, limits: HealthLimits = LIMITS) -> Stall | None:
    """None of a node that is not stalled."""
    return _stands_still(seen, limits) if node_health(seen, limits) is NodeHealth.STALLED else None


def _stands_still(seen: Sighting, limits: HealthLimits) -> Stall | None:
    """Its main loop, by the node's own clock; else its phase's work."""
    status = seen.status
    if stalled_since(status) is not None:
        return Stall("its loop", status.loop_still_s + seen.silent_s)
    if _has_work(status) and seen.still_s > limits.stalled_after_s:
        return Stall("its work", seen.still_s)
    return None


def is_at_work(seen: Sighting) -> bool:
    """Whether the reader has looked for long enough to tell that the work of a living node does not stand still."""
    return seen.has_worked or not _has_work(seen.status)


def _has_work(status: NodeStatus) -> bool:
    """Whether it is in a phase's work that is counted."""
    return not status.arrived and status.progress is not None


def place(status: NodeStatus) -> tuple[int, int, int, bool]:
    """How far a node is: two nodes compare by it."""
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


@dataclass
class _Mark:
    identity: tuple[str, ProcessId]
    seq: tuple[int, int]
    work: tuple[int, int, int, int | None]
    seq_at: float
    work_at: float
    has_moved: bool = False
    has_worked: bool = False


class BeatWatch:
    """Remembers when each node's sequence and work last moved, by the reader's monotonic clock."""

    def __init__(self) -> None:
        self._marks: dict[int, _Mark] = {}

    def see(self, status: NodeStatus, now_s: float, *, is_gone: bool = False) -> Sighting:
        """Take one look; `now_s` on any clock of the reader's that never jumps."""
        identity = (status.host, status.writer)
        seq = (status.epoch, status.seq)
        work = (status.epoch, status.iteration, status.phase, status.progress)
        mark = self._marks.get(status.rank)
        if mark is None:
            mark = self._marks[status.rank] = _Mark(identity, seq, work, now_s, now_s)
        # A file that goes back is an old one shown by a cache, unless it is another process's.
        if identity != mark.identity or seq > mark.seq:
            mark.identity, mark.seq, mark.seq_at, mark.has_moved = identity, seq, now_s, True
        if work != mark.work:
            mark.work, mark.work_at, mark.has_worked = work, now_s, True
        return Sighting(status, now_s - mark.seq_at, now_s - mark.work_at, mark.has_moved, is_gone, mark.has_worked)

    def forget(self, ranks: Iterable[int]) -> None:
        """Keep only `ranks`."""
        kept = set(ranks)
        self._marks = {rank: mark for rank, mark in self._marks.items() if rank in kept}
