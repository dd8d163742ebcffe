"""Pieces of a phase's work that take time: looked at now and then, given up at any moment.

They are of this node's own processes: rollout workers, its inference server, its rank of the trainer. Each has a keeper
and a log.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from prime_rl.contract.files import make_folder, open_append, open_file
from prime_rl.contract.status import InferenceStatus, read_status
from prime_rl.multinode.member import Report

TAIL_BYTES = 4_000
NUM_TAIL_LINES = 5

logger = logging.getLogger("node")


class Nothing:
    """In the place of a process where there is nothing to do: it has ended well before it began."""

    exit_code = 0

    def failure(self) -> str | None:
        """None: nothing can fail."""
        return None

    def ask_to_end(self) -> None:
        """Nothing runs."""


class Child:
    """One process under a keeper. Its output goes to `log`; `environment` is added to this node's."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self._is_asked = False
        make_folder(log.parent)
        logger.debug("starts %s (%s): %s", name, log, shlex.join(argv))
        with open_append(log) as output:
            output.write(f"$ {shlex.join(argv)}\n".encode())
            output.flush()
            self._start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prime_rl.utils.process", *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            )

    @property
    def exit_code(self) -> int | None:
        """The exit code of the command, 128 + N after signal N; None while it or its keeper runs."""
        if self._process.returncode is None and self._process.poll() is not None:
            logger.debug("%s ended with code %d", self.name, self._process.returncode)
        return self._process.returncode

    def failure(self) -> str | None:
        """Why it failed, with its last lines; None while it runs or when it ended well."""
        code = self.exit_code
        if code in (None, 0):
            return None
        with os.fdopen(open_file(self.log), "rb") as file:
            file.seek(max(self._start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).decode(errors="replace").splitlines()[-NUM_TAIL_LINES:]
        return f"{self.name} ended with code {code} ({self.log}): {' | '.join(lines)}"

    def ask_to_end(self) -> None:
        """It and everything below it: the keeper sees to that. Returns at once; once is enough."""
        if not self._is_asked and self.exit_code is None:
            self._process.send_signal(signal.SIGTERM)
        self._is_asked = True


SERVER = "this node's inference server to serve"


class Task(Protocol):
    """Some work under way, in the node's thread for work. It may read and copy, and never waits for a process."""

    def look(self) -> Report:
        """Go on with the work, and report how far it is."""

    def give_up(self) -> None:
        """Ask what is under way to end."""

    @property
    def has_ended(self) -> bool:
        """True when all of it has ended."""


class Now:
    """Work that is tried at every look until it returns that it is done. It must be safe to try again.

    `waiting_on` names what is missing while it is not, `needs` why that will never be there.
    """

    def __init__(
        self,
        attempt: Callable[[], bool],
        waiting_on: str | None = None,
        needs: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._attempt = attempt
        self._waiting_on = waiting_on
        self._needs = needs

    def look(self) -> Report:
        """Make one attempt."""
        return Report(done=self._attempt(), error=self._needs(), waiting_on=self._waiting_on)

    def give_up(self) -> None:
        """Nothing goes on between two looks."""

    @property
    def has_ended(self) -> bool:
        """Always True: nothing goes on between two looks."""
        return True


class Process:
    """Work of one process, begun as soon as `start` has what it needs (before that it gives None).

    Args:
        waiting_on: what it needs to begin.
        needs: why that will never be there, or None.
        measure: grows as the work goes on.
        finish: what is left to see once the process has ended well; tried until true.
        is_shared: other nodes work on the same, so its failure may be theirs.
    """

    def __init__(
        self,
        start: Callable[[], Child | Nothing | None],
        *,
        waiting_on: str | None = None,
        needs: Callable[[], str | None] = lambda: None,
        measure: Callable[[], int] = lambda: 0,
        finish: Callable[[], bool] = lambda: True,
        is_shared: bool = False,
    ) -> None:
        self._start = start
        self._waiting_on = waiting_on
        self._needs = needs
        self._measure = measure
        self._finish = finish
        self._is_shared = is_shared
        self._child: Child | Nothing | None = None
        self._failure: str | None = None

    def look(self) -> Report:
        """Start the process if it can begin, and report its progress, its failure or its end."""
        if self._child is None:
            self._child = self._start()
        progress = self._measure()
        if self._child is None:
            return Report(progress, error=self._needs(), waiting_on=self._waiting_on)
        if self._child.exit_code is None:
            return Report(progress)
        self._failure = self._failure or self._child.failure()
        if self._failure is not None:
            return Report(progress, error=self._failure, is_shared=self._is_shared)
        return Report(progress, done=self._finish())

    def give_up(self) -> None:
        """Ask the process to end; one that has not begun never does."""
        self._start = lambda: None
        if self._child is not None:
            self._child.ask_to_end()

    @property
    def has_ended(self) -> bool:
        """True when the process has ended, or never began."""
        return self._child is None or self._child.exit_code is not None


class InferenceServer:
    """This node's server and its status file. `url` is None until it serves."""

    def __init__(self, start: Callable[[], Child], status_file: Path) -> None:
        self._start = start
        self._status_file = status_file
        self._child: Child | None = None

    @property
    def url(self) -> str | None:
        """The server's base URL; None while its process does not run or its status is not `serving`."""
        status = read_status(self._status_file, InferenceStatus)
        is_ours = self._child is not None and self._child.exit_code is None
        return status.base_url if is_ours and status is not None and status.state == "serving" else None

    def start(self) -> None:
        """Start the server unless it runs; the status file of an earlier one is removed."""
        if self.has_ended:
            self._status_file.unlink(missing_ok=True)
            self._child = self._start()

    def failure(self) -> str | None:
        """Why it does not serve and never will."""
        if self._child is None or self._child.exit_code is None:
            return None
        return self._child.failure() or f"{self._child.name} ended with code 0 ({self._child.log})"

    def give_up(self) -> None:
        """Ask the server to end."""
        if self._child is not None:
            self._child.ask_to_end()

    @property
    def has_ended(self) -> bool:
        """True when the server has ended, or was never started."""
        return self._child is None or self._child.exit_code is not None


def size(path: Path) -> int:
    """In bytes, as a measure of progress; 0 when it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
