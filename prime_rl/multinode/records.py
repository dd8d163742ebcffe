"""The records of a group's nodes and of the group, as the decisions use them, and their store on the shared folder.

Every record has one writer: a node writes `node_<rank>.json`, the master also `group/group.json`. A flag is a field of
such a record together with its epoch, so what an older epoch wrote is never mistaken for new, and nothing has to be
deleted. The store relies on the atomicity of rename only. A file is read again when its stamp changed; one that cannot
be read (half shown by a cache, damaged, gone for a moment) counts as what it was before. Beside what decisions need, a
node's record shows people where it is and for how long (`PhaseLog`).

An iteration has fourteen phases (`RULES`): the work of master and workers, and the file that proves that it was done. A
node works in one phase at a time, notes in its own record that it is done, and goes on when the master has released the
next. So every phase ends in a barrier, also those in which only one side has work. `work` does the work, `decide` moves
the group from phase to phase.
"""

from __future__ import annotations

import enum
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.nodes import PHASE_NAMES, RL_PHASES, dead_after_s
from prime_rl.contract.status import GroupStatus, NodeStatus, PhaseTime, Status, read_status
from prime_rl.utils.process import ProcessId


class Phase(enum.IntEnum):
    """The phases of `--rl-phase both`; `rollout` ends with EVAL_AGGREGATE, `update` begins with STOP_INFERENCE."""

    START = 0
    TRAIN_ROLLOUT = 1
    ROLLOUT_DONE = 2
    FILES_READY = 3
    AGGREGATE = 4
    EVAL_ROLLOUT = 5
    EVAL_AGGREGATE = 6
    STOP_INFERENCE = 7
    PREPARE = 8
    CONFIG_READY = 9
    TRAIN = 10
    COPY_CHECKPOINT = 11
    RESTART_INFERENCE = 12
    FINAL = 13

    @property
    def label(self) -> str:
        """The name for people, as in `PHASE_NAMES`."""
        return PHASE_NAMES[self]


class RlPhase(enum.StrEnum):
    """The part of the loop that `--rl-phase` names: all of it or one half."""

    BOTH = "both"
    ROLLOUT = "rollout"
    UPDATE = "update"


@dataclass(frozen=True)
class PhaseRule:
    """One row of the protocol's table. `proof` is a file below `multinode/` ({} is the iteration), or None."""

    master: str
    worker: str
    proof: str | None = None


_WAITS = "waits"
_SERVES = "starts its inference server"
_STOPS = "stops its inference server"
_TRAINS = "trains with all nodes (torchrun)"
RULES: Mapping[Phase, PhaseRule] = {
    Phase.START: PhaseRule("writes the run's config", _WAITS),
    Phase.TRAIN_ROLLOUT: PhaseRule(
        f"divides the tasks, {_SERVES}, makes its part of them",
        f"{_SERVES}, makes its part of the tasks",
        "iteration_{}/train_rank_*",
    ),
    Phase.ROLLOUT_DONE: PhaseRule("notes that its part is made", "notes that its part is made"),
    Phase.FILES_READY: PhaseRule("looks until it sees every task in the rank files", _WAITS),
    Phase.AGGREGATE: PhaseRule("notes the file of each task", _WAITS, "iteration_{}/train.json"),
    Phase.EVAL_ROLLOUT: PhaseRule(
        "decides on evaluation, makes its part of it", "makes its part, if any", "iteration_{}/eval_rank_*"
    ),
    Phase.EVAL_AGGREGATE: PhaseRule("takes the mean over all rank files", _WAITS, "iteration_{}/eval.json"),
    Phase.STOP_INFERENCE: PhaseRule(_STOPS, _STOPS),
    Phase.PREPARE: PhaseRule("writes the batches and the trainer's config", _WAITS, "iteration_{}/update.json"),
    Phase.CONFIG_READY: PhaseRule(_WAITS, "looks until it sees the trainer's config"),
    Phase.TRAIN: PhaseRule(_TRAINS, _TRAINS, "../run_multinode/broadcast/step_*/STABLE"),
    Phase.COPY_CHECKPOINT: PhaseRule("copies the new weights", _WAITS, "iteration_{}/checkpoint.json"),
    Phase.RESTART_INFERENCE: PhaseRule(_SERVES + " if more rollouts follow", _SERVES + " if more rollouts follow"),
    Phase.FINAL: PhaseRule("notes the end of the iteration", _WAITS, "iteration_{}/done.json"),
}


class Position(NamedTuple):
    """Where a group is. `round` counts, within a phase, how often work was divided again after a node was lost."""

    iteration: int
    phase: Phase
    round: int = 0

    def __str__(self) -> str:
        again = f", round {self.round}" if self.round else ""
        return f"iteration {self.iteration}, phase {int(self.phase)} ({self.phase.label}){again}"


def phases_of(rl_phase: RlPhase) -> Sequence[Phase]:
    """The phases of one iteration in a mode, in their order."""
    return [Phase(number) for number in RL_PHASES[rl_phase]]


def first_position(rl_phase: RlPhase, iteration: int) -> Position:
    """Where an iteration begins in a mode."""
    return Position(iteration, phases_of(rl_phase)[0])


def next_position(position: Position, rl_phase: RlPhase) -> Position:
    """The position after `position`, once all nodes are done; after the mode's last phase the next iteration begins."""
    if position.phase is phases_of(rl_phase)[-1]:
        return first_position(rl_phase, position.iteration + 1)
    return Position(position.iteration, Phase(position.phase + 1))


def eval_is_due(iteration: int, interval: int | None) -> bool:
    """True when iteration N (from 1) is evaluated: every `interval` iterations, beginning with the first."""
    return interval is not None and iteration % interval == 1 % interval


EXIT_DONE = 0
EXIT_REFUSED = 2
# EX_TEMPFAIL of sysexits.h: start the same command again.
EXIT_TRY_AGAIN = 75
EXIT_INTERRUPTED = 130
# Of `loop_timeout_s`: a node whose loop stands still for longer is stalled, long before it counts as lost.
LOOP_STALLED_SHARE = 0.25


class NodeState(enum.StrEnum):
    """A node's state, set by the node. The last three are final; an unknown one has ended."""

    JOINING = "joining"
    RUNNING = "running"
    FAILED = "failed"
    LEFT = "left"
    ENDED = "ended"

    @classmethod
    def _missing_(cls, value: object) -> NodeState:
        return cls.ENDED

    @property
    def is_final(self) -> bool:
        """True when the node never leaves this state."""
        return self in (NodeState.FAILED, NodeState.LEFT, NodeState.ENDED)


class GroupState(enum.StrEnum):
    """The group's state, set by the master. ENDING is final: it carries the reason and the exit code of all nodes."""

    GATHERING = "gathering"
    RUNNING = "running"
    ENDING = "ending"

    @classmethod
    def _missing_(cls, value: object) -> GroupState:
        return cls.ENDING


class NodeRecord(msgspec.Struct, frozen=True):
    """One node. A field has its `name` in `NodeStatus`.

    Attributes:
        incarnation: random, new for each start of the process.
        seq: grows with every write; that it moves is the only proof of life.
        looks: grows with every turn of its main loop.
        still_s: since the last of those turns, by its own clock, when the record was written.
        fingerprint: what must be equal on all nodes (number of nodes, weights, code version, ...).
        epoch: of the group that it has joined; "" before.
        arrived: its work in `position` is done.
        progress: grows while it works; one that stands still while `seq` moves means a stall.
        reason: why its state is final, or what it waits for.
        port: where the master answers; 0 of a worker.
        unreached: of a worker: beats since the master of its epoch last answered it over the network.
    """

    rank: int
    incarnation: str
    seq: int
    state: NodeState = msgspec.field(name="word", default=NodeState.JOINING)
    fingerprint: Mapping[str, str] = msgspec.field(default_factory=dict)
    epoch: str = msgspec.field(name="group", default="")
    position: Position | None = None
    arrived: bool = False
    progress: int = 0
    reason: str | None = None
    exit_code: int | None = None
    host: str = ""
    address: str = ""
    port: int = 0
    pid: int = 0
    unreached: int = 0
    looks: int = msgspec.field(name="loop", default=0)
    still_s: float = msgspec.field(name="loop_still_s", default=0.0)

    def __str__(self) -> str:
        return f"node {self.rank} ({self.host}, pid {self.pid})"


class GroupRecord(msgspec.Struct, frozen=True):
    """The group, written by its master. A field has its `name` in `GroupStatus`.

    Attributes:
        epoch: number and incarnation of the master, so that two masters never share an epoch.
        members: rank -> incarnation; empty while it gathers.
        position: what the members work on now; its release is the end of the barrier before it.
        awaited: the nodes that hold the group up now, one sentence each.
        reason: why it ends; before that, why its members changed last.
    """

    epoch_number: int = msgspec.field(name="epoch")
    incarnation: str
    seq: int
    state: GroupState = GroupState.GATHERING
    members: Mapping[int, str] = msgspec.field(default_factory=dict)
    position: Position | None = None
    awaited: tuple[str, ...] = ()
    exit_code: int = EXIT_DONE
    reason: str | None = None

    @property
    def epoch(self) -> str:
        """The epoch's name, such as "3-9f2c": its number and the master's incarnation."""
        return f"{self.epoch_number}-{self.incarnation}"


@dataclass(frozen=True)
class GroupSetting:
    """The settings of one node, as far as decisions need them. Times are seconds of the reader's own clock.

    Attributes:
        loop_timeout_s: a node that beats while its loop stands still for so long counts as lost.
        barrier_timeout_s: longest wait at one barrier.
        gather_timeout_s: longest wait for all nodes to be there.
    """

    rank: int
    num_nodes: int
    rl_phase: RlPhase
    fingerprint: Mapping[str, str]
    elastic: bool = False
    max_iterations: int | None = None
    heartbeat_s: float = 2.0
    barrier_timeout_s: float = 3600.0
    gather_timeout_s: float = 600.0
    loop_timeout_s: float = 120.0

    @property
    def dead_after_s(self) -> float:
        """A node whose record has not moved for longer is dead."""
        return dead_after_s(self.heartbeat_s)

    @property
    def loop_limit_s(self) -> float:
        """A loop that stands still for longer is stalled."""
        return LOOP_STALLED_SHARE * self.loop_timeout_s


def epoch_number(epoch: str) -> int:
    """Its number: "3-9f2c" -> 3; anything else -> 0."""
    number = epoch.partition("-")[0]
    return int(number) if number.isdecimal() else 0


def epoch_master(epoch: str) -> str:
    """The incarnation of the master of that epoch: 3-9f2c -> 9f2c."""
    return epoch.partition("-")[2]


HISTORY = 64
_STATES = {NodeState.JOINING: "starting", NodeState.FAILED: "failed", NodeState.LEFT: "stopped"}
StatusT = TypeVar("StatusT", bound=Status)
RecordT = TypeVar("RecordT", "NodeRecord", "GroupRecord")


class PhaseLog:
    """Where a node is and since when, and how long the phases before took. Seconds of the node's own clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.history: deque[PhaseTime] = deque(maxlen=HISTORY)
        self._clock = clock
        self._position: Position | None = None
        self._began_at = clock()
        self._arrived_at: float | None = None

    def note(self, position: Position | None, arrived: bool) -> None:
        """Take in where the node is; when it has moved, the phase that it left goes into `history`."""
        now = self._clock()
        if position != self._position:
            self._close(now)
            self._position, self._began_at, self._arrived_at = position, now, None
        if arrived and self._arrived_at is None:
            self._arrived_at = now

    @property
    def phase_s(self) -> float:
        """Seconds since the node came to its position."""
        return self._clock() - self._began_at

    @property
    def waited_s(self) -> float:
        """Seconds since the node arrived at the end of its phase; 0 before that."""
        return self._clock() - self._arrived_at if self._arrived_at is not None else 0.0

    def _close(self, now: float) -> None:
        if self._position is None:
            return
        arrived_at = now if self._arrived_at is None else self._arrived_at
        iteration, phase, _ = self._position
        times = PhaseTime(iteration=iteration, phase=phase, work_s=arrived_at - self._began_at, wait_s=now - arrived_at)
        self.history.append(times)


class DiskStore:
    """The shared folder as one node sees it.

    Args:
        setting: what the node was started with, for people to read in its record.
        weight: the node's, in `--rank-weights`; for people too.
        ranks: whose records it reads; None: of all that are there.
    """

    def __init__(
        self,
        output: OutputDir,
        setting: GroupSetting,
        *,
        weight: float,
        ranks: frozenset[int] | None,
    ) -> None:
        self.output = output
        self.waiting_on: Callable[[], str | None] = lambda: None
        self._setting = setting
        self._weight = weight
        self._ranks = ranks
        self._log = PhaseLog(time.monotonic)
        self._started_at = time.time()
        self._writer = ProcessId.of(os.getpid())
        self._known: dict[Path, tuple[tuple[int, int, int], Status]] = {}
        output.group_status.parent.mkdir(parents=True, exist_ok=True)

    def read_nodes(self) -> Mapping[int, NodeRecord]:
        """The records of `ranks`, by rank; one that was never read is left out."""
        found = {}
        for rank in self.output.list_nodes() if self._ranks is None else sorted(self._ranks):
            status = self._read(self.output.node_status(rank), NodeStatus)
            if status is not None and status.rank == rank:
                found[rank] = _record(status, NodeRecord)
        return found

    def read_group(self) -> GroupRecord | None:
        """The group's record, or None before the first one was read."""
        status = self._read(self.output.group_status, GroupStatus)
        return _record(status, GroupRecord) if status is not None else None

    def write_node(self, record: NodeRecord) -> None:
        """Replace `node_<rank>.json`; times of the phases are added to the record. Raises OSError."""
        self._log.note(record.position, record.arrived)
        write_atomic(self.output.node_status(record.rank), msgspec.json.encode(self._status(record)))

    def write_group(self, record: GroupRecord) -> None:
        """Replace `group/group.json`. Raises OSError."""
        said = {"updated_at": time.time(), "waiting_on": "; ".join(record.awaited) or None, "group": record.epoch}
        status = msgspec.convert(_facts(record) | said, GroupStatus)
        write_atomic(self.output.group_status, msgspec.json.encode(status))

    def _read(self, path: Path, kind: type[StatusT]) -> StatusT | None:
        known = self._known.get(path)
        try:
            info = path.stat()
            stamp = (info.st_mtime_ns, info.st_ino, info.st_size)
            if known is None or known[0] != stamp:
                status = read_status(path, kind)
                if status is not None:
                    known = self._known[path] = (stamp, status)
        except OSError:
            pass
        return known[1] if known is not None and isinstance(known[1], kind) else None

    def _status(self, record: NodeRecord) -> NodeStatus:
        ended = "stopped" if record.exit_code else "done"
        working = "waiting" if record.arrived else "working"
        state = {NodeState.RUNNING: working, NodeState.ENDED: ended}.get(record.state) or _STATES[record.state]
        facts = {
            "pid": self._writer.pid,
            "pid_create_time": self._writer.create_time,
            "pid_start": self._writer.start,
            "state": state,
            "waiting_on": self.waiting_on(),
            "updated_at": time.time(),
            "epoch": epoch_number(record.epoch),
            "phase_name": record.position.phase.label if record.position else "",
            "phase_s": self._log.phase_s,
            "waited_s": self._log.waited_s,
            "started_at": self._started_at,
            "history": list(self._log.history),
            "num_nodes": self._setting.num_nodes,
            "weight": self._weight,
            "rl_phase": str(self._setting.rl_phase),
            "heartbeat_s": self._setting.heartbeat_s,
            "loop_limit_s": self._setting.loop_limit_s,
        }
        return msgspec.convert(_facts(record) | facts, NodeStatus)


def _facts(record: NodeRecord | GroupRecord) -> dict[str, Any]:
    """The fields of a record by their names in its file."""
    iteration, phase, round = record.position or (0, -1, 0)
    return {**msgspec.to_builtins(record), "iteration": iteration, "phase": int(phase), "round": round}


def _record(status: NodeStatus | GroupStatus, kind: type[RecordT]) -> RecordT:
    is_placed = 0 <= status.phase < len(Phase)
    position = (status.iteration, status.phase, status.round) if is_placed else None
    counts = {"progress": status.progress or 0, "loop": status.loop or 0}
    return msgspec.convert({**msgspec.structs.asdict(status), **counts, "position": position}, kind)
