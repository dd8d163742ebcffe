"""Incremental readers of files that another process appends to: metrics (JSON lines) and logs.

Each keeps a byte offset and reads only what is new. They survive what files do: a last line that is still being
written, truncation, rotation, deletion while open, lines that are no JSON, lines without an end. Memory is bounded,
whatever the file holds. No user interface here, and no threads: one thread calls one reader.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prime_rl.utils.text import clean_text
from tui.series import Series

# One look takes at most this much, so a huge file is read in steps between which the reader can be told to stop.
CHUNK_BYTES = 1 << 20
# A line longer than this is no metrics line and no log line that a person reads; it is dropped, not kept in memory.
MAX_LINE_BYTES = 1 << 18
# A log is shown from this far before its end: about 2,500 lines.
LOG_TAIL_BYTES = 1 << 18
MAX_LOG_LINES = 2_000
MAX_LOG_LINE_CHARS = 2_000
# So many bytes before the offset are compared at each look: a file that was cut and grew again past the offset is
# then noticed, though its size and inode say nothing.
_MARK_BYTES = 64


@dataclass(frozen=True)
class TailRead:
    """What one look found: whole lines without their end, in order.

    `reset` says that the file is another one than before (cut, replaced, gone): forget the earlier lines. `more` says
    that the look stopped at its limit, so look again at once.
    """

    lines: list[bytes]
    reset: bool = False
    more: bool = False


class FileTail:
    """The whole lines of a growing file.

    Args:
        start_bytes: begin at most this far before the end of the file (the cut first line is dropped); None begins at
            the start. Holds also after a reset.
    """

    def __init__(self, path: Path, *, start_bytes: int | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.path = path
        self._start_bytes = start_bytes
        self._chunk_bytes = chunk_bytes
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self._mark = b""
        self._partial = b""
        self._skipping = False  # inside a line that is too long, or that began before the start

    def read(self) -> TailRead:
        """Lines that were completed since the last call. Never raises for what a file may do."""
        try:
            with self.path.open("rb", buffering=0) as file:
                return self._read(file.fileno())
        except OSError:
            had_content = self._identity is not None
            self._forget()
            return TailRead([], reset=had_content)

    def _read(self, fd: int) -> TailRead:
        stat = os.fstat(fd)
        identity = (stat.st_dev, stat.st_ino)
        reset = self._identity is not None and not self._continues(fd, identity, stat.st_size)
        if reset or self._identity is None:
            self._forget()
            self._identity = identity
            self._start(fd, stat.st_size)
        data = os.pread(fd, self._chunk_bytes, self._offset)
        self._offset += len(data)
        self._mark = (self._mark + data)[-_MARK_BYTES:]
        return TailRead(self._split(data), reset, more=len(data) == self._chunk_bytes)

    def _continues(self, fd: int, identity: tuple[int, int], size: int) -> bool:
        if identity != self._identity or size < self._offset:
            return False
        return os.pread(fd, len(self._mark), self._offset - len(self._mark)) == self._mark

    def _start(self, fd: int, size: int) -> None:
        if self._start_bytes is None or size <= self._start_bytes:
            return
        self._offset = size - self._start_bytes
        self._skipping = os.pread(fd, 1, self._offset - 1) != b"\n"

    def _split(self, data: bytes) -> list[bytes]:
        *whole, rest = data.split(b"\n")
        lines = []
        for piece in whole:
            if not self._skipping and len(self._partial) + len(piece) <= MAX_LINE_BYTES:
                lines.append(self._partial + piece)
            self._partial, self._skipping = b"", False
        self._partial = b"" if self._skipping else self._partial + rest
        if len(self._partial) > MAX_LINE_BYTES:
            self._partial, self._skipping = b"", True
        return lines

    def _forget(self) -> None:
        self._offset, self._identity, self._mark, self._partial, self._skipping = 0, None, b"", b"", False


def parse_metrics(line: bytes) -> tuple[int, dict[str, float]] | None:
    """`{"step": 3, "loss": 0.1, ...}` -> (3, {"loss": 0.1, ...}); numbers only. None for what is no metrics line."""
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
