"""A tenant cannot tell that it has neighbours: together equals alone, whatever the neighbours do.

The real loop, real files, recorded batches. Three runs of different rank, alpha, optimizer, rate, schedule, clipping,
delta and batch size are trained alone first; then together in ways that have gone wrong elsewhere.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from prime_rl.contract.layout import RunDir
from tests.trainer_support import (
    adapter,
    make_batch,
    published,
    put_batch,
    put_batches,
    relative_difference,
    sample,
    train_until,
    trainer_config,
    write_model,
    write_run,
)

NUM_STEPS = 6
TOLERANCE = 1e-4
RUNS: dict[str, dict[str, Any]] = {
    "run_adamw": {
        "seed": 1,
        "model": {"lora": {"rank": 4, "alpha": 16}},
        "optim": {"type": "adamw", "lr": 2e-3, "weight_decay": 0.1, "max_norm": 0.5},
        "scheduler": {"type": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.1},
    },
    "run_sgd": {
        "seed": 2,
        "model": {"lora": {"rank": 8, "alpha": 8}},
        "optim": {"type": "sgd", "lr": 5e-2, "max_norm": 1e9, "weight_decay": 0.01},
        "loss": {"delta": 1.5},
    },
    "run_muon": {
        "seed": 3,
        "model": {"lora": {"rank": 16}},
        "optim": {"type": "muon", "lr": 1e-2, "betas": [0.8, 0.999]},
        "scheduler": {"type": "linear"},
    },
}
NUM_SAMPLES = {"run_adamw": 4, "run_sgd": 12, "run_muon": 8}


def put_run(house: Path, model: Path, run_id: str) -> RunDir:
    run = write_run(house, run_id, model, max_steps=NUM_STEPS, **RUNS[run_id])
    put_batches(run, NUM_STEPS, num_samples=NUM_SAMPLES[run_id], seed=len(run_id))
    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """The last adapter of each run when it had the trainer for itself."""
    adapters = {}
    for run_id in RUNS:
        house = tmp_path_factory.mktemp(run_id)
        run = put_run(house, model, run_id)
        train_until(trainer_config(house, model), lambda run=run: published(run) == NUM_STEPS)
        adapters[run_id] = adapter(run, NUM_STEPS)
    return adapters


def check(runs: list[RunDir], alone: dict[str, dict[str, torch.Tensor]]) -> None:
    for run in runs:
        assert published(run) == NUM_STEPS
        assert relative_difference(adapter(run, NUM_STEPS), alone[run.run_id]) <= TOLERANCE, run.run_id


def all_done(runs: list[RunDir]) -> Callable[[], bool]:
    return lambda: all(published(run) == NUM_STEPS for run in runs)


def test_training_changes_the_adapters_and_every_step_matters(
    alone: dict[str, dict[str, torch.Tensor]], model: Path, tmp_path: Path
) -> None:
    run = put_run(tmp_path, model, "run_adamw")
    put_batch(run, make_batch(run.run_id, NUM_STEPS, num_samples=4, seed=99))
    train_until(trainer_config(tmp_path, model), all_done([run]))
    assert relative_difference(adapter(run, NUM_STEPS), alone["run_adamw"]) > 10 * TOLERANCE


@pytest.mark.parametrize("max_tokens", [32, 256, 4096])
def test_together_equals_alone_however_batches_are_split(
    alone: dict[str, dict[str, torch.Tensor]], model: Path, tmp_path: Path, max_tokens: int
) -> None:
    runs = [put_run(tmp_path, model, run_id) for run_id in RUNS]
    train_until(trainer_config(tmp_path, model, max_tokens_per_micro_batch=max_tokens), all_done(runs))
    check(runs, alone)


def test_a_smaller_adapter_is_the_same_in_larger_slots(
    alone: dict[str, dict[str, torch.Tensor]], model: Path, tmp_path: Path
) -> None:
    """Also for Muon, whose step depends on the shape of the matrix."""
    house = tmp_path
    runs = [put_run(house, model, run_id) for run_id in RUNS]
    train_until(trainer_config(house, model, model={"lora": {"rank": 24}}, max_concurrent_runs=3), all_done(runs[:2]))
    check(runs[:2], alone)
    small, large = tmp_path / "small", tmp_path / "large"
    for place, rank in ((small, 4), (large, 16)):
        place.mkdir()
        run = write_run(place, "run_m", model, max_steps=3, optim={"type": "muon"}, model={"lora": {"rank": 4}})
        put_batches(run, 3)
        train_until(trainer_config(place, model, model={"lora": {"rank": rank}}), lambda run=run: published(run) == 3)
    one, other = (adapter(RunDir(place / "run_m"), 3) for place in (small, large))
    assert relative_difference(one, other) <= TOLERANCE


@pytest.mark.parametrize("advantage", [1e6, 1e38])
def test_a_neighbour_that_blows_up_harms_nobody(
    alone: dict[str, dict[str, torch.Tensor]], model: Path, tmp_path: Path, advantage: float
) -> None:
    runs = [put_run(tmp_path, model, run_id) for run_id in RUNS]
    wild = write_run(tmp_path, "run_wild", model, max_steps=NUM_STEPS, optim={"lr": 10.0, "max_norm": 1e9})
    put_batches(wild, NUM_STEPS, advantage=advantage)
    train_until(trainer_config(tmp_path, model, max_tokens_per_micro_batch=128), all_done(runs))
    check(runs, alone)
    if advantage > 1e37:
        assert "not finite" in wild.evicted.read_text() and "gradient norm" in wild.evicted.read_text()


@pytest.mark.parametrize("fault", ["nan", "empty", "junk", "wrong step"])
def test_a_bad_batch_evicts_its_run_with_the_reason_and_no_other(
    alone: dict[str, dict[str, torch.Tensor]], model: Path, tmp_path: Path, fault: str
) -> None:
    run = put_run(tmp_path, model, "run_sgd")
    bad = write_run(tmp_path, "run_bad", model)
    put_batch(bad, make_batch("run_bad", 1))
    batch = make_batch("run_bad", 2)
    worse = msgspec.structs.replace(sample(random.Random(0)), advantage=float("nan"))
    put_batch(
        bad,
        {
            "nan": msgspec.structs.replace(batch, samples=[*batch.samples, worse]),
            "empty": msgspec.structs.replace(batch, samples=[]),
            "junk": batch,
            "wrong step": batch,
        }[fault],
    )
    if fault == "junk":
        bad.rollout_file(2).write_bytes(b"\x00junk")
    if fault == "wrong step":
        put_batch(bad, batch)
        shutil.copy(bad.rollout_file(1), bad.rollout_file(2))
    train_until(trainer_config(tmp_path, model), lambda: published(run) == NUM_STEPS and bad.evicted.exists())
    check([run], alone)
    reason = {
        "nan": "sample 8: advantage is nan",
        "empty": "it has no samples",
        "junk": "not a batch file",
        "wrong step": "step is 1, expected 2",
    }[fault]
    assert reason in bad.evicted.read_text() and "rollouts/step_2" in bad.evicted.read_text()
    assert published(bad) == 1


def test_a_neighbour_evicted_in_the_middle_of_its_batch_and_its_slot_used_again(
    alone: dict[str, dict[str, torch.Tensor]], model: Path, tmp_path: Path
) -> None:
    """Tiny passes, so the eviction falls between passes of one batch; the next run takes the same slot."""
    first = write_run(tmp_path, "run_0", model, optim={"lr": 1.0}, model={"lora": {"rank": 16}})
    put_batches(first, 50, num_samples=24, seed=5)
    runs = [put_run(tmp_path, model, run_id) for run_id in ("run_adamw", "run_sgd")]
    late: list[RunDir] = []
    looks = 0

    def done() -> bool:
        nonlocal looks
        looks += published(first) >= 1
        if looks == 5:
            first.evicted.write_text("enough")
            late.append(put_run(tmp_path, model, "run_muon"))
        return bool(late) and all_done([*runs, *late])()

    config = trainer_config(tmp_path, model, max_tokens_per_micro_batch=48, max_concurrent_runs=3)
    train_until(config, done)
    check([*runs, *late], alone)
    assert 1 <= published(first) < 50


def test_a_run_whose_files_cannot_be_written_is_evicted_alone(
    alone: dict[str, dict[str, torch.Tensor]], model: Path, tmp_path: Path
) -> None:
    run = put_run(tmp_path, model, "run_adamw")
    full = write_run(tmp_path, "run_full", model)
    put_batches(full, 3)
    full.broadcast.write_text("a file where the folder should be")
    train_until(trainer_config(tmp_path, model), lambda: published(run) == NUM_STEPS and full.evicted.exists())
    check([run], alone)
    assert "publishing version 1 failed" in full.evicted.read_text()


def test_a_run_deleted_in_the_middle_is_not_made_again(
    alone: dict[str, dict[str, torch.Tensor]], model: Path, tmp_path: Path
) -> None:
    run = put_run(tmp_path, model, "run_adamw")
    gone = write_run(tmp_path, "run_gone", model)
    put_batches(gone, 50, num_samples=16)

    def done() -> bool:
        if published(gone) >= 2 and gone.path.exists():
            gone.path.rename(tmp_path / "trash")
        return published(run) == NUM_STEPS and not gone.path.exists()

    train_until(trainer_config(tmp_path, model, max_tokens_per_micro_batch=64), done)
    check([run], alone)
    assert not gone.path.exists()


def test_a_pipe_in_the_place_of_a_batch_holds_up_nobody(
    alone: dict[str, dict[str, torch.Tensor]], model: Path, tmp_path: Path
) -> None:
    run = put_run(tmp_path, model, "run_adamw")
    sly = write_run(tmp_path, "run_sly", model)
    sly.rollout_dir(1).mkdir()
    os.mkfifo(sly.rollout_file(1))
    train_until(trainer_config(tmp_path, model), lambda: published(run) == NUM_STEPS and sly.evicted.exists())
    check([run], alone)
    assert "must be a file" in sly.evicted.read_text()
