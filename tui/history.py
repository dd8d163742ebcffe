"""All steps of some metrics of one run, in columns, kept up to date from its files. No user interface, no threads.

Built for runs of 100,000 steps: a block of lines is decoded to the requested keys only and appended column by column.
Each metric keeps at most `capacity` points; beyond that neighbours are thinned so that every least and greatest value
stays.
"""

from __future__ import annotations

import math
import operator
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.contract.metrics import parse_metrics
from prime_rl.utils.tail import FileTail
from tui.series import downsample

CAPACITY = 1 << 17
MAX_STEP = 2.0**53
# Metrics whose names are known only when they come: one for each environment that is evaluated.
EVAL_PREFIX, EVAL_SUFFIX = "eval/", "/reward"
MAX_EVALS = 8
# From this many values on the greatest smoothing factor has no bias left that a float32 shows.
_UNBIASED = 1_000


class History:
    """One metric: ascending steps and their values. A step that was seen before replaces it and what follows."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.steps = array("d")
        self.values = array("f")
        self._factor = 0.0
        self._smooth = array("f")
        self._sum = 0.0  # of the average so far, weighted, with the bias to zero that a start from zero has

    def __len__(self) -> int:
        return len(self.steps)

    def extend(self, steps: Sequence[float], values: Sequence[float]) -> None:
        if not steps:
            return
        if not _ascends(steps):
            for step, value in zip(steps, values, strict=True):
                self.extend((step,), (value,))
            return
        if self.steps and steps[0] <= self.steps[-1]:
            self._cut(bisect_left(self.steps, steps[0]))
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

    def _cut(self, num: int) -> None:
        """Keep the first `num` points."""
        del self.steps[num:], self.values[num:]
        self._forget_smooth()

    def _thin(self) -> None:
        steps, values = downsample(self.steps, self.values, self.capacity // 2)
        self.steps, self.values = array("d", steps), array("f", values)
        self._forget_smooth()

    def _forget_smooth(self) -> None:
        self._factor, self._smooth, self._sum = 0.0, array("f"), 0.0


class HistoryReader:
    """The histories of `keys` and of all evaluations in one metrics file."""

    def __init__(self, path: Path, keys: Iterable[str], capacity: int = CAPACITY) -> None:
        self._tail = FileTail(path)
        self._capacity = capacity
        self._names = {key: f"v{number}" for number, key in enumerate(keys)}
        fields = [(name, float | None, msgspec.field(name=key, default=None)) for key, name in self._names.items()]
        line = msgspec.defstruct("Line", [("step", float), *fields])
        self._decode: Callable[[bytes], Any] = msgspec.json.Decoder(line).decode
        self._getters = [(key, operator.attrgetter(name)) for key, name in self._names.items()]
        self._line = line
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
        rows = [row for line in lines if (row := self._row(line)) is not None]
        steps = [row.step for row in rows]
        for key, get in self._getters:
            self._extend(key, steps, list(map(get, rows)))

    def _extend(self, key: str, steps: list[float], values: list[float | None]) -> None:
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
            self.histories.setdefault(key, History(self._capacity)).extend(steps, known)

    def _row(self, line: bytes) -> Any:
        """A decoded line, or None. Evaluations are taken at once: their keys are not known before."""
        is_eval = b'"eval/' in line
        if not is_eval:
            try:
                row = self._decode(line)
                return row if 0 <= row.step < MAX_STEP else None
            except msgspec.MsgspecError:
                pass
        parsed = parse_metrics(line)
        if parsed is None:
            return None
        step, values = parsed
        if is_eval:
            self._take_evals(step, values)
        return self._line(step, **{name: values[key] for key, name in self._names.items() if key in values})

    def _take_evals(self, step: int, values: dict[str, float]) -> None:
        known = sum(key.startswith(EVAL_PREFIX) for key in self.histories)
        for key, value in values.items():
            if key.startswith(EVAL_PREFIX) and key.endswith(EVAL_SUFFIX):
                known += key not in self.histories
                if key in self.histories or known <= MAX_EVALS:
                    self.histories.setdefault(key, History(self._capacity)).extend((step,), (value,))


def _ascends(steps: Sequence[float]) -> bool:
    return all(map(operator.lt, steps, steps[1:]))
