"""Parts of a decoder layer, each one differentiable operation where the libraries write several. They keep less.

Trainer and embedded engine have the same ones, so that both round alike in 16 bits.

- RMS normalization with a weight that is not trained. As the libraries write it, it is six operations forward and more
  backward, each over all activations, and there are four of it in a layer: on the CPU that is a tenth of a step. What
  is frozen needs one gradient only, that of the input. Of a norm only the input is kept: its result, which the layers
  behind it would keep too, costs two operations, so backward makes it again (`remember`), as it does queries and keys
  at their positions, where they were normalized before. Of a layer of Qwen3-0.6B this is more than a third of all that
  is kept. The same operations on the same numbers: no bit changes.
- The gated MLP, `down(silu(gate(x)) * up(x))`. As the libraries write it, four tables of the width of the MLP are kept
  for each token: more than a half of all that a layer keeps. Here it is two, what gate and up gave. It may be none:
  then backward makes these again, at a tenth of a pass.
- Rotary positions. As the libraries write them, they make four tables of the size of the queries in addition to the
  result. Here the result is the only one, forward and backward.

Behind the layers is the head, whose table of all tokens would be larger than everything else: it has a few at a time.

Dimensions: ... any, D normalized, R rows, T tokens, I inputs; at positions H query heads, K KV heads, N tokens.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import silu

from prime_rl.lora.linear import MultiLoRALinear, SharedInput, gated_mlp

# Entries of a model's config that change its logits after the head.
CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
# Largest table of a chunk of the head, in bytes of float32: enough to keep a GPU busy, small beside any real model.
CHUNK_BYTES = 128 * 2**20
# Results that are remembered: from a norm to the last operation that keeps its result there are two others.
_NUM_REMEMBERED = 3
_Recipe = Callable[[], Tensor]


def head_chunks(num_tokens: int, num_vocabulary: int) -> list[slice]:
    """Tokens whose tables exist at one time."""
    size = max(1, CHUNK_BYTES // (4 * num_vocabulary))
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


def changes_logits(config: Any) -> str | None:
    """The entry of a model's config because of which its logits are not what the head gives, or None."""
    return next((name for name in CHANGES_LOGITS if getattr(config, name, None) not in (None, 1, 1.0)), None)


@dataclass(frozen=True)
class _View:
    """A tensor that is, or looks at, the result of `recipe`."""

    recipe: _Recipe
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def make(self) -> Tensor:
        return _made(self.recipe).as_strided(self.shape, self.stride, self.offset)


# Result, its version, how it is made. A weak reference: what is freed late leaves a hole in the heap. As long as there
# is one, no other storage has its address.
_remembered: deque[tuple[StorageWeakRef, int, _Recipe]] | None = None
# What was made last: queries, keys and values come from the same input, one after another.
_last: tuple[_Recipe, Tensor] | None = None


@contextmanager
def made_again() -> Iterator[None]:
    """Inside, what was `remember`ed is not kept for backward."""
    global _remembered, _last
    before, _remembered, _last = _remembered, deque(maxlen=_NUM_REMEMBERED), None
    try:
        with saved_tensors_hooks(_pack, lambda kept: kept.make() if isinstance(kept, _View) else kept):
            yield
    finally:
        _remembered = before


def remember(result: Tensor, make: Callable[..., Tensor], *inputs: Any) -> None:
    """Let `make(*inputs)` stand for `result`, which it equals; of the inputs, those that are kept anyway."""
    if _remembered is not None and torch.is_grad_enabled():
        inputs = tuple(each.detach() if isinstance(each, Tensor) else each for each in inputs)
        storage = StorageWeakRef(result.untyped_storage())  # type: ignore[no-untyped-call]
        _remembered.append((storage, result._version, lambda: make(*inputs)))


def recipe_of(tensor: Tensor) -> _Recipe | None:
    """The recipe that makes `tensor` again, if it is a view of what was remembered."""
    view = _pack(tensor)
    return view.make if isinstance(view, _View) else None


def _pack(tensor: Tensor) -> Tensor | _View:
    for result, version, recipe in _remembered or ():
        if tensor.untyped_storage()._cdata == result.cdata and tensor._version == version:
            return _View(recipe, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    return tensor


def _made(recipe: _Recipe) -> Tensor:
    global _last
    if _last is not None and _last[0] is recipe:
        return _last[1]
    _last = None  # gone before the next is made
    with torch.no_grad():
        made = recipe()
    _last = recipe, made
    return made


# Those of transformers that are `weight * x / rms(x)`; others add one to the weight, or have a bias.
PLAIN_NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})
# Those of transformers that are `down_proj(act_fn(gate_proj(x)) * up_proj(x))`.
GATED_MLPS = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"})
SILUS = frozenset({"SiLU", "SiLUActivation"})
# Those of transformers whose module has `apply_rotary_pos_emb(q, k, cos, sin)` with halves that are rotated.
ROTARY_ATTENTIONS = frozenset({"LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention"})


class FrozenRMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension; worked out in float32, or wider where `x` is."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`x` normalized, in the type of `x`."""
        if x.is_cuda:  # torch has one kernel for it there, forward and backward
            fused = nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
            remember(fused, nn.functional.rms_norm, x, self.weight.shape, self.weight, self.eps)
            return fused
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True, dtype=wide)
        scale = norm.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()
        out: Tensor = _RMSNorm.apply(x, self.weight, scale)  # type: ignore[no-untyped-call]
        remember(out, _normalized, x, self.weight, scale)
        return out


def _normalized(x: Tensor, weight_D: Tensor, scale: Tensor) -> Tensor:
    out: Tensor = (x * scale).to(x.dtype).mul_(weight_D)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_D, scale)
        return _normalized(x, weight_D, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight_D, scale = ctx.saved_tensors
        # One table of the size of x: it has the products with x first.
        weight_D = weight_D.to(scale.dtype)
        weighted = grad * x.to(scale.dtype)
        along = (weighted @ weight_D)[..., None] * (scale.square() / -x.shape[-1])
        torch.mul(grad, weight_D, out=weighted)
        return weighted.addcmul_(x, along).mul_(scale).to(x.dtype), None, None


# Set while a layer is computed again in backward.
_computes_again: ContextVar[bool] = ContextVar("computes_again", default=False)


@contextmanager
def computed_again() -> Iterator[None]:
    """Inside, a decoder layer is computed for backward alone, which does not need the result of its last operation."""
    token = _computes_again.set(True)
    try:
        yield
    finally:
        _computes_again.reset(token)


class GatedMLP(nn.Module):
    """`down_proj(silu(gate_proj(x)) * up_proj(x))`, the last of its decoder layer; `keeps`: as in `gated_mlp`."""

    def __init__(
        self, gate_proj: MultiLoRALinear, up_proj: MultiLoRALinear, down_proj: MultiLoRALinear, keeps: bool
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self._gate_up = SharedInput([gate_proj, up_proj])
        self.keeps = keeps

    def forward(self, x_RTI: Tensor) -> Tensor:
        """The MLP's output; NaN inside `computed_again`, unless all rows use the base model alone."""
        plan = self.down_proj.plan_for(x_RTI)
        if plan is None:
            base_RTI: Tensor = self.down_proj(silu(self.gate_proj(x_RTI)) * self.up_proj(x_RTI))
            return base_RTI
        gate_up, down = self._gate_up.with_adapters(plan), self.down_proj.shared.with_adapters(plan)
        x_NI, for_backward = x_RTI.reshape(-1, x_RTI.shape[-1]), _computes_again.get()
        return gated_mlp(x_NI, gate_up, down, plan, keeps=self.keeps, for_backward=for_backward).view_as(x_RTI)


def fuse_norms(model: nn.Module) -> int:
    """Replace the plain norms of a frozen `model`; returns how many. Names of parameters stay the same."""
    norms = {
        name: FrozenRMSNorm(module.weight, module.variance_epsilon)
        for name, module in model.named_modules()
        if type(module).__name__ in PLAIN_NORMS
    }
    return _replace(model, norms)


def fuse_mlps(model: nn.Module, *, keeps: bool) -> int:
    """Replace the gated MLPs whose layers have adapters; returns how many. Names of parameters stay the same."""
    mlps = {
        name: GatedMLP(module.gate_proj, module.up_proj, module.down_proj, keeps)
        for name, module in model.named_modules()
        if type(module).__name__ in GATED_MLPS
        and type(module.act_fn).__name__ in SILUS
        and all(isinstance(each, MultiLoRALinear) for each in (module.gate_proj, module.up_proj, module.down_proj))
    }
    return _replace(model, mlps)


def share_inputs(model: nn.Module) -> int:
    """Let queries, keys and values of attention be one operation where they have adapters; returns how many are."""
    attentions = [each for each in model.modules() if type(each).__name__ in ROTARY_ATTENTIONS]
    layers = [[each.q_proj, each.k_proj, each.v_proj] for each in attentions]
    adapted = [[each for each in of_one if isinstance(each, MultiLoRALinear)] for of_one in layers]
    return len([SharedInput(of_one) for of_one in adapted if len(of_one) > 1])


def _replace(model: nn.Module, replacements: Mapping[str, nn.Module]) -> int:
    for name, module in replacements.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, module)
    return len(replacements)


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


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int = 1) -> Tensor:
    """`x` at its positions; with `sign` -1 the gradient of what is at them."""
    first, second = x.chunk(2, -1)
    sin_first, sin_second = sin.chunk(2, -1)[::sign]
    out = x * cos
    out_first, out_second = out.chunk(2, -1)
    out_first.addcmul_(second, sin_first, value=-sign)
    out_second.addcmul_(first, sin_second, value=sign)
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
        return _rotated(grad, cos, sin, sign=-1), None, None
