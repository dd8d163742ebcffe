"""Which example comes next: a pure function of the seed and a running index, so a restart needs one number.

Several environments are sampled in equal parts, one after the other. Each goes through its train split in epochs, and
every epoch has its own order.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass

from prime_rl.orchestrator.envs.base import Environment, Example


@dataclass(frozen=True)
class Pick:
    """One example of one environment (by its name in metrics)."""

    env_name: str
    example: Example


class ExampleSampler:
    """The endless example order of a run. Raises ValueError for an environment without train examples."""

    def __init__(self, envs: Mapping[str, Environment], seed: int) -> None:
        self._examples = [(name, env.examples("train")) for name, env in envs.items()]
        self._seed = seed
        if empty := [name for name, examples in self._examples if not examples]:
            raise ValueError(f"env {empty[0]}: its train split has no examples")
        # An epoch's order is needed for all of the epoch; its neighbours may overlap in flight.
        self._order = functools.lru_cache(maxsize=2 * len(self._examples))(self._shuffled)

    def pick(self, index: int) -> Pick:
        name, examples = self._examples[index % len(self._examples)]
        epoch, position = divmod(index // len(self._examples), len(examples))
        return Pick(name, examples[self._order(name, len(examples), epoch)[position]])

    def _shuffled(self, name: str, num_examples: int, epoch: int) -> list[int]:
        order = list(range(num_examples))
        random.Random(f"{self._seed}/{name}/{epoch}").shuffle(order)
        return order
