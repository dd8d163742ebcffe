"""`daemons/<name>.json`: the supervisor's records of its daemons, read by all, and by the next supervisor.

Written at every change and every heartbeat; an unchanged file is renewed without waiting for the disk. The supervisor
itself has its own status file. It decides nothing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping

import msgspec

from daemons.daemon import LIVE, Daemon, State
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import HEARTBEAT_S, DaemonStatus
from prime_rl.utils.process import ProcessId, boot_id


class Records:
    """Writes the records of one supervisor, each when it has changed or its heartbeat is due.

    Args:
        clock: seconds that never jump.
    """

    def __init__(self, output: OutputDir, clock: Callable[[], float]) -> None:
        self._output = output
        self._clock = clock
        self._tails: dict[str, list[str]] = {}
        self._written: dict[str, tuple[float, Daemon]] = {}
        self._writer = ProcessId.of(os.getpid())
        self._host, self._boot_id = socket.gethostname(), boot_id()

    def keep_tail(self, name: str, lines: list[str]) -> None:
        """The last lines of a daemon's log before it ended."""
        self._tails[name] = lines

    def forget(self, name: str) -> None:
        """Remove the record of a daemon, with its file if there is one."""
        self._tails.pop(name, None)
        self._written.pop(name, None)
        self._output.daemon_status(name).unlink(missing_ok=True)

    def write(self, daemons: Mapping[str, Daemon], *, stopped: bool = False) -> None:
        """Write one file per daemon. `stopped`: they are no longer supervised.

        Tries all of them, then raises the first OSError.
        """
        now = self._clock()
        trouble: OSError | None = None
        for name, daemon in daemons.items():
            last = self._written.get(name)
            changed = stopped or last is None or last[1] != daemon
            if not changed and last is not None and now - last[0] < HEARTBEAT_S:
                continue
            status = self._status(daemon)
            if stopped and (daemon.state in LIVE or daemon.state is State.BACKOFF):
                status.state, status.child, status.handle = "stopped", None, None
                status.waiting_on, status.reason = None, None
            try:
                write_atomic(self._output.daemon_status(name), msgspec.json.encode(status), durable=changed)
                self._written[name] = (now, daemon)
            except OSError as error:  # a file that cannot be written costs the others nothing
                trouble = error
        if trouble is not None:
            raise trouble

    def _status(self, daemon: Daemon) -> DaemonStatus:
        status = DaemonStatus(
            name=daemon.spec.name,
            state=_state(daemon),
            updated_at=time.time(),  # readers compare it with their clock
            waiting_on=daemon.waiting_on,
            argv=list(daemon.spec.argv),
            num_restarts=daemon.num_restarts,
            exit_code=daemon.exit_code,
            reason=daemon.reason,
            log_tail=self._tails.get(daemon.spec.name, []),
            started_at=daemon.started_at,
            stalled_since=daemon.stalled_since,
            crashes=list(daemon.crashes),
            host=self._host,
            boot_id=self._boot_id,
        )
        status.sign(self._writer)
        status.child = daemon.process
        status.handle = daemon.handle if daemon.state in LIVE else None
        return status


def _state(daemon: Daemon) -> str:
    """Its state for readers: one that was asked to stop still runs, or is still stalled."""
    if daemon.state is State.STOPPING:
        return str(State.RUNNING if daemon.stalled_since is None else State.STALLED)
    return str(daemon.state)
