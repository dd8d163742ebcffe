"""Serving the gateway's application on a bound socket: in the daemon, and in processes that have no daemons.

A connection that is slow before its request begins is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import uvicorn
from starlette.types import ASGIApp

from prime_rl.contract.calls import Backend
from prime_rl.gateway.app import build_app
from prime_rl.utils.http_server import MAX_HEAD_BYTES, QuietServer, TimedConnection
from prime_rl.utils.runtime import LOOPBACK, bound_socket, origin

# Answers under way may still take so long after a stop.
DRAIN_S = 2
BACKLOG = 2048
# For the head of a request.
HEAD_TIMEOUT_S = 60.0


class _Connection(TimedConnection):
    @property
    def head_timeout_s(self) -> float:
        return HEAD_TIMEOUT_S


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
    server = QuietServer(config)
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
