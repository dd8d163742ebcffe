"""What is not finite is never published: the run ends with the reason, and its neighbours end where they end alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.budgets import in_full
from tests.isolation_support import Adapter, all_done, check, put_run
from tests.trainer_support import (
    adapter,
    published,
    put_batches,
    train_until,
    trainer_config,
    whole_config,
    write_run,
)

MOST_IN_BFLOAT16 = 3.39e38
# Each with the update at which it ends, and the reason.
WILD: dict[str, tuple[dict[str, Any], int, str]] = {
    "logits": ({"optim": {"lr": 1e15}}, 2, "its loss and entropy"),
    "logits, of a loss with limits": ({"optim": {"lr": 1e15}, "loss": {"type": "cispo"}}, 2, "entropy"),
    "weights": ({"optim": {"type": "sgd", "lr": 1e38, "max_norm": 1e9}}, 1, "the weights after it"),
    "weights in bfloat16": (
        {"optim": {"lr": 3.395e38}, "model": {"lora": {"dtype": "bfloat16"}}},
        1,
        "the weights after it",
    ),
}


def test_a_run_ends_at_the_first_update_whose_weights_or_next_logits_are_not_finite(
    alone: dict[str, Adapter], tiny: Path, tmp_path: Path
) -> None:
    good = put_run(tmp_path, tiny, "run_adamw")
    wild = {kind: write_run(tmp_path, f"run_{at}", tiny, **WILD[kind][0]) for at, kind in enumerate(WILD)}
    for run in wild.values():
        put_batches(run, 4, num_samples=6, advantage=100.0)
    config = trainer_config(tmp_path, tiny, max_concurrent_runs=8, max_tokens_per_micro_batch=128)
    train_until(config, lambda: all_done([good])() and all(run.evicted.exists() for run in wild.values()))
    check([good], alone)
    for kind, run in wild.items():
        _, step, what = WILD[kind]
        reason = run.evicted.read_text()
        assert reason.startswith(f"update {step}: ") and what in reason and "are not finite: loss " in reason, kind
        assert f"lr {run_lr(kind):g}; lower optim.lr (prl runs set {run.run_id} optim.lr=0.001), then " in reason, kind
        assert published(run) == step - 1, kind
        for version in range(1, step):
            assert all(tensor.isfinite().all() for tensor in adapter(run, version).values()), kind


def run_lr(kind: str) -> float:
    return float(WILD[kind][0]["optim"]["lr"])


def test_weights_that_inference_cannot_hold_are_not_published(tiny: Path, tmp_path: Path) -> None:
    """Finite in float32, in which they are trained, and not in float16."""
    run = write_run(tmp_path, "run_a", tiny, optim={"lr": 1e5})
    put_batches(run, 2)
    train_until(trainer_config(tmp_path, tiny, model={"dtype": "float16"}), run.evicted.exists)
    assert run.evicted.read_text().startswith("update 1: the weights after it are not finite: loss ")
    assert published(run) == 0


def test_a_whole_model_that_is_not_finite_is_not_published(tiny: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path, "run_a", tiny, optim={"lr": 1e6})
    put_batches(run, 2)
    train_until(whole_config(tmp_path, tiny, model={"dtype": "float16"}), run.evicted.exists)
    assert run.evicted.read_text().startswith("update 1: the weights after it are not finite: loss ")
    assert published(run) == 0


@pytest.mark.parametrize("value", [math.nan, *in_full(math.inf, MOST_IN_BFLOAT16)])
@pytest.mark.parametrize("warm", [False, True])
def test_a_run_neither_resumes_nor_starts_from_weights_that_are_not_finite(
    tiny: Path, tmp_path: Path, warm: bool, value: float
) -> None:
    """In a checkpoint, in which case it is its own or that of a rollback, and in the adapter of `[init]`."""
    lora = {"rank": 4, "dtype": "bfloat16"}
    source = write_run(tmp_path, "run_a", tiny, ckpt={"interval": 1}, model={"lora": lora})
    put_batches(source, 1)
    config = trainer_config(tmp_path, tiny)
    train_until(config, lambda: (source.checkpoint_dir(1) / "STABLE").exists())
    files = source.trainer_checkpoint(1)
    # Twice the scale: B is halved.
    changes: dict[str, Any] = {"init": {"from": "run_a@v1"}, "model": {"lora": {**lora, "alpha": 4.0}}}
    if warm:
        source.evicted.write_text("its fork goes on")
    run = write_run(tmp_path, "run_b", tiny, **changes) if warm else source
    folder = run.init if warm else files
    if warm:
        files.rename(run.init)
    weights = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in weights if "lora_B" in name)
    weights[name] = weights[name].float()
    weights[name][0, 0] = value
    save_file(weights, folder / "adapter_model.safetensors")
    put_batches(run, 2)
    for version in run.broadcast.glob("*"):
        version.rename(tmp_path / version.name)
    train_until(config, run.evicted.exists)
    reason = run.evicted.read_text()
    assert "it cannot be started: its weights are not finite: " in reason and f"{name} has " in reason
    assert published(run) == 0 and not run.broadcast_dir(0).exists()
