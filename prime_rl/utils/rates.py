"""Tokens per second, from a count that grows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


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
