"""How the ranks of one start find each other in a store that may hold what an earlier start left behind.

torchrun keeps its store when it starts the workers again, and counts restarts on each machine for itself. So rank 0
gives every start a new name, and each rank asks for that name under its own random key.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

# An unnoticed wait, and a store that is asked 20 times a second.
POLL_S = 0.05


class MissingRanks(RuntimeError):
    """Ranks that did not join; the message names them."""


def name_of_this_start(
    store: Store, rank: int, size: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> str:
    """A name that all ranks of this start have and no earlier one had. Waits for all; raises MissingRanks."""
    return _welcome_all(store, size, timeout_s, clock) if rank == 0 else _ask(store, rank, timeout_s)


def _welcome_all(store: Store, size: int, timeout_s: float, clock: Callable[[], float]) -> str:
    name, deadline = secrets.token_hex(8), clock() + timeout_s
    missing = list(range(1, size))
    while missing:
        if clock() >= deadline:
            who = " and ".join(map(str, missing))
            raise MissingRanks(f"rank {who} of {size} did not join within {timeout_s:g} s")
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
        raise MissingRanks(f"rank 0 did not join within {timeout_s:g} s; rank {rank} waits for it") from error
    name = store.get(f"start/{key}").decode()
    store.set(f"here/{name}/{rank}", "")
    return name
