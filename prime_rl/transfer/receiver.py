"""Inference's side: one worker of a server, which gets the whole weights or fails with a one-line error."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from prime_rl.transfer.link import (
    NUM_REQUESTS_KEY,
    Answer,
    Description,
    Group,
    Hello,
    Request,
    answer_key,
    connect,
    gpu_name,
    hello_key,
    request_key,
)

# What a server needs beside the weights while it loads them.
SPARE_BYTES = 1 << 30


class TransferError(RuntimeError):
    """The weights were not received; the message is one line with the reason."""


class WeightReceiver:
    """Connection and process group stay open between transfers, and are made again when either side was restarted.

    Args:
        host, port: where the trainer listens.
        rank: 1 to `num_receivers`, the workers of the server; the first asks for all.
        timeout_s: how long the trainer may take to be reached, and each tensor to get through.
        device: where the model of this worker is.
        gpu: name of that device; default: `gpu_name`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        rank: int = 1,
        num_receivers: int = 1,
        timeout_s: float,
        device: torch.device | None = None,
        gpu: str | None = None,
    ) -> None:
        self._host, self._port = host, port
        self._rank, self._num_receivers = rank, num_receivers
        self._timeout_s = timeout_s
        self._device = device or torch.device("cpu")
        self._gpu = gpu or gpu_name(self._device)
        self._where = f"the trainer's weight sender at {host}:{port}"
        self._store: TCPStore | None = None
        self._group: tuple[str, Group] | None = None
        self._lock = threading.Lock()

    def receive(self, label: str, ticket: str) -> dict[str, Tensor]:
        """The weights called `label`: on the worker's GPU where it has room for them, else in host memory.

        Args:
            ticket: the same for all workers of one transfer, and never used before.
        """
        with self._lock:
            try:
                return self._receive(label, ticket)
            except TransferError:
                raise
            except BaseException as error:
                # Half a transfer may still be on its way: this group cannot be used again.
                self.close()
                if not isinstance(error, RuntimeError):
                    raise
                first_line = next(iter(str(error).splitlines()), type(error).__name__)
                raise TransferError(
                    f"{self._where} disconnected, or sent nothing for {self._timeout_s:g} s: {first_line}"
                ) from error

    def close(self) -> None:
        """Drop connection and group; the next transfer makes new ones."""
        if self._group is not None:
            self._group[1].close()
        self._store = self._group = None

    def _receive(self, label: str, ticket: str) -> dict[str, Tensor]:
        store = self._connected()
        hello = Hello(self._group[0] if self._group else None, self._gpu)
        store.set(hello_key(ticket, self._rank), msgspec.json.encode(hello).decode())
        if self._rank == 1:
            _ask(store, Request(ticket, label, self._num_receivers))
        answer = self._wait_for_answer(store, ticket)
        group = self._join(store, answer)
        home = group.device if _has_room(group.device, answer.tensors) else torch.device("cpu")
        return {each.name: _get(group, each, home) for each in answer.tensors}

    def _connected(self) -> TCPStore:
        """To the trainer that runs now, which may not be that of the last transfer."""
        if self._store is not None:
            try:
                self._store.add(NUM_REQUESTS_KEY, 0)
            except RuntimeError:
                self.close()
        if self._store is None:
            try:
                self._store = connect(self._host, self._port, self._timeout_s)
            except RuntimeError as error:
                raise TransferError(f"{self._where} cannot be reached within {self._timeout_s:g} s") from error
        return self._store

    def _wait_for_answer(self, store: TCPStore, ticket: str) -> Answer:
        # Twice: the sender waits once itself, for the other workers.
        timeout_s = 2 * self._timeout_s
        try:
            store.wait([answer_key(ticket)], timedelta(seconds=timeout_s))
        except RuntimeError as error:
            self.close()
            raise TransferError(f"{self._where} did not answer within {timeout_s:g} s") from error
        answer = msgspec.json.decode(store.get(answer_key(ticket)), type=Answer)
        if answer.problem is not None:
            raise TransferError(f"{self._where} refused: {answer.problem}")
        return answer

    def _join(self, store: TCPStore, answer: Answer) -> Group:
        """The group that the sender named."""
        if self._group is not None and self._group[0] == answer.group_id:
            return self._group[1]
        if self._group is not None:
            self._group[1].close()
            self._group = None
        group = Group(
            store,
            answer.group_id,
            device=self._device if answer.backend == "nccl" else torch.device("cpu"),
            host=self._host,
            rank=self._rank,
            size=1 + self._num_receivers,
            timeout_s=self._timeout_s,
        )
        self._group = answer.group_id, group
        return group


def _ask(store: TCPStore, request: Request) -> None:
    number = store.add("next_request", 1)
    store.set(request_key(number), msgspec.json.encode(request).decode())
    # Counted when it is there, so the sender never waits for one.
    store.add(NUM_REQUESTS_KEY, 1)


def _has_room(device: torch.device, tensors: Sequence[Description]) -> bool:
    """Whether `device` holds them beside the weights in force."""
    if device.type != "cuda":
        return True
    needed = sum(getattr(torch, each.dtype).itemsize * torch.Size(each.shape).numel() for each in tensors)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return bool(needed + SPARE_BYTES <= torch.cuda.mem_get_info(device)[0] + unused)


def _get(group: Group, described: Description, home: torch.device) -> Tensor:
    tensor = torch.empty(described.shape, dtype=getattr(torch, described.dtype), device=group.device)
    group.broadcast(tensor)
    return tensor.to(home)
