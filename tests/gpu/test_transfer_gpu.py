"""Whole weights from GPU to GPU over NCCL, and the refusal of one GPU for both sides. Skipped without a GPU."""

from __future__ import annotations

import logging

import pytest
import torch

from prime_rl.transfer import WeightSender
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.transfer_main import HOST, LABEL, ask, digest, process, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def sender_on_gpu(port: int) -> WeightSender:
    sender = WeightSender(HOST, port, timeout_s=PATIENCE_S)
    sender.offer(LABEL, {name: tensor.to("cuda:0") for name, tensor in weights(1).items()})
    return sender


def test_one_gpu_for_both_sides_is_refused_by_its_name() -> None:
    port = free_port()
    sender = sender_on_gpu(port)
    try:
        with process("receive", port, "-", "cuda:0") as server:
            error = str(ask(server)["error"])
    finally:
        sender.close()
    name = str(torch.cuda.get_device_properties(0).uuid)
    assert f"share the GPU {name}" in error and "\n" not in error


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices")
def test_weights_stay_on_gpus_and_a_killed_server_gets_them_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "prime_rl.transfer")
    port = free_port()
    sender = sender_on_gpu(port)
    try:
        for _ in range(2):  # the second after a kill -9 of the first
            with process("receive", port, "-", "cuda:1") as server:
                for _ in range(2):
                    assert ask(server) == {"digest": pytest.approx(digest(weights(1))), "device": "cuda:1"}
    finally:
        sender.close()
    assert sum("inference joined over nccl" in record.getMessage() for record in caplog.records) == 2
