"""What colours the tokens of rollouts: how unusual a value is, in levels. Pure.

Level 0 is usual, 1 to 3 are higher and higher, -1 to -3 lower and lower; None: there is no value, as for a token of the
environment.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tui import fmt
from tui.readers.rollouts import TokenLine

# Factors between the trainer's probability of a token and the policy's; a loss clips at about the second.
RATIO_FACTORS = (1.05, 1.25, 2.0)
# Probabilities of the token that was sampled.
SURPRISES = (0.5, 0.1, 0.01)
_Value = Callable[[TokenLine, int], float | None]


@dataclass(frozen=True)
class Tint:
    """One meaning of the colours.

    Attributes:
        limits: of the levels 1, 2 and 3, ascending.
        marks: what the legend calls the levels, ascending: of six those below 0 come first.
        about: what the marks mean, for the legend.
    """

    limits: tuple[float, float, float]
    marks: tuple[str, ...]
    about: str
    value: _Value

    def level(self, value: float | None) -> int | None:
        """The level of a value, from -3 to 3; None without a finite value. With three `marks` negative values are 0."""
        if value is None or not math.isfinite(value):
            return None
        found = sum(abs(value) >= limit for limit in self.limits)
        if value < 0:
            return -found if len(self.marks) > 3 else 0
        return found

    def legend(self) -> Iterator[tuple[str, int]]:
        """Each mark with its level."""
        levels = (1, 2, 3) if len(self.marks) == 3 else (-3, -2, -1, 1, 2, 3)
        yield from zip(self.marks, levels, strict=True)


TINTS = ("advantage", "log-ratio", "surprise")


def make_tint(name: str, advantage: float, largest: float) -> Tint:
    """One of TINTS, for a rollout with that advantage; `largest` (absolute) is that of its group."""
    if name == "log-ratio":
        limits = tuple(math.log(factor) for factor in RATIO_FACTORS)
        below = [f"/{factor:g}" for factor in reversed(RATIO_FACTORS)]
        marks = (*below, *(f"*{factor:g}" for factor in RATIO_FACTORS))
        return Tint(limits, marks, "trainer / policy", lambda line, at: line.ratios[at])  # type: ignore[arg-type]
    if name == "surprise":
        limits = tuple(-math.log(share) for share in SURPRISES)
        marks = tuple(f"p<{100 * share:g}%" for share in SURPRISES)
        return Tint(limits, marks, "sampled at", lambda line, at: _surprise(line.logprobs[at]))  # type: ignore[arg-type]
    thirds = (fmt.LEAST_GAIN, max(largest / 3, fmt.LEAST_GAIN), max(largest * 2 / 3, fmt.LEAST_GAIN))
    above = [fmt.gain(limit) for limit in thirds[1:]]
    below = [fmt.gain(-limit) for limit in reversed(thirds[1:])]
    marks = (*below, "<0", ">0", *above)
    return Tint(thirds, marks, "of its example", lambda line, at: _credit(line, at, advantage))


def _surprise(logprob: float | None) -> float | None:
    return None if logprob is None else -logprob


def _credit(line: TokenLine, at: int, advantage: float) -> float | None:
    """Of a token of the policy: its own advantage, or that of its rollout."""
    if line.logprobs[at] is None:
        return None
    return line.advantages[at] if line.advantages else advantage


def tinted(line: TokenLine, tint: Tint) -> list[tuple[str, int | None]]:
    """The text in pieces with their levels; tokens of one level in a row are one piece."""
    levels = [(piece, tint.level(tint.value(line, at))) for at, piece in enumerate(line.pieces)]
    if not line.num_left_out:
        return _merged(levels)
    middle = len(levels) // 2
    left_out = (f"\n… {fmt.counted(line.num_left_out, 'token')} left out …\n", None)
    return [*_merged(levels[:middle]), left_out, *_merged(levels[middle:])]


def _merged(levels: Sequence[tuple[str, int | None]]) -> list[tuple[str, int | None]]:
    groups = itertools.groupby(levels, key=lambda each: each[1])
    return [("".join(piece for piece, _ in each), level) for level, each in groups]
