"""Whose work the trainer's seconds were."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import RunStatus, StatusWriter
from prime_rl.contract.usage import UsageLine, UsageLog, read_usage
from prime_rl.trainer.metrics import PHASES, PhaseTimer, TrainerUsage
from prime_rl.trainer.runs import TrainerRun
from prime_rl.trainer.runs.discovery import Leave, find_leave


def test_a_pass_is_split_by_positions_and_an_update_is_its_runs_own(tmp_path: Path) -> None:
    path, config = OutputDir(tmp_path).run_usage("trainer"), OrchestratorConfig.model_construct()
    runs = [TrainerRun(idx, RunDir(tmp_path / f"run_{idx}"), config, idx) for idx in range(3)]
    manager: Any = SimpleNamespace(used=runs)
    usage = TrainerUsage(manager, UsageLog(path))

    def lines() -> dict[str, UsageLine]:
        return {line.run_id: line for line in read_usage(path).values()}

    runs[0].pass_positions, runs[1].pass_positions = 100, 300
    usage.passed(4.0)
    runs[1].pass_positions = 50
    usage.passed(1.0)
    assert lines() == {}, "a line is written with an update"
    usage.updated(runs[1], 900, {**dict.fromkeys(PHASES, 0.0), "wait": 99.0, "forward_backward": 5.0, "optim": 0.5})
    line = lines()["run_1"]
    assert (line.trainer_s, line.trained_tokens, line.computed_tokens) == (pytest.approx(4.5), 900, 350)
    usage.write(runs[0])
    usage.write(runs[0])
    usage.write(runs[2])
    assert set(lines()) == {"run_0", "run_1"}, "a run without work has no line"
    line = lines()["run_0"]
    assert (line.trainer_s, line.trained_tokens, line.computed_tokens) == (pytest.approx(1.0), 0, 100)


def test_a_timer_tells_its_last_phase() -> None:
    seconds = iter([0.0, 1.0, 1.0, 3.5])
    timer = PhaseTimer(clock=lambda: next(seconds))
    for expected in (1.0, 2.5):
        with timer("optim"):
            pass
        assert timer.last_s == expected
    assert timer.take()["optim"] == 3.5


def test_what_a_person_did_comes_first(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run_a")
    run.control.mkdir(parents=True)
    assert find_leave(run) is None
    StatusWriter(run.status, RunStatus(run_id="run_a")).close(state="failed", reason="no luck")
    assert find_leave(run) == Leave("its orchestrator failed: no luck", "failed")
    run.finished.write_text("enough\nof it")
    assert find_leave(run) == Leave("it is finished: enough of it", "finished", saves=True)
    run.evicted.touch()
    assert find_leave(run) == Leave("it was evicted", "evicted")
