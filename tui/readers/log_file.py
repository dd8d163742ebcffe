"""Parts of a log of any size, read from any position, forwards and backwards. No user interface, no threads.

Nothing here reads a whole file: a part is read by blocks from a position. Long work comes in steps, as generators that
yield None, so that the caller can stop in between. A line without a level belongs to the record above it and has its
level.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_rl.contract.files import open_file
from prime_rl.utils.text import CleanText, clean_text

BLOCK_BYTES = 1 << 18
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
        start = max(position - BLOCK_BYTES, 0)
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
        data = os.pread(fd, BLOCK_BYTES, position)
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
    """Whether a block can have a record of `level`; not exact."""
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
