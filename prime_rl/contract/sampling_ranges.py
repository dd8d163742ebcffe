"""The values that sampling parameters may have: one table for configs, both engines, chats and the trainer.

vLLM raises a temperature below 0.01 to that without a word, and the trainer's distribution would not be the one that
was sampled from. Other values that are nearly zero are zero in float32: quotients by them are not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_MAX_INT = 2**31 - 1


class Range(NamedTuple):
    """From `lowest` to `highest`, and the values in `off`, which change nothing (or, of a temperature, are greedy)."""

    lowest: float
    highest: float
    off: tuple[float, ...] = ()

    def __str__(self) -> str:
        return "".join(f"{value}, or " for value in self.off) + f"{self.lowest} to {self.highest}"

    def problem(self, value: float) -> str | None:
        """The reason why `value` is refused, None when it is not. NaN is outside of every range."""
        fits = value in self.off or self.lowest <= value <= self.highest
        return None if fits else f"found {value}: must be {self}"

    def check(self, value: float) -> float:
        """Return `value`. Raises ValueError when it is refused."""
        if problem := self.problem(value):
            raise ValueError(problem)
        return value


TEMPERATURE = Range(0.01, 2, off=(0,))
RANGES: Mapping[str, Range] = {
    "n": Range(1, 256),
    "temperature": TEMPERATURE,
    "top_p": Range(1e-6, 1),
    "top_k": Range(1, _MAX_INT, off=(-1, 0)),
    "min_p": Range(1e-6, 1, off=(0,)),
    "repetition_penalty": Range(0.01, 2),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "min_tokens": Range(0, _MAX_INT),
    "max_tokens": Range(1, _MAX_INT),
    "max_completion_tokens": Range(1, _MAX_INT),
    "seed": Range(-(2**63), 2**63 - 1),
}


def refusal(params: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first parameter outside of its range, and the reason. What is not a number is not looked at."""
    for name, limits in RANGES.items():
        value = params.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and (problem := limits.problem(value)):
            return name, f"{name}: {problem}"
    return None
