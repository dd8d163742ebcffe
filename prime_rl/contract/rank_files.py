"""A rank's part of an iteration's rollouts: one finished task a frame, appended as it is done.

A frame is length and checksum (two big-endian 32-bit numbers), then msgpack. What a killed writer left of its last
frame is ignored by readers and cut off by the next writer, so every task that was acknowledged counts and no other. One
writer a file. What a node asks of the rollout workers on its machine, and what comes of an evaluation, is JSON beside
these files, which `prime_rl.orchestrator.share` reads. A task is a number as text: the index of a group in the run's
example order, or of an example of the evaluation.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

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


Split = Literal["train", "eval"]


class MakeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Make `tasks` with `policy_version`, served at `base_url`, into `rank_file`. `run` is the run's folder.

    `sampler_state` is that of the last batch before: what is known of the examples, the same on every node.
    """

    run: str
    base_url: str
    policy_version: int
    seq_len: int
    split: Split
    tasks: list[str]
    rank_file: str
    sampler_state: dict[str, Any] = {}


class JoinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Join the tasks, each from the rank file named for it: into batch files, or into the mean of an evaluation.

    `steps` are the updates that the groups feed, in equal parts and in order; of an evaluation the one policy version.
    `sampler_state` is the one that the groups were drawn with.
    """

    run: str
    split: Split
    sources: dict[str, str]
    steps: list[int]
    result: str
    sampler_state: dict[str, Any] = {}


class JoinResult(msgspec.Struct, frozen=True, kw_only=True):
    """The joined rollouts: their number, and the mean reward of each step, or of each environment.

    `steps` are those of the request, `sampler_state` is that of the last batch.
    """

    rewards: dict[str, float]
    num_rollouts: int
    steps: list[int]
    sampler_state: dict[str, Any] = {}
