"""Ranks that follow rank 0: messages over the store, state of the runs, hooks that fail on one rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from prime_rl.contract.files import WaitTimeout
from prime_rl.trainer.fair_queue import rows_of, to_micro_batch
from prime_rl.trainer.runs import MultiRunManager
from prime_rl.trainer.runs.sync import Channel, PackMessage, SlotState, StopMessage, slot_changes
from tests.patience import PATIENCE_S
from tests.runs_support import add, manager_of
from tests.trainer_support import make_batch


def test_only_rank_0_discovers(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, channel=Channel(HashStore(), rank=1, size=2))
    with pytest.raises(RuntimeError, match="on rank 0 only"):
        manager.discover_runs()
    with pytest.raises(RuntimeError, match="on rank 0 only"):
        manager.evict_run(0, "x")


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[tuple[MultiRunManager, MultiRunManager]]:
    store = HashStore()
    channels = [Channel(store, rank, 2, timeout_s=PATIENCE_S) for rank in range(2)]
    return manager_of(tmp_path, channel=channels[0]), manager_of(tmp_path, channel=channels[1])


def both(managers: tuple[MultiRunManager, MultiRunManager]) -> None:
    managers[0].discover_runs()
    threads = [threading.Thread(target=manager.synchronize_state) for manager in managers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_other_ranks_follow_rank_0(tmp_path: Path, two_ranks: tuple[MultiRunManager, MultiRunManager]) -> None:
    add(tmp_path, "run_a", landed=1, model={"lora": {"rank": 4}})
    add(tmp_path, "run_b", landed=2, seed=7)
    both(two_ranks)
    master, other = two_ranks
    assert other.idx_2_id == master.idx_2_id == {0: "run_a", 1: "run_b"}
    assert other.config == master.config and other.scaling_factors == master.scaling_factors
    for idx in (0, 1):
        ours, theirs = master.get_state_dict_for_run(idx), other.get_state_dict_for_run(idx)
        assert all((ours[name] == theirs[name]).all() for name in ours)
    calls: list[tuple[str, str]] = []
    other.register_deletion_hook(lambda idx, run_id: calls.append(("deletion", run_id)))
    other.register_creation_hook(lambda idx, run_id: calls.append(("creation", run_id)))
    master.evict_run(0, "test")
    add(tmp_path, "run_c", landed=3)
    both(two_ranks)
    assert calls == [("deletion", "run_a"), ("creation", "run_c")]
    assert other.idx_2_id == master.idx_2_id == {0: "run_c", 1: "run_b"}


def test_a_look_is_a_sign_of_life(tmp_path: Path) -> None:
    store = HashStore()
    manager = manager_of(tmp_path, channel=Channel(store, rank=0, size=2))
    assert store.add("beat", 0) == 0
    manager.discover_runs()
    assert store.add("beat", 0) == 1


def test_a_hook_that_fails_on_one_rank_drops_the_run_on_all(
    tmp_path: Path, two_ranks: tuple[MultiRunManager, MultiRunManager]
) -> None:
    run = add(tmp_path, "run_a", landed=1)
    add(tmp_path, "run_b", landed=2)
    master, other = two_ranks

    def hook(run_idx: int, run_id: str) -> None:
        if run_id == "run_a":
            raise ValueError("rank 1 has no room")

    other.register_creation_hook(hook)
    both(two_ranks)
    assert master.idx_2_id == other.idx_2_id == {1: "run_b"}
    assert "rank 1 has no room" in run.evicted.read_text()


def test_messages_come_in_order_and_each_once() -> None:
    store = HashStore()
    sender, receiver = (Channel(store, rank, 2, timeout_s=PATIENCE_S) for rank in range(2))
    packs = [
        PackMessage(to_micro_batch(rows_of(idx, make_batch("run_a", 1).columns().samples)), []) for idx in range(2)
    ]
    sender.send(packs)
    sender.send_all(StopMessage())
    assert receiver.peek() == receiver.peek() == packs[1]
    assert receiver.receive() == packs[1] and receiver.receive() == StopMessage()


def test_a_silent_rank_0_is_named_and_a_beating_one_is_waited_for() -> None:
    store = HashStore()
    now = [0.0]

    class Waiting(Channel):
        """Time passes by ten seconds at each slice; rank 0 beats until second 100."""

        def _wait_slice(self, key: str) -> bool:
            now[0] += 10.0
            if now[0] <= 100.0:
                store.add("beat", 1)
            return False

    channel = Waiting(store, 1, 2, timeout_s=30.0, clock=lambda: now[0])
    with pytest.raises(WaitTimeout, match="no heartbeat for 30 s while waiting for rank 1: rank 0 to send message 1"):
        channel.receive()
    assert now[0] == 130.0


def test_slot_changes_are_by_admission() -> None:
    old = [SlotState(0, "run_a", 1, "", 0), SlotState(1, "run_b", 2, "", 0)]
    new = [SlotState(0, "run_a", 3, "", 4), SlotState(1, "run_b", 2, "", 9)]
    assert slot_changes(old, new) == ([old[0]], [new[0]])
