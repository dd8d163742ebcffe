"""Ports for what is started later: the kernel hands them to nobody meanwhile."""

from __future__ import annotations

import random
import socket

# Below those that connections and `port = 0` get by themselves, above those of services, clear of those of Ray.
_FIRST, _LAST = 20_000, 32_000


def free_port(host: str = "127.0.0.1") -> int:
    """One that nothing listens at now."""
    dice = random.SystemRandom()
    while True:
        port = dice.randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
