"""Which example comes next: a pure function of the seed and a running index, so a restart needs one number.

Several environments take turns by their weights: next is the one that is furthest behind its share, so every stretch of
examples has nearly the shares of the whole. Each goes through its train split in epochs, and every epoch has its own
order.
"""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from prime_rl.orchestrator.envs.base import Environment, Example


@dataclass(frozen=True)
class Pick:
    """One example of one environment (by its name in metrics)."""

    env_name: str
    example: Example


class ExampleSampler:
    """The endless example order of a run. Raises ValueError for an environment without train examples.

    Args:
        weights: by the names of `envs`; without, all are alike.
    """

    def __init__(self, envs: Mapping[str, Environment], seed: int, weights: Mapping[str, float] | None = None) -> None:
        self._examples = [(name, env.examples("train")) for name, env in envs.items()]
        self._seed = seed
        given = [weights[name] if weights else 1.0 for name in envs]
        self._shares = [weight / sum(given) for weight in given]
        # Which environment has its turn at an index, and how many it had before. Worked out as far as it was asked for.
        self._turns = array("H")
        self._rounds = array("I")
        self._counts = [0] * len(given)
        if empty := [name for name, examples in self._examples if not examples]:
            raise ValueError(f"env {empty[0]}: its train split has no examples")
        # An epoch's order is needed for all of the epoch; its neighbours may overlap in flight.
        self._order = functools.lru_cache(maxsize=2 * len(self._examples))(self._shuffled)

    def pick(self, index: int) -> Pick:
        self._take_turns(index + 1)
        name, examples = self._examples[self._turns[index]]
        epoch, position = divmod(self._rounds[index], len(examples))
        return Pick(name, examples[self._order(name, len(examples), epoch)[position]])

    def _take_turns(self, num_turns: int) -> None:
        for turn in range(len(self._turns), num_turns):
            behind = [share * (turn + 1) - count for share, count in zip(self._shares, self._counts, strict=True)]
            # Rounding must not decide between those that are equally far behind.
            env = behind.index(max(behind, key=lambda value: round(value, 9)))
            self._turns.append(env)
            self._rounds.append(self._counts[env])
            self._counts[env] += 1

    def _shuffled(self, name: str, num_examples: int, epoch: int) -> list[int]:
        order = list(range(num_examples))
        random.Random(f"{self._seed}/{name}/{epoch}").shuffle(order)
        return order
