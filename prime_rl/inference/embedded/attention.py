"""Attention of a decode step without repeating keys and values for grouped queries.

transformers repeats the KV heads for every masked call on the CPU, which copies the whole cache once a step and layer.
With one query a row, the queries of a group can stand where the tokens of a query stand: the same numbers, no copy. All
other calls go to transformers' own function.

Dimensions: R rows, H query heads, K KV heads, G query heads of one KV head, T columns, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

NAME = "prl_grouped"


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Switch `model` to `grouped_attention` when it uses transformers' sdpa; other kinds are left as they are."""
    if model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


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
    """Same arguments and result as transformers' sdpa function: query `[R, H, Q, D]` -> `[R, Q, H, D]`."""
    num_groups = getattr(module, "num_key_value_groups", 1)
    plain = query.shape[2] == 1 and num_groups > 1 and kwargs.get("position_bias") is None
    if not plain or (attention_mask is not None and attention_mask.shape[1] != 1):
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    R, H, _, D = query.shape
    query_RKGD = query.reshape(R, key.shape[1], num_groups, D)
    mask_R1GT = None if attention_mask is None else attention_mask.expand(-1, -1, num_groups, -1)
    out_RKGD = F.scaled_dot_product_attention(query_RKGD, key, value, attn_mask=mask_R1GT, scale=scaling)
    return torch.reshape(out_RKGD, (R, 1, H, value.shape[-1])), None
