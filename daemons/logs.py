"""The logs of daemons: their last lines, their rotation, and all of them as one stream.

Following one log as it grows is `prime_rl.utils.tail`'s work.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from prime_rl.contract.files import closing, open_file
from prime_rl.utils.tail import MAX_OLD_LOGS, FileTail
from prime_rl.utils.text import clean_text

MAX_LINE_BYTES = 1 << 18
_BLOCK_BYTES = 1 << 16
# Reading stops at a longer stretch without a line's end: a file with a hole is not a log.
_MAX_UNBROKEN_BYTES = 1 << 24
_COPY_BYTES = 1 << 20
# Of a log that is far larger than allowed (a flood, a file with a hole) only the newest is kept, at least so much; of
# what is written while it is copied, at most so much.
_MIN_KEPT_BYTES = 64 << 20
_UNKNOWN = -1

# Logs of no daemon, where the engine is Slurm: of the job's script, and of every srun.
JOB_LOG = "job"
SRUN_LOG = "srun"

Wanted = Callable[[str], bool]


def node_log(log: Path, node: int) -> Path:
    """The log of one node of a daemon: what several machines append to one file may overlap."""
    return log if node == 0 else log.with_name(f"{log.stem}-node{node}{log.suffix}")


# The last lines. No text is cleaned here.


def last_lines(path: Path, num_lines: int, wanted: Wanted = lambda line: True, *, end: int | None = None) -> list[str]:
    """The last lines that match `wanted`, oldest first, from the log (up to byte `end`) and older files beside it."""
    if not num_lines:
        return []
    logs = zip(_newest_first(path), itertools.chain([end], itertools.repeat(None)), strict=False)
    found = (line for log, its_end in logs for line in _backwards(log, its_end) if wanted(line))
    return list(itertools.islice(found, num_lines))[::-1]


def _newest_first(path: Path) -> Iterator[Path]:
    yield path
    for number in range(1, MAX_OLD_LOGS + 1):
        older = old_log(path, number)
        if not older.is_file():
            return
        yield older


def _backwards(path: Path, end: int | None) -> Iterator[str]:
    """The lines of a file, last one first; a last line without a newline counts. Nothing if the file is missing."""
    try:
        opened = open_file(path)
    except OSError:
        return
    with closing(opened) as fd:
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


def end_of_lines(path: Path) -> int:
    """The offset after the last whole line, 0 without a file: what is being written is read when it is complete."""
    try:
        with os.fdopen(open_file(path), "rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - MAX_LINE_BYTES)
            return start + os.pread(file.fileno(), size - start, start).rfind(b"\n") + 1
    except OSError:
        return 0


# Rotation. A daemon and all that it starts append to one open file, so that the output of a crash in native code is
# kept too; they cannot be asked to open another file. So the supervisor alone copies `x.log` to `x.log.1` and
# truncates it. What is written between the last copied byte and the truncation, some microseconds, is lost.


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
    new = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with closing(open_file(log, os.O_RDWR)) as source, closing(open_file(staged, new)) as copy:
        limit = max(_MIN_KEPT_BYTES, 2 * max_bytes)
        os.lseek(source, max(0, os.fstat(source).st_size - limit), os.SEEK_SET)
        _copy(source, copy, limit)
        os.rename(staged, newest)  # before the cut: a kill in between leaves the lines twice, never not at all
        _copy(source, copy, _MIN_KEPT_BYTES)
        os.ftruncate(source, 0)
    return True


def _copy(source: int, copy: int, limit: int) -> None:
    """From where `source` stands to its end, at most `limit` bytes."""
    while data := os.read(source, min(limit, _COPY_BYTES)):
        limit -= len(data)
        while data:
            data = data[os.write(copy, data) :]


# One stream of lines, for `prl up --foreground`: a container's logs, systemd's journal.


class LogRelay:
    """Writes `name | line` for each new line of each daemon's log, from where it ended at `follow`."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._tails: dict[str, tuple[FileTail, int]] = {}

    def follow(self, name: str, log: Path, num_nodes: int = 1) -> None:
        """Add a daemon, with the log of each of its nodes. Call it before the daemon is started."""
        for node in range(num_nodes):
            label, path = f"{name}-node{node}" if node else name, node_log(log, node)
            if label not in self._tails:
                self._tails[label] = (FileTail(path, position=_size(path)), _size(path))

    def pump(self) -> None:
        """Write what is new; of each log at most what one look takes, so one that grows quickly holds up no other."""
        for name, (tail, size) in self._tails.items():
            now = _size(tail.path)
            if now == size:
                continue
            read = tail.read()
            self._tails[name] = (tail, _UNKNOWN if read.more else now)
            for line in read.lines:
                self._out.write(f"{name} | {clean_text(line.decode(errors='replace'))}\n")
        self._out.flush()


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0
