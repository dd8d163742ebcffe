"""Rows that begin alike: what they have in common is computed once, and nothing else changes."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prime_rl.configs.base import LoRAConfig
from prime_rl.configs.losses import AipoLossConfig, DppoLossConfig, GspoLossConfig, LossConfig
from prime_rl.contract.types import TOKEN_DTYPE, MicroBatch, SampleColumns
from prime_rl.trainer.fair_queue import (
    MIN_SHARED,
    MOST_SEEN,
    Row,
    RowQueue,
    _of_busiest,
    rows_of,
    sharing,
    to_micro_batch,
)
from prime_rl.trainer.model import PolicyModel, adapt_model, train_whole
from prime_rl.trainer.step import PassResult, Rows, forward_backward
from tests.budgets import examples
from tests.trainer_support import VOCAB, sample, tiny_model

CPU = torch.device("cpu")
NUM_RUNS = 5


@st.composite
def batches(draw: st.DrawFn, longest: int = 400, most_rows: int = 8) -> list[SampleColumns]:
    """Samples that begin with a part of an earlier one, or with nothing that another has."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    samples: list[SampleColumns] = []
    for _ in range(draw(st.integers(1, most_rows))):
        one = sample(rng, num_tokens=4 + draw(st.integers(1, longest)))
        if samples and draw(st.booleans()):
            other = samples[draw(st.integers(0, len(samples) - 1))].lists().token_ids
            prefix = other[: draw(st.integers(0, len(other)))]
            num_loss = draw(st.integers(1, len(one.token_ids)))  # some of them may stand in what is shared
            ids = [*prefix, *one.token_ids]
            mask = [at >= max(1, len(ids) - num_loss) for at in range(len(ids))]
            logprobs = [rng.gauss(-3, 0.5) if on else 0.0 for on in mask]
            one = msgspec.structs.replace(one, token_ids=ids, loss_mask=mask, logprobs=logprobs)
        samples.append(one.columns())
    return samples


def alone(rows: list[Row]) -> list[Row]:
    return [replace(row, shared=0) for row in rows]


@settings(max_examples=examples(120), deadline=None)
@given(runs=st.lists(batches(longest=60), min_size=1, max_size=3), max_tokens=st.sampled_from([100, 400, 5_000]))
def test_every_row_finds_its_tokens_in_the_packed_one(runs: list[list[SampleColumns]], max_tokens: int) -> None:
    queue = RowQueue(max_tokens, packs=True)
    for idx, samples in enumerate(runs):
        queue.add(idx, rows_of(idx, samples))
    seen = 0
    while taken := queue.next_rows():
        batch = to_micro_batch(taken)
        rows = Rows.of(batch)
        ids_1N, packed = rows.packed(range(len(taken)))
        seen += len(taken)
        for row, places in enumerate(packed.places):
            tokens = np.frombuffer(batch.token_ids[row], TOKEN_DTYPE)
            assert ids_1N[0, places].tolist() == tokens[:-1].tolist()
        assert ids_1N.shape[1] == rows.num_positions(packed=True) == sum(packed.computed)
        is_one_row = sum(row.shared == 0 for row in taken) == 1 and packed.computed[0] > max_tokens
        assert ids_1N.shape[1] <= max_tokens or is_one_row
        assert sum(packed.seen) <= MOST_SEEN * max_tokens or len(taken) == 1
        assert all(row.shared == 0 or row.shared >= MIN_SHARED or row.num_positions == 1 for row in taken)
    assert seen == sum(map(len, runs))


def test_a_group_computes_its_prompt_once_and_branches_their_history() -> None:
    rng = random.Random(0)
    prompt, turn = ([rng.randrange(VOCAB) for _ in range(num)] for num in (100, 60))
    groups = [prompt + sample(rng, num_tokens=n).token_ids for n in (20, 30, 20, 9)]
    branches = [prompt + turn + sample(rng, num_tokens=n).token_ids for n in (7, 8)]
    rows = sharing([row_of(ids) for ids in (*groups, *branches, sample(rng, num_tokens=50).token_ids)])
    assert sum(row.num_positions for row in rows) == 100 + (19 + 29 + 19 + 8) + 60 + (6 + 7) + 49
    assert sorted(row.shared for row in rows) == [0, 0, 100, 100, 100, 100, 160]


def test_what_answers_have_in_common_by_chance_is_computed_for_each() -> None:
    """So that all of a group share equally: their attention is one call."""
    rng = random.Random(0)
    prompt = [rng.randrange(VOCAB) for _ in range(100)]
    rows = sharing([row_of([*prompt, *([1] * num), 2 + num, *([9] * 20)]) for num in range(10)])
    assert [row.shared for row in rows] == [0] + [100] * 9


def row_of(ids: list[int]) -> Row:
    one = msgspec.structs.replace(sample(random.Random(0), num_tokens=len(ids)), token_ids=ids)
    return rows_of(0, [one.columns()])[0]


GROUPS = st.tuples(st.integers(32, 600), st.lists(st.integers(2, 400), min_size=1, max_size=40))


@settings(max_examples=examples(60), deadline=None)
@given(groups=st.lists(GROUPS, min_size=1, max_size=4), num_ranks=st.integers(2, 8))
def test_no_rank_has_more_to_compute_than_where_nothing_is_shared(
    groups: list[tuple[int, list[int]]], num_ranks: int
) -> None:
    rng = random.Random(0)
    samples = []
    for num_prompt, answers in groups:
        prompt = [rng.randrange(VOCAB) for _ in range(num_prompt)]
        samples += [sample(rng, num_tokens=num_prompt + num, prompt=prompt).columns() for num in answers]
    rows = rows_of(0, samples)
    most = []
    for each in (rows, alone(rows)):
        queue = RowQueue(100_000, packs=True)
        computed = queue.add(0, each, num_ranks=num_ranks)
        assert computed == sum(bundle.num_positions for bundle in queue._waiting[0])
        most.append(_of_busiest(queue._waiting[0], num_ranks))
    assert most[0] <= most[1]


def test_ranks_have_a_part_each_of_one_group() -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(VOCAB) for _ in range(64)]
    for answers, num_ranks, most in (([64] * 16, 4, 64 + 4 * 63), ([200] * 15, 4, 64 + 4 * 199)):
        samples = [sample(rng, num_tokens=64 + num, prompt=prompt).columns() for num in answers]
        queue = RowQueue(8_192, packs=True)
        queue.add(0, rows_of(0, samples), num_ranks=num_ranks)
        hands = queue.next_pack(num_ranks)
        assert len(hands) == num_ranks and not queue
        assert max(sum(row.num_positions for row in hand) for hand in hands) == most


def test_what_waits_is_cut_again_when_passes_have_to_be_smaller() -> None:
    samples = group(random.Random(0), [20] * 30)
    queue = RowQueue(4_096, packs=True)
    queue.add(0, rows_of(0, samples))
    queue.limit(200)
    queue.limit(1_000)
    passes = []
    while taken := queue.next_rows():
        passes.append(sum(row.num_positions for row in taken))
        assert taken[0].shared == 0
    assert max(passes) <= 200 and len(passes) >= 5


def test_all_layers_keep_one_mask() -> None:
    batch = to_micro_batch(rows_of(0, group(random.Random(0), [20, 30, 20])), base_pass=True)
    masks = set[int]()

    def seen(tensor: Tensor) -> Tensor:
        if tensor.dim() >= 2 and tensor.shape[-1] - tensor.shape[-2] == 70:
            masks.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        run(replace(model_of(), remakes=False), batch)
    lengths = {len(mask) for mask, shared in zip(batch.loss_mask, batch.shared, strict=True) if shared}
    assert len(masks) == len(lengths) > 0


def model_of(*, packs: bool = True, checkpoints: bool = False, dtype: torch.dtype = torch.float32) -> PolicyModel:
    model = adapt_model(tiny_model(), LoRAConfig(rank=4), NUM_RUNS, packs=packs, checkpoints=checkpoints)
    model.module.to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.adapters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def run(model: PolicyModel, batch: MicroBatch) -> tuple[PassResult, list[Tensor]]:
    losses: list[LossConfig] = [
        AipoLossConfig(kl_coef=0.3 * (idx == 0)) if idx < 3 else GspoLossConfig(type="gspo") for idx in batch.run_idxs
    ]
    result = forward_backward(model, batch, losses, CPU)
    assert result is not None
    parameters = model.adapters() or list(model.module.parameters())
    return result, [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]


def check(found: tuple[PassResult, list[Tensor]], expected: tuple[PassResult, list[Tensor]]) -> None:
    mask_RK = expected[0].inputs.mask_RK
    for name in ("logprobs_RK", "base_logprobs_RK"):
        one, other = (getattr(each[0].inputs, name)[mask_RK] for each in (found, expected))
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=1e-4)
    entropies = (each[0].entropy_RK[mask_RK].double() for each in (found, expected))
    torch.testing.assert_close(*entropies, rtol=0, atol=1e-4)
    for grad, wanted in zip(found[1], expected[1], strict=True):
        most = float(wanted.abs().max())
        torch.testing.assert_close(grad.double(), wanted.double(), rtol=0, atol=1e-4 * most + 1e-12)


@pytest.mark.numeric
@settings(max_examples=examples(45), deadline=None)
@given(runs=st.lists(batches(), min_size=1, max_size=NUM_RUNS), checkpoints=st.booleans(), data=st.data())
def test_a_pass_that_shares_equals_one_that_does_not(
    runs: list[list[SampleColumns]], checkpoints: bool, data: st.DataObject
) -> None:
    rows = [row for idx, samples in enumerate(runs) for row in rows_of(idx, samples)]
    shared, apart = to_micro_batch(rows, base_pass=True), to_micro_batch(alone(rows), base_pass=True)
    wanted = run(model_of(packs=data.draw(st.booleans())), apart)
    check(run(model_of(checkpoints=checkpoints), shared), wanted)


@pytest.mark.numeric
def test_sharing_is_no_further_from_float64_than_rows_alone() -> None:
    rows = [row for idx in range(2) for row in rows_of(idx, group(random.Random(idx), [5, 33, 12, 33, 1]))]
    shared, apart = to_micro_batch(rows, base_pass=True), to_micro_batch(alone(rows), base_pass=True)
    exact, exact_grads = run(model_of(dtype=torch.float64), apart)
    scale = [float(grad.abs().max()) for grad in exact_grads]

    def error(found: tuple[PassResult, list[Tensor]]) -> tuple[float, float]:
        logprobs = float((found[0].inputs.logprobs_RK - exact.inputs.logprobs_RK).detach().abs().max())
        return logprobs, max(
            float((grad - wanted).abs().max()) / most
            for grad, wanted, most in zip(found[1], exact_grads, scale, strict=True)
            if most
        )

    for ours, theirs in zip(error(run(model_of(), shared)), error(run(model_of(), apart)), strict=True):
        assert ours <= max(2 * theirs, 1e-6)


@pytest.mark.numeric
def test_a_whole_model_gets_the_same_gradients() -> None:
    from prime_rl.trainer.memory import mesh_of_ranks

    rows = rows_of(0, group(random.Random(0), [5, 33, 12, 1]))
    found = []
    with mesh_of_ranks(1) as mesh:
        for each in (rows, alone(rows)):
            model = train_whole(tiny_model(), mesh, torch.float32, packs=True)
            result, grads = run(model, to_micro_batch(each, base_pass=True))
            found.append((result, [grad.to_local() for grad in grads]))  # type: ignore[attr-defined]
    check(*found)


def group(
    rng: random.Random, answers: list[int], prompt: int = 70, advantage: float | None = None
) -> list[SampleColumns]:
    """Samples of one prompt of 70 tokens, with answers of so many."""
    prompt = 70
    ids = [rng.randrange(VOCAB) for _ in range(prompt)]
    found = []
    for answer in answers:
        one = sample(rng, num_tokens=prompt + answer, advantage=advantage)
        mask = [at >= prompt for at in range(prompt + answer)]
        one = msgspec.structs.replace(one, token_ids=ids + one.token_ids[prompt:], loss_mask=mask)
        found.append(one.columns())
    return found


def test_rows_without_a_gradient_are_left_out_and_their_tokens_still_count() -> None:
    rng = random.Random(0)
    solved, mixed = group(rng, [9, 8], advantage=0.0), group(rng, [5, 7])
    rows = rows_of(0, [*solved, *mixed], needs_advantage=True)
    assert sorted(row.order for row in rows) == [2, 3]
    assert {row.loss_scale for row in rows} == {1 / (9 + 8 + 5 + 7)}
    kept = rows_of(0, [*solved, *mixed], kept=[1], needs_advantage=True)
    assert sorted(row.order for row in kept) == [1, 2, 3], "people get to read its ratios"
    own = [0.0] * 70 + [0.0, 1.0] + [0.0] * 7
    given = msgspec.structs.replace(solved[0].lists(), token_advantages=own).columns()
    assert len(rows_of(0, [given, *mixed], needs_advantage=True)) == 3
    (row,) = rows_of(0, solved, needs_advantage=True)
    assert row.order == 1 and row.loss_scale, "an update with gradients of zero, and what is reported of it"


def test_only_a_loss_with_nothing_but_advantages_leaves_rows_out() -> None:
    assert AipoLossConfig().needs_advantage and GspoLossConfig(type="gspo").needs_advantage
    assert not AipoLossConfig(kl_coef=0.1).needs_advantage
    assert not DppoLossConfig(type="dppo").needs_advantage and DppoLossConfig(type="dppo", tau=0).needs_advantage


@pytest.mark.numeric
def test_left_out_rows_change_no_gradient() -> None:
    rng = random.Random(0)
    samples = [*group(rng, [9, 8, 20], advantage=0.0), *group(rng, [5, 7])]
    found = []
    for needs_advantage in (True, False):
        rows = rows_of(1, samples, needs_advantage=needs_advantage)
        found.append(run(model_of(), to_micro_batch(rows))[1])
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
