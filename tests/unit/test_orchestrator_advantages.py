"""Advantages of one group against numpy, written otherwise, and what must hold whatever the rewards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from prime_rl.configs.base import ConfigError, build
from prime_rl.configs.orchestrator import AdvantageConfig, AdvantageType, OrchestratorConfig
from prime_rl.orchestrator.batch import EPSILON, assemble_batch, compute_advantages, has_signal, weighted_advantages
from prime_rl.orchestrator.envs.checked import EnvironmentFault
from prime_rl.orchestrator.recorder import SoftTarget
from prime_rl.orchestrator.rollout import Group
from prime_rl.orchestrator.share import decode_group
from tests.unit.test_orchestrator_pure import a_group, a_rollout, with_advantages

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
    "batch": lambda r: r - without_each(r),
    "maxrl": lambda r: len(r) * (r / r.sum() - 1 / len(r)),
}


@given(rewards=st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 4)), min_size=2, max_size=12))
def test_groups_of_one_are_compared_with_the_others_of_their_environment(rewards: list[tuple[str, int]]) -> None:
    groups = [a_group(number, [float(reward)], env=env) for number, (env, reward) in enumerate(rewards)]
    config = AdvantageConfig(type="batch")
    batch = assemble_batch("run_a", 1, groups, advantage=config, temperature=1.0)
    for env in ("a", "b"):
        own = np.array([reward for name, reward in rewards if name == env], dtype=float)
        expected = own - without_each(own) if len(own) > 1 else np.zeros(len(own))
        found = [each.advantage for each in batch.samples if each.example_id.startswith(f"{env}/")]
        np.testing.assert_allclose(found, expected, atol=1e-6)
    assert all(has_signal(group, config) for group in groups), "only the batch knows"


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


@pytest.mark.parametrize("kind", TYPES)
@given(
    group=st.lists(st.tuples(*[st.integers(0, 100).map(lambda percent: percent / 100)] * 3), min_size=1, max_size=12),
    weights=st.tuples(*[st.sampled_from([-0.5, 0.0, 0.2, 1.0, 3.0])] * 3),
)
def test_several_rewards_equal_numpy(
    kind: AdvantageType, group: list[tuple[float, ...]], weights: tuple[float, ...]
) -> None:
    """Each normalised by itself, then the weighted sum: a product of matrices."""
    rewards_NG = np.array(group).T
    by_reward_NG = np.stack([REFERENCES[kind](r) if len(set(r)) > 1 else np.zeros(len(r)) for r in rewards_NG])
    config = AdvantageConfig(type=kind, reward_weights=dict(zip("abc", weights, strict=True)))
    rewards = {"unused": [9.0] * len(group), **dict(zip("abc", rewards_NG.tolist(), strict=True))}
    found = weighted_advantages(rewards, [1] * len(group), config)
    np.testing.assert_allclose(found, np.array(weights) @ by_reward_NG, atol=1e-5, rtol=1e-6)


def test_a_reward_that_varies_little_counts_as_much_as_one_that_varies_much() -> None:
    """What a normalisation of the sum would take for noise."""
    rewards = {"right": [0.0, 0.0, 1.0, 1.0], "form": [0.0, 0.01, 0.0, 0.01]}
    config = AdvantageConfig(reward_weights={"right": 1.0, "form": 1.0})
    apart = weighted_advantages(rewards, [1] * 4, config)
    assert apart == pytest.approx([-2.0, 0.0, 0.0, 2.0], abs=1e-3)
    summed = [sum(both) for both in zip(*rewards.values(), strict=True)]
    assert advantages(summed, "grpo") == pytest.approx([-1.0, -1.0, 1.0, 1.0], abs=0.02)


@pytest.mark.parametrize("bad", [{"a b": 1.0}, {"": 1.0}, {"a": float("nan")}, {"a": "much"}, {"\x1b[2J": 1.0}])
def test_weights_of_rewards_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="reward_weights"):
        build(AdvantageConfig, {"reward_weights": bad}, "test")


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


def test_an_environment_s_own_advantages_stand_in_for_those_of_the_group() -> None:
    plain = a_group(4, [0.0, 1.0, 0.5])
    own_T = [0.0, 0.0, 0.0, 2.0, -0.5]
    group = replace(plain, rollouts_G=[with_advantages(plain.rollouts_G[0], own_T), *plain.rollouts_G[1:]])
    first, *others = assemble_batch(
        "run_a", 3, [group], advantage=AdvantageConfig(type="mean"), temperature=1.0
    ).samples
    assert (first.token_advantages, first.advantage) == (own_T, 0.75)
    assert [(sample.token_advantages, sample.advantage) for sample in others] == [([], 0.5), ([], 0.0)]
    # A signal where the rewards have none; and none where the rollout is masked.
    equal = a_group(5, [0.5, 0.5])
    balanced = replace(with_advantages(equal.rollouts_G[0], [0.0, 0.0, 0.0, 1.0, -1.0]), truncated=True)
    signal = replace(equal, rollouts_G=[balanced, equal.rollouts_G[1]])
    assert has_signal(signal, AdvantageConfig()) and not has_signal(equal, AdvantageConfig())
    masks = AdvantageConfig(mask_truncated=True)
    assert not has_signal(signal, masks)
    cut = assemble_batch("run_a", 3, [signal], advantage=masks, temperature=1.0).samples[0]
    assert (cut.advantage, cut.token_advantages, any(cut.loss_mask)) == (0.0, [], False)
    zeros = with_advantages(plain.rollouts_G[0], [0.0] * 5)
    assert not has_signal(replace(plain, rollouts_G=[zeros]), AdvantageConfig())


def test_groups_go_through_rank_files_with_rewards_and_advantages() -> None:
    rollout = replace(with_advantages(a_rollout(), [0.0, 0.0, 0.0, 2.0, -0.5]), rewards={"a": 1.0})
    group = Group(3, "talk", "talk/e3", [rollout, a_rollout()])
    soft_T = [None, SoftTarget.of([(7, -0.5), (1 << 17, -1.25)])]
    taught = [replace(each, teacher_T=[0.0, -0.5], soft_T=soft_T) for each in rollout.branches]
    soft = replace(group, rollouts_G=[replace(rollout, branches=taught)])
    assert decode_group(msgspec.msgpack.encode(soft)) == soft
    assert soft_T[1] is not None and soft_T[1].told() == ([7, 1 << 17], [-0.5, -1.25])
    data = msgspec.msgpack.encode(group)
    assert decode_group(data) == group
    fields = msgspec.msgpack.decode(data)
    for each in fields["rollouts_G"]:  # as the programs before branches wrote them
        (branch,) = each.pop("branches")
        each |= {**branch, "oldest_version": 0}
    before = decode_group(msgspec.msgpack.encode(fields))
    assert before == group
    for each in fields["rollouts_G"]:
        del each["rewards"], each["token_advantages_T"]
    assert decode_group(msgspec.msgpack.encode(fields)).rollouts_G == [a_rollout(), a_rollout()]


def test_named_rewards_have_their_advantages_by_themselves() -> None:
    plain = a_group(4, [0.25, 0.5])
    named = [{"right": 0.0, "form": 0.5}, {"right": 0.25, "form": 0.0}]
    group = replace(
        plain, rollouts_G=[replace(each, rewards=own) for each, own in zip(plain.rollouts_G, named, strict=True)]
    )
    config = AdvantageConfig(type="rloo", reward_weights={"right": 2.0, "form": 1.0})
    samples = assemble_batch("run_a", 3, [group], advantage=config, temperature=1.0).samples
    assert [sample.advantage for sample in samples] == [-0.5 + 0.5, 0.5 - 0.5]
    assert [sample.reward for sample in samples] == [0.25, 0.5], "what is reported stays the environment's reward"
    with pytest.raises(EnvironmentFault, match=r"no reward 'style', .* found: form, right"):
        has_signal(group, config.replace(reward_weights={"right": 1.0, "style": 1.0}))
    assert not has_signal(group, config) and has_signal(group, config.replace(reward_weights={"form": 1.0}))
