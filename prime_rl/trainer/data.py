"""The DataLoader: brings the next pass to each rank, and with it every change of the runs.

Rank 0 looks for runs and batches; the others wait for its messages. Between two looks rank 0 waits on the file watcher,
but never long: new batches are found by one `stat` for each run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from prime_rl.contract.types import MicroBatch
from prime_rl.trainer.metrics import StatusReporter
from prime_rl.trainer.packer import Packer
from prime_rl.trainer.publish import Publisher
from prime_rl.trainer.runs import MultiRunManager
from prime_rl.trainer.runs.sync import PackMessage, ReadyRun, StateMessage, StopMessage
from prime_rl.utils.watch import Watcher

# How often an idle trainer looks for the next batch of its runs: unnoticed by people, microseconds of work.
POLL_S = 0.05
# Looks that find nothing new take at most a twentieth of one core: the status files of many runs change all the time.
LOOK_SHARE = 20
# But one look at a thousand new runs must not keep the next run waiting.
MAX_REST_S = 0.25
# A config that is bad is reported when it has stayed so for this long: an editor may be about to write the rest.
SETTLE_S = 0.5


class Scout:
    """Rank 0: looks at the disk when there is a hint or when it is time, not more often than it can afford.

    A hint is followed by a look at the folders that it names. The slow rescan looks at everything.
    """

    def __init__(
        self,
        manager: MultiRunManager,
        watcher: Watcher,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._manager = manager
        self._watcher = watcher
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._hinted = False
        self._earliest = 0.0
        self._rescan_at = 0.0

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something to look at, at most `timeout_s`."""
        now = self._clock()
        due = min([self._rescan_at, *self._due()])
        # A hint that may not be followed yet must not keep this loop spinning.
        if self._hinted and timeout_s:
            time.sleep(max(0.0, min(timeout_s, self._earliest - now, due - now)))
        elif self._watcher.wait(max(0.0, min(timeout_s, due - now))):
            self._hinted = True

    def look(self) -> None:
        """Discover runs and inform all ranks, if it is time."""
        now = self._clock()
        everything = now >= self._rescan_at
        hinted = self._hinted and now >= self._earliest
        settled = any(now >= due for due in self._due())
        if not (everything or hinted or settled or self._manager.needs_discovery):
            return
        self._hinted = False
        start_s = self._cpu_clock()
        changed = self._watcher.take_changed()
        everything |= changed is None
        self._manager.discover_runs(None if everything else changed)
        self._watcher.watch(self._manager.findings.folders)
        # Of this thread alone: on a machine with other work to do a look takes long and costs the same.
        rest_s = LOOK_SHARE * (self._cpu_clock() - start_s)
        done = self._clock()
        if everything:
            self._rescan_at = done + max(self._watcher.rescan_s, rest_s)
        if self._manager.has_changes:
            self._manager.synchronize_state()
        elif not everything:
            self._earliest = done + min(rest_s, MAX_REST_S)

    def _due(self) -> list[float]:
        """When to read a config again that was still changing."""
        due = self._manager.findings.due
        return [] if due is None else [due]


class PackSource(Protocol):
    """Where a rank's passes come from."""

    def next(self) -> PackMessage | None:
        """Wait for the next pass of this rank; None when the trainer ends."""


class PackingSource:
    """Rank 0: look, pack, inform the others. It decides for all when the trainer ends.

    A run of which the disk has yet to take too much trains nothing until it has; the others go on.
    """

    def __init__(
        self,
        manager: MultiRunManager,
        packer: Packer,
        scout: Scout,
        status: StatusReporter,
        publisher: Publisher,
        stop: Callable[[], bool],
    ) -> None:
        self._manager = manager
        self._packer = packer
        self._scout = scout
        self._status = status
        self._publisher = publisher
        self._stop = stop

    def next(self) -> PackMessage | None:
        self._scout.wait(0)
        while not self._stop():
            self._scout.look()
            full = self._publisher.full()
            pack = self._packer.pack(full)
            if pack is not None:
                self._status.training()
                messages = [PackMessage(micro_batch, pack.ready) for micro_batch in pack.micro_batches]
                self._manager.channel.send(messages)
                return messages[0]
            self._manager.channel.beat()
            self._status.waiting(next(iter(full.values()), None) or self._packer.waits_for())
            if full:
                self._publisher.wait(POLL_S)
            self._scout.wait(0 if full else POLL_S)
        self._manager.channel.send_all(StopMessage())
        return None


class ReceivingSource:
    """The other ranks: follow rank 0's messages, in order."""

    def __init__(self, manager: MultiRunManager) -> None:
        self._manager = manager

    def next(self) -> PackMessage | None:
        while isinstance(self._manager.channel.peek(), StateMessage):
            self._manager.synchronize_state()
        message = self._manager.channel.receive()
        return message if isinstance(message, PackMessage) else None


class DataLoader:
    """`wait_for_batch` until there is one, then `get_batch`."""

    def __init__(self, manager: MultiRunManager, source: PackSource) -> None:
        self._manager = manager
        self._source = source
        self._message: PackMessage | None = None

    def wait_for_batch(self) -> bool:
        """Wait until this rank has something to do; false when the trainer ends. Marks the runs that get ready."""
        self._message = self._source.next()
        if self._message is None:
            return False
        for run in self._message.ready:
            self._manager.ready_to_update[run.run_idx] = True
        return True

    def get_batch(self) -> tuple[MicroBatch, dict[int, ReadyRun]]:
        """The pass of this rank, and by slot the runs to update after it."""
        assert self._message is not None, "wait_for_batch first"
        message, self._message = self._message, None
        return message.micro_batch, {run.run_idx: run for run in message.ready}
