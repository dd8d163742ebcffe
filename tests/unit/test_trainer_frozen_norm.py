"""The norm that is not trained equals that of the library, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from prime_rl.trainer.frozen_norm import FrozenRMSNorm, fuse_norms
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
