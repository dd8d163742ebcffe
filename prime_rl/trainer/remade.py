"""Tables that backward makes again instead of keeping them.

A norm keeps what it normalizes. Its result, which the layers behind it would keep too, costs two operations: backward
makes it again from that. So with queries and keys at their positions, where they were normalized before. Of a layer of
Qwen3-0.6B this is more than a third of all that is kept. The same operations on the same numbers: no bit changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

# Results that are remembered: from a norm to the last operation that keeps its result there are two others.
_NUM_REMEMBERED = 3
_Recipe = Callable[[], Tensor]


@dataclass(frozen=True)
class _View:
    """A tensor that is, or looks at, the result of `recipe`."""

    recipe: _Recipe
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def make(self) -> Tensor:
        return _made(self.recipe).as_strided(self.shape, self.stride, self.offset)


# Result, its version, how it is made. A weak reference: what is freed late leaves a hole in the heap. As long as there
# is one, no other storage has its address.
_remembered: deque[tuple[StorageWeakRef, int, _Recipe]] | None = None
# What was made last: queries, keys and values come from the same input, one after another.
_last: tuple[_Recipe, Tensor] | None = None


@contextmanager
def made_again() -> Iterator[None]:
    """Inside, what was `remember`ed is not kept for backward."""
    global _remembered, _last
    before, _remembered, _last = _remembered, deque(maxlen=_NUM_REMEMBERED), None
    try:
        with saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _remembered = before


def remember(result: Tensor, make: Callable[..., Tensor], *inputs: Any) -> None:
    """Let `make(*inputs)` stand for `result`, which it equals; of the inputs, those that are kept anyway."""
    if _remembered is not None and torch.is_grad_enabled():
        inputs = tuple(each.detach() if isinstance(each, Tensor) else each for each in inputs)
        storage = StorageWeakRef(result.untyped_storage())  # type: ignore[no-untyped-call]
        _remembered.append((storage, result._version, lambda: make(*inputs)))


def recipe_of(tensor: Tensor) -> _Recipe | None:
    """How `tensor` is made again, if it is a view of what was remembered."""
    view = _pack(tensor)
    return view.make if isinstance(view, _View) else None


def _pack(tensor: Tensor) -> Tensor | _View:
    for result, version, recipe in _remembered or ():
        if tensor.untyped_storage()._cdata == result.cdata and tensor._version == version:
            return _View(recipe, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    return tensor


def _made(recipe: _Recipe) -> Tensor:
    global _last
    if _last is not None and _last[0] is recipe:
        return _last[1]
    _last = None  # gone before the next is made
    with torch.no_grad():
        made = recipe()
    _last = recipe, made
    return made


def _unpack(kept: Tensor | _View) -> Tensor:
    return kept.make() if isinstance(kept, _View) else kept
