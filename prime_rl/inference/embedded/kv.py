"""The KV cache of a running batch: all rows share one write column, so a decode step is one forward for all of them.

Rows are aligned at the right: a row of n tokens fills the last n columns and the columns before them are masked. The
next token of every row then goes into the same column (a plain slice, no gather), distances between columns are
distances between tokens (sliding windows stay right), and transformers' own masks for left-padded batches apply. When
the batch changes (`compose`), rows are copied together and columns that no row needs are cut off.

Dimensions: R rows, H KV heads, C columns allocated, T columns in use, Q new columns, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

# Free columns after a copy: a copy costs about a fifth of a step of a small model, so once in 64 steps is nothing.
SPARE_COLUMNS = 64


class ColumnLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, `[R, H, C, D]`, of which `num_columns` columns are in use."""

    is_sliding = False
    is_compileable = False

    def __init__(self) -> None:
        super().__init__()
        self.num_columns = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = _room(key_states, key_states.shape[2])
        self.values = _room(value_states, key_states.shape[2])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append Q columns `[R, H, Q, D]`; returns all columns in use, as views."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        start, end = self.num_columns, self.num_columns + key_states.shape[2]
        if end > self.keys.shape[2]:
            self.keys = _grown(self.keys, start, end)
            self.values = _grown(self.values, start, end)
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.num_columns = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.num_columns

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):  # type: ignore[misc]
    """The cache of one batch; give it to a transformers model as `past_key_values`."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=ColumnLayer)

    @property
    def num_columns(self) -> int:
        return int(self.layers[0].num_columns) if self.layers else 0

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token of one row, in all layers."""
        tensors = [tensor for layer in self.layers for tensor in (layer.keys, layer.values)]
        return sum(int(t.shape[1] * t.shape[3] * t.element_size()) for t in tensors)


@dataclass(frozen=True)
class CacheRows:
    """Rows `source_rows` of `cache` go to `dest_rows` of the new one, a source row perhaps several times."""

    cache: RowCache
    source_rows: Sequence[int]
    dest_rows: Sequence[int]


def compose(parts: Sequence[CacheRows], num_columns: int) -> RowCache:
    """A new cache of the rows of all `parts`, with the last `num_columns` columns of each.

    `num_columns` must be the length of the longest row at least; what is cut off is lost.
    """
    new = RowCache()
    for layers in zip(*(part.cache.layers for part in parts), strict=True):
        layer = ColumnLayer()
        layer.keys = _joined(parts, [(old.keys, old.num_columns) for old in layers], num_columns)
        layer.values = _joined(parts, [(old.values, old.num_columns) for old in layers], num_columns)
        layer.num_columns = num_columns
        layer.is_initialized = True
        new.layers.append(layer)
    return new


def _joined(parts: Sequence[CacheRows], olds: Sequence[tuple[Tensor, int]], num_columns: int) -> Tensor:
    first_RHCD = olds[0][0]
    num_rows = sum(len(part.dest_rows) for part in parts)
    shape = (num_rows, first_RHCD.shape[1], num_columns + SPARE_COLUMNS, first_RHCD.shape[3])
    # Zeros and not garbage: a masked column is multiplied by zero, and zero times NaN is NaN.
    joined_RHCD = first_RHCD.new_zeros(shape)
    for part, (old_RHCD, old_columns) in zip(parts, olds, strict=True):
        width = min(num_columns, old_columns)
        source = torch.tensor(part.source_rows, device=first_RHCD.device)
        dest = torch.tensor(part.dest_rows, device=first_RHCD.device)
        joined_RHCD[dest, :, num_columns - width : num_columns] = old_RHCD[source, :, old_columns - width : old_columns]
    return joined_RHCD


def _room(states_RHQD: Tensor, num_columns: int) -> Tensor:
    R, H, _, D = states_RHQD.shape
    return states_RHQD.new_zeros((R, H, num_columns, D))


def _grown(old_RHCD: Tensor, used: int, needed: int) -> Tensor:
    new_RHCD = _room(old_RHCD, needed + SPARE_COLUMNS)
    new_RHCD[:, :, :used] = old_RHCD[:, :, :used]
    return new_RHCD
