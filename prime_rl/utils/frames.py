"""Messages on a stream of bytes: msgpack, each behind its length.

Used between an orchestrator and the processes of its environments, and between it and the gateway.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

HEADER_BYTES = 4
# Far above any conversation; a message that claims to be longer is a stream out of step.
MAX_FRAME_BYTES = 256 * 2**20

_encoder = msgspec.msgpack.Encoder()


def frame(message: Any) -> bytes:
    """The bytes of a message on the stream: its length in HEADER_BYTES, then its msgpack. Raises ValueError."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes: at most {MAX_FRAME_BYTES} are allowed")
    return len(payload).to_bytes(HEADER_BYTES) + payload


def payload_len(header: bytes, limit: int | None = None) -> int:
    """The number of bytes after `header`. Raises ValueError for more than `limit`, by default MAX_FRAME_BYTES."""
    length, limit = int.from_bytes(header), limit or MAX_FRAME_BYTES
    if length > limit:
        raise ValueError(f"a message of {length} bytes: at most {limit} are allowed")
    return length


async def read_payload(stream: asyncio.StreamReader, limit: int | None = None) -> bytes:
    """The next message, still encoded. Raises IncompleteReadError at the end, ValueError beyond `limit` bytes."""
    header = await stream.readexactly(HEADER_BYTES)
    return await stream.readexactly(payload_len(header, limit))
