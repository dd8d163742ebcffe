"""Log-probability of the sampled tokens and entropy from logits: one exponential of the vocabulary and no more.

Left to autograd, logsumexp, entropy and their gradient each raise e to every logit again and keep tables as large as
the logits, which for a real vocabulary is most of a pass's memory. Here the exponentials of the forward pass become
the gradient. Pure functions of tensors.

Dimensions: R rows, K positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_logprobs(logits_RKV: Tensor, targets_RK: Tensor, temperatures_R: Tensor) -> tuple[Tensor, Tensor]:
    """(log pi of the targets, entropy), both `[R, K]` in float32, of the distribution after temperature.

    The entropy carries no gradient: it is reported, not trained. Backward can be called once.
    """
    logprobs_RK: Tensor
    entropy_RK: Tensor
    logprobs_RK, entropy_RK = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        logits_RKV, targets_RK, temperatures_R[:, None, None]
    )
    return logprobs_RK, entropy_RK


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_RKV: Tensor, targets_RK: Tensor, temperatures_R11: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits_RKV.dtype, torch.float32)
        # In place after this first copy. Below the largest logit, so nothing overflows.
        scaled_RKV = logits_RKV.to(dtype) / temperatures_R11
        scaled_RKV.sub_(scaled_RKV.amax(-1, keepdim=True))
        powers_RKV = scaled_RKV.exp()
        total_RK = powers_RKV.sum(-1)
        log_total_RK = total_RK.log()
        logprobs_RK = scaled_RKV.gather(-1, targets_RK[..., None]).squeeze(-1) - log_total_RK
        entropy_RK = log_total_RK - torch.linalg.vecdot(powers_RKV, scaled_RKV) / total_RK
        ctx.dtype = logits_RKV.dtype
        ctx.save_for_backward(powers_RKV, total_RK, targets_RK, temperatures_R11)
        ctx.mark_non_differentiable(entropy_RK)
        return logprobs_RK, entropy_RK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RK: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        powers_RKV, total_RK, targets_RK, temperatures_R11 = ctx.saved_tensors
        grad_RK1 = grad_RK[..., None] / temperatures_R11
        grad_RKV = powers_RKV.mul_(-grad_RK1 / total_RK[..., None])
        grad_RKV.scatter_add_(-1, targets_RK[..., None], grad_RK1)
        return grad_RKV.to(ctx.dtype), None, None
