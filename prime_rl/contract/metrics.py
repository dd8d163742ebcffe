"""Lines of the metrics files: flat JSON objects with `step`, `time` and figures; listed in `docs/metrics.md`."""

from __future__ import annotations

import json
import math

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
