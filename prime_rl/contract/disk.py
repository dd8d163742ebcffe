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
# What makes less than this of the workspace's blocks or inodes visible is a quota of the folder's own.
_SAME_SHARE = 0.9
_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
_holding: dict[object, str] = {}
T = TypeVar("T")


def find_trouble(workspace: Path) -> str | None:
    """Why nothing can be written to the file system of `workspace`, as far as a look shows it; None: it can be."""
    try:
        room = os.statvfs(workspace)
    except OSError:
        return None
    if room.f_flag & os.ST_RDONLY:
        return _text(errno.EROFS, workspace, room)
    has_none = _free_bytes(room) < FULL_BYTES or _has_no_inodes(room)
    return _text(errno.ENOSPC, workspace, room) if has_none else None


def disk_trouble(error: BaseException, workspace: Path, folder: Path) -> str | None:
    """The trouble of the workspace's file system that caused `error`, met in `folder` below it; None: another cause."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno in _ERRORS):
        cause = cause.__cause__
    if not isinstance(cause, OSError):
        return None
    place = Path(cause.filename) if isinstance(cause.filename, str) else folder
    place = next((each for each in (place, *place.parents) if folder in each.parents and each.exists()), folder)
    try:
        is_own = not _is_shared(workspace, place) or (cause.errno == errno.EIO and _takes_bytes(workspace))
        return None if is_own else _text(cause.errno or errno.EIO, workspace, os.statvfs(workspace))
    except OSError:
        return None  # the workspace or the run is gone


class NotWritten(RuntimeError):
    """Held until the process was to end, and then given up: the message has the trouble."""


def holding() -> str | None:
    """The trouble for which this process holds something that is to be written; None: it holds nothing."""
    return next(iter(list(_holding.values())), None)


def held(write: Callable[[], T], run: Path, stopped: Callable[[float], bool]) -> T:
    """The result of `write`, which is called again while the file system of the workspace of `run` is in trouble.

    `stopped` sleeps for so many seconds and returns whether to give up: then it raises NotWritten.
    """
    while True:
        try:
            return write()
        except Exception as error:
            trouble = disk_trouble(error, run.parent, run)
            if trouble is None:
                raise
            with _noted(trouble):
                if stopped(RETRY_S):
                    raise NotWritten(trouble) from error


async def held_async(write: Callable[[], T], run: Path) -> T:
    """As `held`; the wait ends when the task is cancelled."""
    while True:
        try:
            return write()
        except OSError as error:
            trouble = disk_trouble(error, run.parent, run)
            if trouble is None:
                raise
        with _noted(trouble):
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
    """Whether both are on one file system, with the same limits."""
    ours, its = os.statvfs(workspace), os.statvfs(place)
    pairs = (ours.f_blocks, its.f_blocks), (ours.f_files, its.f_files)
    is_limited = any(its_size < _SAME_SHARE * size for size, its_size in pairs)
    is_same = os.stat(workspace).st_dev == os.stat(place).st_dev
    return is_same and not is_limited and not (its.f_flag ^ ours.f_flag) & os.ST_RDONLY


def _takes_bytes(workspace: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=workspace) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


def _free_bytes(room: os.statvfs_result) -> int:
    return room.f_frsize * (room.f_bavail if os.geteuid() else room.f_bfree)


def _has_no_inodes(room: os.statvfs_result) -> bool:
    return room.f_files > 0 and room.f_favail == 0


def _text(number: int, workspace: Path, room: os.statvfs_result) -> str:
    mount = mount_of(workspace)
    where = f"{mount.source} ({mount.point})" if mount else str(workspace)
    if number == errno.EROFS:
        return f"{where} is mounted read-only: make it writable, training continues by itself"
    if number == errno.EIO:
        return f"input/output error on {where}: check the disk, training continues by itself"
    if number == errno.ENOSPC and _has_no_inodes(room):
        return f"no inodes left on {where}: remove some files, training continues by itself"
    what = "no space left on" if number == errno.ENOSPC else "disk quota used up on"
    return f"{what} {where}: {_free_bytes(room):,} bytes free; free some, training continues by itself"
