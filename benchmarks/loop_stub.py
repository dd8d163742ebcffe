"""Inference that answers at once, for the benchmarks of the orchestrator: `python -m benchmarks.loop_stub MODEL`.

Every completion has 32 tokens whose answer was made once and for all, so that what is measured is the orchestrator. It
prints its base URL. Plain asyncio: a web framework would take longer for an answer than the orchestrator does.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys

NUM_TOKENS = 32
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_NUM_CHOICES = re.compile(rb'"n": *(\d+)')


class Stub(asyncio.Protocol):
    """One connection. Requests of one connection come one after the other."""

    def __init__(self, models: bytes) -> None:
        self._models = models
        self._answers: dict[int, bytes] = {}
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport for the answers."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Collect bytes until a whole request is there, then answer it."""
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not found or len(body) < (int(length[1]) if length else 0):
            return
        self._data = b""
        path = head.split(b" ", 2)[1]
        if path.endswith(b"/completions"):
            found_n = _NUM_CHOICES.search(body)
            self._transport.write(self._answer(int(found_n[1]) if found_n else 1))
        else:
            self._transport.write(self._models if path.endswith(b"/models") else _response(b"{}"))

    def _answer(self, num_choices: int) -> bytes:
        if num_choices not in self._answers:
            choices = [_choice(number) for number in range(num_choices)]
            self._answers[num_choices] = _response(json.dumps({"choices": choices}).encode())
        return self._answers[num_choices]


def _choice(number: int) -> dict[str, object]:
    token_ids = [40 + (7 * number + position) % 60 for position in range(NUM_TOKENS)]
    logprobs = [-1.2345678901234 - 0.01 * position for position in range(NUM_TOKENS)]
    return {"token_ids": token_ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": "length", "text": ""}


def _response(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def main(model: str) -> None:
    models = _response(json.dumps({"data": [{"id": model}]}).encode())
    server = await asyncio.get_running_loop().create_server(lambda: Stub(models), "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
