"""Search in a log of any size: block by block, with progress, and stoppable at any time. No widgets.

A search in lower case ignores case. It wraps around: what is behind the start comes last.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tui.log_file import line_start, open_log, rank_at

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
        self._stopped.set()

    def run(self) -> None:
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
