"""Advantages from the rewards of one group (all rollouts of one example). Pure; no tensors, groups are small.

G = rollouts of one example.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from prime_rl.configs.orchestrator import AdvantageConfig

# Keeps a group whose rewards are all equal at advantage zero instead of a division by zero.
EPSILON = 1e-6


def compute_advantages(rewards_G: Sequence[float], config: AdvantageConfig) -> list[float]:
    """One advantage a rollout: how much better than its group it did.

    `mean`: R - mean(R). `grpo`: that over the group's (population) standard deviation + EPSILON (arXiv 2402.03300).
    """
    mean = math.fsum(rewards_G) / len(rewards_G)
    centred_G = [reward - mean for reward in rewards_G]
    if config.type == "mean":
        return centred_G
    std = math.sqrt(math.fsum(value * value for value in centred_G) / len(centred_G))
    return [value / (std + EPSILON) for value in centred_G]
