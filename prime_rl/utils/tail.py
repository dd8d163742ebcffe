"""Whole lines of a file that another process appends to, again and again. No threads: one thread calls one tail.

It keeps a byte offset and reads only what is new. It survives what files do: a last line that is still being written,
truncation, rotation, deletion while open, lines without an end. When `x.log` was renamed to `x.log.1` it first reads
the rest of that, so no line is missed. Memory is bounded, whatever the file holds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from prime_rl.contract.files import open_file

# One look takes at most this much, so a huge file is read in steps between which the reader can be stopped.
CHUNK_BYTES = 1 << 20
# A longer line is neither a metrics line nor a readable log line; it is dropped, not kept in memory.
MAX_LINE_BYTES = 1 << 18
# So many bytes before the offset are compared at each look: a file that was cut and grew again past the offset is
# then noticed, though its size and inode are unchanged.
_MARK_BYTES = 64


@dataclass(frozen=True)
class TailRead:
    """What one look found: whole lines without their end, in order.

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
        self._identity: tuple[int, int] | None = None
        self._mark = b""
        self._partial = b""
        self._skipping = False  # inside a line that is too long, or that began before the start

    @property
    def position(self) -> int:
        """The offset after the last whole line that was read."""
        return self._offset - len(self._partial) if self._identity else self._go_on_at

    def read(self) -> TailRead:
        """Lines that were completed since the last call. Never raises for what a file may do."""
        try:
            fd = open_file(self.path)
            try:
                return self._read(fd)
            finally:
                os.close(fd)
        except OSError:
            had_content = self._identity is not None
            self._forget()
            return TailRead([], reset=had_content)

    def _read(self, fd: int) -> TailRead:
        stat = os.fstat(fd)
        identity = (stat.st_dev, stat.st_ino)
        reset = self._identity is not None and not self._continues(fd, identity, stat.st_size)
        if reset and (rest := self._rest_put_aside()) is not None:
            lines = self._split(rest)
            self._offset, self._identity, self._mark = 0, identity, b""
            return TailRead(lines, more=True)
        if reset or self._identity is None:
            self._forget()
            self._identity = identity
            self._start(fd, stat.st_size)
            before = min(_MARK_BYTES, self._offset)
            self._mark = os.pread(fd, before, self._offset - before)
        data = os.pread(fd, self._chunk_bytes, self._offset)
        self._offset += len(data)
        self._mark = (self._mark + data)[-_MARK_BYTES:]
        return TailRead(self._split(data), reset, more=len(data) == self._chunk_bytes)

    def _rest_put_aside(self) -> bytes | None:
        """The unread rest of the rotated file; None when it is missing or another file."""
        try:
            with os.fdopen(open_file(self.path.with_name(f"{self.path.name}.1")), "rb", buffering=0) as file:
                fd = file.fileno()
                size = os.fstat(fd).st_size
                marked = os.pread(fd, len(self._mark), self._offset - len(self._mark)) == self._mark
                fits = self._offset <= size <= self._offset + self._chunk_bytes
                return os.pread(fd, self._chunk_bytes, self._offset) if self._mark and marked and fits else None
        except OSError:
            return None

    def _continues(self, fd: int, identity: tuple[int, int], size: int) -> bool:
        if identity != self._identity or size < self._offset:
            return False
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
