"""Advantages from the rewards of one group (all rollouts of one example). Pure; no tensors, groups are small.

Formulas, sources and when to take which: `docs/advantages.md`. Which groups reach a batch is decided elsewhere.

G = rollouts of one example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from prime_rl.configs.orchestrator import AdvantageConfig, AdvantageType

# Keeps a group whose rewards hardly differ from advantages without limit.
EPSILON = 1e-6


def compute_advantages(rewards_G: Sequence[float], lengths_G: Sequence[int], config: AdvantageConfig) -> list[float]:
    """One advantage a rollout (G numbers): how much better than its group it did.

    Args:
        rewards_G: G rewards.
        lengths_G: G numbers of tokens that the policy sampled; looked at only with a length penalty.

    Exactly zero when all rewards (after the penalty) are equal, so also for a group of one.
    """
    if config.length_penalty:
        rewards_G = penalize_length(rewards_G, lengths_G, config.length_penalty)
    if min(rewards_G) == max(rewards_G):
        return [0.0] * len(rewards_G)
    return FORMULAS[config.type](rewards_G)


def weighted_advantages(
    rewards: Mapping[str, Sequence[float]], lengths_G: Sequence[int], config: AdvantageConfig
) -> list[float]:
    """The advantages of several rewards, each taken separately over its group, summed with `config.reward_weights`.

    A reward that varies little then counts as much as one that varies much. GDPO, arXiv 2601.05242, without its last
    normalisation over the batch.

    Args:
        rewards: G numbers for each name in `config.reward_weights`.
        lengths_G: as in `compute_advantages`.
    """
    weighted = [
        [weight * value for value in compute_advantages(rewards[name], lengths_G, config)]
        for name, weight in config.reward_weights.items()
    ]
    return [math.fsum(values) for values in zip(*weighted, strict=True)]


def penalize_length(rewards_G: Sequence[float], lengths_G: Sequence[int], coef: float) -> list[float]:
    """R * (1 - coef * sigmoid((length - mean) / std)) for G rollouts (arXiv 2502.04463, section 4).

    Mean and standard deviation are those of the lengths of the rollouts with a reward above zero: wrong answers
    neither pay nor count, and no reward changes its sign. Where all those are equally long the sigmoid is 1/2.
    """
    counted = [length for reward, length in zip(rewards_G, lengths_G, strict=True) if reward > 0]
    if not counted:
        return list(rewards_G)
    mean = math.fsum(counted) / len(counted)
    std = _std([length - mean for length in counted])
    return [
        reward * (1 - coef * _sigmoid((length - mean) / std if std else 0.0)) if reward > 0 else reward
        for reward, length in zip(rewards_G, lengths_G, strict=True)
    ]


def centred(rewards_G: Sequence[float]) -> list[float]:
    """R - mean(R). REINFORCE with the group's mean as baseline; Dr. GRPO's advantage (arXiv 2503.20783)."""
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]


def standardized(rewards_G: Sequence[float]) -> list[float]:
    """(R - mean(R)) / (std(R) + EPSILON), the (population) standard deviation of the group. GRPO, arXiv 2402.03300."""
    centred_G = centred(rewards_G)
    std = _std(centred_G)
    return [value / (std + EPSILON) for value in centred_G]


def leave_one_out(rewards_G: Sequence[float]) -> list[float]:
    """R minus the mean of the G - 1 others: a baseline that does not depend on R. RLOO, arXiv 2402.14740. G > 1."""
    total, num_others = math.fsum(rewards_G), len(rewards_G) - 1
    return [reward - (total - reward) / num_others for reward in rewards_G]


def over_mean(rewards_G: Sequence[float]) -> list[float]:
    """(R - mean(R)) / mean(R): the rarer success is, the more it counts. MaxRL, arXiv 2602.02710.

    Zero where the mean is not above zero: it estimates the chance of success, and there was none.
    """
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [(reward - mean) / mean if mean > 0 else 0.0 for reward in rewards_G]


# Each takes rewards that are not all equal.
FORMULAS: dict[AdvantageType, Callable[[Sequence[float]], list[float]]] = {
    "mean": centred,
    "grpo": standardized,
    "rloo": leave_one_out,
    "dr_grpo": centred,
    "maxrl": over_mean,
}


def _std(centred: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in centred) / len(centred))


def _sigmoid(x: float) -> float:
    return 0.5 * (1 + math.tanh(x / 2))  # without overflow
