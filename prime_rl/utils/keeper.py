"""Keeps one child of a process: ends all of it on request, and when that process dies, even by SIGKILL.

    python -m prime_rl.utils.keeper COMMAND...

The kernel signals this process when its parent dies (Linux), and what its child leaves behind becomes its own. So a
killed node of a group leaves no server, no torchrun and no rank. Its exit code is the child's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container
from pathlib import Path
from types import FrameType

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
# Nothing that is kept here needs longer: what it has written survives SIGKILL.
GRACE_S = 1.5
POLL_S = 0.1
# How long processes are killed that start others as fast as they can.
ORPHANS_END_S = 5.0
ORPHANS_POLL_S = 0.001


def main(argv: list[str]) -> int:
    """Run `argv` and return its exit code, 128 + N when signal N ended it.

    SIGTERM, SIGINT and SIGHUP end everything below this process.
    """
    told: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        told.append(signum)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, note)
    _tell_of_the_parents_death()
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    while child.poll() is None and not told:
        time.sleep(POLL_S)
    end_all(child)
    code = child.poll()
    return code if code is not None and code >= 0 else 128 - (code or -signal.SIGKILL)


def end_all(child: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> None:
    """SIGTERM to everything below this process, then SIGKILL until nothing is there."""
    for process in psutil.Process().children(recursive=True):
        send_signal(process, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while left := living(child):
        if time.monotonic() > deadline:
            for process in left:
                send_signal(process, signal.SIGKILL)
        time.sleep(POLL_S)


def living(child: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes below this one; orphans that became ours are reaped on the way."""
    child.poll()
    for process in psutil.Process().children():
        if process.pid != child.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
    return [process for process in psutil.Process().children(recursive=True) if _lives(process)]


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def send_signal(process: psutil.Process, signum: signal.Signals) -> None:
    """Send a signal; a process that has ended, or may not be signalled, is left alone."""
    with contextlib.suppress(psutil.Error):
        process.send_signal(signum)


def _tell_of_the_parents_death() -> None:
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    inherit_orphans()
    if os.getppid() == 1:  # it died before the call
        os.kill(os.getpid(), signal.SIGTERM)


def inherit_orphans() -> None:
    """Whatever a process below this one leaves behind becomes this one's own. Linux only; elsewhere it does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def orphans(own: Container[int] = ()) -> dict[int, int]:
    """The children that this process inherited, pid -> session; those that have ended are reaped.

    A process may leave its session and clear its environment, but it cannot join a session of others: `own` are the
    pids that this process started, and whatever else is a child in another session was inherited.
    """
    found: dict[int, int] = {}
    for pid in _children() if _inherits_orphans() else []:
        with contextlib.suppress(OSError):  # it has ended, and another thread has reaped it
            session = os.getsid(pid)
            if pid not in own and session != os.getsid(0) and os.waitpid(pid, os.WNOHANG) == (0, 0):
                found[pid] = session
    return found


def end_orphans(
    own: Container[int] = (), doomed: Callable[[int], bool] = lambda session: True, patience_s: float = ORPHANS_END_S
) -> list[int]:
    """SIGKILL the orphans whose session is `doomed`, and what they leave behind, until none is left.

    Returns the pids of those that are left after `patience_s`; with 0 each is killed once. What it does not return is
    gone: a process below this one becomes its child when its own parent is killed.
    """

    def find() -> list[int]:
        return [pid for pid, session in orphans(own).items() if doomed(session)]

    deadline = time.monotonic() + patience_s
    while left := find() or find():  # the first reaps one that has ended, whose children were not ours yet
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= deadline:
            break
        time.sleep(ORPHANS_POLL_S)
    return left


def _inherits_orphans() -> bool:
    found = ctypes.c_int()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(found))
    return bool(found.value)


def _children() -> list[int]:
    pids: list[int] = []
    for thread in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += map(int, thread.read_text().split())
    return pids


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
