"""The bound on staleness with the real scheduler: whatever finishes when, and whenever a new version arrives.

The server's answers say which version made them, so the bound is checked on the tokens themselves, not on what the
orchestrator wrote down about them.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prime_rl.contract.layout import RunDir
from prime_rl.orchestrator.envs.base import Example
from prime_rl.orchestrator.guard import TrainerWatch
from prime_rl.orchestrator.metrics import PhaseClock
from prime_rl.orchestrator.policy import PolicyVersions
from prime_rl.orchestrator.rollout import Group
from prime_rl.orchestrator.scheduler import GroupLedger, Scheduler
from prime_rl.utils.watch import Watcher
from tests.budgets import examples
from tests.orchestrator_support import (
    FIRST_BYTE,
    FakeInference,
    TalkEnv,
    connected,
    make_model,
    make_run,
    make_worker,
    publish,
)


@dataclass(frozen=True)
class Case:
    k: int
    groups_per_batch: int
    max_steps: int
    max_groups: int
    num_turns: int
    failing: frozenset[int]  # examples whose environment raises
    num_spare: int = 0
    max_off_policy: int | None = None
    whole: bool = False  # the run trains the whole model: a server has one version at a time

    @property
    def behind(self) -> int:
        """Versions that a request under way may fall behind."""
        return self.k if self.max_off_policy is None else min(self.k, self.max_off_policy)


CASES = st.builds(
    Case,
    k=st.integers(0, 3),
    groups_per_batch=st.integers(1, 3),
    max_steps=st.integers(1, 6),
    max_groups=st.integers(1, 8),
    num_turns=st.integers(1, 2),
    failing=st.frozensets(st.integers(0, 9), max_size=2),
    num_spare=st.integers(0, 4),
    max_off_policy=st.none() | st.integers(0, 2),
    whole=st.booleans(),
)


@dataclass
class Gate:
    """Holds every completion until the test lets it go."""

    version_of: Callable[[str], int]
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    versions: dict[asyncio.Future[None], int] = field(default_factory=dict)

    async def __call__(self, body: dict[str, Any]) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        self.versions[future] = self.version_of(body["model"])
        try:
            await future
        finally:
            self.waiting.remove(future)

    @property
    def oldest(self) -> int | None:
        """The oldest version that a waiting request has asked."""
        return min((self.versions[future] for future in self.waiting), default=None)


@dataclass
class Played:
    """What came of a case: the batches, and the newest published version when each was taken."""

    batches: list[list[Group]] = field(default_factory=list)
    published_at: list[int] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    num_dropped: int = 0
    num_too_old: int = 0
    num_unknown: int = 0
    adapters_left: int = 0


async def play(case: Case, choose: Callable[[int], int], folder: Path) -> Played:
    """Run `case`; `choose(n)` picks which of n things happens next: an answer comes, or a version."""
    run, model = make_run(folder), make_model(folder / "model")
    fake, played = FakeInference(model), Played()
    fake.gate = gate = Gate(fake.version_of)
    transport = httpx.ASGITransport(app=fake)
    client, policy = connected("http://fake/v1", run, model, whole=case.whole, transport=transport)
    env = TalkEnv(num_examples=10, num_turns=case.num_turns, on_rollout=failing(case.failing))
    worker = make_worker(client, policy, model, {"talk": env})
    ledger = GroupLedger(
        step=1,
        next_index=0,
        groups_per_batch=case.groups_per_batch,
        max_steps=case.max_steps,
        max_async_level=case.k,
        max_off_policy_steps=case.behind,
        num_spare=case.num_spare,
    )
    with Watcher(rescan_s=60.0) as watcher:
        trainer = TrainerWatch(folder / "no-trainer")
        scheduler = Scheduler(
            *(run, ledger, worker.group, client, policy, watcher, trainer),
            phases=PhaseClock(),
            max_groups=case.max_groups,
        )
        tasks = [
            asyncio.create_task(take_batches(scheduler, case.max_steps, played)),
            asyncio.create_task(scheduler.update_policy_loop()),
        ]
        try:
            await drive(tasks, scheduler, policy, case, run, gate, played, choose)
            await scheduler.close()
            await policy.close()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await client.close()
    played.num_dropped, played.num_too_old = ledger.num_dropped, ledger.num_too_old
    played.num_unknown, played.adapters_left = fake.num_unknown, len(fake.adapters) + (fake.weights != "base")
    return played


def failing(examples: frozenset[int]) -> Callable[[Example], None]:
    def on_rollout(example: Example) -> None:
        if int(example.id[1:]) in examples:
            raise RuntimeError("injected")

    return on_rollout


async def take_batches(scheduler: Scheduler, max_steps: int, played: Played) -> None:
    for _ in range(max_steps):
        played.batches.append(await scheduler.next_groups())
        played.published_at.append(scheduler.published)


async def drive(
    tasks: list[asyncio.Task[None]],
    scheduler: Scheduler,
    policy: PolicyVersions,
    case: Case,
    run: RunDir,
    gate: Gate,
    played: Played,
    choose: Callable[[int], int],
) -> None:
    while True:
        await settle(lambda: bool(gate.waiting) or scheduler.published < len(played.batches) or tasks[0].done())
        for task in tasks:
            if task.done():
                task.result()
        if tasks[0].done():
            return
        if gate.oldest is not None:
            assert gate.oldest >= policy.version - case.behind, "what is too old is not generated to its end"
        # The trainer publishes one version a batch, in order and never before the batch.
        may_publish = scheduler.published < len(played.batches)
        assert gate.waiting or may_publish, f"deadlock: {scheduler.waiting_on(0.0)}"
        if not gate.waiting and (wait := scheduler.waiting_on(0.0)):
            played.waits.append(wait)
        choice = choose(len(gate.waiting) + may_publish)
        if choice < len(gate.waiting):
            gate.waiting[choice].set_result(None)
            await asyncio.sleep(0)
        else:
            publish(run, scheduler.published + 1)
            await scheduler.notice_published()


async def settle(something_can_happen: Callable[[], bool]) -> None:
    """Let all tasks run until they wait for the test. More turns only when nothing can happen yet."""
    for turn in range(3000):
        if turn >= 40 and something_can_happen():
            return
        await asyncio.sleep(0)


def check_bound(case: Case, played: Played) -> None:
    indexes = [group.index for batch in played.batches for group in batch]
    assert indexes == sorted(set(indexes)), "each example once, in order"
    for step, (batch, published) in enumerate(zip(played.batches, played.published_at, strict=True), start=1):
        assert len(batch) == case.groups_per_batch
        assert step <= published + case.k + 1, "never more than k + 1 batches ahead of the trainer"
        for rollout in (rollout for group in batch for rollout in group.rollouts_G):
            versions = versions_in(rollout.branches[0].token_ids_T, rollout.branches[0].loss_mask_T)
            assert len(versions) == case.num_turns
            assert versions == rollout.turn_versions
            assert min(versions) == rollout.oldest_version >= max(0, step - 1 - case.k)
            assert max(versions) <= step - 1
    if not case.failing:
        assert played.num_dropped == 0
        assert indexes == list(range(len(indexes))), "what was started again has kept its place"
    if case.behind == case.k and not case.num_spare:
        assert played.num_too_old == 0, "fresh enough by the way it was started, not by throwing away"
    assert played.num_unknown == 0, "no version was unloaded while a request used it"
    assert played.adapters_left == 0


def versions_in(token_ids: list[int], loss_mask: list[bool]) -> list[int]:
    """The first sampled token of each turn is its version; see `FakeInference`."""
    starts = [i for i, loss in enumerate(loss_mask) if loss and not loss_mask[i - 1]]
    return [token_ids[i] - FIRST_BYTE for i in starts]


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=CASES, data=st.data())
def test_no_token_is_older_than_the_bound_whatever_the_order(case: Case, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        played = asyncio.run(play(case, lambda n: data.draw(st.integers(0, n - 1)), Path(folder)))
    check_bound(case, played)


@pytest.mark.parametrize("k", [0, 2])
def test_a_slow_trainer_is_waited_for_by_name_and_never_outrun(tmp_path: Path, k: int) -> None:
    """The trainer publishes only when nothing else can happen."""
    case = Case(k=k, groups_per_batch=2, max_steps=5, max_groups=8, num_turns=1, failing=frozenset())
    played = asyncio.run(play(case, lambda n: 0, tmp_path))
    check_bound(case, played)
    assert played.published_at == [max(0, step - 1 - k) for step in range(1, 6)]
    # The versions that generation waited for; none for the batches behind the last.
    assert [wait.split(",")[0] for wait in played.waits] == [
        f"policy version {v + 1} (have {v})" for v in range(5 - 1 - k)
    ]


def test_a_fast_trainer_makes_every_batch_on_policy_at_level_0(tmp_path: Path) -> None:
    case = Case(k=0, groups_per_batch=3, max_steps=4, max_groups=2, num_turns=2, failing=frozenset({1}))
    played = asyncio.run(play(case, lambda n: n - 1, tmp_path))
    check_bound(case, played)
    oldest = [{group.oldest_version for group in batch} for batch in played.batches]
    assert oldest == [{0}, {1}, {2}, {3}]
