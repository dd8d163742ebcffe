"""How the two sides meet: a store that the trainer keeps open, and a process group that lasts over many transfers.

Every worker of a server leaves a `Hello` in the store, the first of them also a `Request`. The sender puts down one
`Answer`: a refusal, or the group in which it is rank 0 and which tensors come. That group is the one of the last
transfer if all of them still have it, else a new one, so either side may die and come back at any time. Groups are
gloo's between CPUs, NCCL's between GPUs. The store is as trusting as torch's: for machines that trust each other.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch import Tensor

# torch.distributed shows these too, but does not export them by name.
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

NUM_REQUESTS_KEY = "num_requests"


class Request(msgspec.Struct, frozen=True):
    """All workers of one server ask for the weights called `label`."""

    ticket: str
    label: str
    num_receivers: int


class Hello(msgspec.Struct, frozen=True):
    """One worker: the group that it still has from the last transfer, and its GPU, if it has one (`gpu_name`)."""

    group_id: str | None = None
    gpu: str | None = None


class Description(msgspec.Struct, frozen=True):
    """One tensor that is sent. `dtype` is its name in `torch`: "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Answer(msgspec.Struct, frozen=True):
    """`problem` is the reason of a refusal; else the tensors come over the group `group_id`, in this order."""

    problem: str | None = None
    group_id: str = ""
    backend: str = "gloo"
    tensors: tuple[Description, ...] = ()


def request_key(number: int) -> str:
    """Where the store has the `Request` of that number, from 1."""
    return f"request/{number}"


def hello_key(ticket: str, rank: int) -> str:
    """Where the store has the `Hello` of worker `rank`, from 1, for the request with that ticket."""
    return f"hello/{ticket}/{rank}"


def answer_key(ticket: str) -> str:
    """Where the store has the `Answer` to the request with that ticket."""
    return f"answer/{ticket}"


def gpu_name(device: torch.device) -> str | None:
    """What identifies a GPU, on any machine; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


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
        # Without a socket torch listens on every address of the machine.
        master_listen_fd=sock.detach(),
    )


def connect(host: str, port: int, timeout_s: float) -> TCPStore:
    """A client's end. Raises RuntimeError (torch's) when no server listens there within `timeout_s`."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


class Group:
    """The sender (rank 0) and the workers of one server, until one of them fails.

    Args:
        device: where the tensors of this side are: of type "cuda" for NCCL, "cpu" for gloo.

    Raises RuntimeError when the others do not join within `timeout_s`.
    """

    def __init__(
        self, store: Store, group_id: str, *, device: torch.device, host: str, rank: int, size: int, timeout_s: float
    ) -> None:
        self.device = device
        self._timeout = timedelta(seconds=timeout_s)
        own = PrefixStore(f"group/{group_id}", store)
        if device.type == "cuda":
            self._group = _nccl(own, rank, size, self._timeout)
            # The streams that train or generate never wait for a transfer.
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        else:
            self._group = _gloo(own, rank, size, self._timeout, host)

    def broadcast(self, tensor: Tensor) -> None:
        """From rank 0 to all, in place; done when it returns. Raises RuntimeError when a side is gone or too slow."""
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._timeout
        with self._on_own_stream():
            self._group.broadcast([tensor], options).wait(self._timeout)

    def close(self) -> None:
        """Never waits for the others."""
        if self.device.type == "cuda":
            self._group.abort()
        del self._group

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        if self.device.type != "cuda":
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield


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
    with _blocking_wait():
        return ProcessGroupNCCL(store, rank, size, options)


@contextlib.contextmanager
def _blocking_wait() -> Iterator[None]:
    """A group made in here raises when the other side is gone; by default it would end this process."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
