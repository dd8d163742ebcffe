"""Advantages of one group against numpy, written otherwise, and what must hold whatever the rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from prime_rl.configs.base import ConfigError, build
from prime_rl.configs.orchestrator import AdvantageConfig, AdvantageType, OrchestratorConfig
from prime_rl.orchestrator.advantage import EPSILON, compute_advantages

TYPES: tuple[AdvantageType, ...] = get_args(AdvantageType)
# Graded rewards on a grid, as a reward of 1e-300 would tell about rounding and not about advantages.
REWARDS = st.lists(st.integers(0, 100).map(lambda percent: percent / 100), min_size=1, max_size=16)
LENGTHS = st.integers(1, 400)
GROUPS = st.lists(st.tuples(st.sampled_from([0.0, 0.25, 1.0]), LENGTHS), min_size=1, max_size=12)
SIGNED_GROUPS = st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.25, 1.0]), LENGTHS), min_size=1, max_size=12)


def advantages(
    rewards: list[float], kind: AdvantageType, lengths: list[int] | None = None, coef: float = 0
) -> list[float]:
    return compute_advantages(rewards, lengths or [1] * len(rewards), AdvantageConfig(type=kind, length_penalty=coef))


def without_each(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of the others, by leaving out the diagonal."""
    others = np.where(np.eye(len(rewards), dtype=bool), np.nan, rewards)
    return np.nanmean(others, axis=1)


# By another way each: correlation of units, an explicit leave-one-out, the paper's sum over successes.
REFERENCES: dict[AdvantageType, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "mean": lambda r: (np.eye(len(r)) - 1 / len(r)) @ r,
    "dr_grpo": lambda r: (np.eye(len(r)) - 1 / len(r)) @ r,
    "grpo": lambda r: (r - r.mean()) / (np.sqrt(np.mean(r**2) - r.mean() ** 2) + EPSILON),
    "rloo": lambda r: r - without_each(r),
    "maxrl": lambda r: len(r) * (r / r.sum() - 1 / len(r)),
}


@pytest.mark.parametrize("kind", TYPES)
@given(rewards=REWARDS)
def test_equal_to_numpy(kind: AdvantageType, rewards: list[float]) -> None:
    expected = REFERENCES[kind](np.array(rewards)) if len(set(rewards)) > 1 else np.zeros(len(rewards))
    np.testing.assert_allclose(advantages(rewards, kind), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", TYPES)
@given(group=GROUPS, coef=st.sampled_from([0.0, 0.3]))
def test_advantages_sum_to_zero(kind: AdvantageType, group: list[tuple[float, int]], coef: float) -> None:
    rewards, lengths = map(list, zip(*group, strict=True))
    assert sum(advantages(rewards, kind, lengths, coef)) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("coef", [0.0, 0.5])
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.0] * 4, [1.0], [0.0]])
def test_equal_rewards_and_a_group_of_one_give_exactly_zero(
    kind: AdvantageType, coef: float, rewards: list[float]
) -> None:
    assert advantages(rewards, kind, [7] * len(rewards), coef) == [0.0] * len(rewards)


def test_a_rare_success_counts_more_with_maxrl_and_a_group_of_two_with_rloo() -> None:
    assert advantages([1.0, 0.0, 0.0, 0.0], "maxrl") == [3.0, -1.0, -1.0, -1.0]
    assert advantages([0.5, -0.5], "maxrl") == advantages([0.0, -0.5], "maxrl") == [0.0, 0.0]
    assert advantages([1.0, 0.0], "rloo") == [1.0, -1.0]
    assert advantages([1.0, 0.0], "mean") == [0.5, -0.5]


@given(group=SIGNED_GROUPS, coef=st.sampled_from([0.1, 0.9]))
def test_the_length_penalty_equals_numpy(group: list[tuple[float, int]], coef: float) -> None:
    rewards, lengths = (np.array(column) for column in zip(*group, strict=True))
    right = lengths[rewards > 0]
    spread = right.std() if len(right) and right.std() > 0 else 1.0
    z = (lengths - (right.mean() if len(right) else 0)) / spread
    shaped = np.where(rewards > 0, rewards * (1 - coef / (1 + np.exp(-np.clip(z, -500, 500)))), rewards)
    found = advantages(list(rewards), "mean", list(lengths), coef)
    np.testing.assert_allclose(found, shaped - shaped.mean(), atol=1e-12)


def test_only_long_right_answers_pay() -> None:
    short, long, wrong, long_wrong = advantages([1.0, 1.0, 0.0, 0.0], "mean", [10, 30, 5, 900], coef=0.2)
    assert short > long > 0 > wrong == long_wrong
    assert advantages([0.0, 0.0], "grpo", [1, 900], coef=0.2) == [0.0, 0.0]


@pytest.mark.parametrize("bad", [{"type": "gae"}, {"length_penalty": 1.0}, {"length_penalty": -0.1}, {"epsilon": 1}])
def test_what_is_no_advantage_is_refused_by_its_key(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        build(AdvantageConfig, bad, "test")


def test_maxrl_is_refused_where_rewards_may_be_negative() -> None:
    data = {
        **{"batch_size": 4, "rollouts_per_example": 2, "model": {"name": "m"}, "advantage": {"type": "maxrl"}},
        "env": [{"id": "reverse-text"}, {"id": "sort-letters", "reward_range": [-1, 1]}],
    }
    with pytest.raises(ConfigError, match=r"maxrl.*reward_range"):
        build(OrchestratorConfig, data, "test")
    data["env"] = [{"id": "reverse-text", "name": "mean"}]
    with pytest.raises(ConfigError, match=r"'mean' is reserved"):
        build(OrchestratorConfig, data, "test")
