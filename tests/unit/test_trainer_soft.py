"""Soft targets in the trainer: the cross-entropy to a teacher's likeliest tokens, in the head and in whole passes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from prime_rl.configs.losses import AipoLossConfig, CrossEntropyLossConfig, RowLoss
from prime_rl.contract.types import MicroBatch, TrainingSample
from prime_rl.lora import parts
from prime_rl.trainer.fair_queue import blank_micro_batch, rows_of, to_micro_batch
from prime_rl.trainer.loss import LossSums, row_statistics, sums_by_run, token_logprobs
from prime_rl.trainer.metrics import _of_tokens
from prime_rl.trainer.model import PolicyModel
from prime_rl.trainer.step import Rows, forward_backward, split
from tests.budgets import examples
from tests.numeric import check_same, num_terms
from tests.trainer_support import VOCAB, sample, with_soft
from tests.unit.test_trainer_texts import CPU, gradient, logits_of, model_of, some, trained

pytestmark = pytest.mark.numeric

N, H, V = 10, 5, 31
TEACHER, HARD, ROLLOUTS = 0, 1, 2


def some_soft(num: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(hidden states, head, targets, temperatures, shares); some shares are 0, and some targets are equal."""
    generator = torch.Generator().manual_seed(num)
    hidden_NH, head_VH = (torch.randn(size, H, generator=generator, dtype=torch.float64) for size in (N, V))
    targets_NM = torch.randint(0, V, (N, num), generator=generator)
    shares_NM = torch.rand(N, num, generator=generator)
    shares_NM[::3, num // 2 :] *= 0 if num > 1 else 1
    shares_NM /= shares_NM.sum(-1, keepdim=True) * (1 + torch.rand(N, 1, generator=generator))
    temperatures_N = 0.5 + torch.rand(N, generator=generator)
    return hidden_NH.to(dtype), (2 * head_VH).to(dtype), targets_NM, temperatures_N, shares_NM


@pytest.mark.parametrize("trained", ["hidden states", "head", "both"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("num", [1, 3, 20])
@pytest.mark.parametrize("tokens_of_a_chunk", [1, 4, 100])
def test_the_head_gives_the_weighted_sum_and_its_gradient(
    trained: str, dtype: torch.dtype, num: int, tokens_of_a_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "CHUNK_BYTES", 4 * V * tokens_of_a_chunk)
    hidden, head, targets_NM, temperatures, shares_NM = some_soft(num, dtype)
    hidden.requires_grad_(trained != "head")
    head.requires_grad_(trained != "hidden states")
    weight_N = torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logprobs, _, is_top = token_logprobs(hidden, head, targets_NM, temperatures, shares_NM)
    (logprobs * weight_N).sum().backward()
    plain = [tensor.detach().double().requires_grad_() for tensor in (hidden, head)]
    all_NV = torch.log_softmax(plain[0] @ plain[1].T / temperatures[:, None].double(), -1)
    expected_N = (shares_NM.double() * all_NV.gather(-1, targets_NM)).sum(-1)
    (expected_N * weight_N).sum().backward()
    torch.testing.assert_close(logprobs.double(), expected_N, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip((hidden, head), plain, strict=True):
        assert (ours.grad is not None) == ours.requires_grad
        if ours.grad is not None and theirs.grad is not None:
            assert float((ours.grad - theirs.grad).norm()) <= 1e-4 * float(theirs.grad.norm())
    likeliest_N = targets_NM.gather(-1, shares_NM.argmax(-1, keepdim=True))[:, 0]
    assert torch.equal(is_top.bool(), likeliest_N == all_NV.argmax(-1))


@pytest.mark.parametrize("trained", ["hidden states", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("filled", [0, 4])
def test_one_target_that_is_certain_is_the_hard_target_bit_for_bit(
    trained: str, dtype: torch.dtype, filled: int
) -> None:
    """Also where it is filled up for rows beside it that have more."""
    found = []
    for is_soft in (False, True):
        hidden, head, targets_NM, temperatures, _ = some_soft(1, dtype)
        hidden.requires_grad_()
        head.requires_grad_(trained == "both")
        shares_NM = torch.nn.functional.pad(torch.ones(N, 1), (0, filled)) if is_soft else None
        targets = torch.nn.functional.pad(targets_NM, (0, filled)) if is_soft else targets_NM[:, 0]
        results = token_logprobs(hidden, head, targets, temperatures, shares_NM)
        results[0].sum().backward()
        found.append([*results, hidden.grad, head.grad])
    for hard, soft in zip(*found, strict=True):
        assert (hard is None and soft is None) or torch.equal(hard, soft)


def taught(num: int = 3, soft: int = 5, seed: int = 0) -> list[TrainingSample]:
    """Texts with soft targets, at several temperatures."""
    texts = [with_soft(each, soft, seed) for each in some("supervised", num, seed)]
    return [replace(each, temperature=(1.0, 0.7, 1.3)[at % 3]) for at, each in enumerate(texts)]


def plain(model: PolicyModel, texts: Sequence[TrainingSample], idx: int) -> Tensor:
    """-sum_k p_k log pi(id_k), times the weight of its text; the mean over all loss tokens."""
    losses = []
    for each in texts:
        logits, _ = logits_of(model, each, idx)
        soft = [pair for pair in zip(each.soft_ids, each.soft_probs, strict=True) if pair[0]]
        ids, probs = torch.tensor([ids for ids, _ in soft]), torch.tensor([probs for _, probs in soft])
        logprobs = torch.log_softmax(logits / each.temperature, -1).gather(-1, ids)
        losses.append(-each.advantage * (probs * logprobs).sum(-1))
    return torch.cat(losses).mean()


def plain_gradient(model: PolicyModel, texts: Sequence[TrainingSample], idx: int) -> tuple[float, Tensor]:
    for parameter in model.adapters():
        parameter.grad = None
    mean = plain(model, texts, idx)
    mean.backward()
    return mean.item(), gradient(model, idx)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_a_pass_is_the_plain_cross_entropy_to_the_teacher(packs: bool, weight: float) -> None:
    model, texts = model_of(packs=packs), [replace(each, advantage=weight) for each in taught()]
    sums, gradients = trained(model, {TEACHER: texts})
    expected, expected_gradient = plain_gradient(model, texts, TEACHER)
    assert sums[TEACHER].loss == pytest.approx(expected, rel=1e-5)
    check_same(gradients[TEACHER], expected_gradient, 3 * num_terms(model.module))
    assert _of_tokens(sums[TEACHER])["supervised/loss"] == pytest.approx(expected / weight, rel=1e-5)


def test_the_accuracy_is_that_of_the_likeliest_token_of_the_teacher() -> None:
    model, texts = model_of(packs=True), taught()
    sums, _ = trained(model, {TEACHER: texts})
    right = []
    for each in texts:
        soft = [pair for pair in zip(each.soft_ids, each.soft_probs, strict=True) if pair[0]]
        likeliest = torch.tensor([ids[max(range(len(ids)), key=probs.__getitem__)] for ids, probs in soft])
        right.append(logits_of(model, each, TEACHER)[0].argmax(-1) == likeliest)
    assert sums[TEACHER].supervised_right == torch.cat(right).sum()


@pytest.mark.parametrize("packs", [False, True])
def test_runs_beside_one_with_soft_targets_get_what_they_get_alone(packs: bool) -> None:
    model = model_of(packs=packs, num_slots=3)
    by_run = {TEACHER: taught(soft=7), HARD: some("supervised", seed=1), ROLLOUTS: some("", weight=0.7, seed=2)}
    together, gradients = trained(model, by_run)
    for idx, samples in by_run.items():
        sums, alone = trained(model, {idx: samples})
        check_same(gradients[idx], alone[idx], 3 * num_terms(model.module))
        assert together[idx].as_list() == pytest.approx(sums[idx].as_list(), rel=1e-4, abs=1e-6)


def test_a_text_with_soft_targets_beside_one_without_in_one_run() -> None:
    model, soft, hard = model_of(packs=True), taught(soft=4), some("supervised", seed=1)
    certain = [
        replace(
            each,
            soft_ids=[[id] if on else [] for id, on in zip(each.token_ids, each.loss_mask, strict=True)],
            soft_probs=[[1.0] if on else [] for on in each.loss_mask],
        )
        for each in hard
    ]
    sums, gradients = trained(model, {TEACHER: [*soft, *hard]})
    expected, expected_gradient = plain_gradient(model, [*soft, *certain], TEACHER)
    assert sums[TEACHER].loss == pytest.approx(expected, rel=1e-5)
    check_same(gradients[TEACHER], expected_gradient, 3 * num_terms(model.module))
    as_soft, same = trained(model, {TEACHER: [*soft, *certain]})
    assert as_soft[TEACHER] == sums[TEACHER] and torch.equal(same[TEACHER], gradients[TEACHER])


def test_texts_that_share_positions_have_targets_of_their_own_there() -> None:
    """The same tokens, each learned from another teacher: their positions are computed once."""
    one = sample(random.Random(0), num_tokens=40, advantage=1.0)
    texts = [with_soft(one, num, seed=num) for num in (2, 5)]
    rows = rows_of(TEACHER, [each.columns() for each in texts])
    assert [row.shared for row in rows] == [0, 38]
    model = model_of(packs=True)
    sums, gradients = trained(model, {TEACHER: texts})
    expected, expected_gradient = plain_gradient(model, texts, TEACHER)
    assert sums[TEACHER].loss == pytest.approx(expected, rel=1e-5)
    check_same(gradients[TEACHER], expected_gradient, 3 * num_terms(model.module))


def measured(model: PolicyModel, batches: Sequence[MicroBatch]) -> LossSums:
    total = LossSums()
    for batch in batches:
        losses: list[RowLoss] = [CrossEntropyLossConfig() if use else AipoLossConfig() for use in batch.uses]
        found = forward_backward(model, batch, losses, CPU)
        assert found is not None
        statistics = row_statistics(found.inputs, found.losses, found.entropy_RK, found.is_top_RK)
        total.add(sums_by_run(statistics, [len(losses)])[0])
    return total


def test_parts_of_a_batch_come_to_the_same_sums() -> None:
    """As over passes, halves of one that does not fit, and ranks, one of which may have a blank row alone."""
    model, samples = model_of(packs=False), [*taught(soft=6), *some("supervised", seed=1), *some("")]
    rows = rows_of(TEACHER, [each.columns() for each in samples])
    whole, halves = measured(model, [to_micro_batch(rows)]), [rows[:4], rows[4:]]
    for ways in (
        [to_micro_batch(half) for half in halves],
        [split(to_micro_batch(rows), part) for part in (slice(4), slice(4, None))],
    ):
        assert measured(model, ways).as_list() == pytest.approx(whole.as_list(), rel=1e-4, abs=1e-6)
    soft = rows_of(TEACHER, [each.columns() for each in taught()])
    assert forward_backward(model, blank_micro_batch(soft), [CrossEntropyLossConfig()], CPU) is None


def test_the_base_model_gives_its_own_sum_for_a_kl() -> None:
    model, texts = model_of(packs=True), [replace(each, temperature=1.0) for each in taught()]
    assert trained(model, {TEACHER: texts}, kl_coef=0.5)[0][TEACHER].kl_base > 0
    with torch.no_grad():
        for parameter in model.adapters():
            parameter.zero_()
    assert trained(model, {TEACHER: texts}, kl_coef=0.5)[0][TEACHER].kl_base == pytest.approx(0, abs=1e-6)


@settings(max_examples=examples(60))
@given(data=st.data(), runs=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=4), min_size=1, max_size=3))
def test_each_loss_token_of_a_pass_has_its_own_targets(data: st.DataObject, runs: list[list[int]]) -> None:
    """`runs`: how many soft targets the tokens of each text have; 0: it has none."""
    rng = random.Random(data.draw(st.integers(0, 99)))
    by_run = [
        [with_soft(each, num, rng.randrange(99)) if num else each for num in nums]
        for nums in runs
        for each in [sample(rng, num_tokens=rng.randrange(6, 20))]
    ]
    rows = [row for idx, texts in enumerate(by_run) for row in rows_of(idx, [each.columns() for each in texts])]
    packed = Rows.of(to_micro_batch(rows))
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, unique=True).map(sorted))
    targets, _ = packed.targets(chosen, CPU, None)
    expected = []
    for row in (sorted(rows, key=lambda row: row.run_idx)[at] for at in chosen):
        each = row.sample.lists()
        for at, on in enumerate(each.loss_mask):
            if on:
                soft = zip(each.soft_ids[at], each.soft_probs[at], strict=True) if each.soft_ids else []
                expected.append(dict(soft) or {each.token_ids[at]: 1.0})
    if targets.shares_NM is None:
        assert targets.ids_N.tolist() == [next(iter(each)) for each in expected]
        assert all(list(each.values()) == [1.0] for each in expected)
        return
    assert targets.shares_NM.dtype == torch.float32 and int(targets.ids_N.max()) < VOCAB
    for ids, shares, each in zip(targets.ids_N.tolist(), targets.shares_NM.tolist(), expected, strict=True):
        assert {id: share for id, share in zip(ids, shares, strict=True) if share} == {
            id: share for id, share in each.items() if share
        }
