"""Log-probability of the sampled tokens and entropy, from hidden states, a chunk of tokens at a time.

The logits of a real vocabulary are most of the memory of a pass: 16,384 tokens of 151,936 entries are 9.3 GiB in
float32, and autograd keeps several tables of that size. Here only a chunk of them exists at a time. The gradient with
respect to a hidden state, `(W[target] - sum_v p_v W[v]) / temperature`, needs nothing but the chunk, so it is worked
out there and backward only multiplies. Where the head itself is trained, backward computes each chunk again instead.

Pure functions of tensors. Dimensions: N tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Largest table of a chunk, in bytes of float32. Large enough to keep a GPU busy, small beside any real model.
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


def _chunks(num_tokens: int, num_vocabulary: int) -> Iterator[slice]:
    size = max(1, CHUNK_BYTES // (4 * num_vocabulary))
    for start in range(0, num_tokens, size):
        yield slice(start, start + size)


def _scaled(hidden_CH: Tensor, weight_VH: Tensor, temperatures_C: Tensor) -> Tensor:
    """Logits after temperature, in float32 (or wider)."""
    logits_CV = hidden_CH @ weight_VH.T
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    return logits_CV.div_(temperatures_C[:, None])


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
        for chunk in _chunks(len(hidden_NH), len(weight_VH)):
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
        for chunk in _chunks(len(hidden_NH), len(weight_VH)):
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
    probs_CV = scaled_CV.sub_(most_C[:, None]).exp()
    total_C = probs_CV.sum(-1)
    scaled_CV.sub_(total_C.log()[:, None])  # log-probabilities of the whole vocabulary
    probs_CV.div_(total_C[:, None])
    logprobs_C = scaled_CV.gather(-1, targets_C[:, None]).squeeze(-1)
    entropy_C = -scaled_CV.mul_(probs_CV).sum(-1)
    if slope_CH is not None:
        del scaled_CV
        slope_CH.copy_(_slope(probs_CV, targets_C, temperatures_C).to(hidden_CH.dtype) @ weight_VH)
    return logprobs_C, entropy_C, most_C + total_C.log()


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
    return _slope(probs_CV, targets_C, temperatures_C).mul_(grad_C[:, None]).to(hidden_CH.dtype)


def _slope(probs_CV: Tensor, targets_C: Tensor, temperatures_C: Tensor) -> Tensor:
    """d log pi(target) / d logits, in place of `probs_CV`."""
    slope_CV = probs_CV.neg_()
    slope_CV.scatter_add_(-1, targets_C[:, None], torch.ones_like(targets_C, dtype=slope_CV.dtype)[:, None])
    return slope_CV.div_(temperatures_C[:, None])
