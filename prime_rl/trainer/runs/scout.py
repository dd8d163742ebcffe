"""When rank 0 looks at the disk: at a hint, when it is time, and not more often than it can afford."""

from __future__ import annotations

import time
from collections.abc import Callable

from prime_rl.trainer.runs.manager import MultiRunManager
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
