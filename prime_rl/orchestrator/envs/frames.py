"""Messages between the orchestrator and the process of an environment: msgpack, each message after its length.

To the process: a `Load` first, then `Start`, `Answer` and `Cancel`. From it: `Ready` or `Refused` first, then `Ask`,
`Done`, `Lost` and `Ended`, and all the time `Beat`. `key` is a rollout. No pickle: what a message can be stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from prime_rl.orchestrator.envs.base import Message

# Far above any conversation; a message that claims to be longer is a stream out of step.
MAX_FRAME_BYTES = 256 * 2**20
HEADER_BYTES = 4


class Load(msgspec.Struct, tag=True):
    """The environment to make (`provider`: its id up to the colon), and how often to send a `Beat`."""

    provider: str
    name: str
    args: dict[str, Any]
    seed: int
    beat_s: float


class Start(msgspec.Struct, tag=True):
    """Start a rollout of one example. It ends with `Done` or `Lost`."""

    key: int
    split: Literal["train", "eval"]
    example_id: str


class Answer(msgspec.Struct, tag=True):
    """The policy's turn, for the last `Ask` of the rollout, and its number of tokens."""

    key: int
    text: str
    num_tokens: int


class Cancel(msgspec.Struct, tag=True):
    """End a rollout whose outcome is not needed. `Ended` follows."""

    key: int


class Ready(msgspec.Struct, tag=True):
    """The environment is there, with the ids of its examples, and the level of each of `train`."""

    train: list[str]
    train_levels: list[int]
    eval: list[str]


class Refused(msgspec.Struct, tag=True):
    """The environment was not found, or its arguments are invalid."""

    reason: str


class Ask(msgspec.Struct, tag=True):
    """The environment requests the policy's next turn."""

    key: int
    messages: list[Message]


class Done(msgspec.Struct, tag=True):
    """The rollout has its score."""

    key: int
    reward: float
    metrics: dict[str, float]
    rewards: Mapping[str, float]
    advantages: Sequence[float | Sequence[float]]


class Lost(msgspec.Struct, tag=True):
    """The environment's code failed. `kind` is one of `checked.FAULTS`."""

    key: int
    reason: str
    kind: str


class Ended(msgspec.Struct, tag=True):
    """The cancelled rollout has ended, or had ended before."""

    key: int


class Beat(msgspec.Struct, tag=True):
    """The event loop of the process still turns."""


Request = Load | Start | Answer | Cancel
Report = Ready | Refused | Ask | Done | Lost | Ended | Beat

_encoder = msgspec.msgpack.Encoder()
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def frame(message: Request | Report) -> bytes:
    """The bytes of a message on the stream: its length in HEADER_BYTES, then its msgpack. Raises ValueError."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes: at most {MAX_FRAME_BYTES} are allowed")
    return len(payload).to_bytes(HEADER_BYTES) + payload


def payload_len(header: bytes) -> int:
    """The number of bytes after `header`. Raises ValueError for more than a message can have."""
    length = int.from_bytes(header)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes")
    return length
