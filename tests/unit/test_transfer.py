"""Whole weights from memory to memory: over real sockets, with the sides coming, going and missing each other."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import uuid
from collections.abc import Iterator, ValuesView
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from prime_rl.contract.files import wait_for
from prime_rl.transfer import MOST_MISSED, TransferError, WeightReceiver, WeightSender, choose_backend
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.transfer_main import HOST, LABEL, ask, digest, process, weights


@pytest.fixture
def port() -> int:
    return free_port(HOST)


@pytest.fixture
def sender(port: int, caplog: pytest.LogCaptureFixture) -> Iterator[WeightSender]:
    caplog.set_level(logging.INFO, "prime_rl.transfer")
    opened = WeightSender(HOST, port, timeout_s=PATIENCE_S)
    yield opened
    opened.close()


class Server:
    """The workers of one server, as threads."""

    def __init__(self, port: int, num_workers: int = 1, timeout_s: float = PATIENCE_S) -> None:
        self.workers = [
            WeightReceiver(HOST, port, rank=rank, num_receivers=num_workers, timeout_s=timeout_s)
            for rank in range(1, num_workers + 1)
        ]

    def fetch(self, label: str = LABEL) -> list[dict[str, Tensor]]:
        ticket = uuid.uuid4().hex
        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(lambda worker: worker.receive(label, ticket), self.workers))


def fetch(port: int, label: str = LABEL, timeout_s: float = PATIENCE_S) -> dict[str, Tensor]:
    return Server(port, timeout_s=timeout_s).fetch(label)[0]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def num_groups(caplog: pytest.LogCaptureFixture) -> int:
    """Groups that were made."""
    return sum("inference joined" in record.getMessage() for record in caplog.records)


def test_every_worker_gets_every_bit_as_often_as_it_asks(sender: WeightSender, port: int) -> None:
    one, three = Server(port), Server(port, num_workers=3)
    for seed in (1, 2):
        sender.offer(LABEL, weights(seed))
        for server in (one, three, three, one):
            assert all(same(got, weights(seed)) for got in server.fetch())


def test_one_group_carries_all_versions_to_a_server(
    sender: WeightSender, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    server, other = Server(port, num_workers=2), Server(port)
    for version in range(4):
        sender.offer(f"step_{version}", weights(version))
        for each in (server, other):
            assert all(same(got, weights(version)) for got in each.fetch(f"step_{version}"))
        with pytest.raises(TransferError, match="not step_9"):
            server.fetch("step_9")
    assert num_groups(caplog) == 2


def test_a_worker_that_lost_the_group_gets_a_new_one_with_all_others(
    sender: WeightSender, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    sender.offer(LABEL, weights(1))
    server = Server(port, num_workers=2)
    server.fetch()
    server.workers[1].close()
    assert all(same(got, weights(1)) for got in [*server.fetch(), *server.fetch()])
    assert num_groups(caplog) == 2


def test_the_group_of_a_server_that_is_gone_is_closed_and_made_again_when_it_asks(
    sender: WeightSender, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    gone, there = Server(port), Server(port)
    sender.offer(LABEL, weights(0))
    gone.fetch()
    for version in range(MOST_MISSED + 2):
        sender.offer(LABEL, weights(version))
        there.fetch()
    assert num_groups(caplog) == 2
    assert same(gone.fetch()[0], weights(MOST_MISSED + 1))
    assert num_groups(caplog) == 3


class Halting(dict[str, Tensor]):
    """Weights whose second tensor is not handed out before `goes_on`."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self._values = super().values

    def values(self) -> ValuesView[Tensor]:
        return self._halting()  # type: ignore[return-value]

    def _halting(self) -> Iterator[Tensor]:
        for number, tensor in enumerate(self._values()):
            if number == 1:
                self.begun.set()
                assert self.goes_on.wait(PATIENCE_S)
            yield tensor


def test_a_server_that_is_killed_in_a_transfer_comes_back_and_harms_no_other(
    sender: WeightSender, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    other = Server(port)
    with process("receive", port, "-") as server:
        for seed in (1, 2):
            sender.offer(LABEL, weights(seed))
            assert ask(server)["digest"] == pytest.approx(digest(weights(seed)))
            other.fetch()
        assert num_groups(caplog) == 2
        halting = Halting(weights(3))
        sender.offer(LABEL, halting)
        server.tell(LABEL)
        assert halting.begun.wait(PATIENCE_S)
        server.kill()
        halting.goes_on.set()
    assert same(other.fetch()[0], weights(3))
    with process("receive", port, "-") as server:
        assert ask(server)["digest"] == pytest.approx(digest(weights(3)))
    assert same(other.fetch()[0], weights(3))
    assert num_groups(caplog) == 3, "that of the other server lasted"


@pytest.mark.slow
def test_a_trainer_that_is_killed_comes_back_and_its_servers_join_it_again(port: int) -> None:
    server = Server(port, num_workers=2)
    for seed in (1, 2):
        with process("send", port, seed):
            for _ in range(2):
                assert all(same(got, weights(seed)) for got in server.fetch())
    server = Server(port, timeout_s=1.0)
    with pytest.raises(TransferError, match="cannot be reached within 1 s"):
        server.fetch()


def test_a_gpu_for_both_sides_is_refused_in_one_line(port: int) -> None:
    sender = WeightSender(HOST, port, timeout_s=PATIENCE_S, gpu="GPU-0a")
    try:
        sender.offer(LABEL, weights(1))
        with process("receive", port, "GPU-0a") as server:
            error = str(ask(server)["error"])
            assert "refused: trainer and inference share the GPU GPU-0a" in error and "\n" not in error
        # Without a GPU on its side there is nothing to share.
        with process("receive", port, "-") as server:
            assert ask(server)["digest"] == pytest.approx(digest(weights(1)))
    finally:
        sender.close()


def test_nccl_is_for_gpus_that_are_all_different() -> None:
    assert choose_backend("a", ["b", "c"]) == "nccl"
    assert {choose_backend(None, ["b"]), choose_backend("a", [None]), choose_backend("a", ["b", None])} == {"gloo"}
    with pytest.raises(ValueError, match="trainer and inference share the GPU b"):
        choose_backend("b", ["a", "b"])
    with pytest.raises(ValueError, match="workers of the server share the GPU b"):
        choose_backend("a", ["b", "c", "b"])


def test_what_is_not_there_is_refused_by_name(sender: WeightSender, port: int) -> None:
    with pytest.raises(TransferError, match=f"at {HOST}:{port} refused: the trainer has published no weights yet"):
        fetch(port)
    sender.offer(LABEL, weights(1))
    with pytest.raises(TransferError, match="the trainer holds run_a/broadcast/step_3, not run_a/broadcast/step_2"):
        fetch(port, "run_a/broadcast/step_2")
    assert same(fetch(port), weights(1))


def test_a_missing_trainer_is_named_in_time(port: int) -> None:
    with pytest.raises(TransferError, match=f"weight sender at {HOST}:{port} cannot be reached within 1 s"):
        fetch(port, timeout_s=1.0)


@pytest.mark.slow
def test_a_worker_that_never_comes_harms_neither_side(port: int) -> None:
    sender = WeightSender(HOST, port, timeout_s=1.0)
    first, _ = Server(port, num_workers=2).workers  # it waits for the sender's word, however late that comes
    _, second = Server(port, num_workers=2, timeout_s=1.0).workers
    try:
        sender.offer(LABEL, weights(1))
        with pytest.raises(TransferError, match="not all 2 workers of the server asked within 1 s"):
            first.receive(LABEL, "half")
        with pytest.raises(TransferError, match="did not answer within 2 s"):
            second.receive(LABEL, "unasked")

        def comes() -> bool:
            with contextlib.suppress(TransferError):  # the sender waits for a second only: a server asks again
                return same(fetch(port, timeout_s=5.0), weights(1))
            return False

        wait_for(comes, "the weights", timeout_s=PATIENCE_S)
    finally:
        sender.close()


def test_a_sender_listens_on_its_address_only_and_its_port_is_free_again(port: int) -> None:
    WeightSender(HOST, port, timeout_s=PATIENCE_S).close()
    sender = WeightSender(HOST, port, timeout_s=PATIENCE_S)
    try:
        with socket.socket() as other:
            other.settimeout(2)
            with pytest.raises(ConnectionRefusedError):
                other.connect(("127.0.0.2", port))
        with pytest.raises(OSError, match="in use"):
            WeightSender(HOST, port, timeout_s=PATIENCE_S)
    finally:
        sender.close()
