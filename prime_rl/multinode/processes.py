"""A node's own processes: rollout workers, its inference server, its rank of the trainer. Each has a keeper and a log.

Independent of phases, which `work` follows.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from prime_rl.contract.files import make_folder, open_append, open_file

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
                [sys.executable, "-m", "prime_rl.utils.keeper", *argv],
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
