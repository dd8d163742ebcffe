"""`daemons/<name>.json`: what the supervisor says about its parts, and what the next one reads of it.

Written at every change and every heartbeat; an unchanged file is renewed without waiting for the disk. It says nothing
about the supervisor itself (that is its own status file) and decides nothing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping

import msgspec

from daemons.parts import LIVE, Part, State
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import HEARTBEAT_S, DaemonStatus
from prime_rl.utils.process import ProcessId, boot_id


class Records:
    """Writes the files of one supervisor's parts."""

    def __init__(self, output: OutputDir, clock: Callable[[], float]) -> None:
        self._output = output
        self._clock = clock
        self._tails: dict[str, list[str]] = {}
        self._written: dict[str, tuple[float, Part]] = {}
        self._writer = ProcessId.of(os.getpid())
        self._host, self._boot_id = socket.gethostname(), boot_id()

    def keep_tail(self, name: str, lines: list[str]) -> None:
        """The last lines of a part's log before it ended."""
        self._tails[name] = lines

    def forget(self, name: str) -> None:
        self._tails.pop(name, None)
        self._written.pop(name, None)
        self._output.daemon_status(name).unlink(missing_ok=True)

    def write(self, parts: Mapping[str, Part], *, stopped: bool = False) -> None:
        """One file a part. `stopped`: nobody watches over them any more. Raises OSError."""
        now = self._clock()
        for name, part in parts.items():
            last = self._written.get(name)
            changed = stopped or last is None or last[1] != part
            if not changed and last is not None and now - last[0] < HEARTBEAT_S:
                continue
            status = self._status(part)
            if stopped and (part.state in LIVE or part.state is State.BACKOFF):
                status.state, status.child, status.waiting_on, status.reason = "stopped", None, None, None
            write_atomic(self._output.daemon_status(name), msgspec.json.encode(status), durable=changed)
            self._written[name] = (now, part)

    def _status(self, part: Part) -> DaemonStatus:
        status = DaemonStatus(
            name=part.spec.name,
            state="running" if part.state is State.STOPPING else str(part.state),
            updated_at=time.time(),  # readers compare it with their clock
            waiting_on=part.waiting_on,
            argv=list(part.spec.argv),
            num_restarts=part.num_restarts,
            exit_code=part.exit_code,
            reason=part.reason,
            log_tail=self._tails.get(part.spec.name, []),
            started_at=part.started_at,
            stalled_since=part.stalled_since,
            crashes=list(part.crashes),
            host=self._host,
            boot_id=self._boot_id,
        )
        status.sign(self._writer)
        status.child = part.process
        return status
