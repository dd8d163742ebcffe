"""How the two sides meet: a store that the trainer keeps open, and a new process group for each transfer.

A receiver asks through the store (`Request`), the sender answers (`Answer`), and where the answer is a yes both join a
group in which the sender is rank 0: gloo between CPUs, NCCL between GPUs. A group lives for one transfer, so either
side may die and come back at any time. The store is as trusting as torch's: for machines that trust each other.
"""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch import Tensor

# torch.distributed shows these too, but does not export them by name.
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

NUM_REQUESTS_KEY = "num_requests"


class Request(msgspec.Struct):
    """The wish of all workers of one server for the weights called `label`."""

    ticket: str
    label: str
    num_receivers: int
    has_gpu: bool


class Description(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class Answer(msgspec.Struct):
    """`problem` is the reason of a refusal; else the tensors come over `backend` in this order."""

    problem: str | None = None
    backend: str = "gloo"
    tensors: tuple[Description, ...] = ()


def request_key(number: int) -> str:
    return f"request/{number}"


def answer_key(ticket: str) -> str:
    return f"answer/{ticket}"


def listen(host: str, port: int, timeout_s: float) -> TCPStore:
    """The sender's end of the store, on this address only. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family)
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        # torch by itself listens on every address of the machine.
        master_listen_fd=sock.detach(),
    )


def connect(host: str, port: int, timeout_s: float) -> TCPStore:
    """A client's end. Raises RuntimeError (torch's) when no server listens there within `timeout_s`."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


class Group:
    """The process group of one transfer; `rank` 0 sends. Raises RuntimeError when the others do not join in time."""

    def __init__(
        self, store: Store, ticket: str, backend: str, *, host: str, rank: int, size: int, timeout_s: float
    ) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        own = PrefixStore(f"group/{ticket}", store)
        self._group = (
            _nccl(own, rank, size, self._timeout) if backend == "nccl" else _gloo(own, rank, size, self._timeout, host)
        )

    def broadcast(self, tensor: Tensor) -> None:
        """From rank 0 to all; in place. Raises RuntimeError when a side is gone or too slow."""
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._timeout
        self._group.broadcast([tensor], options).wait(self._timeout)


def _gloo(store: Store, rank: int, size: int, timeout: timedelta, host: str) -> Any:
    gloo: Any = ProcessGroupGloo  # incomplete stubs
    options = gloo._Options()
    options._timeout = timeout
    # Between processes of one machine nothing listens on its other addresses.
    options._devices = [gloo.create_device(hostname=host) if _is_loopback(host) else gloo.create_default_device()]
    return gloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL  # builds for a CPU do not have it

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, options)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
