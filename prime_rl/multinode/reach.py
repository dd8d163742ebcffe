"""Whether a worker reaches the master over the network, which the shared folder cannot show: one TCP probe a beat.

The master answers every connection with its incarnation, so a worker can check that it is the right one. Failures
are counted in the worker's record as `unreached`; `decide` acts on them.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from prime_rl.contract.nodes import SUSPECT_AFTER_BEATS, dead_after_s
from prime_rl.multinode.records import NodeRecord, epoch_master

logger = logging.getLogger(__name__)

BACKLOG = 1024
ANSWER_TIMEOUT_S = 1.0
# Several times within the timeout of one probe.
RETRY_S = 0.2


class ProbeServer:
    """The master's side: a port that answers with the master's incarnation."""

    def __init__(self, incarnation: str) -> None:
        self._reply = incarnation.encode()
        self._socket = socket.create_server(("", 0), backlog=BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._answer, name="probe-server", daemon=True).start()

    def _answer(self) -> None:
        is_logged = False
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError as error:  # too many open files, no memory: it passes, and without answers the group ends
                if not is_logged:
                    logger.error("workers get no answer at port %d: %s; trying again", self.port, error)
                is_logged = True
                time.sleep(RETRY_S)
                continue
            is_logged = False
            with caller, contextlib.suppress(OSError):
                caller.settimeout(ANSWER_TIMEOUT_S)
                caller.sendall(self._reply)


def patience_s(every_s: float) -> float:
    """Timeout of one probe: the pause before it and three failed probes take as long as a dead node is silent.

    That many count against the master; a single worker has one more.
    """
    return (dead_after_s(every_s) - every_s) / SUSPECT_AFTER_BEATS


class Prober:
    """The worker's side: a thread probes once a beat and counts the misses since the last answer.

    Args:
        master: the newest record of the master.
    """

    def __init__(self, master: Callable[[], NodeRecord | None], every_s: float) -> None:
        # With the incarnation that was probed: misses of a dead master do not count for the next one.
        self._misses = ("", 0)
        self._master = master
        self._every_s = every_s
        threading.Thread(target=self._probe, name="prober", daemon=True).start()

    def count(self, epoch: str) -> int:
        """Misses of that epoch's master."""
        incarnation, misses = self._misses
        return misses if incarnation == epoch_master(epoch) else 0

    def _probe(self) -> None:
        while True:
            began_s = time.monotonic()
            master = self._master()
            if master is not None and master.port and not master.state.is_final:
                before = self._misses[1] if self._misses[0] == master.incarnation else 0
                misses = 0 if answers(master, patience_s(self._every_s)) else before + 1
                self._misses = (master.incarnation, misses)
            # A slow failure leaves no pause before the next probe.
            time.sleep(max(0.0, self._every_s - (time.monotonic() - began_s)))


def answers(master: NodeRecord, timeout_s: float) -> bool:
    """Whether that very master is at its address."""
    expected = master.incarnation.encode()
    try:
        with socket.create_connection((master.address, master.port), timeout=timeout_s) as line:
            found = b""
            while len(found) < len(expected) and (more := line.recv(len(expected) - len(found))):
                found += more
    except OSError:
        return False
    return found == expected
