"""The trainer's side: a thread that hands the newest weights to every server that asks for them, as often as asked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from prime_rl.transfer.link import (
    NUM_REQUESTS_KEY,
    Answer,
    Description,
    Group,
    Request,
    answer_key,
    connect,
    listen,
    request_key,
)

logger = logging.getLogger(__name__)

POLL_S = 0.05


class WeightSender:
    """Listens at `host`:`port` from its construction to `close`. Raises OSError when it cannot.

    Args:
        timeout_s: how long a server that asked may take to join, and each tensor to get through.
    """

    def __init__(self, host: str, port: int, *, timeout_s: float) -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._store = listen(host, port, timeout_s)
        # A separate client: otherwise one waits for the other's answers.
        self._inbox = connect(host, port, timeout_s)
        self._inbox.add(NUM_REQUESTS_KEY, 0)
        self._offer: tuple[str, Mapping[str, Tensor]] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weight sender", daemon=True)
        self._thread.start()

    def offer(self, label: str, tensors: Mapping[str, Tensor]) -> None:
        """From now on these are handed out, under this name. They must not change after that."""
        self._offer = (label, tensors)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _serve(self) -> None:
        number = 0
        while not self._closed.wait(POLL_S):
            while number < self._inbox.add(NUM_REQUESTS_KEY, 0) and not self._closed.is_set():
                number += 1
                try:
                    self._serve_one(self._inbox, number)
                except Exception as error:
                    # The next server must still be served; this one gets an error or a timeout, and asks again.
                    logger.warning("sending weights to inference failed: %s", error)

    def _serve_one(self, store: TCPStore, number: int) -> None:
        request = msgspec.json.decode(store.get(request_key(number)), type=Request)
        store.delete_key(request_key(number))
        answer, tensors = self._answer(request)
        store.set(answer_key(request.ticket), msgspec.json.encode(answer).decode())
        if answer.problem is not None:
            logger.warning("inference requested %s: %s", request.label, answer.problem)
            return
        group = Group(
            store,
            request.ticket,
            answer.backend,
            host=self._host,
            rank=0,
            size=1 + request.num_receivers,
            timeout_s=self._timeout_s,
        )
        for tensor in tensors.values():
            group.broadcast(tensor.to(group.device).contiguous())
        logger.info("inference received %s", request.label)

    def _answer(self, request: Request) -> tuple[Answer, Mapping[str, Tensor]]:
        if self._offer is None:
            return Answer("the trainer has published no weights yet"), {}
        label, tensors = self._offer
        if label != request.label:
            return Answer(f"the trainer holds {label}, not {request.label}"), {}
        descriptions = tuple(
            Description(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in tensors.items()
        )
        backend = "nccl" if request.has_gpu and torch.cuda.is_available() else "gloo"
        return Answer(backend=backend, tensors=descriptions), tensors
