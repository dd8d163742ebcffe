"""The log of a run around a position, or its end while it grows; and the search in it.

Nothing here reads a whole file: parts of a log of any size are read by blocks from a position, forwards and backwards.
Long work comes in steps, as generators that yield None, so that the caller can stop in between. A line without a level
belongs to the record above it and has its level. The reader keeps what is clean already, so a log that grows costs what
is new. A search shows its progress; in lower case it ignores case, and it wraps around: what is behind the start comes
last.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_rl.contract.files import open_file
from prime_rl.contract.layout import RunDir
from prime_rl.utils.text import CleanText, clean_text
from tui.readers.tabs import LOGS, TabData

SEARCH_BLOCK_BYTES = 1 << 18
# A part without levels never takes more than this, however long its lines are.
MAX_PIECE_BYTES = 1 << 20
# A line longer than this comes in several.
MAX_LINE_BYTES = 1 << 17
MAX_LINE_CHARS = 2_000
# So far up the record is looked for to which a line belongs; what precedes any record counts as info.
RECORD_BYTES = 1 << 18
FIRST_RANK = 1
LEVELS = ("all", "info", "warning", "error")
_RANKS = {b"DEBUG": 0, b"INFO": 1, b"WARNING": 2, b"WARN": 2, b"ERROR": 3, b"CRITICAL": 3, b"FATAL": 3}
# How a record begins: its level among the first words, Python's word for an error, the supervisor's for a start.
_HEAD = re.compile(rb"[^a-z]{0,60}?\b(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b|(Traceback )|=== ")

# Words without which a block has no record of a level: nearly all of a long log is passed over by them.
_LOUD_WORDS = (b"ERROR", b"CRITICAL", b"FATAL", b"Traceback", b"WARN")
_HEAD_BYTES = 1 << 16

Raw = tuple[int, bytes]  # offset and bytes of a line, without its end


@dataclass(frozen=True)
class LogLine:
    """One line: `start` and `end` are the offsets of its first byte and after its last."""

    start: int
    end: int
    text: CleanText


@dataclass(frozen=True)
class LogSlice:
    """Lines in order, and whether the file begins (ends) with them."""

    lines: tuple[LogLine, ...]
    is_first: bool
    is_last: bool


Steps = Generator[None, None, tuple[list[Raw], bool]]


def open_log(path: Path) -> int:
    """A file descriptor of a regular file; OSError for anything else. Never waits, also for a pipe."""
    return open_file(path)


def rank(line: bytes) -> int | None:
    """The level of a line, as an index into LEVELS; None for a line that continues the record above it."""
    match = _HEAD.match(line[:120])
    if match is None:
        return None
    if match[1]:
        return _RANKS[match[1]]
    return 3 if match[2] else 1


def lines_before(fd: int, end: int, num: int, level: int = 0) -> Steps:
    """The last `num` lines of at least `level` before offset `end`, in order; and whether none are left."""
    found: list[Raw] = []
    waiting: list[Raw] = []  # lines whose record begins further up
    position, rest, start = end, b"", end
    while position > 0 and len(found) < num:
        start = max(position - SEARCH_BLOCK_BYTES, 0)
        data = os.pread(fd, position - start, start)
        if len(data) < position - start:  # cut meanwhile
            return found, True
        data += rest
        cut = _first_start(data) if start else 0
        rest, position = data[:cut], start
        if level:
            leading = None if _may_be_loud(data, level) else _leading(data, start, cut)
            lines, waiting = (
                _loud(_split(data, start, cut) + waiting, level, is_first=start == 0)
                if leading is None
                else ([], leading)
            )
            found = lines + found
            yield None
            continue
        found = _split(data, start, cut) + found
        if end - start > MAX_PIECE_BYTES:
            break
    left_over = len(found) > num
    return found[-num:], position == 0 and not left_over


def lines_after(fd: int, start: int, num: int, level: int = 0) -> Steps:
    """The first `num` lines of at least `level` from the line start `start` on; and whether none are left."""
    found: list[Raw] = []
    position, rest = start, b""
    is_loud = rank_at(fd, start) >= level if level else True
    while len(found) < num:
        data = os.pread(fd, SEARCH_BLOCK_BYTES, position)
        if not data:
            if rest:
                found += _keep(_split(rest, position - len(rest), 0), level, is_loud)[0]
            return found[:num], len(found) <= num
        position += len(data)
        data = rest + data
        # Where its last whole line ends; its length when it is one long line already.
        cut = data.rfind(b"\n") + 1 or (len(data) if len(data) > MAX_LINE_BYTES else 0)
        skips = not is_loud and not _may_be_loud(data, level)
        if not skips:
            kept, is_loud = _keep(_split(data[:cut], position - len(data), 0), level, is_loud)
            found += kept
        rest = data[cut:]
        if level:
            yield None
        elif position - start > MAX_PIECE_BYTES:
            break
    return found[:num], False


def rank_at(fd: int, offset: int) -> int:
    """The level of the record to which the line that starts at `offset` belongs; as far up as is looked."""
    own = rank(os.pread(fd, 200, offset).partition(b"\n")[0])
    if own is not None:
        return own
    start = max(offset - RECORD_BYTES, 0)
    for _, line in reversed(_split(os.pread(fd, offset - start, start), start, 0)):
        if (said := rank(line)) is not None:
            return said
    return FIRST_RANK


def line_start(fd: int, offset: int) -> int:
    """The offset at which the line around `offset` starts."""
    start = max(offset - MAX_LINE_BYTES, 0)
    return start + os.pread(fd, offset - start, start).rfind(b"\n") + 1


def read_line(start: int, raw: bytes) -> LogLine:
    """Clean, for the screen. A long line loses its end."""
    text = raw[: 4 * MAX_LINE_CHARS].decode(errors="replace").expandtabs(4)
    return LogLine(start, start + len(raw), clean_text(text, MAX_LINE_CHARS))


def _split(data: bytes, offset: int, cut: int) -> list[Raw]:
    """The lines of `data[cut:]`, where `data` starts at `offset`; too long ones in pieces."""
    lines: list[Raw] = []
    place = cut
    for line in data[cut:].removesuffix(b"\n").split(b"\n") if len(data) > cut else ():
        pieces = range(0, max(len(line), 1), MAX_LINE_BYTES)
        lines += [(offset + place + piece, line[piece : piece + MAX_LINE_BYTES]) for piece in pieces]
        place += len(line) + 1
    return lines


def _first_start(data: bytes) -> int:
    """Where the first whole line of a block begins; 0 when the block is one long line already."""
    cut = data.find(b"\n") + 1
    if cut and cut < len(data):
        return cut
    return 0 if len(data) > MAX_LINE_BYTES else len(data)


def _may_be_loud(data: bytes, level: int) -> bool:
    """True when a block can have a record of `level`; not exact."""
    return level < 2 or any(word in data for word in (_LOUD_WORDS if level == 2 else _LOUD_WORDS[:-1]))


def _leading(data: bytes, offset: int, cut: int) -> list[Raw] | None:
    """The lines at the start of a block that belong to a record further up; None when they are too many."""
    lines: list[Raw] = []
    place = cut
    while place < min(cut + _HEAD_BYTES, len(data)):
        end = data.find(b"\n", place)
        line = data[place : end if end >= 0 else len(data)]
        if rank(line) is not None:
            return lines
        lines.append((offset + place, line[:MAX_LINE_BYTES]))
        place += len(line) + 1
    return None


def _keep(lines: Sequence[Raw], level: int, is_loud: bool) -> tuple[list[Raw], bool]:
    """(those of at least `level`, whether a line that goes on after them is); `is_loud`: what goes on before them."""
    if not level:
        return list(lines), True
    kept: list[Raw] = []
    for raw in lines:
        said = rank(raw[1])
        is_loud = is_loud if said is None else said >= level
        if is_loud:
            kept.append(raw)
    return kept, is_loud


def _loud(lines: Sequence[Raw], level: int, *, is_first: bool) -> tuple[list[Raw], list[Raw]]:
    """(lines of records of at least `level`, lines at the start whose record is not known yet)."""
    kept: list[Raw] = []
    unknown: list[Raw] = []
    loud: bool | None = level <= FIRST_RANK or None if is_first else None
    for raw in lines:
        said = rank(raw[1])
        loud = loud if said is None else said >= level
        if loud:
            kept.append(raw)
        elif loud is None:
            unknown.append(raw)
    return kept, [] if is_first else unknown[-1_000:]


# So many lines are around the place that is looked at: some screens in each direction.
NUM_AROUND = 300
_MARK_BYTES = 64


@dataclass(frozen=True)
class LogRequest:
    """Lines of at least `level` (index of `LEVELS`) around the line that starts at `anchor`.

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

    def read(self, request: LogRequest, is_wanted: Callable[[], bool] = lambda: True) -> tuple[LogData | None, bool]:
        """A search for rare lines ends when it is not wanted any more."""
        try:
            fd = open_log(self._run.log)
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
    """The course of a search: `share` of the log is looked through; at the end `start` of the line, None for none.

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
