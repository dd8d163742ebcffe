"""Processes that an engine starts must end with the server, whatever way it ends."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys

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
