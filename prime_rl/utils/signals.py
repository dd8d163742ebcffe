"""Signals set flags, nothing else: the loop of an entry file looks at the flag and cleans up itself.

A handler runs in the middle of whatever the main thread does, also of a wait on the flag itself. So the flag is woken
through a queue that may be entered again, not through a lock that its own waiter may hold.
"""

from __future__ import annotations

import contextlib
import queue
import signal
from types import FrameType

# A shell's exit code for a process that a signal ended; ours exit with the same code.
EXIT_TERMINAL_GONE = 128 + signal.SIGHUP
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


class StopFlag:
    """Set by SIGTERM or SIGINT. Calling it returns whether the process was asked to stop."""

    def __init__(self) -> None:
        self._is_set = False
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.signal_name: str | None = None

    def __call__(self) -> bool:
        """True when a stop was asked for."""
        return self._is_set

    def set(self) -> None:
        """Ask for a stop, and wake all who wait; safe in a signal handler."""
        self._is_set = True
        self._wakes.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Sleep up to `timeout_s`; true as soon as a stop was asked for."""
        if not self._is_set:
            with contextlib.suppress(queue.Empty):
                self._wakes.get(timeout=timeout_s)
                self._wakes.put(None)  # wakes the other waiters
        return self._is_set

    def install(self) -> StopFlag:
        """Catch SIGTERM and SIGINT. Call it first thing in an entry file, before slow imports."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        return self

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(signum).name
        self.set()
