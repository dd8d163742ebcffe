"""One node of a group and its own work: what fails, what heals, what does not end, and who has the rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from prime_rl.contract.nodes import Sighting
from prime_rl.multinode.decide import CUT_OFF_AFTER_BEATS, Exit, View, decide_master, yields_to
from prime_rl.multinode.member import END_TIMEOUT_S, EXIT_FAILED, Member, Report
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
    Phase,
    Position,
    RlPhase,
)

SETTING = GroupSetting(0, 1, RlPhase.BOTH, {}, max_iterations=2)
PATIENCE_OF_A_GROUP_S = 2 * SETTING.dead_after_s


class Alone:
    """The only node of a group: its folder, its work and its clock."""

    def __init__(self, iteration: int = 1) -> None:
        self.now = 1000.0
        self.nodes: dict[int, NodeRecord] = {}
        self.written: list[NodeRecord] = []
        self.group: GroupRecord | None = None
        self.report = Report()
        self.resume_at: Position | None = Position(iteration, Phase.START)
        self.num_resumed, self.begun = 0, list[Position]()
        self.has_ended, self.is_stopped = True, False
        self.member = Member(SETTING, NodeRecord(0, "mine", 0), self, self, clock=lambda: self.now)

    # The folder

    def read_nodes(self) -> Mapping[int, NodeRecord]:
        return self.nodes

    def read_group(self) -> GroupRecord | None:
        return self.group

    def write_node(self, record: NodeRecord) -> None:
        self.nodes[record.rank] = record
        self.written.append(record)

    def write_group(self, record: GroupRecord) -> None:
        self.group = record

    # The work

    def resume(self) -> Position | None:
        self.num_resumed += 1
        return self.resume_at

    def begin(self, position: Position, group: GroupRecord) -> None:
        self.begun.append(position)

    def look(self) -> Report:
        return self.report

    def stop(self) -> None:
        self.is_stopped = True

    # What the tests do

    def tick(self, after_s: float = 0.1) -> Exit | None:
        self.now += after_s
        return self.member.tick()

    def until_exit(self, after_s: float = 0.1, limit: int = 30) -> Exit:
        for _ in range(limit):
            if (exit := self.tick(after_s)) is not None:
                return exit
        raise AssertionError(f"{self.member.own.state} on {self.member.waiting_on}")

    def at_work(self) -> Alone:
        while self.member.own.state is not NodeState.RUNNING:
            assert self.tick() is None
        return self


def test_work_goes_through_all_phases_of_all_iterations_and_the_node_is_done() -> None:
    alone = Alone().at_work()
    alone.report = Report(done=True)
    assert alone.until_exit(limit=200) == Exit(EXIT_DONE, "done: 2 iterations")
    assert alone.begun == [Position(iteration, phase) for iteration in (1, 2) for phase in Phase]
    assert alone.written[-1].state is NodeState.ENDED and alone.is_stopped


@pytest.mark.parametrize("phase", [Phase.EVAL_ROLLOUT, Phase.CONFIG_READY, Phase.RESTART_INFERENCE])
def test_a_group_that_starts_again_works_at_nothing_that_is_proven(phase: Phase) -> None:
    """It meets at its first barrier, and goes on from there where the proofs end."""
    alone = Alone()
    alone.resume_at = Position(1, phase)
    alone.report = Report(done=True)
    alone.until_exit(limit=200)
    first, *others = [position.phase for position in alone.begun if position.iteration == 1]
    assert first is Phase.START and others == list(Phase)[phase:]


def test_an_error_that_heals_costs_nothing_and_the_next_one_has_all_its_time() -> None:
    alone = Alone().at_work()
    alone.report = Report(error="no space left", may_heal=True)
    assert alone.tick() is None and alone.tick(PATIENCE_OF_A_GROUP_S - 1.0) is None
    alone.report = Report()
    assert alone.tick() is None
    alone.report = Report(error="no space left", may_heal=True)
    assert alone.tick() is None and alone.tick(PATIENCE_OF_A_GROUP_S - 1.0) is None
    assert alone.member.own.state is NodeState.RUNNING
    assert alone.until_exit(0.6) == Exit(EXIT_FAILED, "no space left")


@pytest.mark.parametrize(
    ("report", "code", "ends_after_s"),
    [
        (Report(error="a damaged file"), EXIT_FAILED, 0.0),
        (Report(error="the trainer ended", is_shared=True), EXIT_TRY_AGAIN, PATIENCE_OF_A_GROUP_S),
        (Report(error="no space left", may_heal=True), EXIT_FAILED, PATIENCE_OF_A_GROUP_S),
    ],
)
def test_an_error_ends_the_node_at_once_or_when_a_neighbour_would_have_been_found_dead(
    report: Report, code: int, ends_after_s: float
) -> None:
    alone = Alone().at_work()
    alone.report = report
    alone.tick()
    if ends_after_s:
        assert alone.member.own.state is NodeState.RUNNING
        alone.tick(ends_after_s - 0.1)
        assert alone.member.own.state is NodeState.RUNNING
    alone.tick(0.2)
    assert alone.member.own.state is NodeState.FAILED
    assert alone.until_exit() == Exit(code, report.error or "")


def test_what_the_node_has_started_is_waited_for_and_not_for_ever() -> None:
    for ends in (True, False):
        alone = Alone().at_work()
        alone.has_ended = False
        alone.member.leave("asked to end by SIGINT")
        for _ in range(5):
            assert alone.tick(END_TIMEOUT_S / 10) is None
        alone.has_ended = ends
        left = "" if ends else f" (what it started did not end within {END_TIMEOUT_S:g} s)"
        assert alone.until_exit(1.0) == Exit(EXIT_INTERRUPTED, f"asked to end by SIGINT{left}")
        assert (alone.written[-1].state, alone.written[-1].exit_code) == (NodeState.LEFT, EXIT_INTERRUPTED)


def test_a_node_that_has_failed_does_not_say_afterwards_that_it_was_asked_to() -> None:
    alone = Alone().at_work()
    alone.member.own = replace(alone.member.own, state=NodeState.FAILED, reason="a damaged file")
    alone.member.leave("asked to end by SIGINT")
    assert alone.until_exit() == Exit(EXIT_FAILED, "a damaged file")
    assert alone.written[-1].state is NodeState.FAILED


def test_what_fails_while_the_group_ends_is_not_the_reason() -> None:
    worker = Alone()
    worker.member.setting = dataclasses.replace(SETTING, rank=1, num_nodes=2)
    worker.member.own = NodeRecord(1, "mine", 0)

    def tick(state: GroupState, seq: int) -> Exit | None:
        worker.nodes[0] = NodeRecord(0, "m", seq, state=NodeState.RUNNING, epoch="1-m")
        members, position = {0: "m", 1: "mine"}, Position(1, Phase.START)
        worker.group = GroupRecord(1, "m", seq, state, members, position, exit_code=75, reason="node 0 left")
        return worker.tick()

    for seq in range(1, 4):
        assert tick(GroupState.RUNNING, seq) is None
    assert worker.begun == [Position(1, Phase.START)]
    worker.report = Report(error="its neighbour is gone")
    assert tick(GroupState.ENDING, 4) == Exit(EXIT_TRY_AGAIN, "node 0 left")


def test_the_next_master_has_an_epoch_above_all_that_it_has_seen() -> None:
    alone = Alone()
    alone.nodes[3] = NodeRecord(3, "b", 1, state=NodeState.ENDED, epoch="41-old")
    alone.group = GroupRecord(17, "old", 1)
    alone.at_work()
    assert alone.group.epoch == "42-mine"


@pytest.mark.parametrize(("iteration", "is_done"), [(2, False), (3, True)])
def test_a_node_that_comes_when_all_is_done_leaves_at_once(iteration: int, is_done: bool) -> None:
    alone = Alone(iteration)
    assert alone.tick() == (Exit(EXIT_DONE, "done: 2 iterations") if is_done else None)


def with_one_more(phase: Phase, **fields: Any) -> tuple[bool, Position]:
    """Whether an elastic group that has done `phase` lets a node with `fields` in, and where it goes on."""
    setting = dataclasses.replace(SETTING, num_nodes=2, elastic=True)
    position = Position(1, phase)
    group = GroupRecord(1, "mine", 1, GroupState.RUNNING, members={0: "mine"}, position=position)
    own = NodeRecord(0, "mine", 1, NodeState.RUNNING, epoch=group.epoch, position=position, arrived=True)
    sightings = {rank: Sighting(rank, (1,), 0, moved_at=9.0, worked_at=9.0, has_moved=True) for rank in (0, 1)}
    view = View(10.0, 9.0, {0: own, 1: NodeRecord(1, "other", 1, epoch=group.epoch, **fields)}, sightings)
    following = decide_master(setting, own, group, view, Position(1, Phase.START))
    assert following.position is not None
    return 1 in following.members, following.position


@pytest.mark.parametrize("misses", [0, CUT_OFF_AFTER_BEATS - 1, CUT_OFF_AFTER_BEATS])
def test_a_node_that_cannot_reach_the_master_is_not_let_in_again(misses: int) -> None:
    is_let_in = misses < CUT_OFF_AFTER_BEATS
    assert with_one_more(Phase.FINAL, unreached=misses) == (is_let_in, Position(2, Phase.START))


def test_a_node_that_was_started_differently_is_not_let_in_again() -> None:
    assert with_one_more(Phase.FINAL, fingerprint={"code": "another"}) == (False, Position(2, Phase.START))


@pytest.mark.parametrize("phase", list(Phase))
def test_a_node_is_let_in_again_at_the_start_of_an_iteration_only(phase: Phase) -> None:
    """What is divided among the nodes of an iteration stays divided as it was."""
    is_let_in, position = with_one_more(phase)
    assert position > Position(1, phase) and is_let_in is (position.iteration == 2)


def test_the_proofs_are_read_at_most_once_a_beat() -> None:
    alone = Alone()
    alone.resume_at = None
    for _ in range(3):
        assert alone.tick() is None
    assert alone.num_resumed == 3, "the search is not over"
    worker = Alone()
    worker.member.setting = dataclasses.replace(SETTING, rank=1, num_nodes=2)
    worker.member.own = NodeRecord(1, "mine", 0)
    for _ in range(4):
        worker.tick(SETTING.heartbeat_s / 4)
    assert worker.num_resumed == 1
    worker.tick(SETTING.heartbeat_s / 4)
    assert worker.num_resumed == 2


def test_of_two_at_work_with_one_rank_one_goes_and_writes_nothing_more() -> None:
    alone = Alone().at_work()
    alone.nodes[0] = replace(alone.nodes[0], incarnation="earlier", host="other", pid=7, state=NodeState.RUNNING)
    num_written = len(alone.written)
    assert alone.tick() == Exit(EXIT_REFUSED, "rank 0 is taken by node 0 (other, pid 7)")
    alone.member.heartbeat.beat()
    assert len(alone.written) == num_written and alone.is_stopped
    later = Alone().at_work()
    later.nodes[0] = replace(later.nodes[0], incarnation="other", state=NodeState.RUNNING)
    assert later.tick() is None, "the larger incarnation goes, which is the other"


@pytest.mark.parametrize(("own", "rival", "goes"), [("a", "b", False), ("b", "a", True)])
@pytest.mark.parametrize("state", [NodeState.JOINING, NodeState.RUNNING])
def test_of_two_with_one_rank_the_one_that_is_not_at_work_goes_else_the_larger(
    state: NodeState, own: str, rival: str, goes: bool
) -> None:
    mine, others = NodeRecord(0, own, 1, state), NodeRecord(0, rival, 1, state)
    assert yields_to(mine, others) is goes
    for at_work in (mine, others):
        waits = mine if at_work is others else others
        pair = replace(at_work, state=NodeState.RUNNING), replace(waits, state=NodeState.JOINING)
        assert not yields_to(*pair) and yields_to(*reversed(pair))


def test_the_end_of_a_node_of_an_earlier_group_does_not_end_this_one() -> None:
    """Its record stays until its next process writes one."""
    setting = dataclasses.replace(SETTING, num_nodes=2)
    group = GroupRecord(2, "mine", 1)
    own = NodeRecord(0, "mine", 1, epoch=group.epoch)
    for state in (NodeState.FAILED, NodeState.LEFT):
        for epoch, ends in (("1-mine", False), (group.epoch, True)):
            view = View(10.0, 9.0, {0: own, 1: NodeRecord(1, "other", 1, state, epoch=epoch)}, {})
            following = decide_master(setting, own, group, view, Position(1, Phase.START))
            assert (following.state is GroupState.ENDING) is ends
