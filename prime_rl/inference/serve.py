"""Serving an ASGI application on a socket that is already bound, until a stop is asked for or the engine fails.

Used by both engines. Signals belong to the entry file: uvicorn gets none. A connection that sends too much or too
slowly before its request begins is closed. What an engine counts goes into its status file.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest, nsmallest

import msgspec
import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp

from prime_rl.configs.inference import InferenceConfig
from prime_rl.contract.status import StatusWriter
from prime_rl.inference.guard import ApiError, run_of
from prime_rl.utils.http_server import MAX_HEAD_BYTES, QuietServer, TimedConnection
from prime_rl.utils.runtime import StartError, TokenRate

# How long requests in flight may still take after a stop was asked for; below the supervisor's grace.
DRAIN_S = 5
# And how long their answers may take after they were aborted, before the connections are cut.
CUT_S = 2
POLL_S = 0.1
REPORT_EVERY_S = 0.5
# File descriptors that are left to everything but connections, at most half of what the process may have.
OWN_DESCRIPTORS = 256


@dataclass(frozen=True)
class ServerContext:
    """`sock` is bound and does not listen yet; `api_key` is None when no key is required."""

    config: InferenceConfig
    sock: socket.socket
    api_key: str | None
    stop: Callable[[], bool]
    status: StatusWriter


async def serve(
    app: ASGIApp,
    context: ServerContext,
    *,
    alive: Callable[[], bool],
    stats: Callable[[], Snapshot],
    abort: Callable[[], None] = lambda: None,
    tick: Callable[[], str | None] = lambda: None,
) -> None:
    """Serve until a stop is asked for; let requests in flight finish for DRAIN_S, then `abort()` them.

    `tick` is called every REPORT_EVERY_S and returns what requests that were not begun wait for, in words. Raises
    StartError when the engine is not `alive` any more.
    """
    server, stop, status = QuietServer(app, Connection, drain_s=DRAIN_S + CUT_S), context.stop, context.status
    task = asyncio.create_task(server.serve(sockets=[context.sock]))
    beat = asyncio.create_task(_report(server, status, EngineReporter(status, stats), tick))
    try:
        while not task.done() and not stop() and alive():
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
        raise StartError("the engine has failed; its error is in the log")


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


# Long enough to be steady over one batch of requests, short enough to show an idle server as idle.
WINDOW_S = 5.0


@dataclass(frozen=True)
class Snapshot:
    """The figures of an engine. `num_tokens` are those generated since the start; `kv_use` is from 0 to 1.

    Of `num_prefix_queries` tokens that requests began with, `num_prefix_hits` were not computed again.
    """

    adapters: Sequence[str] = ()
    num_running: int = 0
    num_waiting: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    kv_use: float | None = None


class EngineReporter:
    """Writes a snapshot into the status file at every `tick`, with the rate over the last WINDOW_S."""

    def __init__(
        self, status: StatusWriter, read: Callable[[], Snapshot], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._status = status
        self._read = read
        self._rate = TokenRate(WINDOW_S, clock)

    def tick(self, waiting_on: str | None = None) -> None:
        """Read a snapshot and update the status file with it."""
        snapshot = self._read()
        self._status.update(
            waiting_on=waiting_on,
            adapters=list(snapshot.adapters),
            num_running=snapshot.num_running,
            num_waiting=snapshot.num_waiting,
            progress=snapshot.num_tokens,
            kv_use=None if snapshot.kv_use is None else round(snapshot.kv_use, 4),
            tokens_per_s=round(self._rate.per_s(snapshot.num_tokens), 1),
        )


# A client that has read nothing for so long would hold its answer for ever.
READ_TIMEOUT_S = 60.0


def _most_connections() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(limit - OWN_DESCRIPTORS, limit // 2)


class Connection(TimedConnection):
    """uvicorn's, which waits for the rest of a request for ever, and answers what is not HTTP in a form of its own."""

    head_timeout_s = 10.0  # the body has a limit of its own (`guard`)
    _unread: asyncio.TimerHandle | None = None
    _made_at = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the first request its time. Where there are too many connections, some of whom has the most give way.

        Of those without a request the oldest, of a run the newest.
        """
        super().connection_made(transport)
        self._made_at = self.loop.time()
        if len(self.connections) > (most := _most_connections()):
            open_now = (each for each in self.connections if not each.transport.is_closing())
            here = [(each, each._run) for each in open_now if isinstance(each, Connection)]
            ((largest, _),) = Counter(run for _, run in here).most_common(1)
            theirs = [each for each, run in here if run == largest]
            choose = nsmallest if largest is None else nlargest
            for each in choose(1 + most // 100, theirs, key=lambda each: each._made_at):
                each.transport.close()

    @property
    def _run(self) -> str | None:
        """The run whose request is worked on; None while there is no whole request."""
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            return None
        return run_of(Request(dict(self.cycle.scope)))

    def pause_writing(self) -> None:
        """Note that the client is behind: it has some time to read on."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Go on: the client has read what was written."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _watch_reader(self, before: int | None = None) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread == before:
            self.transport.abort()
        elif not self.transport.is_closing():
            self._unread = self.loop.call_later(READ_TIMEOUT_S, self._watch_reader, unread)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP in OpenAI's form; what was being answered is broken off."""
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            message = f"{msg} It must be HTTP/1.1, with a head of at most {MAX_HEAD_BYTES} bytes."
            body = msgspec.json.encode(ApiError(400, message).body())
            head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()
