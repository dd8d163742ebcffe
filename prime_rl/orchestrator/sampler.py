"""Which example comes next: a function of the seed and a running index, so a restart needs one number.

Several environments take turns by their weights: next is the one that is furthest behind its share, so every stretch of
examples has nearly the shares of the whole. Each goes through its train split in epochs, and every epoch has its own
order. Where settled examples (`pools`) are to be drawn seldom, others stand in for most of them; which, depends on what
was known when the example was drawn. An environment with a curriculum has one level in force at each index, and only
examples of that level are drawn.
"""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prime_rl.orchestrator.curriculum import Curricula
from prime_rl.orchestrator.envs.base import Environment, Example
from prime_rl.orchestrator.envs.checked import EnvironmentBroken
from prime_rl.orchestrator.pools import Pools

# For one that stands in for a settled example; if nearly all are settled, the example itself is as good as any.
MAX_DRAWS = 100


@dataclass(frozen=True)
class Pick:
    """One example of one environment (by its name in metrics)."""

    env_name: str
    example: Example


class ExampleSampler:
    """The endless example order of a run. Raises EnvironmentBroken for one without train examples.

    Args:
        weights: by the names of `envs`; without, all are alike.
        pools: what is known of the examples; kept up to date by `note`.
        settled_share: how often a settled example is drawn, as a share of how often others are.
        curricula: the levels of environments; kept up to date by `note` and `end_batch`.
        next_index: no example from here on was drawn yet.
    """

    def __init__(
        self,
        envs: Mapping[str, Environment],
        seed: int,
        weights: Mapping[str, float] | None = None,
        pools: Pools | None = None,
        settled_share: float = 1.0,
        curricula: Curricula | None = None,
        next_index: int = 0,
    ) -> None:
        self.pools = pools
        self.curricula = curricula
        self._next_index = next_index
        self._settled_share = settled_share
        self._examples = [(name, env.examples("train")) for name, env in envs.items()]
        self._seed = seed
        given = [weights[name] if weights else 1.0 for name in envs]
        self._shares = [weight / sum(given) for weight in given]
        # Which environment has its turn at an index, and how many it had before. Worked out as far as it was asked for.
        self._turns = array("H")
        self._rounds = array("I")
        self._counts = [0] * len(given)
        if empty := [name for name, examples in self._examples if not examples]:
            raise EnvironmentBroken(f"env {empty[0]}: its train split has no examples: change its args or its code")
        self._of_level: dict[tuple[str, int], list[Example]] = {}
        for name, examples in self._examples:
            for example in examples:
                self._of_level.setdefault((name, example.level), []).append(example)
        # An epoch's order is needed for all of the epoch; its neighbours may overlap in flight.
        self._order = functools.lru_cache(maxsize=2 * len(self._examples))(self._shuffled)

    def pick(self, index: int) -> Pick:
        """The example at `index` of the order, which counts as drawn from then on."""
        self._take_turns(index + 1)
        self._next_index = max(self._next_index, index + 1)
        name, examples = self._examples[self._turns[index]]
        level = self.curricula.level_at(name, index) if self.curricula else None
        if level is not None:
            examples = self._of_level[name, level]
        epoch, position = divmod(self._rounds[index], len(examples))
        return Pick(
            name, self._unless_settled(name, examples, self._order(name, len(examples), epoch)[position], index)
        )

    def note(self, index: int, env_name: str, example_id: str, rewards: Sequence[float]) -> None:
        """The rewards of the group that was made of the example at `index`."""
        if self.pools is not None:
            self.pools.note(env_name, example_id, rewards)
        if self.curricula is not None:
            self.curricula.note(index, env_name, rewards)

    def end_batch(self, last_index: int) -> None:
        """A batch is complete with the group at `last_index`: time to change levels."""
        if self.curricula is not None:
            self.curricula.end_batch(last_index, self._next_index)

    def state(self, next_index: int) -> dict[str, Any]:
        """As JSON: where the order goes on, and what is known of the examples."""
        parts = {"pools": self.pools, "curricula": self.curricula}
        states = {name: part.state() for name, part in parts.items() if part}
        return {"next_index": next_index, **{name: state for name, state in states.items() if state}}

    def figures(self) -> dict[str, float]:
        """What is known of the examples, as metrics."""
        return {name: value for part in (self.pools, self.curricula) if part for name, value in part.figures().items()}

    def _unless_settled(self, name: str, examples: Sequence[Example], position: int, index: int) -> Example:
        example = examples[position]
        if self.pools is None or self._settled_share == 1.0 or not self.pools.has(name, example.id):
            return example
        rng = random.Random(f"{self._seed}/settled/{index}")
        if rng.random() < self._settled_share:
            return example
        drawn = (rng.choice(examples) for _ in range(MAX_DRAWS))
        return next((other for other in drawn if not self.pools.has(name, other.id)), example)

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
