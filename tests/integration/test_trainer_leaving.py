"""A run that is ended in its slot: saved, let go, and not taken again; and whose work the trainer's seconds were."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from prime_rl.contract.files import read_text, wait_for
from prime_rl.contract.layout import OutputDir, RunDir, list_steps
from prime_rl.contract.status import TrainerStatus, read_status
from prime_rl.contract.usage import read_usage
from tests.patience import PATIENCE_S
from tests.trainer_support import (
    adapter,
    make_batch,
    published,
    put_batch,
    put_batches,
    relative_difference,
    start_trainer,
    train_until,
    trainer_config,
    whole_config,
    write_run,
)

NUM_BATCHES = 6


def checkpoints(run: RunDir) -> list[int]:
    return list_steps(run.checkpoints, stable_only=True)


def trainer_status(workspace: Path) -> TrainerStatus:
    status = read_status(workspace / "trainer" / "status.json", TrainerStatus)
    assert status is not None
    return status


@pytest.mark.numeric
def test_an_ended_run_leaves_with_a_checkpoint_and_goes_on_from_it(model: Path, tmp_path: Path) -> None:
    """One slot: run_a is ended after some updates, run_b gets the slot; later run_a goes on as if nothing had been."""
    workspace, config = tmp_path / "workspace", trainer_config(tmp_path / "workspace", model, max_concurrent_runs=1)
    run_a, run_b = (write_run(workspace, run_id, model, max_steps=NUM_BATCHES) for run_id in ("run_a", "run_b"))
    put_batches(run_a, 3)
    put_batches(run_b, NUM_BATCHES)

    def ended_and_replaced() -> bool:
        if published(run_a) >= 2 and not run_a.finished.exists():
            run_a.finished.write_text("budget used up")
        return published(run_b) == NUM_BATCHES

    train_until(config, ended_and_replaced)
    left_at = published(run_a)
    assert 2 <= left_at <= 3 and checkpoints(run_a) == [left_at], "its last update is saved, though none was due"
    assert "run_a" not in trainer_status(workspace).runs

    seconds = {line.run_id: line for line in read_usage(OutputDir(workspace).run_usage("trainer")).values()}
    clock = trainer_status(workspace).total_s
    busy_s = sum(value for phase, value in clock.items() if phase != "wait")
    assert sum(line.trainer_s for line in seconds.values()) == pytest.approx(busy_s, rel=0.02)
    tokens = [sum(len(sample.token_ids) for sample in make_batch("run_b", n + 1).samples) for n in range(NUM_BATCHES)]
    assert seconds["run_b"].trained_tokens == sum(tokens) and seconds["run_b"].trainer_s > 0

    run_a.finished.unlink()
    for step in range(left_at + 1, NUM_BATCHES + 1):
        put_batch(run_a, make_batch("run_a", step))
    train_until(config, lambda: published(run_a) == NUM_BATCHES)
    assert relative_difference(adapter(run_a, NUM_BATCHES), adapter(run_b, NUM_BATCHES)) <= 1e-4


@pytest.mark.release
def test_two_ranks_save_a_whole_model_that_is_ended(model: Path, tmp_path: Path) -> None:
    """What is sharded is put together by all ranks, though no checkpoint was due; then the trainer goes on waiting."""
    workspace = tmp_path / "workspace"
    run = write_run(workspace, "run_a", model, model={"full_finetune": True}, optim={"lr": 1e-3})
    put_batches(run, 2)
    process = start_trainer(whole_config(workspace, model, dist_timeout_s=PATIENCE_S), tmp_path, num_ranks=2)
    try:

        def wait(condition: Callable[[], bool], what: str) -> None:
            wait_for(lambda: condition() or process.poll() is not None, what, timeout_s=PATIENCE_S)
            assert process.poll() is None, read_text(tmp_path / "log")

        wait(lambda: published(run) == 2, "both updates")
        run.finished.write_text("enough")
        wait(lambda: checkpoints(run) == [2], "the checkpoint")
        wait(lambda: not trainer_status(workspace).runs, "the slot to be free")
        run.finished.unlink()
        put_batch(run, make_batch("run_a", 3))
        wait(lambda: published(run) == 3, "the run to go on from its checkpoint")
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
    log = read_text(tmp_path / "log") or ""
    # A rank that hears of the end from rank 0 before its own signal comes names no signal.
    ends = re.findall(r" trainer: stopped(?: by SIGTERM)?$", log, re.MULTILINE)
    assert len(ends) == 2 and "stopped by SIGTERM" in log, log
