"""Parts of a layer with adapters equal those of the library, forward and backward, and keep less."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from prime_rl.configs.base import DEFAULT_TARGET_MODULES
from prime_rl.lora.linear import AdapterRouting, apply_lora_to_model
from prime_rl.lora.parts import FrozenRMSNorm, GatedMLP, fuse_mlps, fuse_norms
from tests.numeric import check_same
from tests.trainer_support import VOCAB, tiny_model

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 8), (2, 3, 4, 8)])
def test_outputs_and_gradients_are_those_of_the_library(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Those of the library in float32: in bfloat16 it rounds between its operations, and so do we, at other places."""
    weight, x, slope = (torch.randn(size).to(dtype) for size in ((8,), shape, shape))
    theirs = Qwen3RMSNorm(8, eps=1e-3).requires_grad_(False)
    theirs.weight.copy_(weight)
    ours = FrozenRMSNorm(nn.Parameter(weight, requires_grad=False), eps=1e-3)
    found, expected = [], []
    for norm, like, seen in ((theirs, torch.float32, expected), (ours, dtype, found)):
        copied = x.to(like, copy=True).requires_grad_()
        out = norm(copied)
        (out * slope.to(like)).sum().backward()
        assert copied.grad is not None and copied.grad.dtype == out.dtype == like
        seen += [out.detach(), copied.grad]
    for ours_is, theirs_is in zip(found, expected, strict=True):
        check_same(ours_is.float(), theirs_is, num_terms=8, dtype=dtype)


def test_only_norms_of_known_meaning_are_replaced_and_names_stay() -> None:
    plain = tiny_model().requires_grad_(False)
    fused = copy.deepcopy(plain)
    # Per layer: before attention, before the MLP, of queries, of keys; and the last one.
    assert fuse_norms(fused) == 4 * 2 + 1
    assert [name for name, _ in fused.named_parameters()] == [name for name, _ in plain.named_parameters()]
    token_ids = torch.randint(0, VOCAB, (2, 9))
    torch.testing.assert_close(fused(token_ids).logits, plain(token_ids).logits)
    assert fuse_norms(nn.Sequential(GemmaRMSNorm(4), nn.RMSNorm(4), nn.LayerNorm(4))) == 0


WIDTH = 64


def adapted_model(
    targets: tuple[str, ...] = DEFAULT_TARGET_MODULES, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, AdapterRouting]:
    """Three adapters with weights that matter, in float32 as always."""
    model, routing = tiny_model().requires_grad_(False).to(dtype), AdapterRouting(3)
    layers = apply_lora_to_model(model, 4, 3, targets, routing)
    with torch.no_grad():
        for layer in layers.values():
            for parameter in (*layer.lora_A, *layer.lora_B):
                parameter.normal_(std=0.1)
    return model, routing


def kept_by(mlp: nn.Module, x: Tensor) -> tuple[list[Tensor], int]:
    """Output and all gradients; and how many tables of the MLP's width backward keeps."""
    wide: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape[-1] == WIDTH and tensor.numel() == x[..., 0].numel() * WIDTH:
            wide.add(tensor.untyped_storage().data_ptr())
        return tensor

    mlp.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = mlp(x)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)).sum().backward()
    grads = [parameter.grad for parameter in mlp.parameters() if parameter.grad is not None]
    assert x.grad is not None
    return [out.detach(), x.grad, *grads], len(wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("idxs", "lengths"),
    [([0, 1, 2], None), ([0, 0, 2], None), ([0, None, 1], None), ([None] * 3, None), ([0, 2, None], [5, 9, 1])],
    ids=str,
)
@pytest.mark.parametrize("keeps", [False, True])
def test_a_gated_mlp_gives_the_numbers_of_the_library_and_keeps_half_or_nothing(
    idxs: list[int | None], lengths: list[int] | None, dtype: torch.dtype, keeps: bool
) -> None:
    """The very same operations, so the very same bits."""
    model, routing = adapted_model(dtype=dtype)
    plain = model.model.layers[0].mlp
    assert isinstance(plain, Qwen3MLP) and plain.down_proj.base_layer.in_features == WIDTH
    routing.set_rows(idxs, lengths)
    x = torch.randn((3, 5, 32) if lengths is None else (1, 15, 32)).to(dtype)
    expected, plainly_kept = kept_by(plain, x)
    assert fuse_mlps(model, keeps=keeps) == 2
    fused = model.model.layers[0].mlp
    assert isinstance(fused, GatedMLP)
    found, kept = kept_by(fused, x)
    assert len(found) == len(expected) == 2 + 2 * 3 * len({idx for idx in idxs if idx is not None})
    # The gradient of the input is a sum of gate's and up's, which are added in another order.
    check_same(found.pop(1), expected.pop(1), 3 * (32 + WIDTH), dtype)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    with torch.no_grad():
        assert torch.equal(fused(x), expected[0])
    if any(idx is not None for idx in idxs):
        assert (plainly_kept, kept) == (4, 2 if keeps else 0)


def test_only_gated_mlps_of_known_meaning_are_replaced_and_names_stay() -> None:
    plain, _ = adapted_model()
    fused = copy.deepcopy(plain)
    assert fuse_mlps(fused, keeps=False) == 2
    assert [name for name, _ in fused.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for targets in (("gate_proj", "up_proj"), ("down_proj",)):
        assert fuse_mlps(adapted_model(targets)[0], keeps=False) == 0, "not all layers have adapters"
    for layer in plain.model.layers:
        layer.mlp.act_fn = nn.GELU()
    assert fuse_mlps(plain, keeps=False) == 0
    other, _ = adapted_model()
    for layer in other.model.layers:
        layer.mlp.__class__ = type("OtherMLP", (Qwen3MLP,), {})
    assert fuse_mlps(other, keeps=False) == 0
