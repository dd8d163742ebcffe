"""The processes of the daemons as the supervisor holds them: its own children, and those that it adopted.

An adopted daemon was started by a supervisor that is gone. It is not our child, so the kernel reports its end (through
a pidfd, where supported) but not its exit code. This module starts, signals and kills nothing (`local` does).
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from collections.abc import Iterable
from typing import Protocol

from prime_rl.utils.process import ProcessId


class Child(Protocol):
    """The process of a daemon. `exit_code` is None while it runs, and always for an adopted one."""

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal."""
        ...

    def lives(self) -> bool:
        """Whether the process still runs; returns at once."""
        ...

    def close(self) -> None:
        """Release what watches the process; the process itself goes on."""
        ...


class OwnChild:
    """A process that this one has started. Asking whether it lives also reaps it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def exit_code(self) -> int | None:
        """What the last call of `lives` found, negative for a signal; None while the process ran."""
        return self._process.returncode

    def lives(self) -> bool:
        """Whether the process runs; one that has ended is reaped, which sets `exit_code`."""
        return self._process.poll() is None

    def close(self) -> None:
        """Do nothing: a child of our own needs no file to be watched."""
        pass


class AdoptedChild:
    """A process that an earlier supervisor has started."""

    exit_code: int | None = None

    def __init__(self, process: ProcessId) -> None:
        self._process = process
        self._poll = select.poll()
        self._fd: int | None = None
        with contextlib.suppress(AttributeError, OSError):  # an old kernel, or too many open files
            self._fd = os.pidfd_open(process.pid)
            self._poll.register(self._fd, select.POLLIN)
        if not process.is_running():  # its number may have gone to another before the pidfd was there
            self.close()

    def lives(self) -> bool:
        """Whether the process runs: by its pidfd, else by its pid and start time."""
        return not self._poll.poll(0) if self._fd is not None else self._process.is_running()

    def close(self) -> None:
        """Close the pidfd, if it is open; `lives` goes on without it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def any_ended(children: Iterable[Child], own_pids: frozenset[int]) -> bool:
    """Whether one of `children` has ended, in one system call for all of our own.

    Reaps other processes too: as the first process of a container this one inherits every orphan.
    """
    while (ended := _ended_child()) is not None:
        if ended in own_pids:
            return True
        with contextlib.suppress(ChildProcessError):
            os.waitpid(ended, os.WNOHANG)
    return any(isinstance(child, AdoptedChild) and not child.lives() for child in children)


def _ended_child() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found is not None else None
