"""Whole weights from memory to memory: over real sockets, with the sides coming, going and missing each other."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from prime_rl.transfer import TransferError, WeightSender, receive
from tests.patience import PATIENCE_S

HOST = "127.0.0.1"
LABEL = "run_a/broadcast/step_3"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"layer.{i}": torch.randn(3, 1 + i, generator=generator) for i in range(4)}
    return tensors | {
        "half": torch.randn(5, generator=generator).bfloat16(),
        "view": tensors["layer.3"].T,
        "one": torch.tensor(2.0),
    }


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def sender(port: int) -> Iterator[WeightSender]:
    opened = WeightSender(HOST, port, timeout_s=PATIENCE_S)
    yield opened
    opened.close()


def fetch(port: int, label: str = LABEL, *, num_receivers: int = 1, timeout_s: float = 5.0) -> list[dict[str, Tensor]]:
    ticket = uuid.uuid4().hex

    def get(rank: int) -> dict[str, Tensor]:
        return receive(
            HOST, port, label=label, ticket=ticket, rank=rank, num_receivers=num_receivers, timeout_s=timeout_s
        )

    with ThreadPoolExecutor(num_receivers) as pool:
        return list(pool.map(get, range(1, num_receivers + 1)))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_every_worker_gets_every_bit_as_often_as_it_asks(sender: WeightSender, port: int) -> None:
    for seed, num_receivers in ((1, 1), (2, 3)):
        sender.offer(LABEL, weights(seed))
        for _ in range(2):
            assert all(same(got, weights(seed)) for got in fetch(port, num_receivers=num_receivers))


def test_what_is_not_there_is_refused_by_name(sender: WeightSender, port: int) -> None:
    with pytest.raises(TransferError, match=f"at {HOST}:{port} refused: the trainer has published no weights yet"):
        fetch(port)
    sender.offer(LABEL, weights(1))
    with pytest.raises(TransferError, match="the trainer holds run_a/broadcast/step_3, not run_a/broadcast/step_2"):
        fetch(port, "run_a/broadcast/step_2")
    assert same(fetch(port)[0], weights(1))


def test_a_missing_trainer_is_named_in_time(port: int) -> None:
    with pytest.raises(TransferError, match=f"weight sender at {HOST}:{port} cannot be reached within 1 s"):
        fetch(port, timeout_s=1.0)


def test_a_worker_that_never_comes_harms_neither_side(port: int) -> None:
    sender = WeightSender(HOST, port, timeout_s=1.0)
    try:
        sender.offer(LABEL, weights(1))
        with pytest.raises(TransferError, match="sent nothing for 1 s"):
            receive(HOST, port, label=LABEL, ticket="half", rank=1, num_receivers=2, timeout_s=1.0)
        with pytest.raises(TransferError, match="did not answer within 1 s"):
            receive(HOST, port, label=LABEL, ticket="unasked", rank=2, num_receivers=2, timeout_s=1.0)
        assert same(fetch(port)[0], weights(1))
    finally:
        sender.close()


def test_a_sender_listens_on_its_address_only_and_its_port_is_free_again(port: int) -> None:
    WeightSender(HOST, port, timeout_s=PATIENCE_S).close()
    sender = WeightSender(HOST, port, timeout_s=PATIENCE_S)
    try:
        with socket.socket() as other, pytest.raises(OSError):
            other.settimeout(2)
            other.connect(("127.0.0.2", port))
        with pytest.raises(OSError):
            WeightSender(HOST, port, timeout_s=PATIENCE_S)
    finally:
        sender.close()
