"""The trainer on a GPU reaches what it reaches on the CPU. Skipped without a GPU.

.venv/bin/python -m pytest -s tests/gpu
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.contract.files import read_text, wait_for
from prime_rl.contract.layout import RunDir
from tests.patience import PATIENCE_S
from tests.trainer_support import (
    adapter,
    published,
    put_batches,
    relative_difference,
    start_trainer,
    train_until,
    trainer_config,
    whole_config,
    write_model,
    write_run,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

NUM_STEPS = 4
RUNS: dict[str, dict[str, Any]] = {
    "run_adamw": {"model": {"lora": {"rank": 4}}, "optim": {"lr": 2e-3}},
    "run_sgd": {"model": {"lora": {"rank": 8}}, "optim": {"type": "sgd", "lr": 5e-2}, "loss": {"kl_coef": 0.5}},
}
# Kernels sum in other orders, and bfloat16 has seven bits of mantissa, over four updates.
TOLERANCES = {"float32": 1e-2, "bfloat16": 1e-1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def put_runs(workspace: Path, model: Path) -> list[RunDir]:
    runs = [write_run(workspace, run_id, model, max_steps=NUM_STEPS, **changes) for run_id, changes in RUNS.items()]
    for run in runs:
        put_batches(run, NUM_STEPS, num_samples=12)
    return runs


def done(runs: list[RunDir]) -> bool:
    return all(published(run) == NUM_STEPS for run in runs)


def train_on_gpus(config: TrainerConfig, folder: Path, runs: list[RunDir], num_ranks: int = 1) -> None:
    """The real process, until all runs are done; prints how fast it was."""
    process = start_trainer(config, folder, num_ranks=num_ranks)
    try:
        wait_for(lambda: done(runs) or process.poll() is not None, "the runs to finish", timeout_s=PATIENCE_S)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0 or num_ranks > 1, read_text(folder / "log")
    finally:
        process.kill()
        process.wait()
    assert done(runs), read_text(folder / "log")
    for run in runs:
        rates = [json.loads(line)["tokens_per_s"] for line in run.trainer_metrics.read_text().splitlines()]
        print(f"{run.run_id}: {rates[-1]:.0f} tokens/s on {num_ranks} GPU, {config.model.dtype}")


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_adapters_are_those_of_the_cpu(model: Path, tmp_path: Path, dtype: str) -> None:
    changes: dict[str, Any] = {"model": {"dtype": dtype}, "max_tokens_per_micro_batch": 96}
    on_cpu, on_gpu = (put_runs(tmp_path / device, model) for device in ("cpu", "cuda"))
    train_until(trainer_config(tmp_path / "cpu", model, **changes), lambda: done(on_cpu))
    train_on_gpus(trainer_config(tmp_path / "cuda", model, device="cuda", **changes), tmp_path, on_gpu)
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        difference = relative_difference(adapter(ours, NUM_STEPS), adapter(theirs, NUM_STEPS))
        assert difference <= TOLERANCES[dtype], ours.run_id


@pytest.fixture
def whole_on_cpu(model: Path, tmp_path: Path) -> Iterator[dict[str, Tensor]]:
    run = write_run(tmp_path / "cpu", "run_a", model, max_steps=NUM_STEPS, optim={"lr": 1e-3})
    put_batches(run, NUM_STEPS)
    train_until(whole_config(tmp_path / "cpu", model), lambda: done([run]))
    return load_file(run.broadcast_dir(NUM_STEPS) / "model.safetensors")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_whole_model_is_that_of_the_cpu(
    model: Path, tmp_path: Path, whole_on_cpu: dict[str, Tensor], num_ranks: int
) -> None:
    if num_ranks > torch.cuda.device_count():
        pytest.skip(f"there are not {num_ranks} CUDA devices")
    workspace = tmp_path / "cuda"
    run = write_run(workspace, "run_a", model, max_steps=NUM_STEPS, optim={"lr": 1e-3})
    put_batches(run, NUM_STEPS)
    train_on_gpus(whole_config(workspace, model, device="cuda"), tmp_path, [run], num_ranks)
    ours = load_file(run.broadcast_dir(NUM_STEPS) / "model.safetensors")
    assert relative_difference(ours, whole_on_cpu) <= TOLERANCES["float32"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices")
def test_a_sharded_base_over_nccl_changes_no_adapter(model: Path, tmp_path: Path) -> None:
    on_cpu, on_gpus = (put_runs(tmp_path / device, model) for device in ("cpu", "cuda"))
    train_until(trainer_config(tmp_path / "cpu", model), lambda: done(on_cpu))
    train_on_gpus(trainer_config(tmp_path / "cuda", model, device="cuda"), tmp_path, on_gpus, num_ranks=2)
    for ours, theirs in zip(on_gpus, on_cpu, strict=True):
        assert relative_difference(adapter(ours, NUM_STEPS), adapter(theirs, NUM_STEPS)) <= TOLERANCES["float32"]
