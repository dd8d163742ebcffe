"""A bounded series of (step, value), and what is drawn of it: pure.

A series of any length fits into `capacity` points: when it is full, neighbours are merged and from then on each point
is the mean of twice as many steps. The newest values are kept as they came too, for sparklines and for the last change.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections import deque
from collections.abc import Sequence

NUM_RECENT = 128
_BLOCKS = "▁▂▃▄▅▆▇█"


class Series:
    """Steps ascend; a step that was seen already (a trainer replays after a restart) replaces it and what follows."""

    def __init__(self, capacity: int = 4096) -> None:
        if capacity < 2:
            raise ValueError(f"capacity {capacity} is too small: at least 2")
        self._capacity = capacity
        self._steps = array("d")
        self._sums = array("d")
        self._counts = array("d")
        self._stride = 1  # values a point
        self._recent: deque[tuple[int, float]] = deque(maxlen=NUM_RECENT)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last(self) -> float | None:
        return self._recent[-1][1] if self._recent else None

    @property
    def last_step(self) -> int | None:
        return self._recent[-1][0] if self._recent else None

    def append(self, step: int, value: float) -> None:
        self._drop_from(step)
        self._recent.append((step, value))
        if len(self._steps) == self._capacity and not self._is_open():
            self._merge()
        if self._is_open():
            self._steps[-1] = step
            self._sums[-1] += value
            self._counts[-1] += 1
            return
        self._steps.append(step)
        self._sums.append(value)
        self._counts.append(1)

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """`append` for each; much faster where nothing has to be merged or replaced."""
        first = (self.last_step is None or steps[0] > self.last_step) if steps else False
        fits = self._stride == 1 and len(self._steps) + len(steps) <= self._capacity
        if first and fits and all(map(operator.lt, steps, itertools.islice(steps, 1, None))):
            self._steps.extend(steps)
            self._sums.extend(values)
            self._counts.extend(itertools.repeat(1, len(steps)))
            self._recent.extend(zip(steps[-NUM_RECENT:], values[-NUM_RECENT:], strict=True))
            return
        for step, value in zip(steps, values, strict=True):
            self.append(step, value)

    def _is_open(self) -> bool:
        """Whether the newest point has room for one more value."""
        return bool(self._counts) and self._counts[-1] < self._stride

    def points(self) -> tuple[list[float], list[float]]:
        """All steps and their values, at most `capacity`."""
        return list(self._steps), [total / count for total, count in zip(self._sums, self._counts, strict=True)]

    def recent(self, num: int) -> list[float]:
        """The newest `num` values as they came."""
        return [value for _, value in self._recent][-num:]

    def _drop_from(self, step: int) -> None:
        while self._steps and self._steps[-1] >= step:
            del self._steps[-1], self._sums[-1], self._counts[-1]
        while self._recent and self._recent[-1][0] >= step:
            self._recent.pop()

    def _merge(self) -> None:
        self._stride *= 2
        even = len(self._steps) // 2 * 2
        odd = slice(even, None)
        self._steps = self._steps[1:even:2] + self._steps[odd]
        self._sums = _pair_sums(self._sums, even) + self._sums[odd]
        self._counts = _pair_sums(self._counts, even) + self._counts[odd]


def _pair_sums(values: array[float], even: int) -> array[float]:
    return array("d", (values[i] + values[i + 1] for i in range(0, even, 2)))


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
        low = min(range(start, end), key=values.__getitem__)
        high = max(range(start, end), key=values.__getitem__)
        kept.extend(sorted({low, high}))
    kept.append(len(steps) - 1)
    return [steps[i] for i in kept], [values[i] for i in kept]


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest `width` values as block characters, scaled to their own range. A flat line is drawn in the middle."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-12):
        return _BLOCKS[3] * len(shown)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((value / 2 - low / 2) / (high / 2 - low / 2) * top)] for value in shown)


def change(values: Sequence[float], window: int = 5) -> float | None:
    """Mean of the newest `window` values less the mean of the `window` before; None when there are too few."""
    if len(values) < 2 * window:
        return None
    newer, older = values[-window:], values[-2 * window : -window]
    return sum(newer) / window - sum(older) / window
