"""Directions of rank 0 to the other ranks: numbered messages over the c10d store, never a collective.

Rank 0 alone looks at the disk. What it finds reaches the others as messages, each under a key with its own number, so a
late rank can never read the next one by mistake. A waiting rank renews its deadline as long as rank 0 beats, so an idle
trainer does not time out and a dead rank 0 is named. `gather` lets all ranks agree on whether a hook failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import DistStoreError, distributed_c10d

from prime_rl.contract.files import WaitTimeout
from prime_rl.contract.types import MicroBatch

# One blocking call to the store; between two of them a waiting rank looks at the beat of rank 0.
SLICE_S = 1.0
_DEFAULT_TIMEOUT_S = 600.0


class SlotState(msgspec.Struct, frozen=True):
    """One slot in use. `admission` numbers all admissions, so a run that left and came back is a new one."""

    run_idx: int
    run_id: str
    admission: int
    config_json: str
    step: int = 0
    total_tokens: int = 0
    total_samples: int = 0
    ready: bool = False
    scaling: float = 1.0


class StateMessage(msgspec.Struct, frozen=True, tag="state"):
    """All slots in use, from now on."""

    slots: list[SlotState]


class ReadyRun(msgspec.Struct, frozen=True):
    """A run whose whole batch has been handed out: it is updated after this pack.

    Attributes:
        num_tokens, num_samples: of the batch.
        kept: places in the batch of the samples that people get to read.
        num_rows, num_trained: samples that have a gradient, and their tokens.
        num_computed: positions that passes computed for them.
    """

    run_idx: int
    num_tokens: int
    num_samples: int
    kept: list[int] = []
    num_rows: int = 0
    num_trained: int = 0
    num_computed: int = 0


class PackMessage(msgspec.Struct, frozen=True, tag="pack"):
    """One forward/backward pass of this rank, and the runs to update after it."""

    micro_batch: MicroBatch
    ready: list[ReadyRun]


class SaveMessage(msgspec.Struct, frozen=True, tag="save"):
    """The run in this slot is to be saved: all ranks collect it."""

    run_idx: int


class StopMessage(msgspec.Struct, frozen=True, tag="stop"):
    """The trainer ends."""


class HookReport(msgspec.Struct, frozen=True):
    """One rank's report after its next hook for one run: what failed, and whether it has more hooks to call."""

    fault: str | None
    has_more: bool


Message = StateMessage | PackMessage | SaveMessage | StopMessage
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_report_decoder = msgspec.msgpack.Decoder(HookReport)


def slot_changes(old: Sequence[SlotState], new: Sequence[SlotState]) -> tuple[list[SlotState], list[SlotState]]:
    """(left, came), each by slot number. A slot whose admission number changed is in both."""
    before = {(slot.run_idx, slot.admission) for slot in old}
    after = {(slot.run_idx, slot.admission) for slot in new}
    left = sorted((s for s in old if (s.run_idx, s.admission) not in after), key=lambda s: s.run_idx)
    came = sorted((s for s in new if (s.run_idx, s.admission) not in before), key=lambda s: s.run_idx)
    return left, came


class Channel:
    """Rank 0 to all other ranks, in order; and a gather among all.

    Args:
        store: shared by the ranks, for this channel alone.
        timeout_s: how long a rank waits without a sign of life before it raises WaitTimeout with the missing rank.
    """

    def __init__(
        self,
        store: Store | None = None,
        rank: int = 0,
        size: int = 1,
        *,
        timeout_s: float = _DEFAULT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.size = size
        self._store: Store = store if store is not None else HashStore()
        self._timeout_s = timeout_s
        self._clock = clock
        self._message_number = 0
        self._gather_number = 0
        self._peeked: Message | None = None
        self._last_beat = 0.0

    @classmethod
    def of_default_group(cls) -> Channel:
        """Among the ranks of the default process group; of one rank when there is no group.

        Each call makes a new channel. All ranks must make theirs in the same order: the n-th of one rank meets
        the n-th of the others. The count is kept in the store, so a new group starts at one.
        """
        if not dist.is_initialized():
            return cls()
        store, rank = distributed_c10d._get_default_store(), dist.get_rank()
        number = store.add(f"multi_run_channels/{rank}", 1)
        return cls(PrefixStore(f"multi_run_channel/{number}", store), rank, dist.get_world_size())

    @property
    def is_master(self) -> bool:
        """True when this is rank 0, which sends."""
        return self.rank == 0

    def send(self, messages: Sequence[Message]) -> None:
        """Rank 0: one message for each rank; its own is not sent."""
        self._message_number += 1
        for rank, message in list(enumerate(messages))[1:]:
            self._set(f"message/{self._message_number}/{rank}", _encoder.encode(message))

    def send_all(self, message: Message) -> None:
        """Rank 0: the same message for each rank."""
        self.send([message] * self.size)

    def beat(self) -> None:
        """Heartbeat of rank 0 while it has no message."""
        if self.size > 1 and self._clock() - self._last_beat >= SLICE_S:
            self._last_beat = self._clock()
            self._store.add("beat", 1)

    def peek(self) -> Message:
        """Other ranks: the next message, left in place. Waits for it as long as rank 0 runs."""
        if self._peeked is None:
            key = f"message/{self._message_number + 1}/{self.rank}"
            self._wait(key, f"rank {self.rank}: rank 0 to send message {self._message_number + 1}")
            self._peeked = _decoder.decode(self._store.get(key))
            self._store.delete_key(key)
        return self._peeked

    def receive(self) -> Message:
        """Other ranks: the next message."""
        message = self.peek()
        self._message_number += 1
        self._peeked = None
        return message

    def gather(self, mine: HookReport) -> list[HookReport]:
        """All ranks' `mine`, by rank. All ranks must call it the same number of times."""
        if self.size == 1:
            return [mine]
        self._gather_number += 1
        number = self._gather_number
        self._set(f"gather/{number}/{self.rank}", _encoder.encode(mine))
        values = []
        for rank in range(self.size):
            key = f"gather/{number}/{rank}"
            self._wait(key, f"rank {self.rank}: rank {rank} to finish hook call {number}")
            values.append(_report_decoder.decode(self._store.get(key)))
        if number > 2:
            # A rank that is here has been through number - 1, for which all ranks had to be through number - 2.
            self._store.delete_key(f"gather/{number - 2}/{self.rank}")
        return values

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # str in the stub; the store takes and returns bytes

    def _wait(self, key: str, what: str) -> None:
        beat = -1
        deadline = self._clock() + self._timeout_s
        while not self._wait_slice(key):
            heard = self._store.add("beat", 0)
            if heard != beat:
                beat, deadline = heard, self._clock() + self._timeout_s
            if self._clock() >= deadline:
                raise WaitTimeout(f"no heartbeat for {self._timeout_s:g} s while waiting for {what}")

    def _wait_slice(self, key: str) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=SLICE_S))
        except DistStoreError:
            return False
        return True
