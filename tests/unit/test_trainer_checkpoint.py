"""Which checkpoints are due, which are kept, and which rollout files may go."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.configs.orchestrator import CkptConfig, OrchestratorConfig
from prime_rl.contract.layout import RunDir
from prime_rl.contract.resume import ResumeRequest, pending_request
from prime_rl.trainer.checkpoint import is_due
from prime_rl.trainer.metrics import last_metrics_step
from prime_rl.trainer.retention import steps_to_remove
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


def test_the_last_step_of_a_metrics_file_is_found_also_when_the_last_line_is_torn(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert last_metrics_step(run) == 0
    run.metrics.mkdir()
    run.trainer_metrics.write_text("".join(f'{{"step":{n},"filler":"{"x" * 900}"}}\n' for n in range(1, 40)))
    assert last_metrics_step(run) == 39
    with run.trainer_metrics.open("a") as file:
        file.write('{"step":40,"lo')
    assert last_metrics_step(run) == 39
