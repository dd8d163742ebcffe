"""Which checkpoints are due, which are kept, and which rollout files may go."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from prime_rl.configs.orchestrator import CkptConfig, OrchestratorConfig
from prime_rl.contract import files
from prime_rl.contract.files import mark_stable
from prime_rl.contract.layout import RunDir, list_steps, stable_marker
from prime_rl.contract.notes import ResumeRequest, pending_request
from prime_rl.trainer import checkpoint
from prime_rl.trainer.checkpoint import (
    PROGRESS_FILE,
    drop_after,
    is_due,
    prune,
    remove_step,
    steps_to_remove,
    sweep,
    trainer_steps,
)
from prime_rl.trainer.metrics import last_metrics_step
from prime_rl.trainer.runs.discovery import is_finished
from tests.trainer_support import write_config, write_run


def config(**changes: object) -> OrchestratorConfig:
    return OrchestratorConfig.model_validate(
        {
            "batch_size": 4,
            "rollouts_per_example": 4,
            "model": {"name": "m"},
            "env": [{"id": "reverse-text"}],
            **changes,
        }
    )


def test_a_checkpoint_is_due_at_the_interval_and_at_the_end() -> None:
    run = config(max_steps=7, ckpt={"interval": 3})
    assert [step for step in range(1, 8) if is_due(run, step)] == [3, 6, 7]


@pytest.mark.parametrize(
    ("ckpt", "complete", "of_both", "removed"),
    [
        ({"keep_last": 2}, [1, 2, 3, 4], [1, 2, 3, 4], [1, 2]),
        ({"keep_last": 1, "keep_interval": 2}, [1, 2, 3, 4, 5], [5], [1, 3]),
        ({"keep_last": 1}, [3, 6, 8], [3, 6], [3]),
        ({"keep_last": 3}, [1, 2], [], []),
    ],
)
def test_old_checkpoints_go_but_never_the_last_one_of_both_parts(
    ckpt: dict[str, int], complete: list[int], of_both: list[int], removed: list[int]
) -> None:
    assert steps_to_remove(CkptConfig.model_validate(ckpt), complete, of_both) == removed


def run_with(
    tmp_path: Path, *, batches: Sequence[int], of_trainer: Sequence[int], of_both: Sequence[int] = ()
) -> RunDir:
    """A run with these batches, and complete checkpoints of the trainer alone or of both parts."""
    run = write_run(tmp_path, "run_a", Path("m"))
    for step in batches:
        run.rollout_dir(step).mkdir()
        run.rollout_file(step).touch()
    for step in (*of_trainer, *of_both):
        run.trainer_checkpoint(step).mkdir(parents=True)
        (run.trainer_checkpoint(step) / PROGRESS_FILE).touch()
        mark_stable(run.checkpoint_dir(step))
    for step in of_both:
        run.orchestrator_checkpoint(step).mkdir()
        (run.orchestrator_checkpoint(step) / "state.json").touch()
    return run


def test_a_batch_goes_when_both_parts_of_a_checkpoint_cover_it(tmp_path: Path) -> None:
    run = run_with(tmp_path, batches=[1, 2, 3, 4, 5], of_both=[2], of_trainer=[4])
    prune(run, CkptConfig())
    assert list_steps(run.rollouts) == [3, 4, 5], "the orchestrator cannot go on from step 4"
    assert list_steps(run.checkpoints, stable_only=True) == [2, 4]


def test_a_run_that_keeps_its_rollouts_keeps_all(tmp_path: Path) -> None:
    run = run_with(tmp_path, batches=[1, 2, 3], of_trainer=[], of_both=[2])
    prune(run, CkptConfig(keep_rollouts=True))
    assert list_steps(run.rollouts) == [1, 2, 3]


def test_what_a_writer_has_yet_to_rename_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    run = run_with(tmp_path, batches=[1, 2], of_trainer=[2])
    run.orchestrator_checkpoint(2).mkdir()
    (run.orchestrator_checkpoint(2) / ".state.json.5f.tmp").touch()
    prune(run, CkptConfig())
    assert list_steps(run.rollouts) == [1, 2]


def test_a_checkpoint_that_was_not_completed_goes_when_a_newer_one_is_complete(tmp_path: Path) -> None:
    run = run_with(tmp_path, batches=[], of_trainer=[1, 3, 4])
    for step in (2, 5):
        run.orchestrator_checkpoint(step).mkdir(parents=True)  # the orchestrator is ahead of the trainer
    prune(run, CkptConfig(keep_last=3))
    assert list_steps(run.checkpoints) == [1, 3, 4, 5]


def test_the_trainer_resumes_from_what_has_its_own_part(tmp_path: Path) -> None:
    run = run_with(tmp_path, batches=[], of_trainer=[1, 2])
    (run.trainer_checkpoint(2) / PROGRESS_FILE).unlink()
    assert trainer_steps(run) == [1]


def test_a_run_that_goes_back_keeps_the_step_that_it_goes_back_to(tmp_path: Path) -> None:
    run = run_with(tmp_path, batches=[1, 2, 3, 4], of_trainer=[1, 2, 3])
    for step in (1, 2, 3):
        run.broadcast_dir(step).mkdir(parents=True)
    drop_after(run, 2)
    parents = run.broadcast, run.checkpoints, run.rollouts
    assert [list_steps(each) for each in parents] == [[1, 2]] * 3
    sweep(run)
    assert [sorted(os.listdir(each)) for each in parents] == [["step_1", "step_2"]] * 3


def test_a_run_that_goes_back_does_not_have_all_runs_wait_while_its_folders_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path, batches=[], of_trainer=[1, 2])

    def removes(*args: object) -> None:
        raise AssertionError("this may take long: it is for the thread of the run")

    monkeypatch.setattr(files, "remove_at", removes)
    drop_after(run, 1)
    assert list_steps(run.checkpoints) == [1]


class Killed(BaseException):
    """The process ends here."""


def test_a_run_that_goes_back_loses_its_later_versions_before_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a reader picks one up whose checkpoint and batches are gone."""
    run = run_with(tmp_path, batches=[1, 2, 3], of_trainer=[1, 2, 3])
    for step in (1, 2, 3):
        run.broadcast_dir(step).mkdir(parents=True)
    put_away = checkpoint.put_away

    def dies_after_the_versions(path: Path) -> None:
        if path.parent != run.broadcast:
            raise Killed
        put_away(path)

    monkeypatch.setattr(checkpoint, "put_away", dies_after_the_versions)
    with pytest.raises(Killed):
        drop_after(run, 1)
    assert list_steps(run.broadcast) == [1] and list_steps(run.rollouts) == [1, 2, 3]


def test_what_a_killed_trainer_left_half_written_is_swept_and_nothing_of_others(tmp_path: Path) -> None:
    run = run_with(tmp_path, batches=[], of_trainer=[], of_both=[2])
    half = [run.broadcast / ".step_3.5f.tmp", run.checkpoint_dir(2) / ".trainer.5f.tmp"]
    other = [run.broadcast_dir(2), run.trainer_checkpoint(2), run.checkpoint_dir(2) / ".orchestrator.5f.tmp"]
    for folder in (*half, *other):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "file").touch()
    sweep(run)
    assert not any(folder.exists() for folder in half) and all((folder / "file").exists() for folder in other)


def test_a_step_folder_is_no_longer_stable_before_anything_else_of_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path, batches=[], of_trainer=[2])

    def no_disk(name: str, folder: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "_remove_tree", no_disk)
    remove_step(run.checkpoint_dir(2))
    assert run.trainer_checkpoint(2).is_dir() and not stable_marker(run.checkpoint_dir(2)).exists()


def test_an_explicit_resume_is_pending_until_it_was_carried_out_for_this_text(tmp_path: Path) -> None:
    run = write_run(tmp_path, "run_a", Path("m"), ckpt={"resume_step": 4})
    asked = config(ckpt={"resume_step": 4})
    request = pending_request(run, asked.ckpt.resume_step)
    assert request is not None and request.resume_step == 4
    run.resumed.write_text(f'{{"resume_step":4,"config_sha256":"{request.config_sha256}","version":1}}')
    assert pending_request(run, asked.ckpt.resume_step) is None
    write_config(run, Path("m"), ckpt={"resume_step": 4}, seed=1)
    assert isinstance(pending_request(run, asked.ckpt.resume_step), ResumeRequest)
    assert pending_request(run, config().ckpt.resume_step) is None


def test_a_finished_run_that_is_sent_back_is_not_finished(tmp_path: Path) -> None:
    run = write_run(tmp_path, "run_a", Path("m"), max_steps=2, ckpt={"resume_step": 1})
    back, on = config(max_steps=2, ckpt={"resume_step": 1}), config(max_steps=2)
    run.broadcast_dir(1).mkdir(parents=True)
    mark_stable(run.broadcast_dir(1))
    assert not is_finished(run, on)
    run.broadcast_dir(2).mkdir()
    mark_stable(run.broadcast_dir(2))
    assert is_finished(run, on) and not is_finished(run, back)


def test_the_last_step_of_a_metrics_file_is_found_also_when_the_last_line_is_torn(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert last_metrics_step(run) == 0
    run.metrics.mkdir()
    run.trainer_metrics.write_text("".join(f'{{"step":{n},"filler":"{"x" * 900}"}}\n' for n in range(1, 40)))
    assert last_metrics_step(run) == 39
    with run.trainer_metrics.open("a") as file:
        file.write('{"step":40,"lo')
    assert last_metrics_step(run) == 39
