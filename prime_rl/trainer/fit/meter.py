"""How many bytes of tensors are alive, while real code runs on tensors without memory, on ranks that are not there."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives of tensors without memory
import torch.testing._internal.distributed.fake_pg
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages of the tensors that operations return; each counts once, until the last tensor on it goes.

    Attributes:
        alive: bytes now.
        peak: most bytes since the start, or since `reset_peak`.
        on_host: bytes that lie elsewhere, in the memory of the host; they do not count as alive.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = 0
        self.peak = 0
        self.on_host = 0
        self._is_host = False
        self._seen: weakref.WeakKeyDictionary[torch.UntypedStorage, _Size] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # more than half of all calls, and each is slow when a mode is asked
        if DTensor in types:
            return NotImplemented  # it comes again, as an operation on the part of this rank
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # Numbers that code makes on the side are real tensors, and small.
            if isinstance(leaf, FakeTensor):
                self._add(leaf)
        self.peak = max(self.peak, self.alive)
        return result

    def reset_peak(self) -> None:
        """Begin a new peak from what is alive."""
        self.peak = self.alive

    def copy_on_host(self, tensor: Tensor) -> Tensor:
        """As large as `tensor`, in the memory of the host."""
        self._is_host = True
        try:
            return torch.empty_like(tensor)
        finally:
            self._is_host = False

    def resized(self, storage: torch.UntypedStorage) -> None:
        """`storage` has another size now: sharded weights come and go so."""
        if size := self._seen.get(storage):
            self.alive += storage.nbytes() - size.num_bytes
            size.num_bytes = storage.nbytes()
            self.peak = max(self.peak, self.alive)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        size = self._seen[storage] = _Size(storage.nbytes(), self._is_host)
        self._count(size, size.num_bytes)
        weakref.finalize(storage, self._remove, size)

    def _remove(self, size: _Size) -> None:
        self._count(size, -size.num_bytes)

    def _count(self, size: _Size, num_bytes: int) -> None:
        if size.is_on_host:
            self.on_host += num_bytes
        else:
            self.alive += num_bytes


@dataclass
class _Size:
    num_bytes: int
    is_on_host: bool


@contextmanager
def metered() -> Iterator[Meter]:
    """Inside, tensors have shapes and types and no memory, and the meter counts them."""
    meter = Meter()
    storage_class: Any = torch.UntypedStorage
    resize = storage_class.resize_

    def resize_and_tell(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        resized = resize(storage, num_bytes)
        meter.resized(storage)
        return resized

    storage_class.resize_ = resize_and_tell
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), meter:
            yield meter
    finally:
        storage_class.resize_ = resize


@contextmanager
def mesh_of_ranks(num_ranks: int) -> Iterator[DeviceMesh]:
    """A mesh of `num_ranks`. In a trainer it is of its own group, which must have as many ranks: then a collective."""
    is_alone = not dist.is_initialized()
    if is_alone:
        dist.init_process_group("fake", rank=0, world_size=num_ranks, store=HashStore())
    try:
        yield init_device_mesh("cpu", (num_ranks,))
    finally:
        if is_alone:
            dist.destroy_process_group()
