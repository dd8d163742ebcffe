"""A connection to the server. One that sends too much or too slowly before its request begins is closed."""

from __future__ import annotations

import asyncio

import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from prime_rl.inference.errors import error_body

# The request line and all headers together.
MAX_HEAD_BYTES = 32 * 2**10
# From the first byte, or from the connection. The body has a limit of its own (`guard`).
HEAD_TIMEOUT_S = 10.0


class Connection(H11Protocol):
    """uvicorn's, which waits for the rest of a request for ever, and answers what is not HTTP in a form of its own."""

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
            self._late = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)
        elif not is_waiting and self._late is not None:
            self._late.cancel()
            self._late = None

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP in OpenAI's form; what was being answered is broken off."""
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            message = f"{msg} It must be HTTP/1.1, with a head of at most {MAX_HEAD_BYTES} bytes."
            body = msgspec.json.encode(error_body(400, message))
            head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()
