"""The KV cache of a running batch: all rows share one write column, so a decode step is one forward for all of them.

Rows are aligned at the right: a row of n tokens fills the last n columns and the columns before them are masked. The
next token of every row then goes into the same column (a plain slice, no gather), distances between columns are
distances between tokens (sliding windows stay right), and transformers' own masks for left-padded batches apply. When
the batch changes (`compose`), rows are copied together and columns that no row needs are cut off.

transformers repeats the KV heads for every masked call, which copies the whole cache once a step and layer. With one
query a row, the queries of a group can stand where the tokens of a query stand: the same numbers, no copy
(`grouped_attention`).

Dimensions: R rows, H KV heads, C columns allocated, T columns in use, Q new columns, D head size; in the attention
also G query heads of one KV head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

# Free columns after a copy: a copy costs about a fifth of a step of a small model, so once in 64 steps is nothing.
SPARE_COLUMNS = 64
ATTENTION = "prl_grouped"


class ColumnLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, `[R, H, C, D]`, of which `num_columns` columns are in use."""

    is_croppable = False
    keys: Any
    values: Any
    is_initialized: bool

    def __init__(self) -> None:
        super().__init__()
        self.num_columns = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append Q columns `[R, H, Q, D]`; returns all columns in use, as views."""
        start, end = self.num_columns, self.num_columns + key_states.shape[2]
        if not self.is_initialized or end > self.keys.shape[2]:
            # A prompt gets no spare columns: it is copied when its row joins the others.
            room = end + SPARE_COLUMNS if start else end
            self.keys, self.values = _grown(self.keys, key_states, room), _grown(self.values, value_states, room)
            self.is_initialized = True
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.num_columns = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.num_columns


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


def compose(rows: Sequence[tuple[RowCache, int]], num_columns: int) -> RowCache:
    """A new cache whose rows are the given rows of other caches, with the last `num_columns` columns of each.

    `num_columns` must be the length of the longest row at least; what is cut off is lost.
    """
    caches = {id(cache): cache for cache, _ in rows}.values()
    device = rows[0][0].layers[0].keys.device
    # Of each old cache: rows of it, and where they go.
    moves = [
        torch.tensor([(row, dest) for dest, (cache, row) in enumerate(rows) if cache is each], device=device).unbind(1)
        for each in caches
    ]
    new = RowCache()
    # Zeros and not garbage: a masked column is multiplied by zero, and zero times NaN is NaN.
    for olds in zip(*(cache.layers for cache in caches), strict=True):
        layer = ColumnLayer()
        layer.keys, layer.values = (
            like.new_zeros((len(rows), like.shape[1], num_columns + SPARE_COLUMNS, like.shape[3]))
            for like in (olds[0].keys, olds[0].values)
        )
        layer.num_columns, layer.is_initialized = num_columns, True
        for old, (source_R, dest_R) in zip(olds, moves, strict=True):
            width = min(num_columns, old.num_columns)
            to, since = slice(num_columns - width, num_columns), slice(old.num_columns - width, old.num_columns)
            layer.keys[dest_R, :, to] = old.keys[source_R, :, since]
            layer.values[dest_R, :, to] = old.values[source_R, :, since]
        new.layers.append(layer)
    return new


def _grown(old_RHCD: Tensor | None, states_RHQD: Tensor, room: int) -> Tensor:
    R, H, _, D = states_RHQD.shape
    new_RHCD = states_RHQD.new_zeros((R, H, room, D))
    if old_RHCD is not None:
        new_RHCD[:, :, : old_RHCD.shape[2]] = old_RHCD
    return new_RHCD


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Switch `model` to `grouped_attention` when it uses transformers' sdpa; other kinds are left as they are."""
    if model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(ATTENTION, grouped_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Same arguments and result as transformers' sdpa function: query `[R, HG, Q, D]` -> `[R, Q, HG, D]`."""
    num_groups = getattr(module, "num_key_value_groups", 1)
    plain = query.shape[2] == 1 and num_groups > 1 and kwargs.get("position_bias") is None
    if not plain or (attention_mask is not None and attention_mask.shape[1] != 1):
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    query_RHGD = query.reshape(query.shape[0], key.shape[1], num_groups, query.shape[3])
    mask_R1GT = None if attention_mask is None else attention_mask.expand(-1, -1, num_groups, -1)
    out_RHGD = F.scaled_dot_product_attention(query_RHGD, key, value, attn_mask=mask_R1GT, scale=scaling)
    return out_RHGD.flatten(1, 2)[:, None], None
