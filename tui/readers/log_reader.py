"""What the log tab shows: the run's log around a position, or its end while it grows; and the search in it.

The reader keeps what is clean already, so a log that grows costs what is new. A search goes block by block, with
progress, and can be stopped at any time; in lower case it ignores case. It wraps around: what is behind the start comes
last.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from prime_rl.contract.layout import RunDir
from tui.readers.log_file import (
    LogLine,
    LogSlice,
    Raw,
    line_start,
    lines_after,
    lines_before,
    open_log,
    rank_at,
    read_line,
)
from tui.readers.tabs import LOGS, TabData

# So many lines are around the place that is looked at: some screens in each direction.
NUM_AROUND = 300
_MARK_BYTES = 64


@dataclass(frozen=True)
class LogRequest:
    """Lines of at least `level` (index of `log_file.LEVELS`) around the line that starts at `anchor`.

    None: the end, also when it grows.
    """

    anchor: int | None = None
    level: int = 0


NOTHING = LogSlice((), True, True)


@dataclass(frozen=True)
class LogData(TabData):
    """One look. `generation` changes when the file is another one than before: earlier places mean nothing then.

    `size` is in bytes.
    """

    tab = LOGS
    request: LogRequest = LogRequest()
    slice: LogSlice = NOTHING
    size: int = 0
    generation: int = 0


_Work = Generator[None, None, LogSlice]


class LogTabReader:
    """Reads when the file or the request changed. A search for rare lines goes on over several reads."""

    def __init__(self, output_dir: Path, run_id: str) -> None:
        self._run = RunDir(output_dir / run_id)
        self._shown: object = None
        self._identity: tuple[int, int] | None = None
        self._size = 0
        self._mark = b""
        self._generation = 0
        self._clean: dict[int, LogLine] = {}

    @property
    def path(self) -> Path:
        """The log that the tab shows; the file need not exist."""
        return self._run.log

    def read(self, request: LogRequest, is_wanted: Callable[[], bool] = lambda: True) -> tuple[LogData | None, bool]:
        """A search for rare lines ends when it is not wanted any more."""
        try:
            fd = open_log(self.path)
        except OSError:
            return self._missing(request), False
        try:
            return self._look(fd, request, is_wanted)
        finally:
            os.close(fd)

    def _missing(self, request: LogRequest) -> LogData | None:
        if self._identity is not None:
            self._forget(None)
        shown = (request, None)
        if shown == self._shown:
            return None
        self._shown = shown
        return LogData(self._run.run_id, request, generation=self._generation)

    def _look(self, fd: int, request: LogRequest, is_wanted: Callable[[], bool]) -> tuple[LogData | None, bool]:
        info = os.fstat(fd)
        identity = (info.st_dev, info.st_ino)
        if not self._continues(fd, identity, info.st_size):
            self._forget(identity)
        self._size = info.st_size
        shown = (request, identity, info.st_size, self._generation)
        if shown == self._shown:
            return None, False
        self._mark = os.pread(fd, _MARK_BYTES, max(info.st_size - _MARK_BYTES, 0))
        self._shown = shown
        found = self._search(fd, info.st_size, request, is_wanted)
        if found is None:
            self._shown = None
            return None, True
        return LogData(self._run.run_id, request, found, info.st_size, self._generation), False

    def _continues(self, fd: int, identity: tuple[int, int], size: int) -> bool:
        if identity != self._identity or size < self._size:
            return False
        return os.pread(fd, len(self._mark), max(self._size - _MARK_BYTES, 0)) == self._mark

    def _forget(self, identity: tuple[int, int] | None) -> None:
        self._generation += self._identity is not None
        self._identity, self._size, self._mark, self._clean = identity, 0, b"", {}

    def _search(self, fd: int, size: int, request: LogRequest, is_wanted: Callable[[], bool]) -> LogSlice | None:
        """None when it ended early."""
        work = self._gather(fd, size, request)
        while True:
            try:
                next(work)
            except StopIteration as done:
                found: LogSlice = done.value
                return found
            if not is_wanted():
                return None

    def _gather(self, fd: int, size: int, request: LogRequest) -> _Work:
        if request.anchor is None:
            before, is_first = yield from lines_before(fd, size, 2 * NUM_AROUND, request.level)
            after: list[Raw] = []
            is_last = True
        else:
            anchor = min(request.anchor, size)
            before, is_first = yield from lines_before(fd, anchor, NUM_AROUND, request.level)
            after, is_last = yield from lines_after(fd, anchor, NUM_AROUND, request.level)
        lines = tuple(self._line(start, raw) for start, raw in (*before, *after))
        self._clean = {line.start: line for line in lines}
        return LogSlice(lines, is_first, is_last)

    def _line(self, start: int, raw: bytes) -> LogLine:
        known = self._clean.get(start)
        return known if known is not None and known.end == start + len(raw) else read_line(start, raw)


BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class Found:
    """How a search stands: `share` of the log is looked through; at the end `start` of the line, None for none.

    `is_around`: the search went past the end of the log (or its start) to get there.
    """

    serial: int
    share: float
    is_done: bool = False
    start: int | None = None
    is_around: bool = False


class LogSearch:
    """One search.

    Args:
        offset: lines that start before it (forwards: after it) are looked at first.
        level: lines of records below it do not count.
        post: called with progress, and at the end unless it was stopped.
    """

    def __init__(
        self,
        path: Path,
        words: str,
        offset: int,
        *,
        forwards: bool,
        level: int,
        serial: int,
        post: Callable[[Found], object],
    ) -> None:
        self._path = path
        self._minds_case = words != words.lower()
        self._needle = words.encode()
        self._offset = offset
        self._forwards = forwards
        self._level = level
        self._serial = serial
        self._post = post
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End the search before its next block. From any thread."""
        self._stopped.set()

    def run(self) -> None:
        """Search block by block until a match, the end or `stop`. For a thread; without a file nothing is found."""
        try:
            fd = open_log(self._path)
        except OSError:
            self._post(Found(self._serial, 1.0, True))
            return
        try:
            self._run(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def _run(self, fd: int, size: int) -> None:
        num_read = 0
        offset = min(self._offset, size)
        ahead, behind = (offset, size), (0, offset)
        for is_around, (start, end) in enumerate((ahead, behind) if self._forwards else (behind, ahead)):
            for low, high in self._blocks(start, end):
                if self._stopped.is_set():
                    return
                place = self._look(fd, low, high, min(high + len(self._needle) - 1, size))
                if place is not None:
                    self._post(Found(self._serial, 1.0, True, place, bool(is_around)))
                    return
                num_read += high - low
                self._post(Found(self._serial, num_read / max(size, 1)))
        self._post(Found(self._serial, 1.0, True))

    def _blocks(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        places = range(start, end, BLOCK_BYTES)
        for low in places if self._forwards else reversed(places):
            yield low, min(low + BLOCK_BYTES, end)

    def _look(self, fd: int, low: int, high: int, end: int) -> int | None:
        """The first (last) line in reach of which a match begins between `low` and `high`."""
        data = os.pread(fd, end - low, low)
        if not self._minds_case:
            data = data.lower()
        first, last = 0, high - low
        while True:
            if self._forwards:
                place = data.find(self._needle, first, last + len(self._needle) - 1)
            else:
                place = data.rfind(self._needle, first, last + len(self._needle) - 1)
            if place < 0 or self._stopped.is_set():
                return None
            start = line_start(fd, low + place)
            if not self._level or rank_at(fd, start) >= self._level:
                return start
            first, last = (place + 1, last) if self._forwards else (first, place)
