"""RMS normalization with a weight that is not trained, in one differentiable operation.

As the libraries write it, it is six operations forward and more backward, each over all activations, and there are four
of it in a layer: on the CPU that is a tenth of a step. What is frozen needs one gradient only, that of the input.

Dimensions: ... any, D normalized.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Those of transformers that are `weight * x / rms(x)`; others add one to the weight, or have a bias.
PLAIN_NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})


class FrozenRMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension; worked out in float32 whatever the type of `x`."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:  # torch has one kernel for it there, forward and backward
            return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        out: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, scale)
        out: Tensor = (x * scale).to(x.dtype).mul_(weight_D)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight_D, scale = ctx.saved_tensors
        weighted = grad * weight_D.to(torch.float32)
        along = torch.linalg.vecdot(weighted, x.to(torch.float32))[..., None] * (scale.square() / -x.shape[-1])
        return weighted.addcmul_(x, along).mul_(scale).to(x.dtype), None, None


def fuse_norms(model: nn.Module) -> int:
    """Replace the plain norms of a frozen `model`; returns how many. Names of parameters stay the same."""
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in PLAIN_NORMS]
    for name, module in found:
        parent, _, last = name.rpartition(".")
        eps: float = module.variance_epsilon
        setattr(model.get_submodule(parent), last, FrozenRMSNorm(module.weight, eps))
    return len(found)
