"""The last lines of a log, from the older files beside it too: `x.log.1` is the newest of the old ones.

Following a log as it grows is `prime_rl.utils.tail`'s work. It cleans no text and prints nothing.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from daemons.rotation import old_log
from prime_rl.contract.files import open_file

MAX_LINE_BYTES = 1 << 18
_BLOCK_BYTES = 1 << 16
# Reading stops at a longer stretch without a line's end: a file with a hole is not a log.
_MAX_UNBROKEN_BYTES = 1 << 24

Wanted = Callable[[str], bool]


def last_lines(path: Path, num_lines: int, wanted: Wanted = lambda line: True, *, end: int | None = None) -> list[str]:
    """The last lines that match `wanted`, oldest first, from the log (up to byte `end`) and older files beside it."""
    if not num_lines:
        return []
    logs = zip(_newest_first(path), itertools.chain([end], itertools.repeat(None)), strict=False)
    found = (line for log, its_end in logs for line in _backwards(log, its_end) if wanted(line))
    return list(itertools.islice(found, num_lines))[::-1]


def _newest_first(path: Path) -> Iterator[Path]:
    yield path
    for number in itertools.count(1):
        older = old_log(path, number)
        if not older.is_file():
            return
        yield older


def _backwards(path: Path, end: int | None) -> Iterator[str]:
    """The lines of a file, last one first; a last line without a newline counts. Nothing if the file is missing."""
    try:
        fd = open_file(path)
    except OSError:
        return
    try:
        size = os.fstat(fd).st_size
        position, rest, first = size if end is None else min(end, size), b"", True
        unbroken = 0
        while position > 0 and unbroken <= _MAX_UNBROKEN_BYTES:
            size = min(_BLOCK_BYTES, position)
            position -= size
            head, *lines = (os.pread(fd, size, position) + rest).split(b"\n")
            if first and lines and not lines[-1]:
                lines.pop()  # text after the last line's end is not a line yet
            first = False
            unbroken = 0 if lines else unbroken + size
            yield from (line[:MAX_LINE_BYTES].decode(errors="replace") for line in reversed(lines))
            rest = head[-MAX_LINE_BYTES - _BLOCK_BYTES :]
        if not first:
            yield rest[:MAX_LINE_BYTES].decode(errors="replace")
    finally:
        os.close(fd)


def end_of_lines(path: Path) -> int:
    """The offset after the last whole line, 0 without a file: what is being written is read when it is complete."""
    try:
        with os.fdopen(open_file(path), "rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - MAX_LINE_BYTES)
            return start + os.pread(file.fileno(), size - start, start).rfind(b"\n") + 1
    except OSError:
        return 0
