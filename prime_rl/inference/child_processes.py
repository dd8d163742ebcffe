"""Processes that an engine starts, and what they leave behind, end with the server, whatever way it ends.

An exclusive lock on a folder for temporary files proves that its owner runs. The kernel drops the lock of a process
that is killed, and the next process that makes such a folder removes unlocked ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, even by SIGKILL. Linux only; elsewhere it does nothing."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def end_children(grace_s: float) -> None:
    """End every process below this one: SIGTERM, then SIGKILL. Engine workers hold memory and devices."""
    _, alive = psutil.wait_procs(signal_children(signal.SIGTERM), timeout=grace_s)
    for child in alive:
        logger.warning("process %d did not exit: killing it", child.pid)
    psutil.wait_procs(signal_children(signal.SIGKILL), timeout=grace_s)


def signal_children(signum: signal.Signals) -> list[psutil.Process]:
    """Send `signum` to every process below this one; returns them."""
    children = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            # Python's resource tracker takes no SIGTERM; it ends with this process.
            if not any("resource_tracker" in part for part in child.cmdline()):
                child.send_signal(signum)
                children.append(child)
    return children


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
    """Remove abandoned folders; what other users own is not touched."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and (lock := _lock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
