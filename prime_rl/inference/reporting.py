"""From what an engine counts to its status file. The same for both engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prime_rl.contract.status import StatusWriter
from prime_rl.utils.rates import TokenRate

# Long enough to be steady over one batch of requests, short enough to show an idle server as idle.
WINDOW_S = 5.0


@dataclass(frozen=True)
class Snapshot:
    """The figures of an engine. `num_tokens` are those generated since the start; `kv_use` is from 0 to 1."""

    adapters: Sequence[str] = ()
    num_running: int = 0
    num_waiting: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    kv_use: float | None = None


class EngineReporter:
    """Writes a snapshot into the status file at every `tick`, with the rate over the last WINDOW_S."""

    def __init__(
        self, status: StatusWriter, read: Callable[[], Snapshot], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._status = status
        self._read = read
        self._rate = TokenRate(WINDOW_S, clock)

    def tick(self, waiting_on: str | None = None) -> None:
        """Read a snapshot and update the status file with it."""
        snapshot = self._read()
        self._status.update(
            waiting_on=waiting_on,
            adapters=list(snapshot.adapters),
            num_running=snapshot.num_running,
            num_waiting=snapshot.num_waiting,
            progress=snapshot.num_tokens,
            kv_use=None if snapshot.kv_use is None else round(snapshot.kv_use, 4),
            tokens_per_s=round(self._rate.per_s(snapshot.num_tokens), 1),
        )
