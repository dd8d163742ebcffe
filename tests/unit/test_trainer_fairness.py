"""Fairness of packing: a closed loop over a simulated clock, on which a pass costs its token positions.

Every test is played with rows that are padded, whose padding costs, and with rows that lie end to end.

A run that shares the trainer with N - 1 others is owed a trainer of 1/N the speed. With such a trainer for itself it
would make an update every N x (cost of its batch alone) + (time to make the next batch). Every run must reach 80 % of
that rate, whatever the others send, and none may wait much longer than that for any one update.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

import pytest

from prime_rl.trainer.fair_queue import SMALLEST_SHARE, Row, RowQueue
from tests.budgets import in_full
from tests.trainer_support import sample

PASS = 1_000  # token positions of one pass
SHARE = 0.8
SAMPLE = sample(random.Random(0)).columns()
PACKS = False


@pytest.fixture(params=[False, True], ids=["padded", "packed"], autouse=True)
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.PACKS", request.param)


@dataclass(frozen=True)
class Tenant:
    """`lengths` are the rows of each of its batches; the next batch comes `think` after an update."""

    lengths: tuple[int, ...]
    think: int = 0
    weight: float = 1.0
    arrives: int = 0
    idle_from: int | None = None
    idle_until: int = 0

    def rows(self, run_idx: int) -> list[Row]:
        ordered = enumerate(sorted(self.lengths))
        return [Row(run_idx, order, SAMPLE, length, 1.0) for order, length in ordered]

    def next_at(self, now: float) -> float:
        """When the batch after an update at `now` is there."""
        at = now + self.think
        return self.idle_until if self.idle_from is not None and self.idle_from <= at < self.idle_until else at


@dataclass
class Played:
    """By run: when its updates were. By pass: its token positions."""

    updates: list[list[float]]
    pass_sizes: list[int] = field(default_factory=list)

    def within(self, run_idx: int, begin: float, end: float) -> int:
        return sum(begin < at <= end for at in self.updates[run_idx])

    def longest_wait(self, run_idx: int, begin: float, end: float) -> float:
        """The longest time without an update of the run."""
        marks = [begin, *(at for at in self.updates[run_idx] if begin < at <= end), end]
        return max(after - before for before, after in itertools.pairwise(marks))


def play(tenants: list[Tenant], until: float) -> Played:
    """The trainer's loop: take in what is there, one pass, update the runs that are complete."""
    queue, now = RowQueue(PASS, PACKS), 0.0
    ready_at: dict[int, float] = {idx: tenant.arrives for idx, tenant in enumerate(tenants)}
    played = Played([[] for _ in tenants])
    while now < until:
        for idx in [idx for idx, at in ready_at.items() if at <= now]:
            queue.add(idx, tenants[idx].rows(idx), tenants[idx].weight)
            del ready_at[idx]
        if not queue:
            now = min(ready_at.values())
            continue
        rows = queue.next_rows()
        played.pass_sizes.append(positions(rows))
        now += positions(rows)
        for idx in {row.run_idx for row in rows}:
            if not queue.num_waiting(idx):
                played.updates[idx].append(now)
                ready_at[idx] = tenants[idx].next_at(now)
    return played


def positions(rows: list[Row]) -> int:
    return sum(row.num_tokens for row in rows) if PACKS else len(rows) * max(row.num_tokens for row in rows)


def alone(tenant: Tenant) -> float:
    """What a batch of `tenant` costs when it is alone."""
    queue, cost = RowQueue(PASS, PACKS), 0
    queue.add(0, tenant.rows(0))
    while rows := queue.next_rows():
        cost += positions(rows)
    return cost


def owed_every(tenants: list[Tenant], run_idx: int) -> float:
    """Trainer time from one update to the next on a trainer of 1/N the speed."""
    return len(tenants) * alone(tenants[run_idx]) + tenants[run_idx].think


def mixed(seed: int, num: int, low: int, high: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(low, high) for _ in range(num))


HOG, SMALL = Tenant((50,) * 400), Tenant((50,) * 20)
MIXES: dict[str, list[Tenant]] = {
    "a batch 20x larger": [HOG, SMALL],
    "batches below a pass": [Tenant((50,) * 100), Tenant((50,) * 5)],
    "batches of an eighth of a pass": [Tenant((25,) * 100), Tenant((25,) * 5)],
    "batches of many passes": [Tenant((50,) * 2000), Tenant((50,) * 100)],
    "7 others": [HOG, *[SMALL] * 7],
    "7 others of different rows": [HOG, *[Tenant(mixed(n, 16, 20, 90)) for n in range(7)]],
    "rows 20x longer": [Tenant((1000,) * 20), SMALL],
    "rows 20x longer, 7 others": [Tenant((1000,) * 20), *[SMALL] * 7],
    "20x more rows, 20x shorter": [Tenant((20,) * 4000), Tenant((400,) * 10)],
    "rows of all lengths": [Tenant(mixed(1, 320, 10, 400)), *[Tenant(mixed(n, 16, 10, 400)) for n in range(2, 5)]],
    "few rows of all lengths": [Tenant(mixed(1, 160, 10, 100)), *[Tenant(mixed(n, 8, 10, 100)) for n in range(2, 4)]],
    "rows just above half as long": [Tenant((51,) * 400), Tenant((100,) * 10)],
    "rows just below twice as long": [Tenant((100,) * 200), Tenant((51,) * 20)],
    "batches take time to make": [HOG, Tenant((50,) * 20, think=3_000), Tenant((50,) * 20, think=1_500)],
    "7 others that take time": [HOG, *[Tenant((50,) * 10, think=1_000 * n) for n in range(1, 8)]],
    "long rows, and others that take time": [Tenant((1000,) * 20), *[Tenant((20,) * 30, think=2_000)] * 3],
    "two hogs": [HOG, Tenant((500,) * 40), SMALL, SMALL],
    "late comers": [HOG, Tenant((50,) * 20, arrives=20_000), Tenant((50,) * 20, arrives=33_333)],
}


@pytest.mark.parametrize("place", ["first", *in_full("last")])
@pytest.mark.parametrize("name", MIXES)
def test_every_run_gets_its_share_and_none_starves(name: str, place: str) -> None:
    """The hog in the first slot or in the last: the order of slots must not matter."""
    tenants = MIXES[name] if place == "first" else MIXES[name][::-1]
    owed = [owed_every(tenants, idx) for idx in range(len(tenants))]
    end = 12 * max(owed)
    played = play(tenants, end)
    for idx, tenant in enumerate(tenants):
        # The last batch may be half done.
        num_owed = (end - tenant.arrives) / owed[idx] - 1
        assert len(played.updates[idx]) >= SHARE * num_owed, (idx, tenant)
        assert played.longest_wait(idx, tenant.arrives, end) <= 2 * owed[idx] + 2 * PASS, (idx, tenant)


@pytest.mark.parametrize("returning", [HOG, SMALL, Tenant((1000,) * 20)], ids=["hog", "small", "long rows"])
def test_a_run_that_was_away_has_saved_nothing_up(returning: Tenant) -> None:
    """From the moment it is back it has its share, and the others keep theirs."""
    away = 200_000.0
    back = replace(returning, idle_from=30_000, idle_until=int(away))
    tenants = [back, SMALL, HOG]
    end = away + 12 * owed_every(tenants, 2)
    played = play(tenants, end)
    assert not played.within(0, 100_000, away)
    for idx in range(3):
        num_owed = (end - away) / owed_every(tenants, idx) - 1
        assert played.within(idx, away, end) >= SHARE * num_owed, idx
    num_at_once = 20 * owed_every(tenants, 1)
    assert played.within(1, away, away + num_at_once) >= SHARE * 20 - 1, "nor is there a time of getting even"


def test_passes_are_large_where_fairness_does_not_ask_for_small_ones() -> None:
    waits = play([HOG, Tenant((50,) * 20, think=20_000)], 200_000).pass_sizes
    assert sum(waits) / len(waits) >= 0.9 * PASS
    tiny = play([HOG, Tenant((50,))], 200_000).pass_sizes
    assert min(tiny) * SMALLEST_SHARE >= PASS, "a pass below an eighth would be no quicker"


@pytest.mark.parametrize("layout", [False], indirect=True)
def test_padding_is_at_most_a_fifth_of_a_pass_that_is_not_small() -> None:
    queue = RowQueue(PASS, PACKS)
    for idx in range(4):
        queue.add(idx, Tenant(mixed(idx, 40, 5, 400)).rows(idx))
    while rows := queue.next_rows():
        padding = 1 - sum(row.num_tokens for row in rows) / positions(rows)
        assert padding <= 0.2 or (len(rows) - 1) * rows[0].num_tokens * SMALLEST_SHARE <= PASS


@pytest.mark.parametrize(
    "batch", [(50,) * 40, (50,) * 400, mixed(3, 200, 10, 90)], ids=["of two passes", "20", "mixed"]
)
@pytest.mark.parametrize("weights", [(1.0, 2.0, 4.0), *in_full(((4.0, 1.0, 2.0),), ((0.25, 0.5, 1.0),))])
def test_runs_with_equal_work_share_the_tokens_by_their_weights(
    weights: tuple[float, ...], batch: tuple[int, ...]
) -> None:
    num_updates = 200
    tenants = [Tenant(batch, weight=weight) for weight in weights]
    played = play(tenants, num_updates * sum(batch))
    counts = [len(updates) for updates in played.updates]
    assert sum(counts) >= 0.75 * num_updates
    for count, weight in zip(counts, weights, strict=True):
        assert count / sum(counts) == pytest.approx(weight / sum(weights), rel=0.1), counts


def test_a_weight_takes_nothing_from_others_that_its_run_cannot_use() -> None:
    """A run that is slow to make batches trains all it makes; the others have the rest, by their weights."""
    slow = Tenant((50,) * 20, think=20_000, weight=1000.0)
    played = play([slow, Tenant((50,) * 40), Tenant((50,) * 40, weight=2.0)], 400_000)
    made, one, two = (len(updates) for updates in played.updates)
    assert made >= 0.9 * 400_000 / (20_000 + 3 * PASS)
    assert two / one == pytest.approx(2.0, rel=0.1)
    assert one * 2_000 + two * 2_000 >= 0.85 * (400_000 - made * 1_000)


def test_a_heavy_run_starves_nobody() -> None:
    light, heavy = Tenant((50,) * 20), Tenant((50,) * 400, weight=100.0)
    assert len(play([light, heavy], 1_000_000).updates[0]) >= 8
