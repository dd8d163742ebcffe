"""The launcher protocol: how the supervisor starts, watches and ends a daemon, whichever engine runs it.

A launcher places daemons and notices their end. It decides nothing: `decide` chooses what is started and ended, `specs`
what a daemon is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
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
    """The daemon has ended; `exit_code` is None when it is not known. `reason`: what else the engine reports.

    `left`: its processes that still run, though they were killed. `node`: which of its nodes ended it.
    """

    exit_code: int | None
    reason: str | None = None
    left: frozenset[int] = frozenset()
    node: int = 0


class LaunchError(RuntimeError):
    """A workspace or a daemon that cannot be started or stopped.

    The first line has the error, the place and the remedy; a log may follow.
    """

    exit_code = 1


Left = set[ProcessId]


class Launcher(Protocol):
    """One engine in one workspace."""

    def start(self, spec: DaemonSpec) -> Handle:
        """Start a daemon; does not wait until it runs. Raises OSError or LaunchError."""
        ...

    def look(self, handle: Handle) -> Alive | Ended:
        """Return the state of a start. Cheap: called at every look, and asks no network.

        A start that has ended is looked at until `stop` has killed what it left behind, and nothing is left.
        """
        ...

    def has_news(self) -> bool:
        """True when a start that was looked at may have ended since. Called at every tick: costs a few system calls."""
        ...

    def stop(self, handle: Handle, grace_s: float) -> None:
        """Ask a daemon to end; what lives `grace_s` later is killed.

        With infinity never; with 0 now, and all that it left behind. Does not wait, and may be called again.
        """
        ...

    def end(self, handles: Sequence[Handle], grace_s: float, drain_s: float, tick: Callable[[], None]) -> Left:
        """End daemons side by side, and prove it: each may finish and save for `drain_s`, then has `grace_s` to end.

        Waits, and calls `tick` meanwhile. Returns what could not be ended.
        """
        ...

    def adopt(self, record: DaemonStatus) -> Handle | None:
        """The recorded start, also of an earlier supervisor, if it still lives; a launcher may watch it then."""
        ...

    def strays(self, but: Collection[str] = ()) -> set[ProcessId]:
        """All processes that run for daemons of this workspace, recorded or not, except for those named in `but`."""
        ...

    def kill(self, strays: Collection[ProcessId], tick: Callable[[], None]) -> Left:
        """SIGKILL some `strays`, and wait until they are gone, calling `tick`. Returns what could not be ended."""
        ...

    def logs(self, handle: Handle) -> Path:
        """The daemon's log, in the workspace; `logs.node_log` has those of its other nodes."""
        ...


def new_start_id() -> str:
    """An id that no other start has: random, in hexadecimal digits."""
    return os.urandom(_START_ID_BYTES).hex()
