"""The two sides of a transfer, and how they meet.

`WeightSender` is the trainer's side: a thread that hands the newest weights to every server that asks. `WeightReceiver`
is one worker of a server, which gets the whole weights or fails with a one-line error. They meet by a store that the
trainer keeps open, and a process group that lasts over many transfers. Every worker of a server leaves a `Hello` in the
store, the first of them also a `Request`. The sender puts down one `Answer`: a refusal, or the group in which it is
rank 0 and which tensors come. That group is the one of the last transfer if all of them still have it, else a new one,
so either side may die and come back at any time. Groups are gloo's between CPUs, NCCL's between GPUs. The store is as
trusting as torch's: for machines that trust each other.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

logger = logging.getLogger(__name__)

NUM_REQUESTS_KEY = "num_requests"
POLL_S = 0.05
# A server that fetched none of so many versions is gone, or gets a new group when it asks again.
MOST_MISSED = 3
# What a server needs beside the weights while it loads them.
SPARE_BYTES = 1 << 30


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
    """The key of the `Request` of that number, from 1."""
    return f"request/{number}"


def hello_key(ticket: str, rank: int) -> str:
    """The key of the `Hello` of worker `rank`, from 1, for the request with that ticket."""
    return f"hello/{ticket}/{rank}"


def answer_key(ticket: str) -> str:
    """The key of the `Answer` to the request with that ticket."""
    return f"answer/{ticket}"


def gpu_name(device: torch.device) -> str | None:
    """The name of a GPU that is its own on any machine; None for a CPU."""
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


class Offer(NamedTuple):
    """Weights to hand out. `number` counts offers; `device` is where they are."""

    number: int
    label: str
    tensors: Mapping[str, Tensor]
    device: torch.device


@dataclass
class _Server:
    """The workers of one server, which share `group` with the sender; `offer` and `ticket` are of the last transfer."""

    group: Group
    backend: str
    offer: int
    ticket: str


class WeightSender:
    """Listens at `host`:`port` from its construction to `close`. Raises OSError when it cannot.

    Args:
        timeout_s: how long a server that asked may take to join, and each tensor to get through.
        gpu: name of the GPU that the weights are on; default: `gpu_name` of their device.
    """

    def __init__(self, host: str, port: int, *, timeout_s: float, gpu: str | None = None) -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._gpu = gpu
        self._listener = listen(host, port, timeout_s)
        # A separate client: otherwise one waits for the other's answers.
        self._store = connect(host, port, timeout_s)
        self._store.add(NUM_REQUESTS_KEY, 0)
        self._offer: Offer | None = None
        self._servers: dict[str, _Server] = {}  # by the id of their group
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weight sender", daemon=True)
        self._thread.start()

    def offer(self, label: str, tensors: Mapping[str, Tensor]) -> None:
        """From now on these are handed out, under this name. They are all on one device, and must not change."""
        number = self._offer.number + 1 if self._offer else 1
        self._offer = Offer(number, label, tensors, next(iter(tensors.values())).device)

    def close(self) -> None:
        """End the thread when its transfer is over, and leave the groups of all servers."""
        self._closed.set()
        self._thread.join()

    def _serve(self) -> None:
        number = 0
        while not self._closed.wait(POLL_S):
            while number < self._store.add(NUM_REQUESTS_KEY, 0) and not self._closed.is_set():
                number += 1
                try:
                    self._serve_one(number)
                except Exception as error:
                    # The next server must still be served; this one gets an error or a timeout, and asks again.
                    logger.warning("sending weights to inference failed: %s", error)
        for group_id in list(self._servers):
            self._drop(group_id)

    def _serve_one(self, number: int) -> None:
        request = msgspec.json.decode(self._store.get(request_key(number)), type=Request)
        self._store.delete_key(request_key(number))
        try:
            hellos, offer = self._hellos(request), self._offered(request.label)
            backend = choose_backend(self._gpu or gpu_name(offer.device), [hello.gpu for hello in hellos])
        except ValueError as problem:
            self._put(request.ticket, Answer(str(problem)))
            logger.warning("inference requested %s: %s", request.label, problem)
            return
        group_id = self._common_group(hellos, backend) or uuid.uuid4().hex
        described = tuple(
            Description(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in offer.tensors.items()
        )
        self._put(request.ticket, Answer(None, group_id, backend, described))
        try:
            group = self._group(group_id, backend, request, offer)
            for tensor in offer.tensors.values():
                group.broadcast(tensor.to(group.device).contiguous())
        except BaseException:
            self._drop(group_id)
            raise
        for missing in [key for key, server in self._servers.items() if server.offer < offer.number - MOST_MISSED]:
            self._drop(missing)
        logger.info("inference received %s", request.label)

    def _hellos(self, request: Request) -> list[Hello]:
        """One from every worker. Raises ValueError when one does not come."""
        keys = [hello_key(request.ticket, rank) for rank in range(1, 1 + request.num_receivers)]
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise ValueError(
                f"not all {request.num_receivers} workers of the server asked within {self._timeout_s:g} s"
            ) from error
        hellos = [msgspec.json.decode(self._store.get(key), type=Hello) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return hellos

    def _offered(self, label: str) -> Offer:
        """Raises ValueError when it is not what is offered now."""
        if self._offer is None:
            raise ValueError("the trainer has published no weights yet")
        if self._offer.label != label:
            raise ValueError(f"the trainer holds {self._offer.label}, not {label}")
        return self._offer

    def _common_group(self, hellos: Sequence[Hello], backend: str) -> str | None:
        """The group that all of them and the sender still have. What only some of them have is dropped."""
        held = {hello.group_id for hello in hellos}
        if len(held) == 1:
            (group_id,) = held
            if group_id in self._servers and self._servers[group_id].backend == backend:
                return group_id
        for group_id in held:
            if group_id is not None:
                self._drop(group_id)
        return None

    def _group(self, group_id: str, backend: str, request: Request, offer: Offer) -> Group:
        """The group of a server, which the workers join now if it is new."""
        server = self._servers.get(group_id)
        if server is None:
            group = Group(
                self._store,
                group_id,
                device=offer.device if backend == "nccl" else torch.device("cpu"),
                host=self._host,
                rank=0,
                size=1 + request.num_receivers,
                timeout_s=self._timeout_s,
            )
            server = self._servers[group_id] = _Server(group, backend, offer.number, request.ticket)
            logger.info("inference joined over %s, %d workers", backend, request.num_receivers)
        elif server.ticket != request.ticket:
            # A server that asks again has read the answer before.
            self._store.delete_key(answer_key(server.ticket))
        server.offer, server.ticket = offer.number, request.ticket
        return server.group

    def _drop(self, group_id: str) -> None:
        server = self._servers.pop(group_id, None)
        if server is not None:
            server.group.close()

    def _put(self, ticket: str, answer: Answer) -> None:
        self._store.set(answer_key(ticket), msgspec.json.encode(answer).decode())


def choose_backend(sender: str | None, receivers: Sequence[str | None]) -> str:
    """The library that moves the weights: nccl where both sides have GPUs, else gloo. Both by the names of their GPUs.

    Raises ValueError where two share a GPU.
    """
    if sender is None or None in receivers:
        return "gloo"
    if sender in receivers:
        raise ValueError(
            f"trainer and inference share the GPU {sender}, and NCCL needs one GPU for each process: "
            "set CUDA_VISIBLE_DEVICES of one of them to another GPU, or broadcast.type = 'filesystem'"
        )
    if shared := {gpu for gpu in receivers if receivers.count(gpu) > 1}:
        raise ValueError(f"workers of the server share the GPU {min(map(str, shared))}: NCCL needs one GPU for each")
    return "nccl"


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
    """True when `device` holds them beside the weights in force."""
    if device.type != "cuda":
        return True
    needed = sum(getattr(torch, each.dtype).itemsize * torch.Size(each.shape).numel() for each in tensors)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return bool(needed + SPARE_BYTES <= torch.cuda.mem_get_info(device)[0] + unused)


def _get(group: Group, described: Description, home: torch.device) -> Tensor:
    tensor = torch.empty(described.shape, dtype=getattr(torch, described.dtype), device=group.device)
    group.broadcast(tensor)
    return tensor.to(home)
