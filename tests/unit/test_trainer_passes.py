"""A pass gives the same numbers however its rows are laid out: padded, or end to end in one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prime_rl.configs.base import LoRAConfig
from prime_rl.configs.losses import AipoLossConfig, GspoLossConfig, LossConfig
from prime_rl.contract.types import TOKEN_DTYPE, MicroBatch
from prime_rl.trainer.fair_queue import rows_of, to_micro_batch
from prime_rl.trainer.memory import metered
from prime_rl.trainer.model import PolicyModel, adapt_model, can_pack
from prime_rl.trainer.step import PassResult, forward_backward
from tests.numeric import check_same, num_terms
from tests.trainer_support import sample, tiny_model

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
# Two neighbours of one length, so that one call of attention has both.
LENGTHS = {0: [9, 9, 23], 1: [6], 2: [14, 17]}


def model_of(*, packs: bool, checkpoints: bool = False) -> PolicyModel:
    model = adapt_model(tiny_model(), LoRAConfig(rank=4), 3, packs=packs, checkpoints=checkpoints)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.adapters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    assert model.packs == packs
    return model


def some_batch() -> MicroBatch:
    rng = random.Random(0)
    rows = [
        row
        for idx, lengths in LENGTHS.items()
        for row in rows_of(idx, [sample(rng, num_tokens=length, advantage=0.7).columns() for length in lengths])
    ]
    return to_micro_batch(rows, base_pass=True)


def losses_of(batch: MicroBatch) -> list[LossConfig]:
    by_run = [AipoLossConfig(kl_coef=0.3), GspoLossConfig(type="gspo"), AipoLossConfig()]
    return [by_run[idx] for idx in batch.run_idxs]


def run(model: PolicyModel) -> tuple[PassResult, list[Tensor]]:
    batch = some_batch()
    result = forward_backward(model, batch, losses_of(batch), CPU)
    assert result is not None
    grads = [parameter.grad for parameter in model.adapters()]
    assert all(grad is not None and grad.any() for grad in grads)
    return result, [grad for grad in grads if grad is not None]


class WidestMask(TorchDispatchMode):
    """The most tokens x tokens that any table has."""

    num_tokens = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dim() >= 2 and leaf.shape[-1] == leaf.shape[-2]:
                self.num_tokens = max(self.num_tokens, leaf.shape[-1])
        return result


@pytest.mark.parametrize("checkpoints", [False, True])
def test_packed_rows_give_the_log_probabilities_and_gradients_of_padded_ones(checkpoints: bool) -> None:
    (padded, expected), (packed, found) = (
        run(model_of(packs=packs, checkpoints=checkpoints)) for packs in (False, True)
    )
    terms = num_terms(model_of(packs=False).module)
    for name in ("logprobs_RK", "base_logprobs_RK", "mask_RK"):
        check_same(getattr(packed.inputs, name).float(), getattr(padded.inputs, name).float(), terms)
    check_same(packed.losses.loss_R, padded.losses.loss_R, terms)
    check_same(packed.entropy_RK, padded.entropy_RK, terms)
    for one, other in zip(found, expected, strict=True):
        check_same(one, other, 3 * terms)


def test_a_packed_row_has_no_padding_and_no_mask() -> None:
    model, batch = model_of(packs=True), some_batch()
    seen: list[int] = []
    model.module.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    with WidestMask() as widest:
        forward_backward(model, batch, losses_of(batch), CPU)
    # The pass of the base model has the rows of the run whose loss compares with it alone.
    # Nothing is predicted from the last token of a row.
    positions = {idx: sum(lengths) - len(lengths) for idx, lengths in LENGTHS.items()}
    assert seen == [positions[0], sum(positions.values())]
    assert widest.num_tokens < sum(LENGTHS[0])


def test_padded_rows_have_no_mask_on_tensors_without_memory_either() -> None:
    """There, transformers cannot look at a mask to find that it is not needed: `prl fit` would count it."""
    rng, num_tokens = random.Random(0), 40
    batch = to_micro_batch(rows_of(0, [sample(rng, num_tokens=num_tokens).columns() for _ in range(2)]))
    with metered(), WidestMask() as widest:
        model = adapt_model(tiny_model(), LoRAConfig(rank=4), 1)
        forward_backward(model, batch, [AipoLossConfig()] * 2, CPU)
    assert 0 < widest.num_tokens < num_tokens


def test_a_sample_does_not_see_its_neighbours() -> None:
    model, batch = model_of(packs=True), some_batch()
    first = forward_backward(model, batch, losses_of(batch), CPU)
    pairs = zip(batch.run_idxs, batch.token_ids, strict=True)
    others = [(np.frombuffer(row, TOKEN_DTYPE) ^ 1).tobytes() if idx else row for idx, row in pairs]
    changed = forward_backward(model, replace(batch, token_ids=others), losses_of(batch), CPU)
    assert first is not None and changed is not None
    same = [idx == 0 for idx in batch.run_idxs]
    assert torch.equal(first.inputs.logprobs_RK[same], changed.inputs.logprobs_RK[same])
    assert not torch.equal(first.inputs.logprobs_RK, changed.inputs.logprobs_RK)


def gradients(batch: MicroBatch, *, packs: bool) -> list[Tensor]:
    """By run, of its adapter in one piece."""
    model = model_of(packs=packs)
    assert forward_backward(model, batch, losses_of(batch), CPU) is not None
    adapters = zip(*([*layer.lora_A, *layer.lora_B] for layer in model.layers.values()), strict=True)
    by_slot = [torch.cat([p.grad.flatten() for p in each if p.grad is not None]) for each in adapters]
    return [torch.cat([by_slot[idx], by_slot[len(LENGTHS) + idx]]) for idx in LENGTHS]


@pytest.mark.parametrize("packs", [False, True])
def test_advantages_of_tokens_reach_the_adapter_of_their_own_run_alone(packs: bool) -> None:
    """Equal ones are that of the row; others change nothing for the run beside them, whose rows have one each."""
    batch = some_batch()

    def given(first: float, rest: float) -> MicroBatch:
        columns = [np.float32([first] * 7 + [rest] * (len(mask) - 7)).tobytes() for mask in batch.loss_mask]
        own = [column if idx == 2 else b"" for idx, column in zip(batch.run_idxs, columns, strict=True)]
        return replace(batch, token_advantages=own)

    terms = num_terms(model_of(packs=packs).module)
    plain, equal, other = (gradients(each, packs=packs) for each in (batch, given(0.7, 0.7), given(0.7, -3.0)))
    for idx in LENGTHS:
        check_same(equal[idx], plain[idx], terms)
        if idx != 2:
            check_same(other[idx], plain[idx], terms)
    assert not torch.allclose(other[2], plain[2], rtol=0.1)


def test_a_model_with_windows_of_attention_is_padded(caplog: pytest.LogCaptureFixture) -> None:
    base = tiny_model()
    base.config.layer_types = ["full_attention", "sliding_attention"]
    assert not can_pack(base)
    assert not adapt_model(base, LoRAConfig(rank=4), 1, packs=True).packs
    assert "rows are padded" in caplog.text
