"""A node's signs of life: it writes its record once a beat, and at each change. `contract.nodes` judges them.

A thread writes the record, so long work is not death. How long ago the main loop last came round (`still_s`) is in it,
and shows that the node makes progress. Whether a worker reaches the master over the network the shared folder cannot
show: one TCP probe a beat does (`Prober`). The master answers every connection with its incarnation, so a worker can
check that it is the right one. Failures are counted in the worker's record as `unreached`; `decide` acts on them.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from msgspec.structs import replace

from prime_rl.contract.nodes import SUSPECT_AFTER_BEATS, dead_after_s
from prime_rl.multinode.records import GroupRecord, NodeRecord, epoch_master

logger = logging.getLogger("node")


class Records(Protocol):
    """Where the records of this node are written."""

    def write_node(self, record: NodeRecord) -> None:
        """Put this node's record in place of the one before. Raises OSError."""

    def write_group(self, record: GroupRecord) -> None:
        """Put the group's record in place of the one before; for the master only. Raises OSError."""


class Heartbeat:
    """Writes this node's records: at each change that the loop makes, and once a beat whatever the loop does.

    A loop that has stood still for `silent_after_s` is given up: nothing more is written until it comes round again, so
    that another process may take this rank.

    Args:
        clock: seconds; never jumps.
        every_s: one beat.
    """

    def __init__(self, records: Records, *, clock: Callable[[], float], every_s: float, silent_after_s: float) -> None:
        self._records = records
        self._clock = clock
        self._every_s = every_s
        self._silent_after_s = silent_after_s
        self._lock = threading.Lock()
        self._node: NodeRecord | None = None
        self._group: GroupRecord | None = None
        self._seq = 0
        self._looks = 0
        self._looked_at = clock()
        self._given_up_at: int | None = None

    def look(self) -> None:
        """The loop came round."""
        self._looked_at = self._clock()
        self._looks += 1  # last: who sees the new number sees the new time

    def say(self, node: NodeRecord) -> None:
        """This node's record from now on. What only grows (`progress`) is written with the next beat."""
        with self._lock:
            before, self._node = self._node, node
            if before is None or replace(before, progress=node.progress) != node:
                self._write_node(node)

    def say_group(self, group: GroupRecord) -> None:
        """The group's record from now on. For the master only."""
        with self._lock:
            before, self._group = self._group, group
            if group != before:
                self._write_group(group)

    def silence(self) -> None:
        """Stop writing."""
        with self._lock:
            self._node = self._group = None

    def beat(self) -> None:
        """Write the records once more, unless the loop is given up. Raises OSError."""
        with self._lock:
            looks = self._looks
            if self._given_up_at == looks:
                return
            # Judged before this record is written, for a write takes time: the other nodes give the reason from it.
            is_over = self._clock() - self._looked_at > self._silent_after_s
            if self._node is not None:
                self._write_node(self._node)
            if self._group is not None:
                self._write_group(self._group)
            if is_over:
                self._given_up_at = looks

    def _write_node(self, node: NodeRecord) -> None:
        self._seq += 1
        still_s = self._clock() - self._looked_at
        self._records.write_node(replace(node, seq=self._seq, looks=self._looks, still_s=still_s))

    def _write_group(self, group: GroupRecord) -> None:
        self._seq += 1
        self._records.write_group(replace(group, seq=self._seq))

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """A thread beats until the end of the block."""
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(self._every_s):
                try:
                    self.beat()
                except OSError as error:  # a full disk, a shared folder that is gone for a while: a beat is missed
                    logger.warning("a sign of life was not written: %s", error)

        thread = threading.Thread(target=run, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            self.silence()


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
    """True when that very master is at its address."""
    expected = master.incarnation.encode()
    try:
        with socket.create_connection((master.address, master.port), timeout=timeout_s) as line:
            found = b""
            while len(found) < len(expected) and (more := line.recv(len(expected) - len(found))):
                found += more
    except OSError:
        return False
    return found == expected
