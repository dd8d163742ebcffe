"""The real trainer continues another run's training in a new run, to the last bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch

from prime_rl.contract.types import TrainingBatch
from tests.trainer_support import (
    adapter,
    make_batch,
    published,
    put_batch,
    relative_difference,
    train_until,
    trainer_config,
    write_run,
)

CHANGES: dict[str, Any] = {"max_steps": 9, "ckpt": {"interval": 1}, "model": {"lora": {"rank": 4}}}


def as_first_of(run_id: str, batch: TrainingBatch) -> TrainingBatch:
    """The same samples as the first batch of another run."""
    samples = [msgspec.structs.replace(sample, policy_version=0) for sample in batch.samples]
    return TrainingBatch(run_id, 1, samples, batch.sampler_state)


def test_a_fork_with_its_optimizer_makes_the_update_that_the_source_would_have_made(
    tmp_path: Path, model: Path
) -> None:
    source = write_run(tmp_path, "run_a", model, **CHANGES)
    for step in (1, 2):
        put_batch(source, make_batch("run_a", step))
    config = trainer_config(tmp_path, model, num_threads=1)
    train_until(config, lambda: published(source) == 2)
    forks = {}
    for run_id, with_optimizer in (("run_b", True), ("run_c", False)):
        fork = forks[run_id] = write_run(tmp_path, run_id, model, **CHANGES, seed=5, init={"from": "run_a@v1"})
        shutil.copytree(source.trainer_checkpoint(1), fork.init)
        if not with_optimizer:
            (fork.init / "progress.json").unlink()
        put_batch(fork, as_first_of(run_id, make_batch("run_a", 2)))
    source.evicted.write_text("its forks go on")
    train_until(config, lambda: all(published(fork) == 1 for fork in forks.values()))
    differs = {run_id: relative_difference(adapter(fork, 1), adapter(source, 2)) for run_id, fork in forks.items()}
    assert differs["run_b"] < 1e-5 and differs["run_c"] > 1e-3
    for fork in forks.values():
        assert all(torch.equal(tensor, adapter(source, 1)[name]) for name, tensor in adapter(fork, 0).items())
