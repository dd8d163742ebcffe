"""The proof that an engine generates: one token, generated at most once a second, however often it is requested."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from prime_rl.inference.errors import ApiError

TIMEOUT_S = 10.0
# An answer is good for so long, so that polling costs no tokens.
FRESH_S = 1.0
# A full engine gives our one token no place for a long time, and proves itself by the tokens of others.
LOOK_EVERY_S = 0.05


class HealthProbe:
    """See the module.

    Args:
        generate_one: generates one token; raises when the engine cannot.
        num_tokens: how many tokens the engine has generated since its start.
    """

    def __init__(
        self,
        generate_one: Callable[[], Awaitable[None]],
        num_tokens: Callable[[], int],
        *,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._generate_one = generate_one
        self._num_tokens = num_tokens
        self._timeout_s = timeout_s
        self._clock = clock
        self._asked: asyncio.Task[str | None] | None = None
        self._answered_at = 0.0

    async def check(self) -> None:
        """Raises ApiError (503) when the engine does not generate."""
        if self._asked is None or (self._asked.done() and self._clock() - self._answered_at >= FRESH_S):
            self._asked = asyncio.create_task(self._ask())
        # A client that goes away must not take the answer from those that wait for the same one.
        problem = await asyncio.shield(self._asked)
        if problem is not None:
            raise ApiError(503, problem)

    async def _ask(self) -> str | None:
        try:
            return await self._proof()
        finally:
            self._answered_at = self._clock()

    async def _proof(self) -> str | None:
        before = self._num_tokens()
        ours = asyncio.ensure_future(self._generate_one())
        try:
            async with asyncio.timeout(self._timeout_s):
                while not ours.done() and self._num_tokens() == before:
                    await asyncio.wait({ours}, timeout=LOOK_EVERY_S)
        except TimeoutError:
            return f"The engine has generated no token in {self._timeout_s:g} s."
        finally:
            if not ours.done():
                ours.cancel()
        # Whatever the engine raises: health is the question whether it raises.
        error = ours.exception() if ours.done() and not ours.cancelled() else None
        return None if error is None else f"The engine does not generate: {type(error).__name__}."
