"""Which examples are settled: right in every rollout of the group that was drawn last, or wrong in every one.

Such a group has no advantage, so the run learns nothing from it. What is known is part of every batch's sampler state.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from prime_rl.orchestrator.envs.base import Environment


class Pools:
    """Of each environment, by its name in metrics, the ids of settled train examples.

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
        """Whether the example is settled, right or wrong."""
        return example_id in self._settled[env_name]

    def figures(self) -> dict[str, float]:
        """How many examples of each environment are settled."""
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
        """What `state` returned. Raises ValueError. Environments and examples that are no more are left out."""
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
