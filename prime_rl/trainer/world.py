"""The process group of the trainer: rank, size, device, the store. Always made, also for one process alone.

`torchrun` describes the group in the environment; without it this process is a group of one on a free port. torchrun
keeps its store when it starts the workers again, and counts restarts on each machine for itself: so rank 0 gives every
start a new name, and each rank asks for that name under its own random key. Sums over ranks go through here. How the
model is laid over the ranks is in `sharding`, how a lost rank is found in `liveness`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError
from torch.distributed.rendezvous import rendezvous

from prime_rl.trainer.liveness import Liveness

logger = logging.getLogger(__name__)

# How often rank 0 looks for ranks that have yet to join: an unnoticed wait.
POLL_S = 0.05
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class WorldError(RuntimeError):
    """The process group cannot be created, or lost a rank; the message has the reason, or the rank."""


@dataclass(frozen=True)
class World:
    """Where this process stands among the ranks."""

    rank: int
    size: int
    device: torch.device
    store: Store
    liveness: Liveness

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place; equal to the last bit on all of them. A collective: every rank must call it."""
        dist.all_reduce(tensor)
        return tensor

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """What fails in here because another rank is gone raises WorldError with the number of that rank."""
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
    torch.set_float32_matmul_precision("high")  # TF32, where a config asks for float32
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
