"""The head and the attention of a pass. They keep less for backward than the libraries'.

- The head: log-probability of the sampled tokens and entropy, a chunk of tokens at a time. The logits of a real
  vocabulary are most of the memory of a pass: 16,384 tokens of 151,936 entries are 9.3 GiB in float32, and autograd
  keeps several tables of that size. Here only a chunk of them exists at a time. The gradient with respect to a hidden
  state, `(W[target] - sum_v p_v W[v]) / temperature`, needs nothing but the chunk, so it is worked out there and
  backward only multiplies. Where the head itself is trained, backward computes each chunk again instead.
- Attention, causal inside each sample of a packed row: many samples end to end, no padding between them. On a GPU in 16
  bits it is one kernel for all samples: flash-attn's where that is installed, else torch's own. Elsewhere each sample,
  or each stretch of neighbours of one length, is a call of torch's scaled dot product. The mask of tokens x tokens that
  transformers would make never exists.

Dimensions: N tokens, C tokens of a chunk, H hidden size, V vocabulary; in attention N tokens of a packed row, S
samples, H query heads, K KV heads, D head size, R rows, or neighbours of L tokens.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
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

from prime_rl.lora.linear import sent

# Largest table of a chunk of the head, in bytes of float32: enough to keep a GPU busy, small beside any real model.
CHUNK_BYTES = 128 * 2**20


def token_logprobs(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperatures_N: Tensor
) -> tuple[Tensor, Tensor]:
    """(log pi of the targets, entropy), both `[N]` in float32, of the distribution after temperature.

    The entropy carries no gradient: it is reported, not trained.

    Args:
        weight_VH: the head's weight; it may be frozen or trained.
    """
    logprobs_N: Tensor
    entropy_N: Tensor
    logprobs_N, entropy_N = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, targets_N, temperatures_N
    )
    return logprobs_N, entropy_N


def head_chunks(num_tokens: int, num_vocabulary: int) -> list[slice]:
    """Tokens whose tables exist at one time."""
    size = max(1, CHUNK_BYTES // (4 * num_vocabulary))
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


def _scaled(hidden_CH: Tensor, weight_VH: Tensor, temperatures_C: Tensor) -> Tensor:
    """Logits after temperature, in float32 (or wider)."""
    if hidden_CH.dtype.itemsize >= torch.float32.itemsize:  # H of a token is much less than V
        return (hidden_CH / temperatures_C[:, None]) @ weight_VH.T
    scaled_CV: Tensor = (hidden_CH @ weight_VH.T) / temperatures_C[:, None]
    return scaled_CV


class _TokenLogprobs(torch.autograd.Function):
    """The tables of a chunk are locals of `_found` and `_grad`: gone before those of the next are made."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperatures_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        trains_head, trains_hidden = ctx.needs_input_grad[1], ctx.needs_input_grad[0]
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        logprobs_N, entropy_N, log_total_N = (hidden_NH.new_empty(len(hidden_NH), dtype=dtype) for _ in range(3))
        slope_NH = torch.empty_like(hidden_NH) if trains_hidden and not trains_head else None
        for chunk in head_chunks(len(hidden_NH), len(weight_VH)):
            slope_CH = None if slope_NH is None else slope_NH[chunk]
            found = _found(hidden_NH[chunk], weight_VH, targets_N[chunk], temperatures_N[chunk], slope_CH)
            logprobs_N[chunk], entropy_N[chunk], log_total_N[chunk] = found
        if trains_head:
            ctx.save_for_backward(hidden_NH, weight_VH, targets_N, temperatures_N, log_total_N)
        else:
            ctx.save_for_backward(slope_NH)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        if not ctx.needs_input_grad[1]:
            (slope_NH,) = ctx.saved_tensors
            return slope_NH * grad_N[:, None].to(slope_NH.dtype), None, None, None
        hidden_NH, weight_VH, *of_tokens = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH)
        # Many chunks are summed: in float32, whatever the weight's own type.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.promote_types(weight_VH.dtype, torch.float32))
        for chunk in head_chunks(len(hidden_NH), len(weight_VH)):
            grad_CV = _grad(hidden_NH[chunk], weight_VH, *(each_N[chunk] for each_N in (*of_tokens, grad_N)))
            grad_hidden_NH[chunk] = grad_CV @ weight_VH
            grad_weight_VH.add_(grad_CV.T @ hidden_NH[chunk])
            del grad_CV
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype), None, None


def _found(
    hidden_CH: Tensor, weight_VH: Tensor, targets_C: Tensor, temperatures_C: Tensor, slope_CH: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log pi of the targets, entropy, and the logarithm of the sum of all exponentials; fills `slope_CH`.

    Of all operations on a whole table, the exponential alone makes another one.
    """
    scaled_CV = _scaled(hidden_CH, weight_VH, temperatures_C)
    most_C = scaled_CV.amax(-1)
    exps_CV = scaled_CV.sub_(most_C[:, None]).exp()
    total_C = exps_CV.sum(-1)
    log_total_C = total_C.log()
    logprobs_C = scaled_CV.gather(-1, targets_C[:, None]).squeeze(-1) - log_total_C
    entropy_C = log_total_C - scaled_CV.mul_(exps_CV).sum(-1) / total_C
    if slope_CH is not None:
        del scaled_CV
        at_target_C = 1 / temperatures_C.to(exps_CV.dtype)
        slope_CV = _slope(exps_CV, targets_C, at_target_C, at_target_C / total_C)
        slope_CH.copy_(slope_CV.to(hidden_CH.dtype) @ weight_VH)
    return logprobs_C, entropy_C, most_C + log_total_C


def _grad(
    hidden_CH: Tensor,
    weight_VH: Tensor,
    targets_C: Tensor,
    temperatures_C: Tensor,
    log_total_C: Tensor,
    grad_C: Tensor,
) -> Tensor:
    """`[C, V]`, of the logits, in the type of the hidden states."""
    probs_CV = _scaled(hidden_CH, weight_VH, temperatures_C).sub_(log_total_C[:, None]).exp_()
    weights_C = grad_C / temperatures_C.to(probs_CV.dtype)
    return _slope(probs_CV, targets_C, weights_C, weights_C).to(hidden_CH.dtype)


def _slope(exps_CV: Tensor, targets_C: Tensor, at_target_C: Tensor, scales_C: Tensor) -> Tensor:
    """`at_target` at the target, less the scaled exponentials: d log pi(target) / d logits; in place of `exps_CV`."""
    return exps_CV.mul_(-scales_C[:, None]).scatter_add_(-1, targets_C[:, None], at_target_C[:, None])


logger = logging.getLogger(__name__)

# The name of packed attention. No mask function is registered under it, so transformers makes no mask: causal is all
# that there is.
PACKED_ATTENTION = "prl_packed"


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
        return cls(stretches, sent(positions_N[None], device), sent(ends_S, device), max(lengths))


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
    options = {"scale": scaling, "window_size": (-1, 0), **_takes_gqa(varlen_attn)}
    out = varlen_attn(query, key, value, ends, ends, longest, longest, **options)
    assert isinstance(out, Tensor)
    return out


@cache
def _takes_gqa(kernel: Callable[..., Any]) -> dict[str, Any]:
    """Before torch 2.12 it takes fewer KV heads without being asked."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}


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
