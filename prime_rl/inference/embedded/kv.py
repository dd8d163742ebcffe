"""The KV cache of a running batch: all rows share one write column, so a decode step is one forward for all of them.

Rows are aligned at the right: a row of n tokens fills the last n columns and the columns before them are masked. The
next token of every row then goes into the same column (a plain slice, no gather), distances between columns are
distances between tokens (sliding windows stay right), and transformers' own masks for left-padded batches apply. When
the batch changes or its columns are full (`compose`), rows are copied together and columns that no row needs are cut
off.

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
    is_initialized: bool

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None, num_columns: int = 0) -> None:
        super().__init__()
        self.keys: Any = keys
        self.values: Any = values
        self.num_columns = num_columns
        self.is_initialized = keys is not None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append Q columns `[R, H, Q, D]`; returns all columns in use, as views.

        The columns of a prompt are kept as they come: they are copied when its row joins the others.
        """
        start, self.num_columns = self.num_columns, self.num_columns + key_states.shape[2]
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
        else:
            self.keys[:, :, start : self.num_columns] = key_states
            self.values[:, :, start : self.num_columns] = value_states
        return self.keys[:, :, : self.num_columns], self.values[:, :, : self.num_columns]

    def get_seq_length(self) -> int:
        """Columns in use, under the name that transformers calls."""
        return self.num_columns


def new_cache() -> Cache:
    """An empty cache; give it to a transformers model as `past_key_values`."""
    return Cache(layer_class_to_replicate=ColumnLayer)


def compose(rows: Sequence[tuple[Cache, int]], num_columns: int) -> Cache:
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

    def moved(olds: Sequence[Tensor], used: Sequence[int]) -> Tensor:
        _, H, _, D = olds[0].shape
        # Zeros and not garbage: a masked column is multiplied by zero, and zero times NaN is NaN.
        new_RHCD = olds[0].new_zeros((len(rows), H, num_columns + SPARE_COLUMNS, D))
        for old_RHCD, end, (source_R, dest_R) in zip(olds, used, moves, strict=True):
            width = min(num_columns, end)
            new_RHCD[dest_R, :, num_columns - width : num_columns] = old_RHCD[source_R, :, end - width : end]
        return new_RHCD

    new = new_cache()
    for olds in zip(*(cache.layers for cache in caches), strict=True):
        used = [old.num_columns for old in olds]
        keys, values = moved([old.keys for old in olds], used), moved([old.values for old in olds], used)
        new.layers.append(ColumnLayer(keys, values, num_columns))
    return new


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
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Same arguments and result as transformers' sdpa function: query `[R, HG, Q, D]` -> `[R, Q, HG, D]`."""
    num_groups = getattr(module, "num_key_value_groups", 1)
    plain = query.shape[2] == 1 and num_groups > 1 and kwargs.get("position_bias") is None
    if not plain or (attention_mask is not None and attention_mask.shape[1] != 1):
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return result
    query_RHGD = query.reshape(query.shape[0], key.shape[1], num_groups, query.shape[3])
    mask_R1GT = None if attention_mask is None else attention_mask.expand(-1, -1, num_groups, -1)
    out_RHGD = F.scaled_dot_product_attention(query_RHGD, key, value, attn_mask=mask_R1GT, scale=scaling)
    return out_RHGD.flatten(1, 2)[:, None], None
