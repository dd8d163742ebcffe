"""The search over rollouts, and what colours their tokens. Pure.

A search is words of prompt or completion, and terms such as `reward>0.5 env:math step:12`; all must hold. A word is
found in any case; several in a row stand in quotes. A term with an error is in `errors` and is left out. Numbers:
reward, advantage, step, version, tokens. Texts: env, example; `:` is "contains".

Colours are levels of how unusual a value is: level 0 is usual, 1 to 3 are higher and higher, -1 to -3 lower and lower;
None: there is no value, as for a token of the environment.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prime_rl.contract.samples import Sample
from tui import fmt
from tui.model.query import COMPARE, TERM, split_term
from tui.readers.rollouts import TokenLine

_NUMBERS: dict[str, Callable[[Sample], float]] = {
    "reward": lambda sample: sample.reward,
    "advantage": lambda sample: sample.advantage,
    "step": lambda sample: sample.step,
    "version": lambda sample: max(sample.policy_versions, default=-1),
    "tokens": lambda sample: sample.num_completion_tokens,
}
_TEXTS: dict[str, Callable[[Sample], str]] = {
    "env": lambda sample: sample.env,
    "example": lambda sample: sample.example_id,
}
FIELDS = (*_NUMBERS, *_TEXTS)
_Test = Callable[[Sample], bool]


@dataclass(frozen=True)
class SampleQuery:
    """A search.

    Attributes:
        text: as it was typed.
        words: in small letters, what is looked for in the text.
    """

    text: str = ""
    words: tuple[str, ...] = ()
    tests: tuple[_Test, ...] = ()
    errors: tuple[str, ...] = ()

    def matches(self, sample: Sample) -> bool:
        """True when all tests hold and each word is in the prompt, the completion or a turn, in any case."""
        if not all(test(sample) for test in self.tests):
            return False
        if not self.words:
            return True
        found = "\n".join((sample.prompt, sample.completion, *(turn.text for turn in sample.turns))).lower()
        return all(word in found for word in self.words)


def parse_search(text: str) -> SampleQuery:
    """Never raises: what is wrong is in `errors`."""
    words: list[str] = []
    tests: list[_Test] = []
    errors: list[str] = []
    for term in (found.group() for found in TERM.finditer(text)):
        field, op, value = split_term(term)
        value = value.replace('"', "")
        if term.count('"') % 2:
            errors.append("unclosed quote")
        elif field in FIELDS:
            try:
                tests.append(_test(field, op, value))
            except ValueError as error:
                errors.append(str(error))
        elif term.replace('"', ""):
            # Text of rollouts has signs: `x=3` is a word.
            words.append(term.replace('"', "").lower())
    return SampleQuery(text.strip(), tuple(words), tuple(tests), tuple(errors))


def _test(field: str, op: str, value: str) -> _Test:
    if not value:
        raise ValueError(f"missing value after {field}{op}")
    if field in _TEXTS:
        if op not in (":", "=", "~", "!="):
            raise ValueError(f"{field} is a text: use : or !=")
        text, wanted, is_in = _TEXTS[field], value.lower(), op != "!="
        return lambda sample: (wanted in text(sample).lower()) is is_in
    if op not in COMPARE:
        raise ValueError(f"{field} is a number: use > >= < <= = or !=")
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise ValueError(f"invalid number {value!r} after {field}{op}")
    number, compare = _NUMBERS[field], COMPARE[op]
    return lambda sample: compare(number(sample), limit)


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
