"""The real loop with other optimizers and with bfloat16 weights: published as configured, resumed to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prime_rl.contract.layout import RunDir
from tests.budgets import in_full
from tests.trainer_support import (
    adapter,
    published,
    put_batches,
    train_until,
    trainer_config,
    write_run,
)

pytestmark = pytest.mark.numeric

NUM_STEPS = 4


def train_to(run: RunDir, model: Path, step: int) -> dict[str, torch.Tensor]:
    train_until(trainer_config(run.path.parent, model, num_threads=1), lambda: published(run) >= step)
    return adapter(run, step)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("adamw", "bfloat16"), ("muon", "bfloat16"), *in_full(("nadam", "float32"))]
)
def test_a_run_goes_on_to_the_last_bit(model: Path, tmp_path: Path, kind: str, dtype: str) -> None:
    changes: dict[str, Any] = {
        "max_steps": NUM_STEPS,
        "model": {"lora": {"rank": 4, "dtype": dtype}},
        "optim": {"type": kind, "lr": 1e-2, "weight_decay": 0.1},
        "scheduler": {"type": "cosine", "warmup_steps": 1},
    }
    whole, parted = (write_run(tmp_path / name, "run_a", model, **changes) for name in ("whole", "parted"))
    put_batches(whole, NUM_STEPS, num_samples=4)
    expected = train_to(whole, model, NUM_STEPS)
    put_batches(parted, 2, num_samples=4)
    first = train_to(parted, model, 2)
    put_batches(parted, NUM_STEPS, num_samples=4)
    last = train_to(parted, model, NUM_STEPS)
    assert {tensor.dtype for tensor in expected.values()} == {getattr(torch, dtype)}
    assert all(torch.equal(last[name], tensor) for name, tensor in expected.items())
    assert not all(torch.equal(first[name], tensor) for name, tensor in expected.items())
