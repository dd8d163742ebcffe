"""Serving the gateway's application on a bound socket: in the daemon, and in processes that have no daemons.

Signals belong to the entry file: uvicorn gets none. A connection that is slow before its request begins is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from prime_rl.contract.calls import Backend
from prime_rl.gateway.app import build_app
from prime_rl.utils.runtime import LOOPBACK, bound_socket, origin

# Answers under way may still take so long after a stop.
DRAIN_S = 2
BACKLOG = 2048
# The request line and all headers together, and the time for them from the connection on, or from the last answer.
MAX_HEAD_BYTES = 32 * 2**10
HEAD_TIMEOUT_S = 60.0


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """uvicorn's, which waits for the rest of a request's head for ever."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit()

    def _limit(self) -> None:
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self._late is None:
            self._late = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)
        elif not is_waiting and self._late is not None:
            self._late.cancel()
            self._late = None


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, sock: socket.socket) -> AsyncIterator[None]:
    """Serve `app` at a bound socket for as long as the block runs."""
    config = uvicorn.Config(
        app,
        http=_Connection,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=DRAIN_S,
        timeout_keep_alive=round(HEAD_TIMEOUT_S),  # longer than SDKs keep theirs, so none meets a closed one
        backlog=BACKLOG,
        lifespan="off",
        ws="none",
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def serving_here(backend: Backend, secret: bytes) -> AsyncIterator[str]:
    """Serve the sessions of `backend` at a free port of the loopback; the value is the URL before /s/ID."""
    with bound_socket(LOOPBACK, 0) as sock:
        async with serving(build_app(backend, secret), sock):
            yield origin(*sock.getsockname())
