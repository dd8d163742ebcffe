"""Parts of a layer, each one differentiable operation where the libraries write several. They keep less for backward.

- RMS normalization with a weight that is not trained. As the libraries write it, it is six operations forward and more
  backward, each over all activations, and there are four of it in a layer: on the CPU that is a tenth of a step. What
  is frozen needs one gradient only, that of the input.
- The gated MLP, `down(silu(gate(x)) * up(x))`. As the libraries write it, four tables of the width of the MLP are kept
  for each token: a half of all that a layer keeps. Here it is two; backward makes the others again.

Dimensions: ... any, D normalized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import ACT2FN

from prime_rl.lora.linear import MultiLoRALinear

# Those of transformers that are `weight * x / rms(x)`; others add one to the weight, or have a bias.
PLAIN_NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})
# Those of transformers that are `down_proj(act_fn(gate_proj(x)) * up_proj(x))`.
GATED_MLPS = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"})
SILUS = nn.SiLU, type(ACT2FN["silu"])


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


class GatedMLP(nn.Module):
    """`down_proj(silu(gate_proj(x)) * up_proj(x))`; what backward needs of it is kept by `MultiLoRALinear`."""

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: MultiLoRALinear) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        out: Tensor = self.down_proj(self.up_proj(x), gate)
        return out


def fuse_norms(model: nn.Module) -> int:
    """Replace the plain norms of a frozen `model`; returns how many. Names of parameters stay the same."""
    norms = {
        name: FrozenRMSNorm(module.weight, module.variance_epsilon)
        for name, module in model.named_modules()
        if type(module).__name__ in PLAIN_NORMS
    }
    return _replace(model, norms)


def fuse_mlps(model: nn.Module) -> int:
    """Replace the gated MLPs whose last layer has adapters; returns how many. Names of parameters stay the same."""
    mlps = {
        name: GatedMLP(module.gate_proj, module.up_proj, module.down_proj)
        for name, module in model.named_modules()
        if type(module).__name__ in GATED_MLPS
        and isinstance(module.act_fn, SILUS)
        and isinstance(module.down_proj, MultiLoRALinear)
    }
    return _replace(model, mlps)


def _replace(model: nn.Module, replacements: Mapping[str, nn.Module]) -> int:
    for name, module in replacements.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, module)
    return len(replacements)
