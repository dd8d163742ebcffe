"""A clock for decisions within one process. What is written for others, and read by people, is `time.time()`."""

from __future__ import annotations

import time


class SteadyClock:
    """Unix seconds that never jump: those at which it was made, and what has passed since.

    When the machine's clock is set, or the machine slept, this one goes on as if nothing had happened. So it is apart
    from what other processes write: compare only changes of their times.
    """

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset_s + time.monotonic()
