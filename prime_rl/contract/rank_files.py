"""A rank's part of an iteration's rollouts: one finished task a frame, appended as it is done.

A frame is length and checksum (two big-endian 32-bit numbers), then msgpack. What a killed writer left of its last
frame is ignored by readers and cut off by the next writer, so every task that was acknowledged counts and no other. One
writer a file.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from prime_rl.contract.files import open_append, open_file

_HEAD = struct.Struct(">II")
# Far above a group of long rollouts; a length beyond it is a damaged head, not a frame.
MAX_FRAME_BYTES = 1 << 30


class RankEntry(msgspec.Struct, frozen=True):
    """One finished task: its name and its encoded result."""

    task: str
    result: bytes


class RankFileWriter:
    """Appends to one rank file; an entry is on disk when `append` returns. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._file = open_append(path)
        whole = sum(_HEAD.size + len(payload) for payload in _payloads(path))
        self._file.truncate(whole)

    def append(self, entry: RankEntry) -> None:
        """Write one frame and wait until it is on disk."""
        payload = msgspec.msgpack.encode(entry)
        self._file.write(_HEAD.pack(len(payload), zlib.crc32(payload)) + payload)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_rank_file(path: Path) -> Iterator[RankEntry]:
    """The whole entries of a rank file, in the order of writing; none without a file."""
    for payload in _payloads(path):
        yield msgspec.msgpack.decode(payload, type=RankEntry)


def _payloads(path: Path) -> Iterator[bytes]:
    try:
        fd = open_file(path)
    except FileNotFoundError:
        return
    with os.fdopen(fd, "rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            size, checksum = _HEAD.unpack(head)
            left = os.fstat(fd).st_size - file.tell()
            payload = file.read(size) if size <= min(left, MAX_FRAME_BYTES) else b""
            if len(payload) != size or zlib.crc32(payload) != checksum:
                return
            yield payload
