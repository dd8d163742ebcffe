"""Which ranks still live: each has a thread that beats in the store and watches the beats of the others.

A collective cannot be trusted to end when a rank is gone: over gloo its neighbours get an error that names no rank and
the others wait, over NCCL all wait. So a rank that misses another one names it and ends its process. Nothing restarts:
torchrun or the supervisor starts the trainer again, and every run goes on from its last checkpoint.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn

from torch._C._distributed_c10d import Store

from prime_rl.utils.logger import complain

logger = logging.getLogger(__name__)

BEAT_S = 1.0
# Once there is reason to fear for a rank (a collective failed, or this process was asked to stop): ten beats.
SUSPICIOUS_S = 10.0
LEFT = "left"


class Pulse:
    """When each rank's beat last changed, by this process's own clock."""

    def __init__(self, num_ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beats = [""] * num_ranks
        self._changed_at = [clock()] * num_ranks

    def update(self, beats: Sequence[str]) -> None:
        """Take in the beats of all ranks; one that changed is a sign of life."""
        now = self._clock()
        self._changed_at = [
            then if beat == old else now for beat, old, then in zip(beats, self._beats, self._changed_at, strict=True)
        ]
        self._beats = list(beats)

    def lost(self, limit_s: float) -> list[int]:
        """Ranks that were silent for `limit_s` and did not announce their end."""
        now = self._clock()
        silent = zip(self._beats, self._changed_at, strict=True)
        return [rank for rank, (beat, then) in enumerate(silent) if beat != LEFT and now - then >= limit_s]

    @property
    def all_left(self) -> bool:
        """Whether every rank has announced its end."""
        return all(beat == LEFT for beat in self._beats)


class Liveness:
    """The beat of this rank and its eye on the others. Does nothing for a rank alone.

    Args:
        store: used for this alone, over a new connection, because a rank may be inside a call on the other.
        timeout_s: a rank that is silent for so long is lost.
        stop: whether this process was asked to stop.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        stop: Callable[[], bool],
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # missing in the stubs
        self._store.set_timeout(timedelta(seconds=timeout_s))
        self._rank = rank
        self._keys = [f"beat/{other}" for other in range(size)]
        self._timeout_s = timeout_s
        self._suspicious_s = min(SUSPICIOUS_S, timeout_s)
        # Several beats in the shortest silence that counts.
        self._beat_s = min(BEAT_S, timeout_s / 8)
        self._stop = stop
        self._end = end or _end_process
        self._number = self._num_looks = 0
        self._pulse = Pulse(size)
        self._closing = threading.Event()
        self._suspects = False
        self._verdict: str | None = None
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="liveness", daemon=True)
        self._beat()

    def start(self) -> None:
        """Watch from now on. Call it when all ranks have made theirs."""
        if len(self._keys) > 1:
            self._thread.start()

    def explain(self) -> str | None:
        """After a failed collective: which rank is lost, or None when all live. Takes a few beats to find out."""
        if self._thread.is_alive():
            self._suspects = True
            # In looks and not in seconds: the watching thread may get less time than this one.
            num_looks = self._num_looks + math.ceil(self._suspicious_s / self._beat_s) + 5
            while self._thread.is_alive() and self._num_looks < num_looks and not self._settled.wait(self._beat_s):
                pass
        return self._verdict

    def leave(self) -> str | None:
        """Announce that this rank ends normally. Rank 0, which may hold the store, waits for the others.

        Returns which rank is lost, or None.
        """
        if not self._thread.is_alive():
            return self._verdict
        if self._rank == 0:
            self._suspects = True
            if not self._settled.wait(self._timeout_s):
                return f"not all of {len(self._keys)} ranks ended within {self._timeout_s:g} s"
        self._closing.set()
        self._thread.join()
        return self._verdict

    def _watch(self) -> None:
        try:
            while not self._closing.wait(self._beat_s):
                self._beat()
                self._pulse.update(self._others())
                limit_s = self._suspicious_s if self._suspects or self._stop() else self._timeout_s
                if lost := self._pulse.lost(limit_s):
                    return self._conclude(self._agree_on(lost, limit_s))
                if self._suspects and self._pulse.all_left:
                    self._settled.set()
                self._num_looks += 1
            self._store.set(self._keys[self._rank], LEFT)
        except RuntimeError as error:
            logger.debug("the store of the ranks failed", exc_info=True)
            self._conclude(f"the store of the ranks is gone, with rank 0 or its torchrun: {str(error).splitlines()[0]}")

    def _beat(self) -> None:
        self._number += 1
        self._store.set(self._keys[self._rank], str(self._number))

    def _others(self) -> list[str]:
        """The beats of all ranks. This rank's own counts as left."""
        beats = [beat.decode() for beat in self._store.multi_get(self._keys)]
        beats[self._rank] = LEFT
        return beats

    def _agree_on(self, lost: list[int], limit_s: float) -> str:
        """All ranks name those that were missed first, not those that ended because of them."""
        who = " and ".join(f"rank {rank}" for rank in lost)
        mine = f"no heartbeat from {who} of {len(self._keys)} for {limit_s:g} s"
        return self._store.compare_set("lost", "", mine).decode()

    def _conclude(self, verdict: str) -> None:
        self._verdict = verdict
        if not self._suspects:
            # The main thread waits for the lost rank, in a call that no Python can break off.
            self._end(verdict)
        self._settled.set()


def _end_process(verdict: str) -> NoReturn:
    complain("trainer", verdict)
    os._exit(1)
