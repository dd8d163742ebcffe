"""Whole lines of a file that another process appends to, again and again. No threads: one thread calls one tail.

It keeps a byte offset and reads only what is new. It survives what files do: a last line that is still being written,
truncation, rotation, deletion while open, lines without an end. When `x.log` was rotated to `x.log.1`, or several times
since the last look (`x.log.2` ...), it first reads the rest of those. So no line is missed while they are kept and at
most `chunk_bytes` of them are unread; beyond that it goes on at the start of `x.log` and reports `reset`. Memory is
bounded, whatever the file holds.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prime_rl.contract.files import closing, open_file

# One look takes at most this much, so a huge file is read in steps between which the reader can be stopped.
CHUNK_BYTES = 1 << 20
# A longer line is neither a metrics line nor a readable log line; it is dropped, not kept in memory.
MAX_LINE_BYTES = 1 << 18
# No metrics come near it, and a file of holes is read at no more than some hundred MiB a second.
MAX_WHOLE_BYTES = 1 << 28
# Rotation leaves no more; of whoever makes more none are looked at.
MAX_OLD_LOGS = 100
# So many bytes before the offset are compared at each look: a file that was cut and grew again past the offset is
# then noticed, though its size and inode are unchanged.
_MARK_BYTES = 64
_Identity = tuple[int, int]


@dataclass(frozen=True)
class TailRead:
    """The result of one look: whole lines without their end, in order.

    `reset`: the file was cut, replaced or removed, so drop the earlier lines. `more`: the read stopped at its limit, so
    read again at once.
    """

    lines: list[bytes]
    reset: bool = False
    more: bool = False


class FileTail:
    """The whole lines of a growing file.

    Args:
        start_bytes: begin at most this far before the end of the file (the cut first line is dropped); None begins at
            the start. Holds also after a reset.
        position: go on where another tail of the same file stood; a shorter file is read from its start.
    """

    def __init__(
        self, path: Path, *, start_bytes: int | None = None, position: int = 0, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self.path = path
        self._start_bytes = start_bytes
        self._go_on_at = position
        self._chunk_bytes = chunk_bytes
        self._offset = 0
        self._identity: _Identity | None = None
        self._mark = b""
        self._newest_old: _Identity | None = None  # `x.log.1` when reading `x.log` began
        self._partial = b""
        self._skipping = False  # inside a line that is too long, or that began before the start

    @property
    def position(self) -> int:
        """The offset after the last whole line that was read."""
        return self._offset - len(self._partial) if self._identity else self._go_on_at

    def read(self) -> TailRead:
        """Lines that were completed since the last call. Never raises for what a file may do."""
        try:
            with closing(open_file(self.path)) as fd:
                return self._read(fd)
        except OSError:
            if self._is_put_aside():
                return TailRead([])
            had_content = self._identity is not None
            self._forget()
            return TailRead([], reset=had_content)

    def lines(self) -> Iterator[bytes]:
        """The whole lines up to the present end of the file, in chunks; no more of them, whatever takes its place."""
        end = 0
        with contextlib.suppress(OSError):
            end = self.path.stat().st_size
        most = end if self._start_bytes is None else min(end, self._start_bytes)
        for _ in range(2 + most // self._chunk_bytes):  # one may be of what was put aside
            found = self.read()
            yield from found.lines
            if not found.more or self._offset >= end:
                return

    def _read(self, fd: int) -> TailRead:
        identity, size = _look(fd)
        reset = self._identity is not None and not self._continues(fd, identity, size)
        if reset and (rest := self._rest_put_aside()) is not None:
            lines = self._split(rest)
            self._offset, self._identity, self._mark = 0, identity, b""
            return TailRead(lines, more=True)
        if reset or self._identity is None:
            self._forget()
            self._identity, self._newest_old = identity, self._old(1, 0)[0]
            self._start(fd, size)
            before = min(_MARK_BYTES, self._offset)
            self._mark = os.pread(fd, before, self._offset - before)
        data = os.pread(fd, self._chunk_bytes, self._offset)
        self._offset += len(data)
        self._mark = (self._mark + data)[-_MARK_BYTES:]
        return TailRead(self._split(data), reset, more=len(data) == self._chunk_bytes)

    def _is_put_aside(self) -> bool:
        """True when the file that was read is `x.log.1` now: the next `x.log` is about to be made."""
        if self._identity is None:
            return False
        identity, _, is_ours = self._old(1, 0)
        return is_ours or identity == self._identity

    def _rest_put_aside(self) -> bytes | None:
        """The unread rest of the files rotated since the last look; None when it is unknown."""
        rest, newest = b"", self._old(1, 0)[0]
        for number in range(1, MAX_OLD_LOGS + 1):
            identity, data, is_ours = self._old(number, self._chunk_bytes + 1)
            if not self._mark and identity == self._newest_old:
                if number == 1:
                    return None
                break  # the one before it was ours, of which we had read nothing
            rest = data + rest
            if identity is None or len(rest) > self._chunk_bytes:
                return None
            if is_ours:
                break
        else:
            return None
        self._newest_old = newest
        return rest

    def _old(self, number: int, limit: int) -> tuple[_Identity | None, bytes, bool]:
        """Of `x.log.number`: its identity, at most `limit` unread bytes, and whether it is the file that was read."""
        try:
            with closing(open_file(self.path.with_name(f"{self.path.name}.{number}"))) as fd:
                is_ours = bool(self._mark) and self._is_marked(fd)
                return _look(fd)[0], os.pread(fd, limit, self._offset * is_ours), is_ours
        except OSError:
            return None, b"", False

    def _continues(self, fd: int, identity: _Identity, size: int) -> bool:
        if identity != self._identity or size < self._offset:
            return False
        if self._mark:
            return self._is_marked(fd)
        # Nothing was read yet, so only a new old file tells; or the cut is yet to come, and it begins as this does.
        newest, begins, _ = self._old(1, _MARK_BYTES)
        return newest in (None, self._newest_old) or begins == os.pread(fd, _MARK_BYTES, 0)

    def _is_marked(self, fd: int) -> bool:
        return os.pread(fd, len(self._mark), self._offset - len(self._mark)) == self._mark

    def _start(self, fd: int, size: int) -> None:
        if self._go_on_at:
            self._offset, self._go_on_at = self._go_on_at * (self._go_on_at <= size), 0
            return
        if self._start_bytes is None or size <= self._start_bytes:
            return
        self._offset = size - self._start_bytes
        self._skipping = os.pread(fd, 1, self._offset - 1) != b"\n"

    def _split(self, data: bytes) -> list[bytes]:
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = self._partial + lines[0]
            lines = [line for line in lines[self._skipping :] if len(line) <= MAX_LINE_BYTES]
            self._partial, self._skipping = b"", False
        self._partial = b"" if self._skipping else self._partial + rest
        if len(self._partial) > MAX_LINE_BYTES:
            self._partial, self._skipping = b"", True
        return lines

    def _forget(self) -> None:
        self._offset, self._identity, self._mark, self._partial, self._skipping = 0, None, b"", b"", False


def whole_lines(path: Path) -> Iterator[bytes]:
    """The whole lines that a file has now, read in chunks; of a huge one those at its end."""
    return FileTail(path, start_bytes=MAX_WHOLE_BYTES).lines()


def _look(fd: int) -> tuple[_Identity, int]:
    """(which file it is, its size)."""
    stat = os.fstat(fd)
    return (stat.st_dev, stat.st_ino), stat.st_size
