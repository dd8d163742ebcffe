"""uvicorn as all servers of the project have it: no signals, no patience for a head or a body that does not come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

# The request line and all headers together.
MAX_HEAD_BYTES = 32 * 2**10
BACKLOG = 2048


class QuietServer(uvicorn.Server):
    """Signals belong to the entry file. Requests under way have `drain_s` after a stop; `more` is for uvicorn."""

    def __init__(self, app: Any, connection: type[TimedConnection], *, drain_s: int, **more: Any) -> None:
        config = uvicorn.Config(
            app,
            http=connection,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=drain_s,
            backlog=BACKLOG,
            ws="none",
            **more,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield


class TimedConnection(H11Protocol):
    """uvicorn's, which waits for the rest of a request's head for ever.

    `head_timeout_s` is for a head, from the connection on, or from the last answer.
    """

    head_timeout_s: ClassVar[float]
    _late: asyncio.TimerHandle | None = None

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


class BodyRefused(Exception):
    """A body that is not taken: the status of HTTP, and the reason in a sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


async def read_body(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    max_bytes: int,
    max_discarded_bytes: int,
    *,
    timeout_s: float,
    hold: Callable[[int], bool] = lambda num_bytes: True,
) -> bytes:
    """The whole body. Raises BodyRefused. `hold` is asked whether so many bytes more may be kept.

    A body that is refused for its size is read to its end without being kept, so that the client gets the error;
    beyond `max_discarded_bytes` the connection is closed in the middle of it.
    """
    chunks: list[bytes] = []
    size, refusal, deadline = 0, None, asyncio.get_running_loop().time() + timeout_s
    more = True
    while more and size <= max_discarded_bytes:
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise BodyRefused(408, f"The body did not come within {timeout_s:g} s.") from None
        if message["type"] == "http.disconnect":
            raise BodyRefused(400, "The client has closed the connection.")
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > max_bytes:
            refusal = BodyRefused(413, f"The body is larger than {max_bytes} bytes.")
        elif refusal is None and not hold(len(chunk)):
            refusal = BodyRefused(429, "Too many large requests at once.")
        if refusal is None:
            chunks.append(chunk)
        else:
            chunks.clear()
    if refusal is not None:
        raise refusal
    return b"".join(chunks)
