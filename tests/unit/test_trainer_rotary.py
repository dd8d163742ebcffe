"""Rotary positions in one operation: the numbers of the library both ways, and no table besides the result."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.phi3 import modeling_phi3

from prime_rl.lora.parts import rotary, use_rotary


def tables(num_tokens: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin `[1, N, D]`, as the libraries make them."""
    angles = torch.outer(torch.arange(num_tokens), 1e4 ** -(torch.arange(0, size, 2) / size))
    angles_1ND = torch.cat([angles, angles], -1)[None]
    return angles_1ND.cos().to(dtype), angles_1ND.sin().to(dtype)


def library(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The same arithmetic from a module that is never changed."""
    half = modeling_phi3.rotate_half
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_gives_what_the_library_gives(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    # As attention hands them over: [R, N, H, D] with N and H changed places.
    q, k = (torch.randn(2, 7, heads, 8, generator=generator).to(dtype).transpose(1, 2) for heads in (4, 2))
    found, expected = [], []
    for function, results in ((rotary, found), (library, expected)):
        leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
        out = function(*leaves, *tables(7, 8, dtype))
        sum((each * torch.arange(8).to(dtype)).sum() for each in out).backward()
        results += [*out, *(leaf.grad for leaf in leaves)]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


class Tables(TorchDispatchMode):
    """Counts the tensors as large as the queries that are made."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.number = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        is_new = isinstance(out, Tensor) and not func.is_view and all(out is not each for each in args)
        self.number += is_new and out.numel() >= self.size
        return out


def test_queries_and_keys_make_one_table_each() -> None:
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 4, 6, 8)
    with Tables(q.numel()) as ours:
        rotary(q, k, *tables(6, 8, torch.float32))
    with Tables(q.numel()) as theirs:
        library(q, k, *tables(6, 8, torch.float32))
    assert (ours.number, theirs.number) == (2, 8)


def test_attention_of_a_known_model_uses_it_and_that_of_others_does_not() -> None:
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = AutoModelForCausalLM.from_config(config)
    assert use_rotary(model) == 1
    module = type(model.model.layers[0].self_attn).__module__
    assert sys.modules[module].apply_rotary_pos_emb is rotary  # type: ignore[attr-defined]
    model.model.layers[0].self_attn.__class__ = type("OtherAttention", (torch.nn.Module,), {})
    assert use_rotary(model) == 0
