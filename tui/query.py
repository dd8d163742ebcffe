"""The filter language of the home screen: `state:active reward>0.5 name~math`. Pure.

A filter is a list of terms, and a run is shown when all of them hold:

    math                 the word is in its id, state or note
    state:active         also state:active,waiting; the beginning of a word is enough
    reward>0.5           > >= < <= = !=, with 10k, 50%, and 5m or 2h for ages
    name~lr              contains; "two words" in quotes
    is:pinned            pinned, marked, problem, live
    !TERM                does not hold

A term with an error is left out of the filter, and `errors` has its place and the reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tui.snapshot import STATES, RunRow
from tui.sorting import age_s, progress

Number = Callable[[RunRow, float], float | None]
Test = Callable[["Subject"], bool]

NUMBERS: dict[str, Number] = {
    "reward": lambda row, now: row.reward,
    "change": lambda row, now: row.reward_change,
    "loss": lambda row, now: row.loss,
    "tokens": lambda row, now: row.tokens_per_s,
    "lag": lambda row, now: row.lag,
    "step": lambda row, now: row.step,
    "steps": lambda row, now: row.max_steps,
    "progress": lambda row, now: progress(row),
    "version": lambda row, now: row.view.policy_version,
    "lr": lambda row, now: row.view.lr,
    "slot": lambda row, now: row.view.run_idx,
    "restarts": lambda row, now: row.view.num_restarts,
    "seen": lambda row, now: None if row.updated_at is None else max(now - row.updated_at, 0.0),
    "age": age_s,
}
TEXTS: dict[str, Callable[[RunRow], str]] = {
    "name": lambda row: row.run_id,
    "note": lambda row: row.note,
    "reason": lambda row: row.reason or "",
    "model": lambda row: row.view.model or "",
}
FLAGS: dict[str, Test] = {
    "pinned": lambda subject: subject.is_pinned,
    "marked": lambda subject: subject.is_marked,
    "problem": lambda subject: subject.row.is_problem,
    "live": lambda subject: subject.row.is_live,
}
FIELDS = ("state", "is", *TEXTS, *NUMBERS)
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ":": math.isclose,
    "=": math.isclose,
    "!=": lambda a, b: not math.isclose(a, b),
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
}
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "%": 0.01}
_AGES = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_AGE_FIELDS = ("seen", "age")
_TERM = re.compile(r'(?:"[^"]*"?|[^\s"])+')
_PARTS = re.compile(r"(?P<field>[A-Za-z_]+)(?P<op>!=|>=|<=|[:=~<>])(?P<value>.*)", re.DOTALL)
_NUMBER = re.compile(r"(?P<figure>[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)(?P<unit>[a-z%]?)", re.IGNORECASE)


@dataclass(frozen=True)
class Subject:
    """A run, and its marks on this screen. `now` in Unix seconds."""

    row: RunRow
    now: float = 0.0
    is_pinned: bool = False
    is_marked: bool = False


@dataclass(frozen=True)
class FilterError:
    """What is wrong with the term at [start, end) of the text."""

    start: int
    end: int
    message: str


@dataclass(frozen=True)
class Query:
    tests: tuple[Test, ...] = ()
    errors: tuple[FilterError, ...] = ()

    def matches(self, subject: Subject) -> bool:
        return all(test(subject) for test in self.tests)


def parse(text: str) -> Query:
    """Parse a filter. Never raises: invalid terms are in `errors`."""
    tests: list[Test] = []
    errors: list[FilterError] = []
    for found in _TERM.finditer(text):
        try:
            tests.append(_term(found.group()))
        except ValueError as error:
            errors.append(FilterError(found.start(), found.end(), str(error)))
    return Query(tuple(tests), tuple(errors))


def complete(text: str, run_ids: Iterable[str] = ()) -> str | None:
    """`text` with its last term completed by the first word that fits; None when there is nothing to complete."""
    begun = re.search(r"[^\s!]+$", text)
    if begun is None:
        return None
    head, term = text[: begun.start()], begun.group()
    field, op, value = _split(term)
    if not op:
        words: Sequence[str] = [f"{name}:" if name in ("state", "is") else name for name in FIELDS]
        value, prefix = term, ""
    else:
        prefix = field + op
        known: dict[str, Iterable[str]] = {"state": STATES, "is": FLAGS, "name": run_ids}
        words = list(known.get(field, ()))
        if field == "state" and "," in value:
            prefix += value.rpartition(",")[0] + ","
            value = value.rpartition(",")[2]
    fits = next((word for word in words if word.startswith(value) and word != value), None)
    return head + prefix + fits if fits is not None and (value or op) else None


def _split(term: str) -> tuple[str, str, str]:
    parts = _PARTS.fullmatch(term)
    return (parts["field"].lower(), parts["op"], parts["value"]) if parts else ("", "", term)


def _term(term: str) -> Test:
    if term.startswith("!") and len(term) > 1:
        inner = _term(term[1:])
        return lambda subject: not inner(subject)
    field, op, value = _split(term)
    if term.count('"') % 2:
        raise ValueError("unclosed quote")
    if not op:
        word = value.replace('"', "").lower()
        return lambda subject: word in f"{subject.row.run_id} {subject.row.state} {subject.row.note}".lower()
    value = value.replace('"', "")
    if field not in FIELDS:
        raise ValueError(
            f"unknown field {field!r}: expected one of {', '.join(FIELDS)}; put a word with a sign in quotes"
        )
    if not value:
        raise ValueError(f"missing value after {field}{op}")
    if field in NUMBERS:
        return _number_test(field, op, value)
    return _word_test(field, op, value.lower())


def _number_test(field: str, op: str, value: str) -> Test:
    if op not in _COMPARE:
        raise ValueError(f"{field} is a number: use > >= < <= = or !=")
    limit, get, compare = _read_number(field, value), NUMBERS[field], _COMPARE[op]

    def test(subject: Subject) -> bool:
        found = get(subject.row, subject.now)
        return found is not None and compare(found, limit)

    return test


def _read_number(field: str, value: str) -> float:
    units = _AGES if field in _AGE_FIELDS else _UNITS
    read = _NUMBER.fullmatch(value)
    if read is None or read["unit"].lower() not in units:
        names = ", ".join(unit for unit in units if unit)
        raise ValueError(f"invalid number {value!r}: expected digits, then nothing or one of {names}")
    return float(read["figure"]) * units[read["unit"].lower()]


def _word_test(field: str, op: str, value: str) -> Test:
    if op not in (":", "=", "!=", "~"):
        raise ValueError(f"{field} is a text: use : = != or ~ (contains)")
    if field == "is":
        return _flag_test(op, value)
    get = TEXTS.get(field, _state)
    if op == "~":
        return lambda subject: value in get(subject.row).lower()
    words = value.split(",")
    if field == "state":
        words = [state for word in words for state in _states(word)]
    return lambda subject: (get(subject.row).lower() in words) is (op != "!=")


def _state(row: RunRow) -> str:
    return row.state


def _states(word: str) -> list[str]:
    found = [str(state) for state in STATES if word and state.startswith(word)]
    if not found:
        raise ValueError(f"unknown state {word!r}: expected one of {', '.join(STATES)}")
    return found


def _flag_test(op: str, value: str) -> Test:
    if value not in FLAGS:
        raise ValueError(f"unknown flag {value!r} after is: expected one of {', '.join(FLAGS)}")
    flag = FLAGS[value]
    return (lambda subject: not flag(subject)) if op == "!=" else flag
