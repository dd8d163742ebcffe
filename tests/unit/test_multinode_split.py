"""Tasks are divided exactly, by weight, and the same everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.multinode.work import assign, make_plan, split_counts

WEIGHTS = st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=16).filter(lambda all_: sum(all_) > 0)


def test_the_seed_documents_example() -> None:
    assert split_counts(100, [2, 1, 1]) == [50, 25, 25]


def test_remainders_go_to_the_largest_fractions_and_ties_to_the_lower_rank() -> None:
    assert split_counts(10, [1, 1, 1]) == [4, 3, 3]
    assert split_counts(7, [5, 3, 2]) == [4, 2, 1]  # quotas 3.5, 2.1, 1.4
    assert split_counts(2, [1, 0, 1]) == [1, 0, 1]
    assert split_counts(0, [1, 2]) == [0, 0]


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], []])
def test_weights_that_divide_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="rank weights"):
        split_counts(3, weights)


@given(st.integers(0, 2000), WEIGHTS)
def test_counts_are_exact_and_within_one_of_the_quota(num_tasks: int, weights: list[float]) -> None:
    counts = split_counts(num_tasks, weights)
    assert sum(counts) == num_tasks
    for count, weight in zip(counts, weights, strict=True):
        quota = num_tasks * weight / sum(weights)
        assert abs(count - quota) <= 1 + 1e-9 * num_tasks


@given(st.integers(0, 300), WEIGHTS, st.integers(0, 9))
def test_parts_are_disjoint_complete_and_decided_by_the_seed(num_tasks: int, weights: list[float], seed: int) -> None:
    tasks = [f"t{number}" for number in range(num_tasks)]
    by_rank = dict(enumerate(weights))
    parts = assign(tasks, by_rank, seed)
    assert sorted(task for part in parts.values() for task in part) == sorted(tasks)
    assert parts == assign(tasks, dict(reversed(by_rank.items())), seed)


def test_a_task_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="duplicate task"):
        assign(["a", "a"], {0: 1.0}, 0)


@given(st.integers(1, 60), st.data())
def test_a_new_plan_keeps_what_is_finished_and_loses_nothing(num_tasks: int, data: st.DataObject) -> None:
    tasks = [f"t{number}" for number in range(num_tasks)]
    # Files of late writers may overlap, and may hold tasks of another iteration.
    files = {name: data.draw(st.lists(st.sampled_from([*tasks, "old"]), max_size=10)) for name in ("a", "b")}
    plan = make_plan(tasks, files, {0: 1.0, 2: 2.0}, seed=1)
    counted = [task for part in (*plan.taken.values(), *plan.parts.values()) for task in part]
    assert sorted(counted) == sorted(tasks)
    assert {task for part in plan.taken.values() for task in part} == {*files["a"], *files["b"]} - {"old"}
