"""Lines of the metrics files: flat JSON objects with `step`, `time` and figures; listed in `docs/metrics.md`.

When a metric has stopped getting better is a pure rule (`EarlyStop`) that sees nothing but values, so a restarted
process that reads them again decides the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec


def parse_metrics(line: bytes) -> tuple[int, dict[str, float]] | None:
    """`{"step": 3, "loss": 0.1, ...}` -> (3, {"loss": 0.1, ...}); numbers only. None for an invalid line."""
    try:
        record = msgspec.json.decode(line)
    except (msgspec.MsgspecError, RecursionError):
        record = _parse_lenient(line)
    if not isinstance(record, dict):
        return None
    values = {key: number for key, value in record.items() if (number := _number(value)) is not None}
    step = values.pop("step", None)
    return None if step is None or not 0 <= step < 2**53 else (int(step), values)


def _parse_lenient(line: bytes) -> object:
    """Python's own reader also takes NaN and Infinity, which Python's own writer writes."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


_EVAL = "eval/"


@dataclass
class EarlyStop:
    """Feed it the values of one metric in the order of their steps.

    Args:
        mode: "max" or "min": what is better.
        patience: how many values in a row may bring nothing better.
        min_delta: how much better than the best before a value must be.
        min_steps: no stop before this step.
    """

    metric: str
    mode: str = "max"
    patience: int = 5
    min_delta: float = 0.0
    min_steps: int = 0
    best: float | None = None
    best_step: int = 0
    num_without: int = 0
    step: int = -1

    def feed(self, step: int, value: float) -> None:
        """A value that is not finite is no better than any other; one of a step that was fed before does not count."""
        if step <= self.step:
            return
        self.step = step
        sign = 1.0 if self.mode == "max" else -1.0
        if math.isfinite(value) and (self.best is None or sign * (value - self.best) > self.min_delta):
            self.best, self.best_step, self.num_without = value, step, 0
        else:
            self.num_without += 1

    @property
    def reason(self) -> str | None:
        """Why the run is to end, with the numbers; None: it goes on."""
        if self.num_without < self.patience or self.step < self.min_steps:
            return None
        best = "no finite value" if self.best is None else f"best {self.best:.4g} at step {self.best_step}"
        return (
            f"stopped early: {self.metric} did not improve in {self.num_without} values ({best}, now step {self.step})"
        )


def metric_value(values: Mapping[str, float], metric: str) -> float | None:
    """The value of `metric` in one line. "eval/X" without that name is the mean of "eval/<environment>/X"."""
    if metric in values:
        return values[metric]
    if not metric.startswith(_EVAL):
        return None
    ending = f"/{metric.removeprefix(_EVAL)}"
    of_envs = [
        value
        for name, value in values.items()
        if name.startswith(_EVAL) and name.endswith(ending) and name.count("/") == metric.count("/") + 1
    ]
    return math.fsum(of_envs) / len(of_envs) if of_envs else None


def series(lines: Iterable[bytes], metric: str, *, at_most: int | None = None) -> list[tuple[int, float]]:
    """(step, value) of `metric`, ascending, out of the lines of a metrics file, up to the step `at_most`.

    A step that comes again (the run went back to a checkpoint) voids what came after it before.
    """
    found: list[tuple[int, float]] = []
    for line in lines:
        parsed = parse_metrics(line)
        value = None if parsed is None else metric_value(parsed[1], metric)
        if parsed is None or value is None:
            continue
        while found and found[-1][0] >= parsed[0]:
            found.pop()
        found.append((parsed[0], value))
    return [(step, value) for step, value in found if at_most is None or step <= at_most]
