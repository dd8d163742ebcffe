"""How many bytes of tensors are alive, while real code runs on tensors without memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages of the tensors that operations return; each counts once, until the last tensor on it goes.

    Attributes:
        alive: bytes now.
        peak: most bytes since the start, or since `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = 0
        self.peak = 0
        self._seen: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # Numbers that code makes on the side are real tensors, and small.
            if isinstance(leaf, FakeTensor):
                self._add(leaf)
        self.peak = max(self.peak, self.alive)
        return result

    def reset_peak(self) -> None:
        self.peak = self.alive

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        num_bytes = storage.nbytes()
        self._seen[storage] = num_bytes
        self.alive += num_bytes
        weakref.finalize(storage, self._remove, num_bytes)

    def _remove(self, num_bytes: int) -> None:
        self.alive -= num_bytes


@contextmanager
def metered() -> Iterator[Meter]:
    """Inside, tensors have shapes and types and no memory, and the meter counts them."""
    meter = Meter()
    with FakeTensorMode(allow_non_fake_inputs=True), meter:
        yield meter
