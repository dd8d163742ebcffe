"""Attention of the trainer: causal inside each sample of a packed row, and positions without temporaries.

A packed row has many samples end to end, no padding between them. On a GPU in 16 bits it is one kernel for all samples:
flash-attn's where that is installed, else torch's own. Elsewhere each sample, or each stretch of neighbours of one
length, is a call of torch's scaled dot product. The mask of tokens x tokens that transformers would make never exists.

Rotary positions as the libraries write them make four tables of the size of the queries in addition to the result. Here
the result is the only one, forward and backward.

Dimensions: N tokens of a packed row, S samples, H query heads, K KV heads, D head size, R rows, or neighbours of L
tokens.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from prime_rl.trainer.fused import recipe_of, remember

logger = logging.getLogger(__name__)

# The name of packed attention. No mask function is registered under it, so transformers makes no mask: causal is all
# that there is.
PACKED_ATTENTION = "prl_packed"
# Those of transformers whose module has `apply_rotary_pos_emb(q, k, cos, sin)` with halves that are rotated.
ROTARY_ATTENTIONS = frozenset({"LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention"})


@dataclass(frozen=True)
class Segments:
    """The places of the samples of a packed row.

    Attributes:
        stretches: (number of neighbours of one length, that length), in order.
        positions_1N: the place of each token in its own sample.
        ends_S: int32, 0 and the end of each sample, as the kernels want it.
        longest: tokens of the longest sample.
    """

    stretches: tuple[tuple[int, int], ...]
    positions_1N: Tensor
    ends_S: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Segments:
        """Of samples of `lengths` tokens, in order; the tensors are on `device`."""
        stretches = tuple((len(list(same)), length) for length, same in groupby(lengths))
        positions_N = torch.cat([torch.arange(length) for length in lengths])
        ends_S = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(stretches, positions_N[None].to(device), ends_S.to(device), max(lengths))


def can_pack(model: nn.Module) -> bool:
    """True when attention of `model` is causal and nothing else: a window or a score of its own needs its own mask."""
    config: Any = model.config
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    return kinds == {"full_attention"} and config._attn_implementation in ("sdpa", PACKED_ATTENTION)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Let `model` take `segments=Segments(...)` with a packed row; without it attention is plainly causal."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    model.set_attn_implementation(PACKED_ATTENTION)


def packed_attention(
    module: nn.Module,
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KND: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Same arguments and result (`[1, N, H, D]`) as transformers' sdpa function."""
    query, key, value = query_1HND, key_1KND, value_1KND
    if segments is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        q_NHD, k_NKD, v_NKD = (each[0].transpose(0, 1) for each in (query, key, value))
        return varlen_kernel()(q_NHD, k_NKD, v_NKD, segments, scaling)[None], None
    return _by_stretches(query, key, value, segments, scaling), None


VarlenKernel = Callable[[Tensor, Tensor, Tensor, Segments, float | None], Tensor]


@cache
def varlen_kernel() -> VarlenKernel:
    """The best one that is installed; named in the log. Query `[N, H, D]`, key and value `[N, K, D]`."""
    has_flash = importlib.util.find_spec("flash_attn") is not None
    logger.info("packed rows: attention of %s", "flash-attn" if has_flash else "torch (varlen_attn)")
    return _flash_attn if has_flash else _torch_varlen


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]

    ends, longest = segments.ends_S, segments.longest
    out: Tensor = flash_attn_varlen_func(
        query, key, value, ends, ends, longest, longest, softmax_scale=scaling, causal=True
    )
    return out


def _torch_varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = segments.ends_S, segments.longest
    # A window without end to the left and none to the right is causal.
    out = varlen_attn(
        query, key, value, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=True
    )
    assert isinstance(out, Tensor)
    return out


def _by_stretches(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    """`[1, N, H, D]`."""
    parts, start = [], 0
    for num_samples, length in segments.stretches:
        stop = start + num_samples * length
        q_RHLD, k_RKLD, v_RKLD = (
            each[0, :, start:stop].reshape(each.shape[1], num_samples, length, -1).transpose(0, 1)
            for each in (query, key, value)
        )
        out_RHLD = nn.functional.scaled_dot_product_attention(
            q_RHLD, k_RKLD, v_RKLD, is_causal=True, scale=scaling, enable_gqa=True
        )
        parts.append(out_RHLD.transpose(1, 2).flatten(0, 1))
        start = stop
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]


def use_rotary(model: nn.Module) -> int:
    """Let the attention of `model` use `rotary`; returns in how many modules of transformers, for the whole process.

    Attention finds the function by its name in its own module and has no other place for it.
    """
    found = {type(each).__module__ for each in model.modules() if type(each).__name__ in ROTARY_ATTENTIONS}
    for name in found:
        library: Any = sys.modules[name]
        library.apply_rotary_pos_emb = rotary
    return len(found)


def rotary(
    q_RHND: Tensor, k_RKND: Tensor, cos_RND: Tensor, sin_RND: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Queries and keys at their positions: of the halves each pair (x, y) becomes (x cos - y sin, y cos + x sin)."""
    cos, sin = cos_RND.unsqueeze(unsqueeze_dim), sin_RND.unsqueeze(unsqueeze_dim)
    return _rotate(q_RHND, cos, sin), _rotate(k_RKND, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out: Tensor = _Rotary.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    if make := recipe_of(x):
        remember(out, lambda cos, sin: _rotated(make(), cos, sin), cos, sin)
    return out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    sin_first, sin_second = sin.chunk(2, -1)
    out = x * cos
    out_first, out_second = out.chunk(2, -1)
    out_first.addcmul_(second, sin_first, value=-1)
    out_second.addcmul_(first, sin_second)
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        first, second = grad.chunk(2, -1)
        sin_first, sin_second = sin.chunk(2, -1)
        out = grad * cos
        out_first, out_second = out.chunk(2, -1)
        out_first.addcmul_(second, sin_second)
        out_second.addcmul_(first, sin_first, value=-1)
        return out, None, None
