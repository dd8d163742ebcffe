"""The number of a run's rollouts in work at one time: few at first, more while that pays, fewer when inference is full.

`ConcurrencyControl` decides, from answers and overloads alone: no I/O, no clock. `Places` makes requests wait for their
turn. What counts as an overload (429, 503, no answer in time) is decided by the client, and how many groups exist
at all by the scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

# Low enough for a server that many runs share, high enough to be at 64 after two rounds of answers.
START_LIMIT = 16
# A rise pays when the tokens per second grow by at least this share of what the limit grew by.
MIN_GAIN = 0.25
# So many rounds later a rise that did not pay is tried again: other runs may have gone.
ROUNDS_ON_PLATEAU = 10


class ConcurrencyControl:
    """Additive increase, multiplicative decrease; doubling until the first time that a rise does not pay.

    A round is as many answered rollouts as `limit`. The limit rises after a round in which it was reached; a rise that
    did not pay is taken back. It is halved at an overload, once for all requests that were under way together.
    """

    def __init__(self, maximum: int, start: int = START_LIMIT) -> None:
        self.limit = min(start, maximum)
        self.epoch = 0  # of requests that begin now
        self._maximum = maximum
        self._is_doubling = True
        self._before: tuple[int, float] | None = None  # the limit before the last rise, and its tokens per second
        self._rounds_to_wait = 0
        self._begin_round()

    def note_answer(self, num_rollouts: int, num_tokens: int, latency_s: float, *, is_full: bool) -> None:
        """A request was answered; `is_full` when others would have liked to go beside it."""
        self._num_answered += num_rollouts
        self._num_tokens += num_tokens
        self._rollout_s += num_rollouts * latency_s
        self._was_full |= is_full
        if self._num_answered >= self.limit:
            self._end_round()

    def note_overload(self, epoch: int) -> None:
        """Inference did not take a request that began in `epoch`."""
        if epoch < self.epoch:
            return  # it went out together with one for which the limit has been lowered
        self.limit = max(1, self.limit // 2)
        self.epoch += 1
        self._is_doubling = False
        self._before = None
        self._begin_round()

    def _end_round(self) -> None:
        # Little's law: what is under way, over how long each takes.
        tokens_per_s = self.limit * self._num_tokens / self._rollout_s if self._rollout_s else float("inf")
        if self._was_full and self.limit < self._maximum:
            if self._rounds_to_wait:
                self._rounds_to_wait -= 1
            elif self._last_rise_paid(tokens_per_s):
                self._rise(tokens_per_s)
            elif self._before is not None:
                self.limit, _ = self._before
                self._is_doubling = False
                self._before = None
                self._rounds_to_wait = ROUNDS_ON_PLATEAU
        self._begin_round()

    def _last_rise_paid(self, tokens_per_s: float) -> bool:
        if self._before is None:
            return True
        limit, before_per_s = self._before
        return tokens_per_s >= before_per_s * (1 + MIN_GAIN * (self.limit / limit - 1))

    def _rise(self, tokens_per_s: float) -> None:
        self._before = (self.limit, tokens_per_s)
        step = self.limit if self._is_doubling else max(1, self.limit // 8)
        self.limit = min(self._maximum, self.limit + step)

    def _begin_round(self) -> None:
        self._num_answered = 0
        self._num_tokens = 0
        self._rollout_s = 0.0
        self._was_full = False


class Places:
    """First come, first served. A request that is larger than the limit goes alone."""

    def __init__(self, maximum: int) -> None:
        self.control = ConcurrencyControl(maximum)
        self.num_used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def hold(self, num_rollouts: int) -> AsyncIterator[None]:
        """Wait until `num_rollouts` may be sampled, and hold their places for as long as the block runs."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_rollouts, turn))
        self._let_in()
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():
                self.num_used -= num_rollouts
            self._let_in()

    def note_answer(self, num_rollouts: int, num_tokens: int, latency_s: float) -> None:
        """Count a request that was answered after `latency_s`, with all tokens of its rollouts."""
        is_full = any(not turn.done() for _, turn in self._waiting)
        self.control.note_answer(num_rollouts, num_tokens, latency_s, is_full=is_full)

    def _let_in(self) -> None:
        while self._waiting:
            num_rollouts, turn = self._waiting[0]
            if not turn.done():
                if self.num_used and self.num_used + num_rollouts > self.control.limit:
                    return
                self.num_used += num_rollouts
                turn.set_result(None)
            self._waiting.popleft()
