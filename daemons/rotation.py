"""Log rotation: a log that is too large is copied and truncated, without touching its daemon.

A daemon and all that it starts append to one open file, so that the output of a crash in native code is kept too; they
cannot be asked to open another file. So the supervisor alone copies `x.log` to `x.log.1` and truncates it. What is
written between the last copied byte and the truncation, some microseconds, is lost. Readers follow it: see
`prime_rl.utils.tail`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from prime_rl.contract.files import open_file

_CHUNK_BYTES = 1 << 20
# Of a log that is far larger than allowed (a flood, a file with a hole) only the newest is kept, at least so much.
_MIN_KEPT_BYTES = 64 << 20


def old_log(log: Path, number: int) -> Path:
    """`x.log.1` is the newest of the old ones."""
    return log.with_name(f"{log.name}.{number}")


def rotate(log: Path, max_bytes: int, num_old: int) -> bool:
    """Rotate `log` if it is larger than `max_bytes`; keep `num_old` old files. Raises OSError."""
    try:
        if os.stat(log, follow_symlinks=False).st_size <= max_bytes:
            return False
    except FileNotFoundError:
        return False
    for number in range(num_old, 1, -1):
        with contextlib.suppress(FileNotFoundError):
            os.rename(old_log(log, number - 1), old_log(log, number))
    newest = old_log(log, 1)
    staged = log.with_name(f".{log.name}.tmp")
    with _opened(log, os.O_RDWR) as source, _opened(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as copy:
        os.lseek(source, max(0, os.fstat(source).st_size - max(_MIN_KEPT_BYTES, 2 * max_bytes)), os.SEEK_SET)
        _copy_rest(source, copy)
        os.rename(staged, newest)  # before the cut: a kill in between leaves the lines twice, never not at all
        _copy_rest(source, copy)
        os.ftruncate(source, 0)
    return True


def _copy_rest(source: int, copy: int) -> None:
    """From where `source` stands to its end."""
    while data := os.read(source, _CHUNK_BYTES):
        while data:
            data = data[os.write(copy, data) :]


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = open_file(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)
