"""The process group of the trainer: rank, size, device, the store. Always made, also for one process alone.

`torchrun` describes the group in the environment; without it this process is a group of one on a free port. torchrun
keeps its store when it starts the workers again, and counts restarts on each machine for itself: so rank 0 gives every
start a new name, and each rank asks for that name under its own random key. Sums over ranks go through here. How the
model is laid over the ranks is in `model`.

Which ranks still live: each has a thread that beats in the store and watches the beats of the others. A collective
cannot be trusted to end when a rank is gone: over gloo its neighbours get an error that names no rank and the others
wait, over NCCL all wait. So a rank that misses another one names it and ends its process. Nothing restarts: torchrun or
the supervisor starts the trainer again, and every run goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError
from torch.distributed.rendezvous import rendezvous

from prime_rl.utils.runtime import complain

logger = logging.getLogger(__name__)

# How often rank 0 looks for ranks that have yet to join: an unnoticed wait.
POLL_S = 0.05
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class WorldError(RuntimeError):
    """The process group cannot be created, or lost a rank; the message has the reason, or the rank."""


@dataclass(frozen=True)
class World:
    """The place of this process among the ranks."""

    rank: int
    size: int
    device: torch.device
    store: Store
    liveness: Liveness

    @property
    def is_master(self) -> bool:
        """True when this is rank 0."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place; equal to the last bit on all of them. A collective: every rank must call it."""
        if self.size > 1:  # NCCL would be set up for nothing
            dist.all_reduce(tensor)
        return tensor

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """A failure in here because another rank is gone raises WorldError with the number of that rank."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            logger.debug("rank %d failed; are all ranks running?", self.rank, exc_info=True)
            if verdict := self.liveness.explain():
                raise WorldError(verdict) from error
            raise

    def close(self) -> None:
        """Leave the group. Raises WorldError when a rank is missing at the end; never waits for it without limit."""
        dist.destroy_process_group()
        if verdict := self.liveness.leave():
            raise WorldError(verdict)


def setup_world(
    device: Literal["auto", "cpu", "cuda"],
    timeout_s: float,
    num_threads: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> World:
    """Join the process group. Raises WorldError without a CUDA device for "cuda", or without a rank."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    where = _pick_device(device)
    timeout = timedelta(seconds=timeout_s)
    store, rank, size = _rendezvous(timeout)
    store = PrefixStore(name_of_this_start(store, rank, size, timeout_s), store)
    liveness = Liveness(PrefixStore("liveness", store), rank, size, timeout_s=timeout_s, stop=stop)
    backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        raise WorldError(f"rank {rank} of {size} cannot join the others: {str(error).splitlines()[0]}") from error
    liveness.start()
    return World(rank, size, where, PrefixStore("trainer", store), liveness)


def _rendezvous(timeout: timedelta) -> tuple[Store, int, int]:
    if all(name in os.environ for name in _TORCHRUN):
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        return store, rank, size
    # Port 0: the system picks a free one, so two trainers on one machine never meet.
    return TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timeout), 0, 1


def _pick_device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise WorldError("device = 'cuda': this machine has no CUDA device; set device = 'cpu'")
    if wanted == "cpu" or not has_cuda:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def name_of_this_start(
    store: Store, rank: int, size: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> str:
    """A name that all ranks of this start have and no earlier one had. Waits for all. Raises WorldError."""
    return _welcome_all(store, size, timeout_s, clock) if rank == 0 else _ask(store, rank, timeout_s)


def _welcome_all(store: Store, size: int, timeout_s: float, clock: Callable[[], float]) -> str:
    name, deadline = secrets.token_hex(8), clock() + timeout_s
    missing = list(range(1, size))
    while missing:
        if clock() >= deadline:
            who = " and ".join(map(str, missing))
            raise WorldError(f"rank {who} of {size} did not join within {timeout_s:g} s")
        for rank in missing:
            # The key may be that of a process which is gone: try again until the rank itself answers.
            if store.check([f"key/{rank}"]):
                store.set(f"start/{store.get(f'key/{rank}').decode()}", name)
        missing = [rank for rank in missing if not store.check([f"here/{name}/{rank}"])]
        if missing:
            time.sleep(POLL_S)
    return name


def _ask(store: Store, rank: int, timeout_s: float) -> str:
    key = secrets.token_hex(8)
    store.set(f"key/{rank}", key)
    try:
        store.wait([f"start/{key}"], timedelta(seconds=timeout_s))
    except DistStoreError as error:
        raise WorldError(f"rank 0 did not join within {timeout_s:g} s; rank {rank} waits for it") from error
    name = store.get(f"start/{key}").decode()
    store.set(f"here/{name}/{rank}", "")
    return name


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
        """True when every rank has announced its end."""
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
