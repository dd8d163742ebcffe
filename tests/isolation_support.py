"""Three runs that differ in everything a run may choose, and what each reaches alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from prime_rl.contract.layout import RunDir
from prime_rl.trainer.runs import MultiRunManager, get_multi_run_manager
from tests.budgets import ISOLATION_STEPS
from tests.trainer_support import (
    adapter,
    published,
    put_batches,
    relative_difference,
    train_until,
    trainer_config,
    write_run,
)

NUM_STEPS = ISOLATION_STEPS
TOLERANCE = 1e-4
Adapter = dict[str, torch.Tensor]
# The trainer's largest rank is 16.
RUNS: dict[str, dict[str, Any]] = {
    "run_adamw": {
        "seed": 1,
        "model": {"lora": {"rank": 4, "alpha": 16}},
        "optim": {"type": "adamw", "lr": 2e-3, "weight_decay": 0.1, "max_norm": 0.5},
        "scheduler": {"type": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.1},
        "loss": {"type": "gspo", "clip_low": 0.5, "clip_high": 0.9, "kl_coef": 0.05, "old_logprobs": "inference"},
    },
    "run_sgd": {
        "seed": 2,
        "model": {"lora": {"rank": 8, "alpha": 8}},
        "optim": {"type": "sgd", "lr": 5e-2, "max_norm": 1e9, "weight_decay": 0.01},
        "loss": {"type": "dppo", "low": 0.1, "high": 0.05, "tau": 0.01},
    },
    "run_muon": {
        "seed": 3,
        "model": {"lora": {"rank": 16}},
        "optim": {"type": "muon", "lr": 1e-2, "betas": [0.8, 0.999]},
        "scheduler": {"type": "linear"},
        "loss": {"type": "dr_grpo", "length": 16, "clip_high": 3.0},
    },
}
NUM_SAMPLES = {"run_adamw": 4, "run_sgd": 12, "run_muon": 8}
# Rollouts of a prompt, which one of the runs has alone.
GROUPS = {"run_adamw": 4, "run_sgd": 3, "run_muon": 0}
# Samples of a rollout: the losses of these two divide by rollouts.
BRANCHES = {"run_adamw": 2, "run_sgd": 0, "run_muon": 4}


def put_run(workspace: Path, model: Path, run_id: str) -> RunDir:
    """One of RUNS with all its batches."""
    run = write_run(workspace, run_id, model, max_steps=NUM_STEPS, **RUNS[run_id])
    more = {"num_samples": NUM_SAMPLES[run_id], "group": GROUPS[run_id], "branches": BRANCHES[run_id]}
    put_batches(run, NUM_STEPS, seed=len(run_id), **more)
    return run


def put_runs(workspace: Path, model: Path, run_ids: Iterable[str] = RUNS) -> list[RunDir]:
    return [put_run(workspace, model, run_id) for run_id in run_ids]


def train_alone(workspace: Path, model: Path, run_id: str) -> Adapter:
    """The last adapter of a run that has the trainer for itself, which pads rows and computes each alone."""
    run = put_run(workspace, model, run_id)
    config = trainer_config(workspace, model, model={"packed_rows": False})
    train_until(config, lambda: published(run) == NUM_STEPS)
    return adapter(run, NUM_STEPS)


def all_done(runs: Iterable[RunDir]) -> Callable[[], bool]:
    return lambda: all(published(run) == NUM_STEPS for run in runs)


def check(runs: Iterable[RunDir], alone: dict[str, Adapter]) -> None:
    """Each run reached what it reaches alone."""
    for run in runs:
        assert published(run) == NUM_STEPS, run.run_id
        assert relative_difference(adapter(run, NUM_STEPS), alone[run.run_id]) <= TOLERANCE, run.run_id


def in_the_middle_of_its_batch(run: RunDir, *, after_step: int | None = None) -> bool:
    """Whether a part of a batch of the run has gone through, and not all of it.

    `after_step`: of the batch after that update, whatever the disk has of it by now.
    """
    manager = get_multi_run_manager()
    run_idx = manager.id_2_idx.get(run.run_id)
    if run_idx is None or after_step not in (None, manager.progress[run_idx].step):
        return False
    return has_gradients(manager, run_idx) and not manager.ready_to_update[run_idx]


def has_gradients(manager: MultiRunManager, run_idx: int) -> bool:
    named = manager.get_named_parameters_for_run(run_idx)
    return any(parameter.grad is not None and bool(parameter.grad.any()) for _, parameter in named)


def beyond(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """The part of a slot's tensor that a run of `rank` does not use."""
    return tensor[rank:] if name.endswith(".lora_A") else tensor[:, rank:]
