"""A trainer that was stopped or killed goes on as if nothing had happened, to the last bit."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from prime_rl.configs.admitted import apply
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import RunDir, list_rollout_steps, list_steps
from prime_rl.contract.status import TrainerStatus, read_status
from tests.patience import PATIENCE_S
from tests.trainer_support import (
    adapter,
    make_batch,
    published,
    put_batch,
    put_batches,
    start_warm_trainer,
    train_until,
    trainer_config,
    write_config,
    write_run,
)

NUM_STEPS = 8
CHANGES: dict[str, Any] = {
    "max_steps": NUM_STEPS,
    "ckpt": {"interval": 3},
    "optim": {"lr": 1e-2},
    "scheduler": {"type": "cosine", "warmup_steps": 2},
    "model": {"lora": {"rank": 4}},
}


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    workspace = tmp_path_factory.mktemp("uninterrupted")
    run = make_run(workspace, model)
    train_until(trainer_config(workspace, model, num_threads=1), lambda: published(run) == NUM_STEPS)
    return adapter(run, NUM_STEPS)


@pytest.fixture(scope="module")
def whole_at_4(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = make_run(tmp_path_factory.mktemp("at_4"), model)
    train_to(trainer_config(run.path.parent, model), run, 4)
    return run


@pytest.fixture
def at_4(whole_at_4: RunDir, tmp_path: Path) -> RunDir:
    """A run that was stopped after step 4; all its batches are there."""
    return RunDir(shutil.copytree(whole_at_4.path, tmp_path / whole_at_4.run_id))


def make_run(workspace: Path, model: Path, **changes: Any) -> RunDir:
    run = write_run(workspace, "run_a", model, **{**CHANGES, **changes})
    put_batches(run, NUM_STEPS)
    for step in range(1, NUM_STEPS + 1):
        state = run.orchestrator_checkpoint(step)
        state.mkdir(parents=True)
        (state / "state.json").write_text("{}")
    return run


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def until(run: RunDir, step: int) -> Callable[[], bool]:
    return lambda: published(run) >= step


def train_to(config: TrainerConfig, run: RunDir, step: int) -> None:
    """Train to exactly `step`: later batches come afterwards."""
    later = {number: run.rollout_file(number) for number in list_rollout_steps(run) if number > step}
    batches = {path: path.read_bytes() for path in later.values()}
    for path in batches:
        path.unlink()
    train_until(config, until(run, step))
    for path, batch in batches.items():
        path.write_bytes(batch)


def metrics_steps(run: RunDir) -> list[int]:
    return [msgspec.json.decode(line)["step"] for line in run.trainer_metrics.read_text().splitlines()]


def test_a_stop_between_checkpoints_loses_nothing(
    uninterrupted: dict[str, torch.Tensor], at_4: RunDir, model: Path, tmp_path: Path
) -> None:
    run, config = at_4, trainer_config(tmp_path, model)
    assert list_steps(run.checkpoints, stable_only=True) == [3, 4], "the stop saved step 4"
    assert list_rollout_steps(run)[0] == 4, "step 3 is covered by a checkpoint of both parts"
    train_until(config, until(run, NUM_STEPS))
    assert same(adapter(run, NUM_STEPS), uninterrupted)
    assert metrics_steps(run) == list(range(1, NUM_STEPS + 1))


@pytest.mark.numeric
def test_a_replay_from_the_last_checkpoint_reaches_the_same_bits(
    uninterrupted: dict[str, torch.Tensor], model: Path, tmp_path: Path
) -> None:
    """Stopped at step 5 with only the checkpoint of step 3: rollouts 4 and 5 are trained on again."""
    run = make_run(tmp_path, model)
    config = trainer_config(tmp_path, model)
    train_to(config, run, 5)
    (run.checkpoint_dir(5) / "STABLE").unlink()
    train_until(config, until(run, NUM_STEPS))
    assert same(adapter(run, NUM_STEPS), uninterrupted)
    assert metrics_steps(run) == list(range(1, NUM_STEPS + 1)), "a replayed step is reported once"


def test_without_any_checkpoint_all_is_replayed(
    uninterrupted: dict[str, torch.Tensor], model: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path, model)
    config = trainer_config(tmp_path, model)
    train_to(config, run, 2)
    (run.checkpoint_dir(2) / "STABLE").unlink()
    first = adapter(run, 1)
    train_until(config, until(run, NUM_STEPS))
    assert same(adapter(run, NUM_STEPS), uninterrupted) and not same(first, uninterrupted)


def test_an_evicted_run_goes_on_after_it_is_readmitted(
    uninterrupted: dict[str, torch.Tensor], model: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path, model)
    later = {step: run.rollout_file(step).read_bytes() for step in range(5, NUM_STEPS + 1)}
    for step in later:  # or the run could be finished before its eviction is seen
        run.rollout_file(step).unlink()
    states = []

    def done() -> bool:
        status = read_status(tmp_path / "trainer" / "status.json", TrainerStatus)
        if published(run) == 4 and not states:
            run.evicted.write_text("a break")
            states.append("evicted")
        elif states == ["evicted"] and status is not None and "run_a" not in status.runs:
            for step, batch in later.items():
                run.rollout_file(step).write_bytes(batch)
            run.evicted.unlink()
            states.append("readmitted")
        return published(run) == NUM_STEPS

    train_until(trainer_config(tmp_path, model), done)
    assert states == ["evicted", "readmitted"]
    assert same(adapter(run, NUM_STEPS), uninterrupted)


def test_resume_step_goes_back_once(uninterrupted: dict[str, torch.Tensor], model: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, model, ckpt={"interval": 2, "keep_last": 9})
    config = trainer_config(tmp_path, model)
    train_until(config, until(run, NUM_STEPS))
    assert same(adapter(run, NUM_STEPS), uninterrupted), "checkpoints change no result"
    write_config(run, model, **{**CHANGES, "ckpt": {"interval": 2, "keep_last": 9, "resume_step": 4}})
    apply(run, run.orch_toml.read_text())
    train_until(config, lambda: published(run) == 4 and (run.control / "resumed.json").exists())
    assert list_steps(run.checkpoints, stable_only=True) == [2, 4] and list_rollout_steps(run) == []
    put_batches_from(run, 5)
    train_until(config, until(run, NUM_STEPS))
    assert same(adapter(run, NUM_STEPS), uninterrupted)
    assert metrics_steps(run) == [1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8]
    train_until(config, finished_is_seen(tmp_path))
    assert published(run) == NUM_STEPS, "the same text is not carried out twice"


def put_batches_from(run: RunDir, first: int) -> None:
    for step in range(first, NUM_STEPS + 1):
        put_batch(run, make_batch(run.run_id, step))


def finished_is_seen(workspace: Path) -> Callable[[], bool]:
    def seen() -> bool:
        status = read_status(workspace / "trainer" / "status.json", TrainerStatus)
        return status is not None and status.state == "waiting" and "1 finished" in (status.waiting_on or "")

    return seen


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ckpt": {"interval": 3, "resume_step": 1}}, "ckpt.resume_step = 1: no complete checkpoint"),
        ({"optim": {"type": "sgd"}}, "state of 'adamw', the config asks for optim.type = 'sgd'"),
        ({"model": {"lora": {"rank": 8}}}, "has rank 4, the config asks for model.lora.rank = 8"),
    ],
)
def test_a_resume_that_cannot_be_is_explained(
    at_4: RunDir, model: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    run, config = at_4, trainer_config(tmp_path, model)
    write_config(run, model, **{**CHANGES, **changes})
    apply(run, run.orch_toml.read_text())
    train_until(config, run.evicted.exists)
    assert reason in run.evicted.read_text()


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "state.safetensors", "progress.json", "adapter_config.json"]
)
def test_a_damaged_checkpoint_evicts_with_the_reason(at_4: RunDir, model: Path, tmp_path: Path, name: str) -> None:
    run, config = at_4, trainer_config(tmp_path, model)
    (run.trainer_checkpoint(4) / name).write_bytes(b"\x80junk")
    train_until(config, run.evicted.exists)
    assert "it cannot be started" in run.evicted.read_text()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 1}, "has checkpoint format 1, this program reads 2"),
        ({"step": 3}, "is of step 3, expected 4"),
        ({"state": {}}, "is damaged: KeyError: 'optimizer'"),
        ({"state": [[]]}, "is damaged"),
        ({"total_tokens": 2**60}, "is damaged"),
    ],
)
def test_progress_of_another_kind_is_explained(
    at_4: RunDir, model: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    run, config = at_4, trainer_config(tmp_path, model)
    path = run.trainer_checkpoint(4) / "progress.json"
    path.write_bytes(msgspec.json.encode({**msgspec.json.decode(path.read_bytes()), **change}))
    train_until(config, run.evicted.exists)
    assert reason in run.evicted.read_text()


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("exp_avg", torch.zeros(3), "has torch.float32 of 3 numbers for 'exp_avg'"),
        ("exp_avg_sq", None, "tensor 'optimizer/state/0/exp_avg_sq' not found"),
        ("step", torch.zeros(2), "has torch.float32 of 2 numbers for 'step'"),
    ],
)
def test_moments_that_do_not_fit_evict_before_they_meet_an_update(
    at_4: RunDir, model: Path, tmp_path: Path, key: str, value: torch.Tensor | None, reason: str
) -> None:
    """torch would take them and fail in the middle of the next update, with all other runs."""
    run, config = at_4, trainer_config(tmp_path, model)
    path = run.trainer_checkpoint(4) / "state.safetensors"
    tensors = load_file(path)
    name = f"optimizer/state/0/{key}"
    assert tensors.pop(name) is not None
    save_file({**tensors, **({} if value is None else {name: value})}, path)
    train_until(config, run.evicted.exists)
    assert reason in run.evicted.read_text()


def test_a_missing_rollout_file_is_named_instead_of_waited_for(model: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, model)
    run.rollout_file(1).unlink()
    train_until(trainer_config(tmp_path, model), run.evicted.exists)
    assert "step_1/rollouts.msgpack is missing while step 8 exists" in run.evicted.read_text()


@pytest.mark.slow
def test_a_killed_process_is_started_again_and_reaches_the_same_bits(
    uninterrupted: dict[str, torch.Tensor], model: Path, tmp_path: Path
) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    run = make_run(workspace, model)
    config = trainer_config(workspace, model, num_threads=1)
    for step in range(6, NUM_STEPS + 1):
        run.rollout_file(step).rename(tmp_path / f"batch_{step}")
    process = start_warm_trainer(config, tmp_path)
    try:
        wait_for(until(run, 5), "version 5", timeout_s=PATIENCE_S)
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
        assert list_steps(run.checkpoints, stable_only=True) == [3]
        process = start_warm_trainer(config, tmp_path)
        for step in range(6, NUM_STEPS + 1):
            (tmp_path / f"batch_{step}").rename(run.rollout_file(step))
        wait_for(until(run, NUM_STEPS), f"version {NUM_STEPS}", timeout_s=PATIENCE_S)
        assert same(adapter(run, NUM_STEPS), uninterrupted)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()
        status = read_status(workspace / "trainer" / "status.json", TrainerStatus)
        assert status is not None and status.state == "stopped" and status.pid == process.pid
    finally:
        process.kill()
        process.wait(PATIENCE_S)
