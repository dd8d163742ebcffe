"""The scheduler without servers: refusals, failed groups, the last version, groups that are stopped, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_rl.orchestrator import scheduler as scheduler_module
from prime_rl.orchestrator.client import RequestRefused
from prime_rl.orchestrator.envs.checked import ExampleUnusable
from prime_rl.orchestrator.guard import RunFailed, TrainerWatch
from prime_rl.orchestrator.metrics import PhaseClock
from prime_rl.orchestrator.rollout import Group, GroupFailed
from prime_rl.orchestrator.scheduler import LOAD_REFUSED_LIMIT_S, MAX_FILTERED_BATCHES, GroupLedger, Scheduler
from prime_rl.utils.watch import Watcher
from tests.orchestrator_support import make_run, publish
from tests.patience import PATIENCE_S
from tests.unit.test_orchestrator_async_bound import settle
from tests.unit.test_orchestrator_pure import a_group


class Versions:
    """In place of the policy: nothing is loaded while there is a `refusal`."""

    def __init__(self) -> None:
        self.version = 0
        self.refusal: str | None = None

    async def begin(self) -> None:
        """Nothing was left."""

    async def switch_to(self, version: int) -> None:
        if self.refusal:
            raise RequestRefused(self.refusal)
        self.version = version

    def label(self, version: int) -> str:
        return f"run_a@v{version}"


class Alone:
    """A scheduler without servers; `now` is its clock, `make_group` what its groups are made by."""

    def __init__(self, folder: Path, make_group: Callable[..., Any], groups_per_batch: int = 2) -> None:
        self.now, self.policy, self.run = 0.0, Versions(), make_run(folder)
        ledger = GroupLedger(step=1, next_index=0, groups_per_batch=groups_per_batch, max_steps=99, max_async_level=98)
        client: Any = type("Client", (), {"trouble": None})
        with Watcher(rescan_s=60.0) as watcher:
            self.scheduler = Scheduler(
                *(self.run, ledger, make_group, client, self.policy, watcher, TrainerWatch(folder / "no-trainer")),  # type: ignore[arg-type]
                phases=PhaseClock(lambda: self.now),
                max_groups=3,
                clock=lambda: self.now,
            )


async def never(index: int, note: Callable[[int], None]) -> Group:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def test_an_adapter_that_is_refused_for_too_long_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "LOAD_RETRY_S", 0.0)
    alone = Alone(tmp_path, never)
    scheduler, policy = alone.scheduler, alone.policy

    async def switch(now: float, refusal: str | None) -> None:
        alone.now, policy.refusal = now, refusal
        await scheduler.switch_policy()

    scheduler.published = 1
    for now in (10.0, 10.0 + LOAD_REFUSED_LIMIT_S):
        await switch(now, "all slots are taken")
        assert scheduler.waiting_on(0.0) == "inference to take run_a@v1 (all slots are taken)"
    await switch(20.0 + LOAD_REFUSED_LIMIT_S, None)
    assert policy.version == 1 and scheduler.waiting_on(0.0) is None
    scheduler.published = 2
    for now in (200.0, 200.0 + LOAD_REFUSED_LIMIT_S):  # an earlier refusal, which passed, does not count
        await switch(now, "rank 9 is too large")
    with pytest.raises(RunFailed, match=r"after 120 s waiting for inference to take run_a@v2 \(rank 9 is too large"):
        await switch(201.0 + LOAD_REFUSED_LIMIT_S, "rank 9 is too large")
    await scheduler.close()


async def test_no_group_starts_after_the_end_not_even_in_the_place_of_one_that_fails_just_then(tmp_path: Path) -> None:
    started: list[int] = []

    async def fails_at_the_end(index: int, note: Callable[[int], None]) -> Group:
        started.append(index)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise GroupFailed("its server is gone") from None
        raise AssertionError("unreachable")

    alone = Alone(tmp_path, fails_at_the_end)
    alone.scheduler.published = 1
    await alone.scheduler.switch_policy()
    await settle(lambda: len(started) == 3)
    assert started == [0, 1, 2]
    await alone.scheduler.close()
    alone.scheduler.published = 2
    await alone.scheduler.switch_policy()
    await settle(lambda: True)
    assert started == [0, 1, 2]


async def test_a_run_that_goes_on_begins_with_the_newest_version_that_there_is(tmp_path: Path) -> None:
    alone = Alone(tmp_path, never)
    for version in (1, 2):
        publish(alone.run, version)
    await alone.scheduler.start()
    assert alone.policy.version == 2
    await alone.scheduler.close()


async def test_a_run_fails_when_more_than_half_of_its_last_groups_failed(tmp_path: Path) -> None:
    """Every second group fails, which is survived; so does group 40."""
    goes_on = asyncio.Event()

    async def make_group(index: int, note: Callable[[int], None]) -> Group:
        if index >= 40:
            await (goes_on if index == 40 else asyncio.Event()).wait()
        if index % 2 or index == 40:
            raise GroupFailed(f"group {index} has no answer")
        return a_group(index)

    scheduler = Alone(tmp_path, make_group, groups_per_batch=1).scheduler
    taken = [group.index for _ in range(20) for group in await scheduler.next_groups()]
    assert taken == [*range(0, 40, 2)]
    waiting = asyncio.create_task(scheduler.next_groups())
    await settle(lambda: True)
    assert not waiting.done()
    goes_on.set()
    with pytest.raises(RunFailed, match="11 of the last 20 groups failed; last: group 40 has no answer"):
        await waiting
    await scheduler.close()


async def test_a_group_whose_example_is_unusable_is_left_out_and_is_none_that_was_dropped(tmp_path: Path) -> None:
    async def make_group(index: int, note: Callable[[int], None]) -> Group:
        if index == 1:
            raise ExampleUnusable("its prompt is too long")
        if index == 2:
            raise GroupFailed("its server is gone")
        return a_group(index)

    scheduler = Alone(tmp_path, make_group).scheduler
    groups = await asyncio.wait_for(scheduler.next_groups(), PATIENCE_S)
    assert [group.index for group in groups] == [0, 3]
    assert (scheduler.ledger.num_dropped, list(scheduler._outcomes).count(False)) == (1, 1)
    await scheduler.close()


async def test_the_time_in_which_no_group_is_made_is_that_of_what_is_waited_for(tmp_path: Path) -> None:
    may_end = asyncio.Event()

    async def make_group(index: int, note: Callable[[int], None]) -> Group:
        await may_end.wait()
        return a_group(index, version=index)

    alone = Alone(tmp_path, make_group, groups_per_batch=1)
    scheduler = alone.scheduler
    scheduler.ledger._max_async_level = 0
    waiting = asyncio.create_task(scheduler.next_groups())
    await settle(lambda: True)
    alone.now = 3.0
    may_end.set()
    await waiting
    may_end.clear()
    alone.now = 5.0
    scheduler.published = 1
    await scheduler.switch_policy()
    alone.now = 6.0
    assert {phase: spent for phase, spent in scheduler.phases.lap().items() if spent} == {
        "generate": 4.0,
        "wait_for_policy": 2.0,
    }
    await scheduler.close()


async def test_a_batch_that_is_filled_up_with_groups_without_signal_says_which(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def make_group(index: int, note: Callable[[int], None]) -> Group:
        return a_group(index)

    scheduler = Alone(tmp_path, make_group, groups_per_batch=1).scheduler
    scheduler._has_signal = lambda group: group.index > MAX_FILTERED_BATCHES
    taken = [group.index for _ in range(2) for group in await scheduler.next_groups()]
    assert taken == [MAX_FILTERED_BATCHES, MAX_FILTERED_BATCHES + 1]
    (said,) = (each.getMessage() for each in caplog.records if "used anyway" in each.getMessage())
    assert said.startswith("batch 1: ") and f"/e{MAX_FILTERED_BATCHES} " in said
    await scheduler.close()


async def test_a_version_that_is_there_is_not_what_a_run_waits_for(tmp_path: Path) -> None:
    """What it needs next is published; only inference has yet to take it."""
    scheduler = Alone(tmp_path, never).scheduler
    scheduler._final_version = 2
    publish(scheduler._run, 1)
    await scheduler.notice_published()
    assert "version 2" in str(scheduler.waiting_on(0.0))
    publish(scheduler._run, 2)
    await scheduler.notice_published()
    assert scheduler.waiting_on(0.0) is None
    await scheduler.close()


async def test_the_last_version_is_waited_for_until_it_is_published_or_served(tmp_path: Path) -> None:
    scheduler = Alone(tmp_path, never).scheduler

    async def is_over(waiting: asyncio.Task[None]) -> bool:
        await settle(lambda: True)
        return waiting.done()

    for_publication, for_service = (
        asyncio.create_task(scheduler.wait_for_version(2, serve=serve)) for serve in (False, True)
    )
    assert not await is_over(for_publication)
    publish(scheduler._run, 2)
    await scheduler.notice_published()
    assert await is_over(for_publication) and not await is_over(for_service)
    await scheduler.switch_policy()
    assert await is_over(for_service)
    await scheduler.close()


async def test_what_a_group_makes_after_it_was_stopped_counts_for_nothing(tmp_path: Path) -> None:
    """Group 0 is too old for the version that comes, and swallows that it is stopped."""
    made: list[int] = []
    stopped: list[int] = []

    async def make_group(index: int, note: Callable[[int], None]) -> Group:
        made.append(index)
        note(alone.policy.version)
        if made.count(0) == 1 and index == 0:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                stopped.append(index)
                return a_group(0, rewards=[0.0])
        return a_group(index, rewards=[1.0], version=alone.policy.version)

    alone = Alone(tmp_path, make_group)
    scheduler = alone.scheduler
    scheduler.ledger._max_off_policy_steps = 0
    scheduler._fill()
    await settle(lambda: True)
    scheduler.published = 1
    await scheduler.switch_policy()
    first, second = await scheduler.next_groups()
    assert (first.index, second.index, made.count(0), stopped) == (0, 1, 2, [0])
    assert [rollout.reward for rollout in first.rollouts_G] == [1.0], "of the second try"
    await scheduler.close()


async def test_a_group_that_comes_out_too_old_is_made_again_while_its_batch_is_waited_for(tmp_path: Path) -> None:
    made: list[int] = []

    async def make_group(index: int, note: Callable[[int], None]) -> Group:
        made.append(index)
        return a_group(index, version=1 if made.count(index) == 2 else 0)  # at first older than it was started with

    alone = Alone(tmp_path, make_group, groups_per_batch=1)
    alone.scheduler.ledger._max_async_level, alone.scheduler.ledger.step, alone.policy.version = 0, 2, 1
    (group,) = await asyncio.wait_for(alone.scheduler.next_groups(), PATIENCE_S)
    assert (group.index, group.oldest_version, made[:2], alone.scheduler.ledger.num_too_old) == (0, 1, [0, 0], 1)
    await alone.scheduler.close()
