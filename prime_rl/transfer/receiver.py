"""Inference's side: one call gets the whole weights into host memory, or fails with a one-line error."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from prime_rl.transfer.link import (
    NUM_REQUESTS_KEY,
    Answer,
    Group,
    Request,
    answer_key,
    connect,
    request_key,
)


class TransferError(RuntimeError):
    """The weights were not received; the message is one line with the reason."""


def receive(
    host: str, port: int, *, label: str, ticket: str, rank: int, num_receivers: int, timeout_s: float
) -> dict[str, Tensor]:
    """The weights called `label` from the trainer at `host`:`port`, on the CPU.

    Args:
        ticket: the same for all `num_receivers` of one transfer, and never used before.
        rank: 1 to `num_receivers`; the first asks for all.
    """
    where = f"the trainer's weight sender at {host}:{port}"
    try:
        store = connect(host, port, timeout_s)
    except RuntimeError as error:
        raise TransferError(f"{where} cannot be reached within {timeout_s:g} s") from error
    try:
        if rank == 1:
            request = Request(ticket, label, num_receivers, torch.cuda.is_available())
            _ask(store, request)
        answer = _wait_for_answer(store, ticket, timeout_s, where)
        group = Group(
            store,
            ticket,
            answer.backend,
            host=host,
            rank=rank,
            size=1 + num_receivers,
            timeout_s=timeout_s,
        )
        return {each.name: _get(group, each.shape, each.dtype) for each in answer.tensors}
    except TransferError:
        raise
    except RuntimeError as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise TransferError(f"{where} disconnected, or sent nothing for {timeout_s:g} s: {first_line}") from error


def _ask(store: TCPStore, request: Request) -> None:
    number = store.add("next_request", 1)
    store.set(request_key(number), msgspec.json.encode(request).decode())
    # Counted when it is there, so the sender never waits for one.
    store.add(NUM_REQUESTS_KEY, 1)


def _wait_for_answer(store: TCPStore, ticket: str, timeout_s: float, where: str) -> Answer:
    try:
        store.wait([answer_key(ticket)], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise TransferError(f"{where} did not answer within {timeout_s:g} s") from error
    answer = msgspec.json.decode(store.get(answer_key(ticket)), type=Answer)
    if answer.problem is not None:
        raise TransferError(f"{where} refused: {answer.problem}")
    return answer


def _get(group: Group, shape: tuple[int, ...], dtype: str) -> Tensor:
    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
    group.broadcast(tensor)
    # In host memory: old and new weights together may be more than the device holds.
    return tensor.to("cpu")
