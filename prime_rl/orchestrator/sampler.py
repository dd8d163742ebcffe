"""The choice of the next example: a function of the seed and a running index, so a restart needs one number.

Several environments take turns by their weights: next is the one that is furthest behind its share, so every stretch of
examples has nearly the shares of the whole. Each goes through its train split in epochs, and every epoch has its own
order. Where settled examples (`Pools`) are to be drawn seldom, others stand in for most of them; which, depends on what
was known when the example was drawn. An environment with a curriculum has one level in force at each index, and only
examples of that level are drawn.

Levels (`Curricula`) change batch by batch, in the order of the examples and not of their completion. A new one is in
force from the first example that was not yet drawn. What is known of the examples is part of every batch's sampler
state, so a restarted orchestrator draws the same examples again.
"""

from __future__ import annotations

import base64
import binascii
import functools
import random
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prime_rl.configs.envs import CurriculumConfig, EnvConfig
from prime_rl.orchestrator.envs.base import Environment, Example, HasExamples
from prime_rl.orchestrator.envs.checked import EnvironmentBroken

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
        envs: Mapping[str, HasExamples],
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
        """The knowledge of the examples, as metrics."""
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


class Pools:
    """Of each environment, by its name in metrics, the ids of settled train examples.

    Settled is what was right in every rollout of the group that was drawn last, or wrong in every one: such a group has
    no advantage, so the run learns nothing from it.

    Args:
        reward_ranges: lowest and highest reward of each environment: wrong and right.
    """

    def __init__(self, envs: Mapping[str, Environment], reward_ranges: Mapping[str, tuple[float, float]]) -> None:
        self._ids = {name: [example.id for example in env.examples("train")] for name, env in envs.items()}
        self._reward_ranges = reward_ranges
        # By environment and example: whether it is right.
        self._settled: dict[str, dict[str, bool]] = {name: {} for name in envs}

    def note(self, env_name: str, example_id: str, rewards: Sequence[float]) -> None:
        """The rewards of a whole group."""
        low, high = self._reward_ranges[env_name]
        if all(reward >= high for reward in rewards) or all(reward <= low for reward in rewards):
            self._settled[env_name][example_id] = rewards[0] >= high
        else:
            self._settled[env_name].pop(example_id, None)

    def has(self, env_name: str, example_id: str) -> bool:
        """True when the example is settled, right or wrong."""
        return example_id in self._settled[env_name]

    def figures(self) -> dict[str, float]:
        """The number of settled examples of each environment."""
        figures = {}
        for name, settled in self._settled.items():
            num_right = sum(settled.values())
            figures[f"env/{name}/settled_right"] = float(num_right)
            figures[f"env/{name}/settled_wrong"] = float(len(settled) - num_right)
        return figures

    def state(self) -> dict[str, dict[str, str]]:
        """As JSON: for each environment a bit for each train example, in their order."""
        return {
            name: {
                "right": _bits([settled.get(example_id) is True for example_id in self._ids[name]]),
                "wrong": _bits([settled.get(example_id) is False for example_id in self._ids[name]]),
            }
            for name, settled in self._settled.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned. Raises ValueError. Environments and examples that are no more are left out."""
        try:
            for name, settled in self._settled.items():
                for kind, is_right in (("right", True), ("wrong", False)):
                    flags = _flags(state.get(name, {}).get(kind, ""))
                    settled.update({each: is_right for each, flag in zip(self._ids[name], flags, strict=False) if flag})
        except (AttributeError, TypeError, binascii.Error) as error:
            raise ValueError(f"the settled examples cannot be read: {error}") from error


def _bits(flags: Sequence[bool]) -> str:
    number = sum(1 << place for place, flag in enumerate(flags) if flag)
    return base64.b64encode(number.to_bytes((len(flags) + 7) // 8, "little")).decode()


def _flags(text: str) -> list[bool]:
    data = base64.b64decode(text, validate=True)
    return [bool(byte >> place & 1) for byte in data for place in range(8)]


class Curriculum:
    """The levels of one environment: one up when enough is solved, one down when too little is. Decided purely.

    Args:
        num_levels: levels that the examples have, numbered from 0, the easiest.
        full_reward: what a rollout must reach to count as solved.
    """

    def __init__(self, config: CurriculumConfig, num_levels: int, full_reward: float) -> None:
        self._config = config
        self._top = num_levels - 1
        self._full_reward = full_reward
        # (first index, level), ascending; and of the newest groups of `level` the shares that were solved.
        self._begins = [(0, 0)]
        self._shares: deque[float] = deque(maxlen=config.window)

    @property
    def level(self) -> int:
        """The level of the examples that are drawn from now on."""
        return self._begins[-1][1]

    def level_at(self, index: int) -> int:
        """The level of the example at `index` of the run's example order."""
        return next((level for first, level in reversed(self._begins) if first <= index), self._begins[0][1])

    def add(self, index: int, rewards: Sequence[float]) -> None:
        """The rewards of a whole group. One of an earlier level, drawn before the newest change, is left out."""
        if index >= self._begins[-1][0]:
            self._shares.append(sum(reward >= self._full_reward for reward in rewards) / len(rewards))

    def decide(self, next_index: int) -> None:
        """Change the level from `next_index` on, if the window is full and its share calls for that."""
        if len(self._shares) < self._config.window:
            return
        share = sum(self._shares) / len(self._shares)
        change = (share >= self._config.raise_at) - (share < self._config.lower_at)
        level = min(max(self.level + change, 0), self._top)
        if level != self.level:
            self._begins.append((next_index, level))
            self._shares.clear()

    def forget_before(self, index: int) -> None:
        """No example before `index` is asked for any more."""
        while len(self._begins) > 1 and self._begins[1][0] <= index:
            del self._begins[0]

    def state(self) -> dict[str, Any]:
        """As JSON: where each level begins, and the solved shares of the newest groups."""
        return {"begins": [list(begin) for begin in self._begins], "shares": list(self._shares)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned, at most the highest level. Raises KeyError, TypeError, ValueError."""
        begins = [(int(first), min(max(int(level), 0), self._top)) for first, level in state["begins"]]
        if not begins or begins != sorted(begins):
            raise ValueError(f"levels {begins} are not in order")
        self._begins = begins
        self._shares.extend(float(share) for share in state["shares"])


class Curricula:
    """The curricula of a run, by the names of their environments in metrics."""

    def __init__(self, curricula: Mapping[str, Curriculum]) -> None:
        self._of = curricula
        # Of groups that no batch has counted yet: (environment, rewards) by index.
        self._noted: dict[int, tuple[str, Sequence[float]]] = {}

    @classmethod
    def of(cls, configs: Sequence[EnvConfig], envs: Mapping[str, Environment]) -> Curricula:
        """Those that `configs` ask for; `envs` by the same names."""
        made = {}
        for config in configs:
            if config.curriculum is not None:
                num_levels = 1 + max((example.level for example in envs[config.label].examples("train")), default=0)
                made[config.label] = Curriculum(config.curriculum, num_levels, config.reward_range[1])
        return cls(made)

    def level_at(self, env_name: str, index: int) -> int | None:
        """The level of the example at `index`; None for an environment without a curriculum."""
        curriculum = self._of.get(env_name)
        return None if curriculum is None else curriculum.level_at(index)

    def note(self, index: int, env_name: str, rewards: Sequence[float]) -> None:
        """The rewards of the group at `index`; of one that was made twice the last ones count."""
        if env_name in self._of:
            self._noted[index] = (env_name, rewards)

    def end_batch(self, last_index: int, next_index: int) -> None:
        """A batch is complete with the group at `last_index`; no example from `next_index` on was drawn yet."""
        for index in sorted(index for index in self._noted if index <= last_index):
            env_name, rewards = self._noted.pop(index)
            self._of[env_name].add(index, rewards)
        for curriculum in self._of.values():
            curriculum.decide(next_index)
            curriculum.forget_before(last_index + 1)

    def figures(self) -> dict[str, float]:
        """The level of each environment, as examples are drawn from now on."""
        return {f"env/{name}/level": float(curriculum.level) for name, curriculum in self._of.items()}

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {name: curriculum.state() for name, curriculum in self._of.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned. Raises ValueError. Environments without a curriculum are left out."""
        try:
            for name, curriculum in self._of.items():
                if name in state:
                    curriculum.restore(state[name])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the levels cannot be read: {error!r}") from error
