"""The norm that is not trained equals that of the library, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from prime_rl.trainer.frozen_norm import FrozenRMSNorm, fuse_norms
from tests.trainer_support import VOCAB, tiny_model

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("shape", [(2, 3, 8), (2, 3, 4, 8)])
def test_outputs_and_gradients_are_those_of_the_library(shape: tuple[int, ...]) -> None:
    norm = Qwen3RMSNorm(8, eps=1e-3).requires_grad_(False)
    nn.init.normal_(norm.weight)
    grads, outputs = [], []
    x = torch.randn(shape, dtype=torch.float32)
    for module in (norm, FrozenRMSNorm(norm.weight, norm.variance_epsilon)):
        copied = x.clone().requires_grad_()
        out = module(copied)
        (out * torch.linspace(-1, 1, out.numel()).view(shape)).sum().backward()
        outputs.append(out.detach())
        grads.append(copied.grad)
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(grads[1], grads[0])


def test_only_norms_of_known_meaning_are_replaced_and_names_stay() -> None:
    plain = tiny_model().requires_grad_(False)
    fused = copy.deepcopy(plain)
    # Per layer: before attention, before the MLP, of queries, of keys; and the last one.
    assert fuse_norms(fused) == 4 * 2 + 1
    assert [name for name, _ in fused.named_parameters()] == [name for name, _ in plain.named_parameters()]
    token_ids = torch.randint(0, VOCAB, (2, 9))
    torch.testing.assert_close(fused(token_ids).logits, plain(token_ids).logits)
    other = nn.Sequential(GemmaRMSNorm(4), nn.RMSNorm(4), nn.LayerNorm(4), Qwen3RMSNorm(4).to(torch.bfloat16))
    assert fuse_norms(other) == 0
