"""What the log tab shows: the run's log around a position, or its end while it grows.

Called by one thread; the screen sets `request` from another. It keeps what is clean already, so a log that grows costs
what is new.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from prime_rl.contract.layout import RunDir
from tui.log_file import LogLine, LogSlice, Raw, lines_after, lines_before, open_log, read_line
from tui.tabs import LOGS, TabData

# So many lines are around the place that is looked at: some screens in each direction.
NUM_AROUND = 300
_MARK_BYTES = 64


@dataclass(frozen=True)
class LogRequest:
    """Lines of at least `level` (index of `log_file.LEVELS`) around the line that starts at `anchor`;
    None: the end, also when it grows."""

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

    tab = LOGS

    def __init__(self, output_dir: Path, run_id: str) -> None:
        self._run = RunDir(output_dir / run_id)
        self.request = LogRequest()
        self.is_open = True
        """False ends a search for rare lines that are no longer needed."""
        self._shown: object = None
        self._identity: tuple[int, int] | None = None
        self._size = 0
        self._mark = b""
        self._generation = 0
        self._clean: dict[int, LogLine] = {}

    @property
    def path(self) -> Path:
        return self._run.log

    def read(self) -> tuple[LogData | None, bool]:
        request = self.request
        try:
            fd = open_log(self.path)
        except OSError:
            return self._missing(request), False
        try:
            return self._look(fd, request)
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

    def _look(self, fd: int, request: LogRequest) -> tuple[LogData | None, bool]:
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
        found, is_done = self._search(fd, info.st_size, request)
        if not is_done:
            self._shown = None  # stopped by a new request
            return None, True
        return LogData(self._run.run_id, request, found, info.st_size, self._generation), False

    def _continues(self, fd: int, identity: tuple[int, int], size: int) -> bool:
        if identity != self._identity or size < self._size:
            return False
        return os.pread(fd, len(self._mark), max(self._size - _MARK_BYTES, 0)) == self._mark

    def _forget(self, identity: tuple[int, int] | None) -> None:
        self._generation += self._identity is not None
        self._identity, self._size, self._mark, self._clean = identity, 0, b"", {}

    def _search(self, fd: int, size: int, request: LogRequest) -> tuple[LogSlice, bool]:
        """(lines, whether the search was finished): it stops when the request changes."""
        work = self._gather(fd, size, request)
        while True:
            try:
                next(work)
            except StopIteration as done:
                found: LogSlice = done.value
                return found, True
            if self.request != request or not self.is_open:
                return LogSlice((), False, False), False

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
