"""The trainer as a real process: it starts, waits, trains, reports, follows its ranks, and stops."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from prime_rl.contract.files import read_text, wait_for
from prime_rl.contract.layout import RunDir
from prime_rl.contract.status import TrainerStatus, is_alive, read_status
from tests.patience import PATIENCE_S
from tests.trainer_support import (
    adapter,
    check_refused,
    make_batch,
    published,
    put_batch,
    put_batches,
    relative_difference,
    start_trainer,
    start_warm_trainer,
    train_until,
    trainer_config,
    write_config,
    write_run,
)
from tests.warm import Started

Process = subprocess.Popen[bytes] | Started


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    """Whatever a test puts here is gone when it ends, with its children."""
    started: list[Process] = []
    yield started
    for process in started:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for member in [*family, process]:
            member.kill()
        process.wait(PATIENCE_S)


def status_says(workspace: Path, check: Callable[[TrainerStatus], bool]) -> Callable[[], bool]:
    def holds() -> bool:
        status = read_status(workspace / "trainer" / "status.json", TrainerStatus)
        return status is not None and check(status)

    return holds


@pytest.mark.slow
def test_a_workspace_from_start_to_stop(model: Path, tmp_path: Path, processes: list[Process]) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    config = trainer_config(workspace, model, max_concurrent_runs=1, watch={"rescan_s": 30})
    process = start_trainer(config, tmp_path)
    processes.append(process)

    def wait(condition: Callable[[], bool], what: str) -> None:
        wait_for(condition, f"{what}; log: {read_text(tmp_path / 'log')}", timeout_s=PATIENCE_S)

    wait(
        status_says(workspace, lambda s: s.waiting_on == f"a run: no run_* with control/orch.toml in {workspace}"),
        "idle",
    )
    status = read_status(workspace / "trainer" / "status.json", TrainerStatus)
    assert status is not None and is_alive(status, status.updated_at) and status.pid == process.pid
    assert (status.max_runs, status.max_rank, status.max_seq_len, status.model) == (1, 16, 64, str(model))
    turns = status.loop
    assert turns is not None
    wait(status_says(workspace, lambda s: (s.loop or 0) > turns), "its loop to turn without any run")

    # A bad config is explained, a mended one is taken by its event: the rescan is far away.
    run = write_run(workspace, "run_a", model, optim={"lr": -1})
    wait(run.config_error.exists, "the explanation")
    assert "optim.lr" in run.config_error.read_text()
    wait(status_says(workspace, lambda s: "1 invalid" in (s.waiting_on or "")), "the status to name it")
    write_config(run, model, max_steps=3)
    wait(status_says(workspace, lambda s: s.waiting_on == "a batch of run_a (step 1)"), "run_a to be admitted")
    assert not run.config_error.exists()

    # A second run waits for the slot; batches that come are trained on.
    other = write_run(workspace, "run_b", model, max_steps=9)
    wait(status_says(workspace, lambda s: s.waiting == ["run_b"]), "run_b to wait")
    put_batches(run, 2)
    wait(lambda: published(run) == 2, "version 2")
    wait(status_says(workspace, lambda s: s.runs["run_a"].step == 2 and s.num_updates == 2), "the status of step 2")
    put_batch(run, make_batch("run_a", 3))
    wait(status_says(workspace, lambda s: list(s.runs) == ["run_b"] and not s.waiting), "the slot to go to run_b")
    put_batches(other, 2)
    wait(lambda: published(other) == 2, "version 2 of run_b")

    process.terminate()
    assert process.wait(PATIENCE_S) == 0, read_text(tmp_path / "log")
    assert (other.checkpoint_dir(2) / "STABLE").exists(), "a stop saves what was done"
    assert status_says(workspace, lambda s: s.state == "stopped")()


@pytest.mark.slow
def test_two_ranks_reach_what_one_reaches(model: Path, tmp_path: Path, processes: list[Process]) -> None:
    """Passes alternate between the ranks, runs come, go and are evicted, and the adapters agree with one rank's."""
    one, two = tmp_path / "one", tmp_path / "two"
    lengths = {"run_a": (4, "adamw"), "run_b": (16, "muon"), "run_c": (8, "sgd")}
    for workspace in (one, two):
        for run_id, (rank, kind) in lengths.items():
            run = write_run(
                workspace, run_id, model, max_steps=3, model={"lora": {"rank": rank}}, optim={"type": kind, "lr": 1e-3}
            )
            put_batches(run, 3, num_samples=6)
        bad = write_run(workspace, "run_bad", model)
        put_batch(bad, make_batch("run_other", 1))
    changes = {"max_tokens_per_micro_batch": 64, "max_concurrent_runs": 2, "dist_timeout_s": PATIENCE_S}

    def done(workspace: Path) -> bool:
        return all(published(run_at(workspace, run_id)) == 3 for run_id in lengths) and (
            run_at(workspace, "run_bad").evicted.exists()
        )

    train_until(trainer_config(one, model, **changes), lambda: done(one))
    process = start_trainer(trainer_config(two, model, **changes), tmp_path, num_ranks=2)
    processes.append(process)
    wait_for(lambda: done(two) or process.poll() is not None, "both ranks to finish", timeout_s=PATIENCE_S)
    assert process.poll() is None, read_text(tmp_path / "log")
    for run_id in lengths:
        difference = relative_difference(adapter(run_at(two, run_id), 3), adapter(run_at(one, run_id), 3))
        assert difference <= 1e-4, run_id
    late = write_run(two, "run_late", model, max_steps=1)
    put_batches(late, 1)
    wait_for(lambda: published(late) == 1, "a run that comes after all others", timeout_s=PATIENCE_S)
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    process.wait(PATIENCE_S)
    log = read_text(tmp_path / "log") or ""
    # A rank that hears of the end from rank 0 before its own signal comes names no signal.
    ends = re.findall(r" trainer: stopped(?: by SIGTERM)?$", log, re.MULTILINE)
    assert len(ends) == 2 and "stopped by SIGTERM" in log, log
    assert "Traceback" not in log.split(" trainer: stopped")[0], log
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert status_says(two, lambda s: s.state == "stopped")()


def run_at(workspace: Path, run_id: str) -> RunDir:
    return RunDir(workspace / run_id)


def test_wrong_use_is_one_line_on_standard_error(model: Path, tmp_path: Path) -> None:
    words = ["--output_dir", str(tmp_path), "--model.name", str(model), "--model.lorra.rank", "4"]
    check_refused(words, 2, "did you mean 'lora'")


@pytest.mark.slow
def test_a_model_that_is_not_there_is_one_line_on_standard_error(tmp_path: Path) -> None:
    words = ["--output_dir", str(tmp_path), "--model.name", "no/such/folder", "--model.lora.rank", "4"]
    check_refused(words, 1, "folder not found")


@pytest.mark.slow
def test_a_stop_that_comes_at_once_is_not_lost(model: Path, tmp_path: Path, processes: list[Process]) -> None:
    """SIGTERM as soon as the process shows itself: while the model is loaded."""
    workspace = tmp_path / "workspace"
    process = start_warm_trainer(trainer_config(workspace, model), tmp_path)
    processes.append(process)
    wait_for((workspace / "trainer" / "status.json").exists, "the first status", timeout_s=PATIENCE_S)
    process.terminate()
    assert process.wait(PATIENCE_S) == 0, read_text(tmp_path / "log")
    assert status_says(workspace, lambda s: s.state == "stopped")()
    shutil.rmtree(workspace)
