"""The search over rollouts: words of prompt or completion, and terms such as `reward>0.5 env:math step:12`. Pure.

All terms must hold. A word is found in any case; several in a row stand in quotes. A term with an error is in `errors`
and is left out. Numbers: reward, advantage, step, version, tokens. Texts: env, example; `:` is "contains".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from prime_rl.contract.samples import Sample
from tui.model.query import COMPARE, TERM, split_term

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
        """Whether all tests hold and each word is in the prompt, the completion or a turn, in any case."""
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
