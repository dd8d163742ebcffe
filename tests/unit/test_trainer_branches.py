"""A rollout of several samples: what it trains, what its loss is divided by, and which of its samples are kept."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from prime_rl.configs.losses import AipoLossConfig, DrGrpoLossConfig, LossConfig, LossMean
from prime_rl.contract.samples import MAX_KEPT_BRANCHES, Keeping
from prime_rl.contract.types import (
    BYTES_VERSION,
    SampleColumns,
    TrainingBatch,
    TrainingSample,
    max_batch_bytes,
    max_rollout_bytes,
    read_batch,
    read_columns,
    rollouts_of,
    sample_bytes,
    write_batch,
)
from prime_rl.trainer.fair_queue import loss_scales, rows_of, to_micro_batch
from prime_rl.trainer.step import forward_backward
from tests.trainer_support import VOCAB, sample
from tests.unit.test_trainer_sharing import CPU, alone, model_of

PROMPT, TURN = 70, 9


def talk(rng: random.Random, num_turns: int) -> TrainingSample:
    """A prompt, and so many answers with a message behind each but the last."""
    one = sample(rng, num_tokens=PROMPT + TURN * (2 * num_turns - 1))
    mask = [at >= PROMPT and (at - PROMPT) // TURN % 2 == 0 for at in range(len(one.token_ids))]
    logprobs = [value if on else 0.0 for value, on in zip([-3.0] * len(mask), mask, strict=True)]
    return msgspec.structs.replace(one, loss_mask=mask, logprobs=logprobs)


def in_branches(one: TrainingSample, rollout_id: str) -> list[TrainingSample]:
    """The same tokens with a loss, each answer in a branch of its own that begins with all that was said before."""
    ends = [
        at for at in range(1, len(one.loss_mask) + 1) if one.loss_mask[at - 1] and not any(one.loss_mask[at : at + 1])
    ]
    branches = []
    for end in ends:
        mask = [one.loss_mask[at] and at >= end - TURN for at in range(end)]
        branches.append(
            msgspec.structs.replace(
                one,
                token_ids=one.token_ids[:end],
                loss_mask=mask,
                logprobs=[value if on else 0.0 for value, on in zip(one.logprobs, mask, strict=False)],
                token_advantages=one.token_advantages[:end],
                rollout_id=rollout_id,
            )
        )
    return branches


def gradients(samples: list[TrainingSample], loss: LossConfig, *, shares: bool) -> list[Tensor]:
    rows = rows_of(0, [each.columns() for each in samples], loss.mean, 16)
    if shares:
        assert any(row.shared >= PROMPT for row in rows)
    model = model_of()
    forward_backward(model, to_micro_batch(rows if shares else alone(rows)), [loss] * len(rows), CPU)
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in model.adapters()]


@pytest.mark.numeric
@pytest.mark.parametrize("shares", [True, False], ids=["once", "each"])
@pytest.mark.parametrize("loss", [AipoLossConfig(), DrGrpoLossConfig(type="dr_grpo")], ids=["token", "constant"])
def test_branches_train_what_the_same_tokens_in_one_sample_train(loss: LossConfig, shares: bool) -> None:
    rng = random.Random(0)
    whole, other = talk(rng, 3), sample(rng, num_tokens=20)
    given = [rng.gauss(0, 1) if on else 0.0 for on in whole.loss_mask]
    for one in (whole, msgspec.structs.replace(whole, token_advantages=given)):
        branches = in_branches(one, "r")
        assert [sum(each.loss_mask) for each in branches] == [TURN] * 3 and sum(one.loss_mask) == 3 * TURN
        found = gradients([*branches, other], loss, shares=shares)
        for grad, wanted in zip(found, gradients([one, other], loss, shares=False), strict=True):
            most = float(wanted.abs().max())
            torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-4 * most + 1e-12)
        assert any(float(grad.abs().max()) > 0 for grad in found)


@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        ("token", [1 / 20] * 5),
        ("sequence", [1 / (3 * 6), 1 / (3 * 6), 1 / (3 * 10), 1 / (3 * 4), 1 / (3 * 4)]),
        ("constant", [1 / (3 * 16)] * 5),
    ],
)
def test_a_rollout_counts_once_in_the_mean(mean: LossMean, expected: list[float]) -> None:
    num_loss_tokens, rollouts = [2, 4, 10, 4, 0], [[0, 1], [2], [3, 4]]
    scales = loss_scales(num_loss_tokens, mean, 16, rollouts)
    assert scales == pytest.approx(expected)
    if mean == "sequence":
        assert sum(scale * num for scale, num in zip(scales, num_loss_tokens, strict=True)) == pytest.approx(1)


def rollout(reward: float, num: int, rollout_id: str) -> list[TrainingSample]:
    one = sample(random.Random(0))
    return [msgspec.structs.replace(one, reward=reward, rollout_id=rollout_id if num > 1 else "") for _ in range(num)]


def test_samples_behind_each_other_are_of_one_rollout_by_their_id() -> None:
    samples = [*rollout(0, 2, "a"), *rollout(0, 1, ""), *rollout(0, 1, ""), *rollout(0, 3, "b"), *rollout(0, 2, "a")]
    assert rollouts_of(samples) == [[0, 1], [2], [3], [4, 5, 6], [7, 8]]


def test_the_kept_samples_are_those_of_whole_rollouts_and_have_their_places() -> None:
    """Of groups of two, the one whose rewards differ most."""
    numbers = [2, 1, 1, MAX_KEPT_BRANCHES + 3]
    rewards = [0.5, 0.5, 0.0, 1.0]
    samples = [
        each.columns()
        for at, (num, reward) in enumerate(zip(numbers, rewards, strict=True))
        for each in rollout(reward, num, f"r{at}")
    ]
    kept = Keeping(per_step=2, group_size=2).samples(samples)
    assert kept == [3, *range(4, 4 + MAX_KEPT_BRANCHES)]
    rows = rows_of(0, samples, kept=kept)
    assert {row.order: kept[row.kept] for row in rows if row.kept >= 0} == {place: place for place in kept}
    assert not Keeping(per_step=0, group_size=2).samples(samples)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_file_of_each_version_is_read(tmp_path: Path, version: int) -> None:
    batch = TrainingBatch("run_a", 1, [*rollout(1.0, 2, "a"), *rollout(0.0, 1, "")], {"next_index": 5})
    path = tmp_path / "rollouts.msgpack"
    if version == 3:
        write_batch(path, batch)
    else:
        plain = [msgspec.structs.replace(each, rollout_id="") for each in batch.samples]
        batch = msgspec.structs.replace(batch, samples=plain)
        earlier = {1: batch, 2: msgspec.structs.replace(batch.columns(), version=BYTES_VERSION)}
        path.write_bytes(msgspec.msgpack.encode(earlier[version]))
    assert msgspec.msgpack.decode(path.read_bytes())["version"] == version
    found: list[SampleColumns] = read_columns(path).samples
    assert found == batch.columns().samples
    assert rollouts_of(found) == ([[0, 1], [2]] if version == 3 else [[0], [1], [2]])
    again = read_batch(path)
    assert again.sampler_state == batch.sampler_state
    assert [each.columns() for each in again.samples] == found


@pytest.mark.parametrize(
    ("size", "branches", "seq_len"), [(4, 1, 64), (64, 256, 4096), (2496, 1, 32_768), (8, 256, VOCAB)]
)
def test_rollouts_of_their_share_are_a_batch_that_is_read(size: int, branches: int, seq_len: int) -> None:
    share = max_rollout_bytes(size, branches, seq_len)
    assert sample_bytes(seq_len) <= share and size * share <= max_batch_bytes(size * branches, seq_len)
