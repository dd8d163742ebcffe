"""uvicorn as all servers of the project have it: no signals, and no patience for a head that does not come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

# The request line and all headers together.
MAX_HEAD_BYTES = 32 * 2**10


class QuietServer(uvicorn.Server):
    """Signals belong to the entry file."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield


class TimedConnection(H11Protocol):
    """uvicorn's, which waits for the rest of a request's head for ever."""

    _late: asyncio.TimerHandle | None = None

    @property
    def head_timeout_s(self) -> float:
        """For a head, from the connection on, or from the last answer."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the first request its time."""
        super().connection_made(transport)
        self._limit()

    def data_received(self, data: bytes) -> None:
        """Take what came. Time counts while no request is answered: for its head, and the rest of a refused body."""
        super().data_received(data)
        self._limit()

    def _limit(self) -> None:
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self._late is None:
            self._late = self.loop.call_later(self.head_timeout_s, self.transport.close)
        elif not is_waiting and self._late is not None:
            self._late.cancel()
            self._late = None
