"""Samples that the policy did not sample, in the trainer: the cross-entropy, and what is measured of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import cross_entropy

from prime_rl.configs.base import LoRAConfig
from prime_rl.configs.losses import AipoLossConfig, CrossEntropyLossConfig, RowLoss
from prime_rl.contract.samples import Keeping
from prime_rl.contract.types import TrainingSample, Use
from prime_rl.trainer.fair_queue import blank_micro_batch, rows_of, to_micro_batch
from prime_rl.trainer.loss import LossSums, row_statistics, sums_by_run
from prime_rl.trainer.metrics import _of_tokens
from prime_rl.trainer.model import PolicyModel, adapt_model
from prime_rl.trainer.step import forward_backward
from tests.numeric import check_same, num_terms
from tests.trainer_support import sample, tiny_model

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
TEXTS, ROLLOUTS = 0, 1


def model_of(*, packs: bool, num_slots: int = 2) -> PolicyModel:
    model = adapt_model(tiny_model(), LoRAConfig(rank=4), num_slots, packs=packs)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.adapters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def some(use: Use, num: int = 3, seed: int = 0, weight: float = 1.0) -> list[TrainingSample]:
    """Texts, or rollouts ("")."""
    rng = random.Random(f"{use}/{seed}")
    made = [sample(rng, num_tokens=rng.randrange(8, 24), advantage=weight) for _ in range(num)]
    return [replace(each, use=use, logprobs=[0.0] * len(each.token_ids)) if use else each for each in made]


def trained(
    model: PolicyModel, by_run: dict[int, Sequence[TrainingSample]], kl_coef: float = 0.0
) -> tuple[dict[int, LossSums], dict[int, Tensor]]:
    """The sums of each run of a pass, and the gradient of its adapter in one piece."""
    rows = [row for idx, samples in by_run.items() for row in rows_of(idx, [each.columns() for each in samples])]
    batch = to_micro_batch(rows, base_pass=kl_coef > 0)
    uses = batch.uses or [""] * len(rows)
    losses: list[RowLoss] = [
        CrossEntropyLossConfig(kl_coef=kl_coef) if use else AipoLossConfig(kl_coef=kl_coef) for use in uses
    ]
    for parameter in model.adapters():
        parameter.grad = None
    found = forward_backward(model, batch, losses, CPU)
    assert found is not None
    statistics = row_statistics(found.inputs, found.losses, found.entropy_RK, found.is_top_RK)
    num_rows = [batch.run_idxs.count(idx) for idx in sorted(by_run)]
    return dict(zip(sorted(by_run), sums_by_run(statistics, num_rows), strict=True)), {
        idx: gradient(model, idx) for idx in by_run
    }


def gradient(model: PolicyModel, idx: int) -> Tensor:
    found = [layer_part[idx].grad for layer in model.layers.values() for layer_part in (layer.lora_A, layer.lora_B)]
    return torch.cat([each.flatten().clone() for each in found if each is not None])


def logits_of(model: PolicyModel, each: TrainingSample, idx: int) -> tuple[Tensor, Tensor]:
    """Of the loss tokens of one text alone, and the tokens."""
    at = torch.tensor([place for place, on in enumerate(each.loss_mask) if on])
    logits = model.logits(torch.tensor([each.token_ids]), at - 1, [idx])[0]
    return logits, torch.tensor(each.token_ids)[at]


def plain(model: PolicyModel, samples: Sequence[TrainingSample], idx: int) -> tuple[Tensor, float]:
    """torch's own cross-entropy, mean over all loss tokens, and the share of them that are the likeliest."""
    pairs = [logits_of(model, each, idx) for each in samples]
    logits, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return cross_entropy(logits, targets), (logits.argmax(-1) == targets).float().mean().item()


@pytest.mark.parametrize("packs", [False, True])
def test_a_supervised_pass_is_the_plain_cross_entropy(packs: bool) -> None:
    model, texts = model_of(packs=packs), some("supervised")
    sums, gradients = trained(model, {TEXTS: texts})
    for parameter in model.adapters():
        parameter.grad = None
    loss, accuracy = plain(model, texts, TEXTS)
    loss.backward()
    assert sums[TEXTS].loss == pytest.approx(loss.item(), rel=1e-4)
    check_same(gradients[TEXTS], gradient(model, TEXTS), 3 * num_terms(model.module))
    told = _of_tokens(sums[TEXTS])
    assert told == {
        "supervised/loss": pytest.approx(loss.item(), rel=1e-4),
        "supervised/accuracy": pytest.approx(accuracy),
    }


def test_without_an_adapter_it_is_the_loss_of_transformers() -> None:
    model, texts = adapt_model(tiny_model(), LoRAConfig(rank=4), 1), some("supervised", num=1)
    sums, _ = trained(model, {TEXTS: texts})
    labels = [token if on else -100 for token, on in zip(texts[0].token_ids, texts[0].loss_mask, strict=True)]
    told = tiny_model()(input_ids=torch.tensor([texts[0].token_ids]), labels=torch.tensor([labels])).loss
    assert sums[TEXTS].loss == pytest.approx(told.item(), rel=1e-4)


def test_a_weight_is_that_of_each_token() -> None:
    model, texts = model_of(packs=True), some("supervised")
    once, single = trained(model, {TEXTS: texts})
    thrice, triple = trained(model, {TEXTS: [replace(each, advantage=3.0) for each in texts]})
    assert thrice[TEXTS].loss == pytest.approx(3 * once[TEXTS].loss, rel=1e-5)
    check_same(triple[TEXTS], 3 * single[TEXTS], 3 * num_terms(model.module))
    assert thrice[TEXTS].supervised_loss == pytest.approx(once[TEXTS].supervised_loss, rel=1e-5), "is told without it"


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_texts_that_are_held_out_are_measured_and_train_nothing(packs: bool, kl_coef: float) -> None:
    model, texts, held = model_of(packs=packs), some("supervised"), some("held_out", num=4)
    alone, expected = trained(model, {TEXTS: texts}, kl_coef)
    sums, gradients = trained(model, {TEXTS: [held[0], *texts, *held[1:]]}, kl_coef)
    check_same(gradients[TEXTS], expected[TEXTS], 3 * num_terms(model.module))
    of_held = ("num_held_out", "held_out_loss", "held_out_right")
    for name, value in vars(sums[TEXTS]).items():
        assert name in of_held or value == pytest.approx(getattr(alone[TEXTS], name), rel=1e-4, abs=1e-6), name
    loss, accuracy = plain(model, held, TEXTS)
    told = _of_tokens(sums[TEXTS])
    assert told["held_out/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert told["held_out/accuracy"] == pytest.approx(accuracy)


def test_a_batch_of_held_out_texts_alone_has_no_gradient() -> None:
    model = model_of(packs=False)
    sums, gradients = trained(model, {TEXTS: some("held_out")})
    assert not gradients[TEXTS].any() and sums[TEXTS].loss == 0 and sums[TEXTS].num_loss_tokens == 0
    assert sums[TEXTS].num_held_out > 0


@pytest.mark.parametrize("packs", [False, True])
def test_rollouts_of_a_run_beside_one_of_texts_get_what_they_get_alone(packs: bool) -> None:
    model, rollouts = model_of(packs=packs), some("", weight=0.7)
    alone, expected = trained(model, {ROLLOUTS: rollouts})
    sums, gradients = trained(model, {TEXTS: [*some("supervised"), *some("held_out")], ROLLOUTS: rollouts})
    check_same(gradients[ROLLOUTS], expected[ROLLOUTS], 3 * num_terms(model.module))
    assert sums[ROLLOUTS].as_list() == pytest.approx(alone[ROLLOUTS].as_list(), rel=1e-4, abs=1e-6)
    assert set(_of_tokens(sums[ROLLOUTS])) == {"mismatch_kl", "importance_ratio/mean", "clipped_fraction"}


def test_a_run_of_both_has_one_mean_over_all_their_tokens() -> None:
    model, texts, rollouts = model_of(packs=False), some("supervised"), some("", weight=0.7)
    (of_texts, _), (of_rollouts, _) = (trained(model, {TEXTS: each}) for each in (texts, rollouts))
    sums, _ = trained(model, {TEXTS: [*rollouts, *texts]})
    nums = [sum(sum(each.loss_mask) for each in samples) for samples in (texts, rollouts)]
    together = sum(num * each[TEXTS].loss for num, each in zip(nums, (of_texts, of_rollouts), strict=True)) / sum(nums)
    assert sums[TEXTS].loss == pytest.approx(together, rel=1e-4)
    assert (sums[TEXTS].num_supervised, sums[TEXTS].num_loss_tokens) == (nums[0], sum(nums))
    told = _of_tokens(sums[TEXTS])
    assert told["mismatch_kl"] == pytest.approx(_of_tokens(of_rollouts[TEXTS])["mismatch_kl"], rel=1e-4)
    assert told["supervised/loss"] == pytest.approx(of_texts[TEXTS].loss, rel=1e-4)


def test_parts_of_a_batch_come_to_the_same_sums() -> None:
    """As over passes, and over ranks, one of which may have a blank row alone."""
    model, samples = model_of(packs=False), [*some("supervised"), *some("held_out"), *some("")]
    whole, _ = trained(model, {TEXTS: samples})
    rows = rows_of(TEXTS, [each.columns() for each in samples])
    total = LossSums()
    for part in (rows[:4], rows[4:]):
        batch = to_micro_batch(part)
        losses: list[RowLoss] = [CrossEntropyLossConfig() if use else AipoLossConfig() for use in batch.uses]
        found = forward_backward(model, batch, losses, CPU)
        assert found is not None
        statistics = row_statistics(found.inputs, found.losses, found.entropy_RK, found.is_top_RK)
        total.add(sums_by_run(statistics, [len(part)])[0])
    assert total.as_list() == pytest.approx(whole[TEXTS].as_list(), rel=1e-4, abs=1e-6)
    assert forward_backward(model, blank_micro_batch(rows), [CrossEntropyLossConfig()], CPU) is None


def test_what_is_not_finite_in_one_run_stays_out_of_the_figures_of_its_neighbour() -> None:
    model = model_of(packs=False)
    rows = [row for idx, use in enumerate(("supervised", "")) for row in rows_of(idx, [some(use, 1)[0].columns()])]
    found = forward_backward(model, to_micro_batch(rows), [CrossEntropyLossConfig(), AipoLossConfig()], CPU)
    assert found is not None
    inputs = found.inputs
    logprobs_RK = inputs.logprobs_RK.detach().clone()
    logprobs_RK[1] = -torch.inf
    broken = type(inputs)(**{**vars(inputs), "logprobs_RK": logprobs_RK})
    statistics = row_statistics(broken, found.losses, found.entropy_RK, found.is_top_RK)
    texts, rollouts = sums_by_run(statistics, [1, 1])
    assert texts.supervised_loss > 0 and rollouts.supervised_loss == 0 and rollouts.held_out_loss == 0


def test_people_get_to_read_rollouts_where_there_are_any_and_never_what_is_held_out() -> None:
    keeping = Keeping(per_step=4, group_size=1)
    texts, held = some("supervised", num=2), some("held_out", num=2)
    assert sorted(keeping.samples([*some("", num=3), *texts, *held])) == [0, 1, 2]
    assert sorted(keeping.samples([*texts, *held])) == [0, 1]
    assert sorted(keeping.samples([*held, *texts])) == [2, 3]
