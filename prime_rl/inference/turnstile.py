"""Requests that generate go through together; a change of the weights goes through alone. For one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator


class StillInUse(RuntimeError):
    """Requests did not end in time; `num_users` of them are left."""

    def __init__(self, num_users: int) -> None:
        super().__init__(f"{num_users} still in use")
        self.num_users = num_users


class Turnstile:
    """Admits no new user while a caller is `alone` or waits for it, so a stream of requests cannot hold up a change."""

    def __init__(self) -> None:
        self._num_users = 0
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._one_at_a_time = asyncio.Lock()

    async def enter(self) -> contextlib.AbstractContextManager[None]:
        """Wait for admission; enter the returned context at once, without an `await` in between."""
        while not self._open.is_set():
            await self._open.wait()
        return self._inside()

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self._num_users += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._empty.set()

    @contextlib.asynccontextmanager
    async def alone(self, timeout_s: float) -> AsyncIterator[None]:
        """Admit no requests, wait until all have left. Raises StillInUse after `timeout_s`."""
        async with self._one_at_a_time:
            self._open.clear()
            try:
                try:
                    await asyncio.wait_for(self._empty.wait(), timeout_s)
                except TimeoutError:
                    raise StillInUse(self._num_users) from None
                yield
            finally:
                self._open.set()
