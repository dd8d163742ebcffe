"""Trouble of the whole file system of a workspace: no space, no inodes, no quota, read-only, or an I/O error.

It is no run's fault, so nothing is evicted and nothing ends for it: what is to be written is held and tried again until
the file system takes it (`held`). An error that only a run's folder has (a disk or a quota of its own) is the run's.
Readers see the trouble in the status files, and where these cannot be written, with `find_trouble`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from prime_rl.utils.mounts import mount_of

logger = logging.getLogger(__name__)

RETRY_S = 1.0
# Less takes no status file.
FULL_BYTES = 64 << 10
# A quota of a folder's own shows as a file system that is smaller than the workspace's.
_SAME_SHARE = 0.9
_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
_holding: dict[object, str] = {}
T = TypeVar("T")


class NotWritten(RuntimeError):
    """A write that was held until the process was to end; the message has the trouble."""


def find_trouble(workspace: Path) -> str | None:
    """Why nothing can be written to the file system of `workspace`, as far as a look shows it; None: it can be."""
    try:
        room = os.statvfs(workspace)
    except OSError:
        return None
    is_full = _free_bytes(room) < FULL_BYTES or (room.f_files > 0 and room.f_favail == 0)
    number = errno.EROFS if room.f_flag & os.ST_RDONLY else errno.ENOSPC if is_full else None
    return _text(number, workspace, room) if number else None


def disk_trouble(error: Exception, workspace: Path, folder: Path) -> str | None:
    """The trouble of the workspace's file system that caused `error`, met in `folder` below it; None: another cause."""
    if not isinstance(error, OSError) or error.errno not in _ERRORS:
        return None
    path = Path(error.filename) if isinstance(error.filename, str) else folder
    place = next((each for each in (path, *path.parents) if folder in each.parents and each.exists()), folder)
    try:
        is_own = not _is_shared(workspace, place) or (error.errno == errno.EIO and _takes_bytes(workspace))
        return None if is_own else _text(error.errno, workspace, os.statvfs(workspace))
    except OSError:
        return None  # the workspace or the run is gone


def holding() -> str | None:
    """The trouble for which this process holds something that is to be written; None: it holds nothing."""
    return next(iter(list(_holding.values())), None)


def held(write: Callable[[], T], run: Path, gives_up: Callable[[float], bool]) -> T:
    """The result of `write`, called again while the file system of the workspace that `run` is in has trouble.

    `gives_up` sleeps for so many seconds; when it returns true, NotWritten is raised.
    """
    while True:
        try:
            return write()
        except Exception as error:
            trouble = disk_trouble(error, run.parent, run)
            if trouble is None:
                raise
        with _noted(trouble):
            if gives_up(RETRY_S):
                raise NotWritten(trouble)


async def held_async(write: Callable[[], T], run: Path) -> T:
    """As `held`; the wait ends when the task is cancelled."""
    while True:
        try:
            return held(write, run, lambda wait_s: True)
        except NotWritten as error:
            with _noted(str(error)):
                await asyncio.sleep(RETRY_S)


@contextlib.contextmanager
def _noted(trouble: str) -> Iterator[None]:
    key = object()
    _holding[key] = trouble
    logger.warning("holding what is to be written: %s", trouble.partition(":")[0])
    try:
        yield
    finally:
        del _holding[key]


def _is_shared(workspace: Path, place: Path) -> bool:
    """True when both are on one file system, mounted alike and with the same limits."""
    ours, its = os.statvfs(workspace), os.statvfs(place)
    is_limited = its.f_blocks < _SAME_SHARE * ours.f_blocks or its.f_files < _SAME_SHARE * ours.f_files
    is_mounted_alike = not (its.f_flag ^ ours.f_flag) & os.ST_RDONLY
    return os.stat(workspace).st_dev == os.stat(place).st_dev and is_mounted_alike and not is_limited


def _takes_bytes(workspace: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=workspace, buffering=0) as file:
            file.write(b"x")
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


def _free_bytes(room: os.statvfs_result) -> int:
    return room.f_frsize * (room.f_bavail if os.geteuid() else room.f_bfree)


def _text(number: int, workspace: Path, room: os.statvfs_result) -> str:
    mount = mount_of(workspace)
    where = f"{mount.source} ({mount.point})" if mount else str(workspace)
    has_inodes = room.f_favail > 0 or room.f_files == 0
    problem = {
        errno.EROFS: f"{where} is mounted read-only: make it writable",
        errno.EIO: f"input/output error on {where}: check the disk",
        errno.EDQUOT: f"disk quota used up on {where}: free some",
        errno.ENOSPC: f"no space left on {where}: {_free_bytes(room):,} bytes free; free some"
        if has_inodes
        else f"no inodes left on {where}: remove some files",
    }[number]
    return f"{problem}, training continues by itself"
