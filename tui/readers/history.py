"""The metrics of a run in columns, kept up to date from its files. No user interface, no threads.

Built for runs of 100,000 steps: a block of lines is decoded to the requested keys only and appended column by column.
Each metric keeps at most `capacity` points; beyond that neighbours are thinned so that every least and greatest value
stays, and the newest values as they came. The home screen reads only the end of each file (`newest_bytes`), and keeps
only the newest values.
"""

from __future__ import annotations

import functools
import math
import operator
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.contract.layout import RunDir
from prime_rl.contract.metrics import parse_metrics
from prime_rl.utils.tail import FileTail

CAPACITY = 1 << 17
# Of a curve in a small picture: more than it has dots beside each other.
SMALL_POINTS = 240
MAX_STEP = 2.0**53
# So many of the newest values are never thinned, but for a quarter of the capacity at most.
NUM_RECENT = 128
# Metrics whose names are known only when they come: one for each environment that is evaluated.
EVAL_PREFIX, EVAL_SUFFIX = "eval/", "/reward"
MAX_EVALS = 8
# From this many values on the greatest smoothing factor has no bias left that a float32 shows.
_UNBIASED = 1_000


class History:
    """One metric: ascending steps and their values. A step that was seen before replaces it and what follows.

    `is_newest`: of more than `capacity` values the oldest are dropped, none thinned, and they keep all their digits, as
    times in Unix seconds need; otherwise they are float32.
    """

    __slots__ = ("_factor", "_is_newest", "_smooth", "_sum", "capacity", "steps", "values")

    def __init__(self, capacity: int = CAPACITY, *, is_newest: bool = False) -> None:
        self.capacity = capacity
        self._is_newest = is_newest
        self.steps = array("d")
        self.values = array("d" if is_newest else "f")
        self._factor = 0.0
        self._smooth = array("f")
        self._sum = 0.0  # of the average so far, weighted, with the bias to zero that a start from zero has

    def __len__(self) -> int:
        return len(self.steps)

    def extend(self, steps: Sequence[float], values: Sequence[float], *, ascends: bool = False) -> None:
        """Take new points; `ascends`: it is known that each step is greater than the one before."""
        if not steps:
            return
        if not (ascends or _ascends(steps)):
            for step, value in zip(steps, values, strict=True):
                self.extend((step,), (value,), ascends=True)
            return
        if self.steps and steps[0] <= self.steps[-1]:
            num_kept = bisect_left(self.steps, steps[0])
            del self.steps[num_kept:], self.values[num_kept:]
            self._forget_smooth()
        self.steps.extend(steps)
        self.values.extend(values)
        if len(self.steps) > self.capacity:
            self._thin()

    def smoothed(self, factor: float) -> array[float]:
        """The exponential moving average of all values, without a bias to zero at the start; computed once a value."""
        if factor <= 0:
            return self.values
        if factor != self._factor:
            self._factor, self._smooth, self._sum = factor, array("f"), 0.0
        start = len(self._smooth)
        new = self.values[start:]
        if new:
            rest = 1.0 - factor
            sums = list(accumulate(new, lambda total, value: total * factor + value * rest, initial=self._sum))[1:]
            self._sum = sums[-1]
            # What the weights of the first values lack to one; soon they lack nothing.
            for index in range(min(len(sums), max(_UNBIASED - start, 0))):
                sums[index] /= 1.0 - factor ** (start + index + 1)
            self._smooth.extend(sums)
        return self._smooth

    def _thin(self) -> None:
        if self._is_newest:
            del self.steps[: -self.capacity], self.values[: -self.capacity]
            return
        num_recent = min(NUM_RECENT, self.capacity // 4)
        recent = slice(-num_recent, None)
        older = self.steps[:-num_recent], self.values[:-num_recent]
        steps, values = downsample(*older, self.capacity // 2 - num_recent)
        self.steps = array("d", steps) + self.steps[recent]
        self.values = array(self.values.typecode, values) + self.values[recent]
        self._forget_smooth()

    def _forget_smooth(self) -> None:
        self._factor, self._smooth, self._sum = 0.0, array("f"), 0.0


@dataclass(frozen=True)
class _Line:
    """How a line is decoded to some keys: its type, which names them `v0`, `v1`, ..., and who gets them from it."""

    make: Callable[..., Any]
    decode: Callable[[bytes], Any]
    names: Mapping[str, str]
    getters: Sequence[tuple[str, Callable[[Any], float | None]]]


@functools.cache
def _line_of(keys: tuple[str, ...]) -> _Line:
    """Made once: it costs as much as reading a file of the home screen, which has one for each run."""
    names = {key: f"v{number}" for number, key in enumerate(keys)}
    fields = [(name, float | None, msgspec.field(name=key, default=None)) for key, name in names.items()]
    line = msgspec.defstruct("Line", [("step", float), *fields], gc=False)
    getters = [(key, operator.attrgetter(name)) for key, name in names.items()]
    return _Line(line, msgspec.json.Decoder(line).decode, names, getters)


class HistoryReader:
    """The histories of `keys`, and of all evaluations, in one metrics file.

    With `newest_bytes` only the end of the file is read, of its newest `capacity` lines `keys` alone; values are exact.
    """

    def __init__(
        self, path: Path, keys: Iterable[str], capacity: int = CAPACITY, *, newest_bytes: int | None = None
    ) -> None:
        self._tail = FileTail(path, start_bytes=newest_bytes)
        self._is_whole = newest_bytes is None
        self._capacity = capacity
        self._line = _line_of(tuple(keys))
        self.histories: dict[str, History] = {}

    def update(self) -> tuple[bool, bool]:
        """Read one block of what is new: (whether anything changed, whether there is more to read at once)."""
        read = self._tail.read()
        if read.reset:
            self.histories = {}
        if read.lines:
            self._take(read.lines)
        return read.reset or bool(read.lines), read.more

    def _take(self, lines: list[bytes]) -> None:
        if not self._is_whole:
            lines = lines[-self._capacity :]
        rows = [row for line in lines if (row := self._row(line)) is not None]
        steps = array("d", [row.step for row in rows])
        ascends = _ascends(steps)
        for key, get in self._line.getters:
            values = list(map(get, rows))
            if values.count(None) < len(values):
                self._extend(key, steps, values, ascends)

    def _extend(self, key: str, steps: Sequence[float], values: list[float | None], ascends: bool) -> None:
        if None not in values and math.isfinite(sum(values)):  # type: ignore[arg-type]
            known: Sequence[float] = values  # type: ignore[assignment]
        else:
            pairs = [
                (step, value)
                for step, value in zip(steps, values, strict=True)
                if value is not None and math.isfinite(value)
            ]
            steps, known = [step for step, _ in pairs], [value for _, value in pairs]
        if steps:
            self._history(key).extend(steps, known, ascends=ascends)

    def _row(self, line: bytes) -> Any:
        """A decoded line, or None. Evaluations are taken at once: their keys are not known before."""
        is_eval = self._is_whole and b'"eval/' in line
        if not is_eval:
            try:
                row = self._line.decode(line)
                return row if 0 <= row.step < MAX_STEP else None
            except msgspec.MsgspecError:
                pass
        parsed = parse_metrics(line)
        if parsed is None:
            return None
        step, values = parsed
        if is_eval:
            self._take_evals(step, values)
        return self._line.make(step, **{name: values[key] for key, name in self._line.names.items() if key in values})

    def _take_evals(self, step: int, values: dict[str, float]) -> None:
        known = sum(key.startswith(EVAL_PREFIX) for key in self.histories)
        for key, value in values.items():
            if key.startswith(EVAL_PREFIX) and key.endswith(EVAL_SUFFIX):
                known += key not in self.histories
                if key in self.histories or known <= MAX_EVALS:
                    self._history(key).extend((step,), (value,))

    def _history(self, key: str) -> History:
        if key not in self.histories:
            self.histories[key] = History(self._capacity, is_newest=not self._is_whole)
        return self.histories[key]


class RunMetrics:
    """The two metrics files of one run. Arguments as of `HistoryReader`."""

    def __init__(
        self, run: RunDir, keys: Iterable[str], capacity: int = CAPACITY, *, newest_bytes: int | None = None
    ) -> None:
        paths = (run.trainer_metrics, run.orchestrator_metrics)
        self._readers = [HistoryReader(path, keys, capacity, newest_bytes=newest_bytes) for path in paths]

    def update(self) -> tuple[bool, bool]:
        """Read one block of each: (whether anything changed, whether there is more to read at once)."""
        looks = [reader.update() for reader in self._readers]
        return any(changed for changed, _ in looks), any(more for _, more in looks)

    def histories(self) -> dict[str, History]:
        """By metric. Of one that both files have the orchestrator's counts."""
        return {key: history for reader in self._readers for key, history in reader.histories.items()}


def _ascends(steps: Sequence[float]) -> bool:
    return all(map(operator.lt, steps, steps[1:]))


def downsample(steps: Sequence[float], values: Sequence[float], limit: int) -> tuple[list[float], list[float]]:
    """At most `limit` points (4 or more): both ends, and the least and the greatest value of each of equal buckets."""
    if limit < 4:
        raise ValueError(f"limit {limit} is too small: at least 4")
    if len(steps) <= limit:
        return list(steps), list(values)
    num_buckets, num_inner = (limit - 2) // 2, len(steps) - 2
    kept = [0]
    for bucket in range(num_buckets):
        start, end = 1 + bucket * num_inner // num_buckets, 1 + (bucket + 1) * num_inner // num_buckets
        piece = values[start:end]
        kept.extend(sorted({start + piece.index(min(piece)), start + piece.index(max(piece))}))
    kept.append(len(steps) - 1)
    return [steps[i] for i in kept], [values[i] for i in kept]


def change(values: Sequence[float], window: int = 5) -> float | None:
    """Mean of the newest `window` values less the mean of the `window` before; None when there are too few."""
    if len(values) < 2 * window:
        return None
    newer, older = values[-window:], values[-2 * window : -window]
    return sum(newer) / window - sum(older) / window
