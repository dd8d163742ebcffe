"""Signals set flags, nothing else: the loop of an entry file looks at the flag and cleans up itself."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class StopFlag:
    """Set by SIGTERM or SIGINT. Calling it tells whether the process was asked to stop."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.signal_name: str | None = None

    def __call__(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """Sleep up to `timeout_s`; true as soon as a stop was asked for."""
        return self._event.wait(timeout_s)

    def install(self) -> StopFlag:
        """Catch SIGTERM and SIGINT. Call it first thing in an entry file, before slow imports."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        return self

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(signum).name
        self._event.set()
