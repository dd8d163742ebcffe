"""A chat whose answer is sent as it is generated: server-sent events in OpenAI's format.

The engine's thread appends tokens to the rows of a job; this reads them from there, so a client that reads slowly holds
up nothing. Text is sent when later tokens cannot change it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from prime_rl.inference.embedded.batch import Job, Row
from prime_rl.inference.embedded.protocol import ChatRequest
from prime_rl.inference.embedded.text import Text
from prime_rl.inference.errors import ApiError

# A reader does not see a difference below this.
POLL_S = 0.03
# What a decoder gives for the first bytes of a character whose rest has not come.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_END = b"data: [DONE]\n\n"


async def chat_events(
    text: Text, model: str, asked: ChatRequest, job: Job, cancel: Callable[[Job], None]
) -> AsyncIterator[bytes]:
    """The events of `job`, which is cancelled when the client goes away."""
    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
    }

    def event(index: int, delta: dict[str, str], finish_reason: str | None = None) -> bytes:
        return _event({**head, "choices": [{"index": index, "delta": delta, "finish_reason": finish_reason}]})

    sent = [0] * len(job.rows)
    try:
        for index in range(len(job.rows)):
            yield event(index, {"role": "assistant", "content": ""})
        while True:
            if is_done := job.ended.is_set():
                await job.result()  # raises what ended the engine
            for index, row in enumerate(job.rows):
                shown = _shown(text, row, asked, is_whole=is_done)
                if len(shown) > sent[index]:
                    yield event(index, {"content": shown[sent[index] :]})
                    sent[index] = len(shown)
                if is_done:
                    yield event(index, {}, row.finish_reason)
            if is_done:
                break
            await asyncio.sleep(POLL_S)
        yield _END
    except ApiError as error:
        yield _event(error.body())
    finally:
        cancel(job)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _shown(text: Text, row: Row, asked: ChatRequest, *, is_whole: bool) -> str:
    """What may be sent of a row now."""
    if is_whole:
        return asked.text_of(row, text)
    decoded = text.decode(list(row.token_ids), skip_special_tokens=asked.skip_special_tokens)
    # A stop string is not part of the answer, neither when the engine is about to end the row nor the beginning of one.
    found = [at for stop in asked.stops if (at := decoded.find(stop)) >= 0]
    end = min(found, default=len(decoded) - max(map(len, asked.stops), default=1) + 1)
    return decoded[: max(end, 0)].rstrip(_UNFINISHED)
