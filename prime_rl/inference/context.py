"""What the entry file hands to the engine that it starts."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from prime_rl.configs.inference import InferenceConfig
from prime_rl.contract.status import StatusWriter
from prime_rl.utils.signals import StopFlag


@dataclass(frozen=True)
class ServerContext:
    """`sock` is bound and does not listen yet; `api_key` is None when no key is required."""

    config: InferenceConfig
    sock: socket.socket
    api_key: str | None
    stop: StopFlag
    status: StatusWriter
