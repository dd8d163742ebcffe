"""A clock for decisions within one process, durations as people write them, and tokens per second.

What is written for others, and read by people, is `time.time()`.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable

_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")


def parse_duration_s(text: str) -> float:
    """Seconds of "7d", "12h", "30m", "45s" or plain seconds. Raises ValueError."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"invalid duration {text!r}: expected a number and s, m, h, d or w, such as 7d")
    return float(match[1]) * _UNIT_S[match[2] or "s"]


class SteadyClock:
    """Unix seconds that never jump: those at which it was made, and what has passed since.

    When the machine's clock is set, or the machine slept, this one goes on as if nothing had happened. So it is apart
    from what other processes write: compare only changes of their times.
    """

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        """Unix seconds by this clock."""
        return self._offset_s + time.monotonic()


class TokenRate:
    """Tokens per second of wall time over the last `window_s`, or longer where `per_s` was not called for longer."""

    def __init__(self, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._seen = deque([(clock(), 0)])

    def per_s(self, total: int) -> float:
        """Note `total`, the tokens since the start, and return the rate; 0.0 while no time has passed."""
        now_s = self._clock()
        while len(self._seen) > 1 and now_s - self._seen[1][0] >= self._window_s:
            self._seen.popleft()
        since_s, before = self._seen[0]
        self._seen.append((now_s, total))
        return (total - before) / (now_s - since_s) if now_s > since_s else 0.0
