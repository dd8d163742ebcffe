"""Parts of the model, each one differentiable operation where the libraries write several. They keep less for backward.

- RMS normalization with a weight that is not trained. As the libraries write it, it is six operations forward and more
  backward, each over all activations, and there are four of it in a layer: on the CPU that is a tenth of a step. What
  is frozen needs one gradient only, that of the input. Of a norm only the input is kept: its result, which the layers
  behind it would keep too, costs two operations, so backward makes it again (`remember`), as it does queries and keys
  at their positions, where they were normalized before. Of a layer of Qwen3-0.6B this is more than a third of all that
  is kept. The same operations on the same numbers: no bit changes.
- The gated MLP, `down(silu(gate(x)) * up(x))`. As the libraries write it, four tables of the width of the MLP are kept
  for each token: more than a half of all that a layer keeps. Here it is two, what gate and up gave. It may be none:
  then backward makes these again, at a tenth of a pass.
- The head: log-probability of the sampled tokens and entropy, a chunk of tokens at a time. The logits of a real
  vocabulary are most of the memory of a pass: 16,384 tokens of 151,936 entries are 9.3 GiB in float32, and autograd
  keeps several tables of that size. Here only a chunk of them exists at a time. The gradient with respect to a hidden
  state, `(W[target] - sum_v p_v W[v]) / temperature`, needs nothing but the chunk, so it is worked out there and
  backward only multiplies. Where the head itself is trained, backward computes each chunk again instead.
- Attention, causal inside each sample of a packed row: many samples end to end, no padding between them. On a GPU in 16
  bits it is one kernel for all samples: flash-attn's where that is installed, else torch's own. Elsewhere each sample,
  or each stretch of neighbours of one length, is a call of torch's scaled dot product. The mask of tokens x tokens that
  transformers would make never exists.
- Rotary positions. As the libraries write them, they make four tables of the size of the queries in addition to the
  result. Here the result is the only one, forward and backward.

Dimensions: ... any, D normalized, N tokens, C tokens of a chunk, H hidden size, V vocabulary; in attention N tokens of
a packed row, S samples, H query heads, K KV heads, D head size, R rows, or neighbours of L tokens.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import silu
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from prime_rl.lora.linear import MultiLoRALinear, gated_mlp, sent

# Results that are remembered: from a norm to the last operation that keeps its result there are two others.
_NUM_REMEMBERED = 3
_Recipe = Callable[[], Tensor]


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
SILUS = nn.SiLU, type(ACT2FN["silu"])
# Largest table of a chunk of the head, in bytes of float32: enough to keep a GPU busy, small beside any real model.
CHUNK_BYTES = 128 * 2**20


class FrozenRMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension; worked out in float32 whatever the type of `x`."""

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
        norm = torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True, dtype=torch.float32)
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
        weight_D = weight_D.to(torch.float32)
        weighted = grad * x.to(torch.float32)
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
        self.keeps = keeps

    def forward(self, x_RTI: Tensor) -> Tensor:
        """The MLP's output; NaN inside `computed_again`, unless all rows use the base model alone."""
        plan = self.down_proj.plan_for(x_RTI)
        if plan is None:
            base_RTI: Tensor = self.down_proj(silu(self.gate_proj(x_RTI)) * self.up_proj(x_RTI))
            return base_RTI
        gate, up, down = (each.with_adapters(plan) for each in (self.gate_proj, self.up_proj, self.down_proj))
        x_NI, for_backward = x_RTI.reshape(-1, x_RTI.shape[-1]), _computes_again.get()
        return gated_mlp(x_NI, gate, up, down, plan, keeps=self.keeps, for_backward=for_backward).view_as(x_RTI)


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
        and isinstance(module.act_fn, SILUS)
        and all(isinstance(each, MultiLoRALinear) for each in (module.gate_proj, module.up_proj, module.down_proj))
    }
    return _replace(model, mlps)


def _replace(model: nn.Module, replacements: Mapping[str, nn.Module]) -> int:
    for name, module in replacements.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, module)
    return len(replacements)


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
