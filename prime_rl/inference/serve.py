"""Serving an ASGI application on a socket that is already bound, until a stop is asked for or the engine fails.

Used by both engines. Signals belong to the entry file: uvicorn gets none.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from prime_rl.contract.status import StatusWriter
from prime_rl.inference.connection import MAX_HEAD_BYTES, Connection
from prime_rl.inference.reporting import EngineReporter

# How long requests in flight may still take after a stop was asked for; below the supervisor's grace.
DRAIN_S = 5
# And how long their answers may take after they were aborted, before the connections are cut.
CUT_S = 2
POLL_S = 0.1
REPORT_EVERY_S = 0.5
BACKLOG = 2048


class EngineFailed(RuntimeError):
    """The engine ended unasked while the server was up."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    app: ASGIApp,
    sock: socket.socket,
    *,
    stop: Callable[[], bool],
    engine_alive: Callable[[], bool],
    status: StatusWriter,
    reporter: EngineReporter,
    abort: Callable[[], None] = lambda: None,
    tick: Callable[[], str | None] = lambda: None,
) -> None:
    """Serve until `stop()`; let requests in flight finish for DRAIN_S, then `abort()` them. Raises EngineFailed.

    `tick` is called every REPORT_EVERY_S and returns what requests that were not begun wait for, in words.
    """
    config = uvicorn.Config(
        app,
        http=Connection,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=DRAIN_S + CUT_S,
        backlog=BACKLOG,
        ws="none",
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    beat = asyncio.create_task(_report(server, status, reporter, tick))
    try:
        while not task.done() and not stop() and engine_alive():
            status.turn()
            await asyncio.sleep(POLL_S)
        failed = not task.done() and not stop()
        beat.cancel()
        # Clients see it, and go to another server.
        await asyncio.to_thread(status.update, state="stopping", waiting_on="the requests under way")
        server.should_exit = True
        _, late = await asyncio.wait({task}, timeout=DRAIN_S)
        if late:
            abort()
        await task
    finally:
        beat.cancel()
    if failed:
        raise EngineFailed("the engine has failed; its error is in the log")


async def _report(
    server: uvicorn.Server, status: StatusWriter, reporter: EngineReporter, tick: Callable[[], str | None]
) -> None:
    while not server.started:
        await asyncio.sleep(POLL_S)
    status.update(state="serving", waiting_on=None)
    while True:
        # A write waits for the disk: not in the event loop.
        await asyncio.to_thread(reporter.tick, tick())
        await asyncio.sleep(REPORT_EVERY_S)
