"""A group's records on the shared folder: `node_<rank>.json` and `group/group.json`, one writer each.

Only the atomicity of rename is relied on. A file is read again when its stamp changed; one that cannot be read (half
shown by a cache, damaged, gone for a moment) counts as what it was before. Beside what decisions need, a node's record
shows people where it is and for how long (`PhaseLog`).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import GroupStatus, NodeStatus, PhaseTime, Status, read_status
from prime_rl.multinode.records import (
    GroupRecord,
    GroupSetting,
    GroupState,
    NodeRecord,
    NodeState,
    Phase,
    Position,
    epoch_number,
)
from prime_rl.utils.process import ProcessId

HISTORY = 64
_STATES = {NodeState.JOINING: "starting", NodeState.FAILED: "failed", NodeState.LEFT: "stopped"}
StatusT = TypeVar("StatusT", bound=Status)


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.output = output
        self.waiting_on: Callable[[], str | None] = lambda: None
        self._setting = setting
        self._weight = weight
        self._ranks = ranks
        self._log = PhaseLog(clock)
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
                found[rank] = _record(status)
        return found

    def read_group(self) -> GroupRecord | None:
        """The group's record, or None before the first one was read."""
        status = self._read(self.output.group_status, GroupStatus)
        return _group_record(status) if status is not None else None

    def write_node(self, record: NodeRecord) -> None:
        """Replace `node_<rank>.json`; times of the phases are added to the record. Raises OSError."""
        self._log.note(record.position, record.arrived)
        write_atomic(self.output.node_status(record.rank), msgspec.json.encode(self._status(record)))

    def write_group(self, record: GroupRecord) -> None:
        """Replace `group/group.json`. Raises OSError."""
        write_atomic(self.output.group_status, msgspec.json.encode(_group_status(record)))

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
        position = record.position
        ended = "stopped" if record.exit_code else "done"
        working = "waiting" if record.arrived else "working"
        state = {NodeState.RUNNING: working, NodeState.ENDED: ended}.get(record.state) or _STATES[record.state]
        return NodeStatus(
            pid=self._writer.pid,
            pid_create_time=self._writer.create_time,
            pid_start=self._writer.start,
            state=state,
            waiting_on=self.waiting_on(),
            updated_at=time.time(),
            progress=record.progress,
            rank=record.rank,
            word=str(record.state),
            incarnation=record.incarnation,
            group=record.epoch,
            fingerprint=dict(record.fingerprint),
            host=record.host,
            address=record.address,
            port=record.port,
            unreached=record.unreached,
            epoch=epoch_number(record.epoch),
            seq=record.seq,
            loop=record.looks,
            loop_still_s=record.still_s,
            iteration=position.iteration if position else 0,
            phase=int(position.phase) if position else -1,
            phase_name=position.phase.label if position else "",
            round=position.round if position else 0,
            arrived=record.arrived,
            phase_s=self._log.phase_s,
            waited_s=self._log.waited_s,
            started_at=self._started_at,
            history=list(self._log.history),
            reason=record.reason,
            num_nodes=self._setting.num_nodes,
            weight=self._weight,
            rl_phase=str(self._setting.rl_phase),
            heartbeat_s=self._setting.heartbeat_s,
            loop_limit_s=self._setting.loop_limit_s,
        )


def _position(iteration: int, phase: int, round: int) -> Position | None:
    return Position(iteration, Phase(phase), round) if 0 <= phase < len(Phase) else None


def _record(status: NodeStatus) -> NodeRecord:
    return NodeRecord(
        rank=status.rank,
        incarnation=status.incarnation,
        seq=status.seq,
        state=NodeState(status.word) if status.word in list(NodeState) else NodeState.ENDED,
        fingerprint=status.fingerprint,
        epoch=status.group,
        position=_position(status.iteration, status.phase, status.round),
        arrived=status.arrived,
        progress=status.progress or 0,
        reason=status.reason,
        host=status.host,
        address=status.address,
        port=status.port,
        unreached=status.unreached,
        pid=status.pid,
        looks=status.loop or 0,
        still_s=status.loop_still_s,
    )


def _group_record(status: GroupStatus) -> GroupRecord:
    return GroupRecord(
        epoch_number=status.epoch,
        incarnation=status.incarnation,
        seq=status.seq,
        state=GroupState(status.state) if status.state in list(GroupState) else GroupState.ENDING,
        members=status.members,
        position=_position(status.iteration, status.phase, status.round),
        awaited=tuple(status.awaited),
        exit_code=status.exit_code,
        reason=status.reason,
    )


def _group_status(record: GroupRecord) -> GroupStatus:
    position = record.position
    return GroupStatus(
        state=str(record.state),
        updated_at=time.time(),
        waiting_on="; ".join(record.awaited) or None,
        incarnation=record.incarnation,
        group=record.epoch,
        epoch=record.epoch_number,
        seq=record.seq,
        members=dict(record.members),
        iteration=position.iteration if position else 0,
        phase=int(position.phase) if position else -1,
        round=position.round if position else 0,
        awaited=list(record.awaited),
        exit_code=record.exit_code,
        reason=record.reason,
    )
