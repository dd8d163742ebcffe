"""The log-ratios that the trainer keeps are those of the tokens of the kept rollouts, however the batch was split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from prime_rl.contract.samples import Keeping, read_ratios
from prime_rl.contract.types import TrainingSample
from tests.trainer_support import make_batch, published, put_batch, tiny_model, train_until, trainer_config, write_run

KEEPING = Keeping(per_step=8, group_size=4)
# Of 12 samples in groups of 4: the groups with the lowest and the highest mean reward.
REWARDS = [0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.1, 0.0, 1.0, 0.9, 1.0, 1.0]
PLACES = [4, 5, 6, 7, 8, 9, 10, 11]


def expected(sample: TrainingSample) -> torch.Tensor:
    """By the base model alone: before the first update an adapter changes nothing."""
    ids = torch.tensor([sample.token_ids])
    with torch.no_grad():
        logprobs = tiny_model()(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    mask = torch.tensor(sample.loss_mask[1:])
    return (logprobs - torch.tensor(sample.logprobs[1:]))[mask]


@pytest.mark.numeric
@pytest.mark.parametrize("max_tokens", [24, 4096])
def test_the_ratios_are_those_of_the_kept_tokens(tiny: Path, tmp_path: Path, max_tokens: int) -> None:
    samples = {"per_step": 8, "keep_steps": 1}
    run = write_run(tmp_path, "run_a", tiny, batch_size=12, max_steps=3, samples=samples)
    off = write_run(tmp_path, "run_off", tiny, max_steps=1, samples={"per_step": 0})
    put_batch(off, make_batch("run_off", 1))
    batches = []
    for step in (1, 2, 3):
        batch = make_batch("run_a", step, num_samples=12)
        rewarded = [replace(one, reward=reward) for one, reward in zip(batch.samples, REWARDS, strict=True)]
        batches.append(replace(batch, samples=rewarded))
        put_batch(run, batches[-1])
    assert KEEPING.places(REWARDS) == PLACES
    config = trainer_config(tmp_path, tiny, max_tokens_per_micro_batch=max_tokens)
    train_until(config, lambda: published(run) == 3 and published(off) == 1)
    found = read_ratios(run.ratios)
    assert sorted(found) == [3], "the newest are kept"
    assert not off.ratios.exists()
    assert {place: len(found[3][place]) for place in found[3]} == {
        place: sum(batches[2].samples[place].loss_mask) for place in PLACES
    }


@pytest.mark.numeric
def test_of_a_rollout_in_branches_each_sample_has_its_own(tiny: Path, tmp_path: Path) -> None:
    """Eight rollouts of two branches in groups of four: of the second group the rewards differ."""
    run = write_run(tmp_path, "run_a", tiny, batch_size=8, max_steps=1, samples={"per_step": 4})
    batch = make_batch("run_a", 1, num_samples=16, branches=2, group=2)
    rewarded = [replace(one, reward=float(at in (8, 9))) for at, one in enumerate(batch.samples)]
    put_batch(run, replace(batch, samples=rewarded))
    train_until(trainer_config(tmp_path, tiny), lambda: published(run) == 1)
    (ratios,) = read_ratios(run.ratios).values()
    assert sorted(ratios) == list(range(8, 16)), "places of samples, not of rollouts"
    for place, values in ratios.items():
        assert (torch.tensor(values) - expected(batch.samples[place])).abs().max() < 1e-3


@pytest.mark.numeric
def test_before_the_first_update_they_compare_the_base_model_with_the_sampler(tiny: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path, "run_a", tiny, max_steps=1, samples={"per_step": 4})
    batch = make_batch("run_a", 1)
    put_batch(run, batch)
    train_until(trainer_config(tmp_path, tiny, max_tokens_per_micro_batch=48), lambda: published(run) == 1)
    (ratios,) = read_ratios(run.ratios).values()
    assert sorted(ratios) == [0, 1, 2, 3]
    for place, values in ratios.items():
        assert (torch.tensor(values) - expected(batch.samples[place])).abs().max() < 1e-3


def test_a_disk_that_takes_no_ratios_stops_nothing(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_run(tmp_path, "run_a", tiny, max_steps=1)
    run.metrics.mkdir()
    run.ratios.symlink_to("/dev/null")
    put_batch(run, make_batch("run_a", 1))
    train_until(trainer_config(tmp_path, tiny), lambda: published(run) == 1)
    assert "log-ratios of step 1 are not kept" in caplog.text and not run.evicted.exists()
