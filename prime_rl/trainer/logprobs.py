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
CHUNK_BYTES = 256 * 2**20


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
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperatures_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        trains_head, trains_hidden = ctx.needs_input_grad[1], ctx.needs_input_grad[0]
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        logprobs_N, entropy_N = (hidden_NH.new_empty(len(hidden_NH), dtype=dtype) for _ in range(2))
        log_total_N = torch.empty_like(logprobs_N)
        slope_NH = torch.empty_like(hidden_NH) if trains_hidden and not trains_head else None
        for chunk in _chunks(len(hidden_NH), len(weight_VH)):
            scaled_CV = _scaled(hidden_NH[chunk], weight_VH, temperatures_N[chunk])
            log_total_N[chunk] = scaled_CV.logsumexp(-1)
            scaled_CV.sub_(log_total_N[chunk][:, None])  # log-probabilities of the whole vocabulary
            logprobs_N[chunk] = scaled_CV.gather(-1, targets_N[chunk][:, None]).squeeze(-1)
            probs_CV = scaled_CV.exp()
            entropy_N[chunk] = -torch.linalg.vecdot(probs_CV, scaled_CV)
            if slope_NH is not None:
                slope_CV = _slope(probs_CV, targets_N[chunk], temperatures_N[chunk])
                slope_NH[chunk] = slope_CV.to(hidden_NH.dtype) @ weight_VH
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
        hidden_NH, weight_VH, targets_N, temperatures_N, log_total_N = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH)
        # Many chunks are summed: in float32, whatever the weight's own type.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.promote_types(weight_VH.dtype, torch.float32))
        for chunk in _chunks(len(hidden_NH), len(weight_VH)):
            scaled_CV = _scaled(hidden_NH[chunk], weight_VH, temperatures_N[chunk])
            probs_CV = scaled_CV.sub_(log_total_N[chunk][:, None]).exp_()
            slope_CV = _slope(probs_CV, targets_N[chunk], temperatures_N[chunk])
            grad_CV = slope_CV.mul_(grad_N[chunk][:, None]).to(hidden_NH.dtype)
            grad_hidden_NH[chunk] = grad_CV @ weight_VH
            grad_weight_VH.add_(grad_CV.T @ hidden_NH[chunk])
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype), None, None


def _slope(probs_CV: Tensor, targets_C: Tensor, temperatures_C: Tensor) -> Tensor:
    """d log pi(target) / d logits, in place of `probs_CV`."""
    slope_CV = probs_CV.neg_()
    slope_CV.scatter_add_(-1, targets_C[:, None], torch.ones_like(targets_C, dtype=slope_CV.dtype)[:, None])
    return slope_CV.div_(temperatures_C[:, None])
