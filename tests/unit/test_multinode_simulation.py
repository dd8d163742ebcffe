"""Whole lives of groups in a simulated world: no hang, no split, no task lost or counted twice, all nodes end."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from msgspec.structs import replace

from prime_rl.multinode.decide import Exit, View, _own_cut
from prime_rl.multinode.node import ProgressLog
from prime_rl.multinode.records import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    EXIT_TRY_AGAIN,
    GroupRecord,
    GroupSetting,
    NodeRecord,
    Phase,
    Position,
    RlPhase,
)
from tests.budgets import SIMULATIONS as NUM_HISTORIES
from tests.budgets import in_full
from tests.multinode_sim import MAX_LAG_S, POLL_S, Node, World, check_finished, expected_effects

NUM_BLOCKS = 5
LIMIT_S = 3000.0
SETTING = GroupSetting(0, 1, RlPhase.BOTH, {})
DEAD_AFTER_S, HEARTBEAT_S = SETTING.dead_after_s, SETTING.heartbeat_s


def random_world(seed: int) -> World:
    rng = random.Random(seed)
    return World(
        seed,
        num_nodes=rng.choice([2, 3, 3, 4, 5, 8]),
        elastic=rng.random() < 0.5,
        num_kills=rng.choice([0, 1, 2, 4, 8]),
        slow_s=rng.choice([0.0, 0.0, 0.0, 20.0]),
    )


@pytest.mark.budget
@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_every_random_history_ends_well(block: int) -> None:
    for number in range(NUM_HISTORIES):
        world = random_world(block * 1_000_000 + number)
        world.run(LIMIT_S)
        check_finished(world)


@pytest.mark.parametrize(("num_nodes", "elastic"), [(16, False), (64, True), *in_full((16, True), (64, False))])
def test_large_groups(num_nodes: int, elastic: bool) -> None:
    world = World(5, num_nodes, num_iterations=1, elastic=elastic, num_kills=3, num_tasks=2 * num_nodes, speed=4)
    world.run(LIMIT_S)
    check_finished(world)


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("rank", [0, 2])
def test_a_death_ends_all_others_in_time_with_its_name(phase: Phase, rank: int) -> None:
    world = World(int(phase), 3, restarts=False, kill_at=(rank, phase), chaos_until_s=0.0, max_lag_s=0.5)
    world.run(LIMIT_S)
    (killed_at, _), *_ = world.killed
    assert sorted(other for _, other, _ in world.exits) == sorted({0, 1, 2} - {rank})
    for at, _, exit in world.exits:
        assert exit.code == EXIT_TRY_AGAIN
        assert f"node {rank}" in exit.reason and "no heartbeat" in exit.reason
        assert "phase" in exit.reason
        # The master itself stays until it has seen that the others have left.
        assert at - killed_at <= HEARTBEAT_S * 3 + 5 + 2 * MAX_LAG_S
    assert world.effects == [effect for effect in world.effects if effect[0] <= killed_at + DEAD_AFTER_S]


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize(("rank", "elastic"), [(0, True), (1, False), *in_full((0, False), (1, True))])
def test_a_kill_at_each_phase_costs_nothing(phase: Phase, elastic: bool, rank: int) -> None:
    world = World(100 + int(phase), 3, elastic=elastic, kill_at=(rank, phase), chaos_until_s=0.0)
    world.run(LIMIT_S)
    assert len(world.killed) == 1
    check_finished(world)


@pytest.mark.parametrize("phase", [Phase.TRAIN_ROLLOUT, Phase.TRAIN])
@pytest.mark.parametrize("elastic", [False, True])
def test_a_node_that_is_cut_off_is_named_and_the_group_goes_on_when_it_is_back(phase: Phase, elastic: bool) -> None:
    world = World(7, 3, elastic=elastic, cut_at=(2, phase), chaos_until_s=0.0, max_lag_s=0.5, speed=8)
    world.run(LIMIT_S)
    (_, first, exit), *_ = world.exits
    assert exit.code == EXIT_TRY_AGAIN and (first == 2 or not elastic)
    assert "node 2 (host2, pid 1002) is cut off: " in exit.reason
    check_finished(world)


@pytest.mark.parametrize(("seed", "max_lag_s"), [(8, 0.5), (12, 3.0)])
@pytest.mark.parametrize("elastic", [False, True])
def test_a_master_that_is_cut_off_is_named_and_not_its_workers(elastic: bool, seed: int, max_lag_s: float) -> None:
    """Also when one worker's record is seen more than a beat later than the other's."""
    world = World(seed, 3, elastic=elastic, cut_at=(0, Phase.TRAIN), chaos_until_s=0.0, max_lag_s=max_lag_s, speed=8)
    world.run(LIMIT_S)
    for _, _, exit in world.exits[:3]:
        assert exit.code == EXIT_TRY_AGAIN
        assert exit.reason.startswith("node 0 (host0, pid 1000), the master, is cut off: all workers failed to connect")
    check_finished(world)


@pytest.mark.parametrize(
    ("misses", "is_cut_off"),
    [((3, 3), True), ((3, 1), True), ((3, 0), False), ((2, 2), False), ((9,), False)],
)
def test_a_worker_whose_probe_and_record_lag_behind_is_heeded(misses: tuple[int, ...], is_cut_off: bool) -> None:
    """A single worker that reaches no master is cut off itself."""
    setting = dataclasses.replace(SETTING, num_nodes=3)
    nodes = {rank: NodeRecord(rank, "a", 1, unreached=count) for rank, count in enumerate((0, *misses))}
    group = GroupRecord(1, "a", 1, members=dict.fromkeys(nodes, "a"), position=Position(1, Phase.TRAIN))
    assert (_own_cut(setting, group, View(0.0, 0.0, nodes, {})) is not None) is is_cut_off


def quiet_world(seed: int, **changes: Any) -> World:
    """Three nodes, disturbed only by `changes`."""
    return World(seed, 3, chaos_until_s=0.0, max_lag_s=0.5, **changes)


@pytest.mark.parametrize("seed", [0, *in_full(*range(1, 10))])
def test_work_that_takes_longer_than_a_node_may_be_silent_costs_no_life(seed: int) -> None:
    world = quiet_world(seed, slow_s=10 * DEAD_AFTER_S)
    world.run(LIMIT_S)
    assert [exit.code for _, _, exit in world.exits] == [EXIT_DONE] * 3
    check_finished(world)


def test_it_would_if_the_loop_did_it() -> None:
    """The simulation sees such a node: this is what the test above guards against."""
    world = quiet_world(0, slow_s=10 * DEAD_AFTER_S, in_loop=True, restarts=False)
    world.run(LIMIT_S)
    assert not world.killed
    assert {exit.code for _, _, exit in world.exits} == {EXIT_TRY_AGAIN}
    assert all("no heartbeat" in exit.reason for _, _, exit in world.exits)


STANDS_STILL = "is alive but its loop has stood still for"


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("phase", [Phase.TRAIN_ROLLOUT, Phase.TRAIN, Phase.FINAL])
def test_a_loop_that_stands_still_is_named_and_waited_for(rank: int, phase: Phase) -> None:
    """Well within `loop_timeout_s`, and far beyond what silence may last."""
    world = quiet_world(20, hang_at=(rank, phase, 0.75 * SETTING.loop_timeout_s))
    said = listen(world, 1)
    world.run(LIMIT_S)
    assert any(f"node {rank} (host{rank}, pid {1000 + rank})" in words and STANDS_STILL in words for words in said)
    assert [exit.code for _, _, exit in world.exits] == [EXIT_DONE] * 3
    check_finished(world)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("elastic", [False, True])
def test_a_loop_that_stands_still_for_too_long_is_given_up_by_name(rank: int, elastic: bool) -> None:
    world = quiet_world(21, elastic=elastic, hang_at=(rank, Phase.TRAIN, 5 * SETTING.loop_timeout_s))
    said = listen(world, 1)
    world.run(LIMIT_S)
    assert world.hung is not None and not world.killed
    hung_at, _ = world.hung
    name = f"node {rank} (host{rank}, pid {1000 + rank})"
    if elastic and rank:
        assert any(f"the group goes on with nodes 0, 1: {name} {STANDS_STILL}" in words for words in said)
    else:
        at, _, exit = world.exits[0]
        assert exit.code == EXIT_TRY_AGAIN and "phase 10 (train)" in exit.reason
        assert exit.reason.startswith(name) and STANDS_STILL in exit.reason
        assert SETTING.loop_timeout_s <= at - hung_at <= 1.02 * SETTING.loop_timeout_s + 2 * HEARTBEAT_S + MAX_LAG_S
    check_finished(world)


def test_the_rank_of_a_node_whose_loop_stands_still_can_be_taken_once_it_is_given_up() -> None:
    world = quiet_world(22, restarts=False, hang_at=(2, Phase.TRAIN, 10.0 * LIMIT_S))
    again: list[Node] = []

    def start_again() -> None:
        again.append(Node(world, 2))
        again[0].live()

    world.at(2 * SETTING.loop_timeout_s, start_again)
    world.at(3 * SETTING.loop_timeout_s, lambda: again[0].member.leave("looked at"))
    world.run(20 * LIMIT_S)
    assert again[0].member.own.reason == "looked at"


def test_one_node_is_a_group() -> None:
    world = World(1, 1, num_kills=1)
    world.run(LIMIT_S)
    check_finished(world)


def test_survivors_of_an_elastic_group_go_on_alone() -> None:
    world = World(3, 4, elastic=True, restarts=False, kill_at=(2, Phase.TRAIN_ROLLOUT), chaos_until_s=0.0)
    world.run(LIMIT_S)
    assert {rank: exit.code for _, rank, exit in world.exits} == {0: 0, 1: 0, 3: 0}
    assert [name for _, _, name in world.effects] == expected_effects(world.num_iterations)


def listen(world: World, rank: int) -> list[str]:
    """The log of the first process of `rank`."""
    said: list[str] = []

    def begin() -> None:
        node = world.nodes[rank]
        assert node is not None
        progress_log = ProgressLog(node.member, said.append, lambda: world.now)

        def look() -> None:
            if not node.is_dead:
                progress_log.update()
                world.at(world.now + POLL_S, look)

        look()

    world.at(4.0, begin)
    return said


def play_with(world: World, *, after_s: float, start: int, **changes: object) -> Node:
    """One more process of rank `start`, with its own setting."""
    extra: list[Node] = []

    def join() -> None:
        node = Node(world, start)
        if changes:
            node.member.setting = dataclasses.replace(node.member.setting, **changes)  # type: ignore[arg-type]
            node.member.own = replace(node.member.own, fingerprint=node.member.setting.fingerprint)
        extra.append(node)
        node.live()

    world.at(after_s, join)
    world.run(LIMIT_S)
    return extra[0]


def exits_of(world: World, rank: int) -> list[Exit]:
    return [exit for _, other, exit in world.exits if other == rank]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("after_s", [0.5, 12.0])
def test_a_second_process_of_a_rank_is_refused_and_disturbs_no_node_at_work(rank: int, after_s: float) -> None:
    world = World(11, 3, chaos_until_s=0.0)
    play_with(world, after_s=after_s, start=rank)
    refused = [exit for exit in exits_of(world, rank) if exit.code == EXIT_REFUSED]
    assert len(refused) == 1 and refused[0].reason.startswith(f"rank {rank} is taken by node {rank} (host{rank}")
    assert [name for _, _, name in world.effects] == expected_effects(world.num_iterations)


def test_nodes_that_were_started_differently_are_refused_by_name() -> None:
    world = World(12, 3, restarts=False, chaos_until_s=0.0, max_lag_s=0.2)
    for rank in range(3):
        world.nodes[rank] = None
    world._events.clear()
    world.at(0.0, lambda: world.start(0))
    world.at(0.0, lambda: world.start(1))
    play_with(world, after_s=1.0, start=2, fingerprint={"--num-nodes": "4"})
    assert {exit.code for _, _, exit in world.exits} == {EXIT_REFUSED}
    assert any(
        "node 2 (host2, pid 1002) was started with --num-nodes 4 (here: 3)" in e.reason for _, _, e in world.exits
    )
    assert world.effects == []


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_leaves_ends_the_group_and_all_say_who(rank: int) -> None:
    world = World(13, 3, restarts=False, chaos_until_s=0.0)

    def leave() -> None:
        node = world.nodes[rank]
        assert node is not None
        node.member.leave("Ctrl-C")

    world.at(15.0, leave)
    world.run(LIMIT_S)
    assert {exit.code for _, _, exit in world.exits} == {EXIT_INTERRUPTED}
    assert len(world.exits) == 3
    for other in {0, 1, 2} - {rank}:
        assert exits_of(world, other)[0].reason.startswith(
            f"node {rank} (host{rank}, pid {1000 + rank}) left in iteration"
        )


def test_a_node_that_never_comes_is_waited_for_by_name_and_not_for_ever() -> None:
    world = World(14, 3, restarts=False, chaos_until_s=0.0)
    world._events.clear()
    world.at(0.0, lambda: world.start(0))
    world.at(0.0, lambda: world.start(1))
    world.run(LIMIT_S)
    assert [exit.code for _, _, exit in world.exits] == [EXIT_TRY_AGAIN] * 2
    assert all("waiting for node 2 to join" in exit.reason for _, _, exit in world.exits)


def test_no_node_is_woken_more_often_than_it_polls() -> None:
    """The simulation's own clock: a life of a minute is some hundred looks, not some million."""
    world = World(15, 2, chaos_until_s=0.0)
    world.run(LIMIT_S)
    assert world._number < 2 * world.now / (0.4 * POLL_S) + 100
