"""A node's log: the nodes that it waits for, that were lost, that came back."""

from __future__ import annotations

import itertools

from prime_rl.multinode.node import SAY_AGAIN_S, ProgressLog
from prime_rl.multinode.records import Phase
from tests.multinode_sim import POLL_S, World

LIMIT_S = 3000.0
NODE_2 = "node 2 (host2, pid 1002)"


def listen(world: World, rank: int) -> list[tuple[float, str]]:
    """The log of the first process of `rank`, with times."""
    heard: list[tuple[float, str]] = []

    def begin() -> None:
        node = world.nodes[rank]
        assert node is not None
        progress_log = ProgressLog(node.member, lambda words: heard.append((world.now, words)), lambda: world.now)

        def look() -> None:
            if not node.is_dead:
                progress_log.update()
                world.at(world.now + POLL_S, look)

        look()

    world.at(4.0, begin)
    world.run(LIMIT_S)
    return heard


def test_a_waiting_node_logs_each_second_which_nodes_and_how_long() -> None:
    world = World(1, 3, restarts=False, kill_at=(2, Phase.FINAL), chaos_until_s=0.0, max_lag_s=0.5)
    heard = listen(world, 1)
    killed_at, _ = world.killed[0]
    waits = [(at, words) for at, words in heard if at > killed_at + 1.0 and words.startswith("waits for")]
    assert len(waits) >= 5
    for before, after in itertools.pairwise(waits):
        assert after[0] - before[0] <= SAY_AGAIN_S + POLL_S + 1e-9
    assert all("phase 13 (final sync)" in words and NODE_2 in words for _, words in waits)
    assert waits[-1][1].endswith("s of at most 3600 s)") and ", suspect: no beat for" in waits[-1][1]


def test_lost_and_returned_nodes_are_logged_once() -> None:
    world = World(2, 3, num_iterations=3, elastic=True, kill_at=(2, Phase.TRAIN_ROLLOUT), chaos_until_s=0.0, speed=8)
    news = [words for _, words in listen(world, 1) if words.startswith("the group goes on")]
    assert len(news) == 2
    assert news[0].startswith(f"the group goes on with nodes 0, 1: {NODE_2} ")
    assert news[1] == f"the group goes on with nodes 0, 1, 2: {NODE_2} joined"


def test_no_group_goes_on_without_its_master_and_that_is_said() -> None:
    world = World(3, 3, elastic=True, restarts=False, kill_at=(0, Phase.TRAIN), chaos_until_s=0.0)
    world.run(LIMIT_S)
    for _, _, exit in world.exits:
        assert "node 0 (host0, pid 1000), the master, is dead" in exit.reason
        assert exit.reason.endswith("--elastic goes on without workers, never without the master")
