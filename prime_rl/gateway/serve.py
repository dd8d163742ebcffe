"""Serving the gateway's application on a bound socket: in the daemon, and in processes that have no daemons.

A connection that is slow before its request begins is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from starlette.types import ASGIApp

from prime_rl.contract.calls import Backend
from prime_rl.gateway.app import build_app
from prime_rl.utils.http_server import QuietServer, TimedConnection
from prime_rl.utils.runtime import LOOPBACK, bound_socket, origin

# Answers under way may still take so long after a stop.
DRAIN_S = 2


class _Connection(TimedConnection):
    head_timeout_s = 60.0


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, sock: socket.socket) -> AsyncIterator[None]:
    """Serve `app` at a bound socket for as long as the block runs."""
    # Connections are kept for longer than SDKs keep theirs, so that none of them meets a closed one.
    keep_s = round(_Connection.head_timeout_s)
    server = QuietServer(app, _Connection, drain_s=DRAIN_S, timeout_keep_alive=keep_s, lifespan="off")
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
