"""One node of a group: look, decide, act, record; and its signs of life. `node` drives it, in the tests a simulation.

`tick` never waits: it decides, starts work, and looks whether that is done. The member writes its own record, and the
group's when it is the master, at every change. It decides nothing itself (`decide` does).

In between the thread of its `Heartbeat` writes the record once a beat, so long work is not death. How long ago the main
loop last came round (`still_s`) is in it, and shows that the node makes progress. Whether a worker reaches the master
over the network the shared folder cannot show: one TCP probe a beat does (`Prober`). The master answers every
connection with its incarnation, so a worker can check that it is the right one. Failures are counted in the worker's
record as `unreached`; `decide` acts on them, and `contract.nodes` judges the beats.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec.structs import replace

from prime_rl.contract.nodes import SUSPECT_AFTER_BEATS, Sighting, dead_after_s, sight
from prime_rl.multinode.decide import (
    MASTER_RANK,
    Claim,
    Exit,
    Step,
    View,
    all_done,
    claim,
    decide_master,
    decide_node,
    may_leave,
    yields_to,
)
from prime_rl.multinode.records import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    EXIT_TRY_AGAIN,
    GroupRecord,
    GroupSetting,
    GroupState,
    NodeRecord,
    NodeState,
    Position,
    epoch_master,
    epoch_number,
)

logger = logging.getLogger("node")


class Store(Protocol):
    """The shared folder. What a reader sees of others may be old; what it wrote itself it sees at once."""

    def write_node(self, record: NodeRecord) -> None:
        """Put this node's record in place of the one before. Raises OSError."""

    def write_group(self, record: GroupRecord) -> None:
        """Put the group's record in place of the one before; for the master only. Raises OSError."""

    def read_nodes(self) -> Mapping[int, NodeRecord]:
        """The nodes' records by rank; a rank whose record was never read is left out."""

    def read_group(self) -> GroupRecord | None:
        """The group's record, or None before the first one was read."""


class Heartbeat:
    """Writes this node's records: at each change that the loop makes, and once a beat whatever the loop does.

    A loop that has stood still for `silent_after_s` is given up: nothing more is written until it comes round again, so
    that another process may take this rank.

    Args:
        clock: seconds; never jumps.
        every_s: one beat.
    """

    def __init__(self, records: Store, *, clock: Callable[[], float], every_s: float, silent_after_s: float) -> None:
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
        self._looked_at = self._clock()
        self._looks += 1  # last: who sees the new number sees the new time

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
        """Write the records once more, unless the loop is given up. Raises OSError."""
        with self._lock:
            looks = self._looks
            if self._given_up_at == looks:
                return
            # Judged before this record is written, for a write takes time: the other nodes give the reason from it.
            is_over = self._clock() - self._looked_at > self._silent_after_s
            if self._node is not None:
                self._write_node(self._node)
            if self._group is not None:
                self._write_group(self._group)
            if is_over:
                self._given_up_at = looks

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


BACKLOG = 1024
ANSWER_TIMEOUT_S = 1.0
# Several times within the timeout of one probe.
RETRY_S = 0.2


class ProbeServer:
    """The master's side: a port that answers with the master's incarnation."""

    def __init__(self, incarnation: str) -> None:
        self._reply = incarnation.encode()
        self._socket = socket.create_server(("", 0), backlog=BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._answer, name="probe-server", daemon=True).start()

    def _answer(self) -> None:
        is_logged = False
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError as error:  # too many open files, no memory: it passes, and without answers the group ends
                if not is_logged:
                    logger.error("workers get no answer at port %d: %s; trying again", self.port, error)
                is_logged = True
                time.sleep(RETRY_S)
                continue
            is_logged = False
            with caller, contextlib.suppress(OSError):
                caller.settimeout(ANSWER_TIMEOUT_S)
                caller.sendall(self._reply)


def patience_s(every_s: float) -> float:
    """Timeout of one probe: the pause before it and three failed probes take as long as a dead node is silent.

    That many count against the master; a single worker has one more.
    """
    return (dead_after_s(every_s) - every_s) / SUSPECT_AFTER_BEATS


class Prober:
    """The worker's side: a thread probes once a beat and counts the misses since the last answer.

    Args:
        master: the newest record of the master.
    """

    def __init__(self, master: Callable[[], NodeRecord | None], every_s: float) -> None:
        # With the incarnation that was probed: misses of a dead master do not count for the next one.
        self._misses = ("", 0)
        self._master = master
        self._every_s = every_s
        threading.Thread(target=self._probe, name="prober", daemon=True).start()

    def count(self, epoch: str) -> int:
        """Misses of that epoch's master."""
        incarnation, misses = self._misses
        return misses if incarnation == epoch_master(epoch) else 0

    def _probe(self) -> None:
        while True:
            began_s = time.monotonic()
            master = self._master()
            if master is not None and master.port and not master.state.is_final:
                before = self._misses[1] if self._misses[0] == master.incarnation else 0
                misses = 0 if answers(master, patience_s(self._every_s)) else before + 1
                self._misses = (master.incarnation, misses)
            # A slow failure leaves no pause before the next probe.
            time.sleep(max(0.0, self._every_s - (time.monotonic() - began_s)))


def answers(master: NodeRecord, timeout_s: float) -> bool:
    """True when that very master is at its address."""
    expected = master.incarnation.encode()
    try:
        with socket.create_connection((master.address, master.port), timeout=timeout_s) as line:
            found = b""
            while len(found) < len(expected) and (more := line.recv(len(expected) - len(found))):
                found += more
    except OSError:
        return False
    return found == expected


EXIT_FAILED = 1
# For what a node has started to end: the keepers' own grace, and what a full machine takes to schedule them.
END_TIMEOUT_S = 20.0


class Report(msgspec.Struct, frozen=True):
    """The course of the work of a position: `progress` grows, `error` ends it.

    Attributes:
        is_shared: a peer may be to blame for the error.
        may_heal: it is tried again at the next look, and may go well then.
        waiting_on: what this node's own work needs and does not have yet.
    """

    progress: int = 0
    done: bool = False
    error: str | None = None
    is_shared: bool = False
    may_heal: bool = False
    waiting_on: str | None = None


class Work(Protocol):
    """The work of the phases, one position at a time; `begin` gives up what was under way. No call waits."""

    def resume(self) -> Position | None:
        """Where a group goes on, by the proofs on disk; None while they are read.

        After an answer they are read again.
        """

    def begin(self, position: Position, group: GroupRecord) -> None:
        """Take `position` as the work from now on; `look` starts it."""

    def look(self) -> Report:
        """Go on with the work of the position, and report how far it is."""

    def stop(self) -> None:
        """Ask all that was started to end; start nothing new."""

    @property
    def has_ended(self) -> bool:
        """True when all that was started has ended."""


@dataclass(frozen=True)
class _Leaving:
    """A node's end that waits for what it has started, until `deadline`. `is_recorded`: its record gets `state`."""

    exit: Exit
    deadline: float
    is_recorded: bool
    state: NodeState


class Member:
    """A node from its claim to its exit.

    Args:
        unreached: how often in a row the master of an epoch did not answer over the network.
    """

    def __init__(
        self,
        setting: GroupSetting,
        own: NodeRecord,
        store: Store,
        work: Work,
        *,
        clock: Callable[[], float],
        unreached: Callable[[str], int] = lambda epoch: 0,
    ) -> None:
        self.setting = setting
        self.own = own
        self.group: GroupRecord | None = None
        self.waiting_on: str | None = None
        self.heartbeat = Heartbeat(
            store, clock=clock, every_s=setting.heartbeat_s, silent_after_s=setting.loop_timeout_s
        )
        self._store = store
        self._work = work
        self._resume_at: Position | None = None
        self._clock = clock
        self._unreached = unreached
        self._first_look: float | None = None
        self._since = clock()
        self._sightings: dict[int, Sighting] = {}
        self._group_sighting: Sighting | None = None
        self._leaving: _Leaving | None = None
        self._epoch_numbers: set[int] = {0}
        self._failed_at: float | None = None
        self._failed_code = EXIT_FAILED
        self._claimed = False
        self._work_waits_on: str | None = None
        self._next_proof_look = self._since

    def leave(self, reason: str) -> None:
        """This node was asked to end (Ctrl-C)."""
        if not self.own.state.is_final:
            self.own = replace(self.own, state=NodeState.LEFT, reason=reason)

    def tick(self) -> Exit | None:
        """One look and what follows from it; an Exit when this node is done."""
        now = self._clock()
        self.heartbeat.look()
        if self._leaving is not None:
            return self._leave(self._leaving, now)
        nodes = self._look(now)
        if not self._claimed:
            verdict = self._claim(nodes, now)
            if verdict is not Claim.OURS:
                taken = Exit(EXIT_REFUSED, f"rank {self.own.rank} is taken by {nodes[self.own.rank]}")
                return self._end(taken, record=False) if verdict is Claim.TAKEN else None
            nodes[self.own.rank] = self.own
        rival = nodes.get(self.own.rank, self.own)
        is_rival = rival.incarnation != self.own.incarnation and not rival.state.is_final
        if is_rival and yields_to(self.own, rival):
            return self._end(Exit(EXIT_REFUSED, f"rank {rival.rank} is taken by {rival}"), record=False)
        nodes = {**nodes, self.own.rank: self.own}
        self._look_at_proofs(now)
        if self._nothing_is_left():
            return self._end(Exit(EXIT_DONE, all_done(self.setting)))
        self._look_at_work(now)
        self.own = replace(self.own, unreached=self._unreached(self.own.epoch))
        if self.own.rank == MASTER_RANK:
            self._lead(nodes, now)
        exit = self._follow(nodes, now)
        if exit is None and self._leaving is None:
            self.heartbeat.say(self.own)
        return exit

    # -- looking ----

    def _look(self, now: float) -> dict[int, NodeRecord]:
        nodes = dict(self._store.read_nodes())
        for rank, node in nodes.items():
            self._sightings[rank] = sight(self._sightings.get(rank), node.incarnation, (node.seq,), node.progress, now)
            self._epoch_numbers.add(epoch_number(node.epoch))
        group = self._store.read_group()
        if group is not None and (self.own.rank != MASTER_RANK or self.group is None):
            self._group_sighting = sight(self._group_sighting, group.incarnation, (group.seq,), None, now)
            self._epoch_numbers.add(group.epoch_number)
            if self.own.rank != MASTER_RANK:
                self._note_change(group, now)
        return nodes

    def _note_change(self, group: GroupRecord, now: float) -> None:
        before, self.group = self.group, group
        place = (group.epoch, group.state, group.position)
        if before is None or (before.epoch, before.state, before.position) != place:
            self._since = now

    def _look_at_work(self, now: float) -> None:
        own = self.own
        is_ending = self.group is not None and self.group.state is GroupState.ENDING
        if own.state is not NodeState.RUNNING or own.arrived or own.position is None or is_ending:
            return
        report = self._work.look()
        self.own = replace(own, progress=max(own.progress, report.progress), arrived=report.done)
        self._work_waits_on = None if report.done else report.waiting_on
        if report.error is None:
            self._failed_at = None
            return
        # A dead neighbour makes others fail first: give the master the time to find the cause.
        self._failed_at = self._failed_at or now
        self.own = replace(self.own, reason=report.error)
        patience_s = 2 * self.setting.dead_after_s if report.is_shared or report.may_heal else 0.0
        if now - self._failed_at >= patience_s:
            self._failed_code = EXIT_TRY_AGAIN if report.is_shared else EXIT_FAILED
            self.own = replace(self.own, state=NodeState.FAILED)

    # -- deciding ----

    def _claim(self, nodes: Mapping[int, NodeRecord], now: float) -> Claim:
        # From the first look, which may come long after the start of a process on a busy machine.
        self._first_look = now if self._first_look is None else self._first_look
        view = View(now, self._first_look, nodes, self._sightings)
        verdict = claim(self.setting, self.own, nodes.get(self.own.rank), view)
        if verdict is Claim.OURS:
            self._claimed = True
            self._since = now
            self.heartbeat.say(self.own)
        else:
            self.waiting_on = f"a sign of life of {nodes[self.own.rank]}, which had this rank before"
        return verdict

    def _look_at_proofs(self, now: float) -> None:
        """Where the group goes on; again once a beat while this node waits to join."""
        is_master = self.own.rank == MASTER_RANK and self._resume_at is None
        is_asked = self.setting.max_iterations is not None or is_master
        if not is_asked or self.own.state is not NodeState.JOINING or now < self._next_proof_look:
            return
        if (found := self._work.resume()) is not None:
            self._resume_at, self._next_proof_look = found, now + self.setting.heartbeat_s

    def _nothing_is_left(self) -> bool:
        """A node that comes when all is done must not wait for the others, which have left."""
        limit, found = self.setting.max_iterations, self._resume_at
        is_joining = self.own.state is NodeState.JOINING
        return is_joining and limit is not None and found is not None and found.iteration > limit

    def _lead(self, nodes: Mapping[int, NodeRecord], now: float) -> None:
        if self._resume_at is None:
            return
        if self.group is None:
            number = max(self._epoch_numbers) + 1
            self._note_change(GroupRecord(number, self.own.incarnation, seq=1), now)
        assert self.group is not None
        view = View(now, self._since, nodes, self._sightings, self.group, self._group_sighting)
        self._note_change(decide_master(self.setting, self.own, self.group, view, self._resume_at), now)
        self._group_sighting = Sighting(self.own.incarnation, (self.group.seq,), None, now, now, has_moved=True)
        self.heartbeat.say_group(self.group)

    def _follow(self, nodes: Mapping[int, NodeRecord], now: float) -> Exit | None:
        leads = self.own.rank == MASTER_RANK and self._resume_at is not None
        if self.own.state.is_final and not leads:
            return self._last(self.own)
        if self.own.rank == MASTER_RANK and not leads:
            self.waiting_on = "what is proven by earlier iterations to be read"
            return None
        view = View(now, self._since, nodes, self._sightings, self.group, self._group_sighting)
        if leads and self.group is not None and self.group.state is GroupState.ENDING:
            self._work.stop()
            self.waiting_on = "the members to leave"
            if not may_leave(self.setting, self.group, view):
                return None
            if self.own.state.is_final:
                return self._last(self.own)
            return self._end(Exit(self.group.exit_code, self.group.reason or ""))
        step = decide_node(self.setting, self.own, view)
        if step.exit is not None:
            return self._end(step.exit)
        self._take(step, now)
        return None

    def _take(self, step: Step, now: float) -> None:
        self.own = replace(self.own, state=step.state, epoch=step.epoch)
        if step.work is not None and self.group is not None:
            self._since, self._failed_at, self._work_waits_on = now, None, None
            self.own = replace(self.own, position=step.work, arrived=False, reason=None, progress=self.own.progress + 1)
            self._work.begin(step.work, self.group)
            self._look_at_work(now)
        self.waiting_on = step.waiting_on or self._work_waits_on

    def _last(self, own: NodeRecord) -> Exit | None:
        code = EXIT_INTERRUPTED if own.state is NodeState.LEFT else self._failed_code
        return self._end(Exit(code, own.reason or str(own.state)), keep_state=True)

    def _end(self, exit: Exit, *, record: bool = True, keep_state: bool = False) -> Exit | None:
        """`record` is false for a node that does not own its rank: the record is another's."""
        self._work.stop()
        if not record:
            self.heartbeat.silence()
        self.waiting_on = "what this node has started to end"
        now = self._clock()
        self._leaving = _Leaving(exit, now + END_TIMEOUT_S, record, self.own.state if keep_state else NodeState.ENDED)
        return self._leave(self._leaving, now)

    def _leave(self, leaving: _Leaving, now: float) -> Exit | None:
        """The end of this node, as soon as all that it has started has ended."""
        exit = leaving.exit
        if not self._work.has_ended:
            if now < leaving.deadline:
                return None
            exit = Exit(exit.code, f"{exit.reason} (what it started did not end within {END_TIMEOUT_S:g} s)")
        if leaving.is_recorded:
            self.own = replace(self.own, state=leaving.state, reason=exit.reason, exit_code=exit.code)
            self.heartbeat.say(self.own)
        return exit
