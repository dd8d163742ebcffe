"""A shared folder as the simulation of a group has it: what one node writes another sees after a delay."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SharedFolder:
    """Files with a history; each reader sees a write of another after its own delay, never going back."""

    rng: random.Random
    max_lag_s: Callable[[float], float]
    history: dict[str, list[tuple[float, int, Any]]] = field(default_factory=dict)
    seen: dict[tuple[int, str], int] = field(default_factory=dict)
    lags: dict[tuple[int, str, int], float] = field(default_factory=dict)

    def write(self, writer: int, path: str, value: Any, now: float) -> None:
        self.history.setdefault(path, []).append((now, writer, value))

    def read(self, reader: int, path: str, now: float) -> Any:
        versions = self.history.get(path, [])
        newest = self.seen.get((reader, path), -1)
        for number in range(newest + 1, len(versions)):
            written_at, writer, _ = versions[number]
            key = (reader, path, number)
            if key not in self.lags:
                self.lags[key] = self.rng.uniform(0.0, self.max_lag_s(written_at))
            if writer == reader or written_at + self.lags[key] <= now:
                newest = number
        self.seen[reader, path] = newest
        return versions[newest][2] if newest >= 0 else None

    def paths(self, prefix: str) -> list[str]:
        return sorted(path for path in self.history if path.startswith(prefix))
