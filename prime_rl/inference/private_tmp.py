"""A folder of this process's own for what a foreign program leaves behind: gone when the process ends, or soon after.

An exclusive lock on the folder proves that its owner runs. The kernel drops the lock of a process that is killed, and
the next process that makes such a folder removes unlocked ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Short: a socket's path has room for about 100 characters, and 37 of them are the name of the socket.
PREFIX = "prl-vllm-"


@contextlib.contextmanager
def private_tmp() -> Iterator[Path]:
    """The folder, which exists as long as the block runs. Raises OSError."""
    parent = Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    folder, lock = _make(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make(parent: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = _lock(folder)
        # Another process may have cleaned up between the two lines.
        if lock is not None and folder.exists():
            return folder, lock
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """A locked descriptor, or None when another process holds the lock or the folder is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(parent: Path) -> None:
    """What other users own is not touched."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and (lock := _lock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
