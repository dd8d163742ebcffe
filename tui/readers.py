"""Incremental readers of files that another process appends to: metrics (JSON lines) and logs.

Each reads only what is new (`utils.tail`), and survives lines that are no JSON. Memory is bounded, whatever the file
holds. No user interface here, and no threads: one thread calls one reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from prime_rl.contract.metrics import parse_metrics
from prime_rl.utils.tail import MAX_LINE_BYTES, FileTail, TailRead
from prime_rl.utils.text import clean_text
from tui.series import Series

__all__ = ["MAX_LINE_BYTES", "FileTail", "LogReader", "MetricsReader", "TailRead", "parse_metrics"]

# A log is shown from this far before its end: about 2,500 lines.
LOG_TAIL_BYTES = 1 << 18
MAX_LOG_LINES = 2_000
MAX_LOG_LINE_CHARS = 2_000


class MetricsReader:
    """The series of some metrics of one run, from its metrics files, kept up to date by `update`.

    `start_bytes` as in `FileTail`: with it only the newest steps are read.
    """

    def __init__(
        self, paths: Sequence[Path], keys: Iterable[str], *, capacity: int, start_bytes: int | None = None
    ) -> None:
        self._tails = [FileTail(path, start_bytes=start_bytes) for path in paths]
        self._keys = frozenset(keys)
        self._capacity = capacity
        self._by_tail: list[dict[str, Series]] = [{} for _ in paths]

    def update(self) -> tuple[bool, bool]:
        """Read what is new: (whether anything changed, whether there is more to read at once)."""
        changed = more = False
        for index, tail in enumerate(self._tails):
            read = tail.read()
            if read.reset:
                self._by_tail[index] = {}
            for line in read.lines:
                self._take(self._by_tail[index], line)
            changed |= read.reset or bool(read.lines)
            more |= read.more
        return changed, more

    def series(self, key: str) -> Series | None:
        """The series of `key`, or None when no line had it. The first file that has it counts."""
        return next((found for by_key in self._by_tail if (found := by_key.get(key)) is not None), None)

    def _take(self, by_key: dict[str, Series], line: bytes) -> None:
        parsed = parse_metrics(line)
        if parsed is None:
            return
        step, values = parsed
        for key in self._keys & values.keys():
            if key not in by_key:
                by_key[key] = Series(self._capacity)
            by_key[key].append(step, values[key])


class LogReader:
    """The last lines of a log, cleaned for the screen. `generation` changes when earlier lines are void."""

    def __init__(self, path: Path) -> None:
        self._tail = FileTail(path, start_bytes=LOG_TAIL_BYTES)
        self._lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self.num_read = 0
        self.generation = 0

    def update(self) -> tuple[bool, bool]:
        """Read what is new: (whether anything changed, whether there is more to read at once)."""
        read = self._tail.read()
        if read.reset:
            self._lines.clear()
            self.num_read = 0
            self.generation += 1
        for line in read.lines:
            self._lines.append(clean_text(line.decode(errors="replace"))[:MAX_LOG_LINE_CHARS])
            self.num_read += 1
        return read.reset or bool(read.lines), read.more

    def lines(self) -> list[str]:
        return list(self._lines)
