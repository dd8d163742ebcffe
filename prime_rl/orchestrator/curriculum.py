"""Which level of its examples an environment draws from: one up when enough is solved, one down when too little is.

Decided purely, batch by batch, in the order of the examples and not of their completion: `note` collects what each
group solved, `end_batch` decides. A new level is in force from the first example that was not yet drawn, and that
index is part of the state of every batch, so a restarted orchestrator draws the same examples again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from prime_rl.configs.envs import EnvConfig
from prime_rl.configs.reasoning_gym import CurriculumConfig
from prime_rl.orchestrator.envs.base import Environment


class Curriculum:
    """The levels of one environment. `level` is the newest one.

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
        """What `state` returned. A level that is no more is the highest one. Raises KeyError, TypeError, ValueError."""
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
        """What `state` returned. Raises ValueError. Environments without a curriculum are left out."""
        try:
            for name, curriculum in self._of.items():
                if name in state:
                    curriculum.restore(state[name])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the levels cannot be read: {error!r}") from error
