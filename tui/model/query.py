"""The runs on the home screen: its filter language, and the orders by every column; the search over rollouts. Pure.

A filter like `state:active reward>0.5 name~math` is a list of terms, and a run is shown when all of them hold:

    math                 the word is in its id, state or note
    state:active         also state:active,waiting; the beginning of a word is enough
    reward>0.5           > >= < <= = !=, with 10k, 50%, and 5m or 2h for ages
    tag:lr-sweep         has the tag
    name~lr              contains; "two words" in quotes
    is:pinned            pinned, marked, problem, live
    !TERM                does not hold

A term with an error is left out of the filter, and `errors` has its place and the reason.

In every order runs without a value come last both ways, and equals keep the workspace's own order (slots, then waiting
runs as they will be admitted, then the others), so that a sort never flickers. Pinned runs stand on top.

A search over rollouts is words of prompt or completion, and terms such as `reward>0.5 env:math step:12`; all must hold.
A word is found in any case; several in a row stand in quotes. A term with an error is in `errors` and is left out.
Numbers: reward, advantage, step, version, tokens. Texts: env, example; `:` is "contains".

The colours of their tokens are levels of how unusual a value is: level 0 is usual, 1 to 3 are higher and higher, -1 to
-3 lower and lower; None: there is no value, as for a token of the environment.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prime_rl.contract.samples import Sample
from tui import fmt
from tui.model.levels import STATES
from tui.model.snapshot import RunRow
from tui.readers.rollouts import TokenLine

_STATE_ORDER = {state: order for order, state in enumerate(STATES)}


def progress(row: RunRow) -> float | None:
    """Share of its steps that are done."""
    return row.step / row.max_steps if row.max_steps else None


def age_s(row: RunRow, now: float) -> float | None:
    """Since it was added, so with the time that it waited for a slot."""
    return None if row.view.added_at is None else max(now - row.view.added_at, 0.0)


Key = Callable[[RunRow], float | str | None]
_order: Callable[[RunRow], int] = operator.attrgetter("order")


def _equal(row: RunRow) -> float:
    """Of the workspace's own order, which is the same whichever way the column goes."""
    return 0


@dataclass(frozen=True)
class Sort:
    """A column to sort by. `descending` is its default: the best, the fastest, the newest on top."""

    title: str
    key: Key
    descending: bool = False


# Column key -> how to sort by it; "slot" is the workspace's own order.
SORTS: dict[str, Sort] = {
    "slot": Sort("slot", _equal),
    "state": Sort("state", lambda row: _STATE_ORDER[row.state]),
    "run": Sort("name", lambda row: row.run_id.lower()),
    "progress": Sort("progress", progress, True),
    "reward": Sort("reward", lambda row: row.reward, True),
    "change": Sort("change of reward", lambda row: row.reward_change, True),
    "loss": Sort("loss", lambda row: row.loss),
    "tokens": Sort("tokens/s", lambda row: row.tokens_per_s, True),
    "lag": Sort("lag", lambda row: row.lag, True),
    "version": Sort("version", lambda row: row.view.policy_version, True),
    "lr": Sort("learning rate", lambda row: row.view.lr, True),
    "note": Sort("note", lambda row: row.note.lower() or None),
    "problems": Sort("problems", lambda row: float(row.level), True),
    "seen": Sort("last sign of life", lambda row: row.updated_at, True),
    "age": Sort("age", lambda row: row.view.added_at, True),
}
DEFAULT_SORT = "slot"


def sort_rows(rows: Iterable[RunRow], sort: str, descending: bool, pins: Collection[str] = ()) -> list[RunRow]:
    """`rows` by that column; pinned ones first, in the same order among themselves."""
    key = SORTS[sort].key
    # Sorting is stable, so the workspace's order stays among equals whichever way the column goes.
    found = sorted(rows, key=_order)
    if key is not _equal:
        valued = [(value, row) for row in found if (value := key(row)) is not None]
        valued.sort(key=operator.itemgetter(0), reverse=descending)
        found = [row for _, row in valued] + [row for row in found if key(row) is None]
    if not pins:
        return found
    return [row for row in found if row.run_id in pins] + [row for row in found if row.run_id not in pins]


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
    "tag": lambda row: " ".join(row.view.tags),
}
FLAGS: dict[str, Test] = {
    "pinned": lambda subject: subject.is_pinned,
    "marked": lambda subject: subject.is_marked,
    "problem": lambda subject: subject.row.is_problem,
    "live": lambda subject: subject.row.is_live,
}
FIELDS = ("state", "is", *TEXTS, *NUMBERS)
COMPARE: dict[str, Callable[[float, float], bool]] = {
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
TERM = re.compile(r'(?:"[^"]*"?|[^\s"])+')
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
    """The fault of the term at [start, end) of the text."""

    start: int
    end: int
    message: str


@dataclass(frozen=True)
class Query:
    """A filter as it was parsed. Terms with an error are not in `tests`, all of which a run must pass."""

    tests: tuple[Test, ...] = ()
    errors: tuple[FilterError, ...] = ()

    def matches(self, subject: Subject) -> bool:
        """True when the run passes all tests; without tests every run does."""
        return all(test(subject) for test in self.tests)


def parse(text: str) -> Query:
    """Parse a filter. Never raises: invalid terms are in `errors`."""
    tests: list[Test] = []
    errors: list[FilterError] = []
    for found in TERM.finditer(text):
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
    field, op, value = split_term(term)
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


def split_term(term: str) -> tuple[str, str, str]:
    """Field, operator and value of a term: ("reward", ">", "0.5"); ("", "", term) for a plain word."""
    parts = _PARTS.fullmatch(term)
    return (parts["field"].lower(), parts["op"], parts["value"]) if parts else ("", "", term)


def _term(term: str) -> Test:
    if term.startswith("!") and len(term) > 1:
        inner = _term(term[1:])
        return lambda subject: not inner(subject)
    field, op, value = split_term(term)
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
    if op not in COMPARE:
        raise ValueError(f"{field} is a number: use > >= < <= = or !=")
    limit, get, compare = _read_number(field, value), NUMBERS[field], COMPARE[op]

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
        if value not in FLAGS:
            raise ValueError(f"unknown flag {value!r} after is: expected one of {', '.join(FLAGS)}")
        flag = FLAGS[value]
        return (lambda subject: not flag(subject)) if op == "!=" else flag
    get = TEXTS.get(field, operator.attrgetter("state"))
    if op == "~":
        return lambda subject: value in get(subject.row).lower()
    words = value.split(",")
    if field == "state":
        words = [state for word in words for state in _states(word)]
    if field == "tag":
        return lambda subject: any(tag.lower() in words for tag in subject.row.view.tags) is (op != "!=")
    return lambda subject: (get(subject.row).lower() in words) is (op != "!=")


def _states(word: str) -> list[str]:
    found = [str(state) for state in STATES if word and state.startswith(word)]
    if not found:
        raise ValueError(f"unknown state {word!r}: expected one of {', '.join(STATES)}")
    return found


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
SAMPLE_FIELDS = (*_NUMBERS, *_TEXTS)
_SampleTest = Callable[[Sample], bool]


@dataclass(frozen=True)
class SampleQuery:
    """A search.

    Attributes:
        text: as it was typed.
        words: in small letters, what is looked for in the text.
    """

    text: str = ""
    words: tuple[str, ...] = ()
    tests: tuple[_SampleTest, ...] = ()
    errors: tuple[str, ...] = ()

    def matches(self, sample: Sample) -> bool:
        """True when all tests hold and each word is in one of the sample's texts, in any case."""
        if not all(test(sample) for test in self.tests):
            return False
        if not self.words:
            return True
        texts = (sample.prompt, sample.completion, sample.output, *(turn.text for turn in sample.turns))
        found = "\n".join(texts).lower()
        return all(word in found for word in self.words)


def parse_search(text: str) -> SampleQuery:
    """Never raises: what is wrong is in `errors`."""
    words: list[str] = []
    tests: list[_SampleTest] = []
    errors: list[str] = []
    for term in (found.group() for found in TERM.finditer(text)):
        field, op, value = split_term(term)
        value = value.replace('"', "")
        if term.count('"') % 2:
            errors.append("unclosed quote")
        elif field in SAMPLE_FIELDS:
            try:
                tests.append(_test(field, op, value))
            except ValueError as error:
                errors.append(str(error))
        elif term.replace('"', ""):
            # Text of rollouts has signs: `x=3` is a word.
            words.append(term.replace('"', "").lower())
    return SampleQuery(text.strip(), tuple(words), tuple(tests), tuple(errors))


def _test(field: str, op: str, value: str) -> _SampleTest:
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
        return Tint(limits, marks, "sampled at", lambda line, at: None if (p := line.logprobs[at]) is None else -p)  # type: ignore[arg-type]
    thirds = (fmt.LEAST_GAIN, max(largest / 3, fmt.LEAST_GAIN), max(largest * 2 / 3, fmt.LEAST_GAIN))
    above = [fmt.gain(limit) for limit in thirds[1:]]
    below = [fmt.gain(-limit) for limit in reversed(thirds[1:])]
    marks = (*below, "<0", ">0", *above)
    return Tint(thirds, marks, "of its example", lambda line, at: _credit(line, at, advantage))


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
