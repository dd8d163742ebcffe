"""The launcher protocol: how the supervisor starts, watches and ends a daemon, whichever engine runs it.

A launcher places daemons and notices their end. It decides nothing: `decide` chooses what is started and ended, `specs`
what a daemon is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from daemons.specs import DaemonSpec
from prime_rl.contract.status import DaemonStatus
from prime_rl.contract.status import Handle as Handle
from prime_rl.utils.process import ProcessId

_START_ID_BYTES = 6


@dataclass(frozen=True)
class Alive:
    """The daemon runs, or is on its way; `process` is None until it is known."""

    process: ProcessId | None


@dataclass(frozen=True)
class Ended:
    """The daemon has ended; `exit_code` is None when it is not known. `reason`: what the engine knows besides."""

    exit_code: int | None
    reason: str | None = None


class LaunchError(RuntimeError):
    """A workspace or a daemon that cannot be started or stopped.

    The first line has the error, the place and the remedy; a log may follow.
    """

    exit_code = 1


class Launcher(Protocol):
    """One engine in one workspace."""

    def start(self, spec: DaemonSpec) -> Handle:
        """Start a daemon; does not wait until it runs. Raises OSError or LaunchError."""
        ...

    def look(self, handle: Handle) -> Alive | Ended:
        """How a start is now. Cheap: called at every tick, and asks no network."""
        ...

    def stop(self, handle: Handle, grace_s: float) -> None:
        """Ask a daemon to end; what lives `grace_s` later is killed. 0: kill it now, and all that it left behind.

        Does not wait, and may be called again.
        """
        ...

    def adopt(self, record: DaemonStatus) -> Handle | None:
        """The recorded start, also of an earlier supervisor, if it still lives."""
        ...

    def logs(self, handle: Handle) -> Path:
        """The daemon's log, in the workspace."""
        ...


def new_start_id() -> str:
    return os.urandom(_START_ID_BYTES).hex()
