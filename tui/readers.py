"""Incremental readers of files that another process appends to: metrics (JSON lines) and logs.

Each reads only what is new (`utils.tail`), and skips lines that are not JSON. Memory is bounded for any file. No user
interface here, and no threads: one thread calls one reader.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.contract.metrics import parse_metrics
from prime_rl.utils.tail import MAX_LINE_BYTES, FileTail, TailRead
from tui.series import Series

__all__ = ["MAX_LINE_BYTES", "FileTail", "MetricsReader", "TailRead", "parse_metrics"]


class MetricsReader:
    """The series of some metrics of one run, from its metrics files, kept up to date by `update`.

    `start_bytes` as in `FileTail`: with it only the newest steps are read.
    """

    def __init__(
        self, paths: Sequence[Path], keys: Iterable[str], *, capacity: int, start_bytes: int | None = None
    ) -> None:
        self._tails = [FileTail(path, start_bytes=start_bytes) for path in paths]
        self._keys = frozenset(keys)
        self._order = tuple(sorted(self._keys))
        self._decoder = _line_decoder(self._order)
        self._capacity = capacity
        self._by_tail: list[dict[str, Series]] = [{} for _ in paths]

    def update(self) -> tuple[bool, bool]:
        """Read what is new: (whether anything changed, whether there is more to read at once)."""
        changed = more = False
        for index, tail in enumerate(self._tails):
            read = tail.read()
            if read.reset:
                self._by_tail[index] = {}
            if read.lines:
                self._take(self._by_tail[index], read.lines)
            changed |= read.reset or bool(read.lines)
            more |= read.more
        return changed, more

    def series(self, key: str) -> Series | None:
        """The series of `key`, or None when no line had it. The first file that has it counts."""
        return next((found for by_key in self._by_tail if (found := by_key.get(key)) is not None), None)

    def _take(self, by_key: dict[str, Series], lines: Sequence[bytes]) -> None:
        found: dict[str, tuple[list[int], list[float]]] = {key: ([], []) for key in self._keys}
        for line in lines:
            parsed = self._parse(line)
            if parsed is None:
                continue
            step, values = parsed
            for key, value in values.items():
                steps, numbers = found[key]
                steps.append(step)
                numbers.append(value)
        for key, (steps, numbers) in found.items():
            if steps:
                by_key.setdefault(key, Series(self._capacity)).extend(steps, numbers)

    def _parse(self, line: bytes) -> tuple[int, dict[str, float]] | None:
        """As `parse_metrics`, of the given keys alone: a typed reader skips all others without making them."""
        try:
            known = self._decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError):
            parsed = parse_metrics(line)
            return parsed and (parsed[0], {key: parsed[1][key] for key in self._keys & parsed[1].keys()})
        step, *values = msgspec.structs.astuple(known)
        if not 0 <= step < 2**53:
            return None
        return step, {key: v for key, v in zip(self._order, values, strict=True) if v is not None and isfinite(v)}


@functools.cache
def _line_decoder(keys: tuple[str, ...]) -> msgspec.json.Decoder[msgspec.Struct]:
    """For lines `{"step": 3, ...}`, of which it takes `keys`."""
    names = {f"field_{index}": key for index, key in enumerate(keys)}
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = [("step", int)]
    fields += [(name, float | None, None) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("Line", fields, rename=names, gc=False))
