"""The selfcheck replays what a workspace recorded, reports runs that neighbours affected, changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from safetensors.torch import load_file, save_file

from benchmarks.selfcheck import Progress, as_json, as_lines, check
from benchmarks.selfcheck import main as selfcheck
from benchmarks.selfcheck_replay import ReplayError, Setting, find_recording, read_published, replay
from benchmarks.selfcheck_replay import trainer_config as config_of_trainer
from prime_rl.configs.base import ConfigError
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.contract.layout import OutputDir, RunDir, list_rollout_steps
from prime_rl.contract.notes import ResumeRequest
from prime_rl.contract.peft import ADAPTER_FILE
from prime_rl.lora import linear
from tests.patience import PATIENCE_S
from tests.trainer_support import (
    adapter,
    published,
    put_batches,
    relative_difference,
    solo_world,
    train_until,
    trainer_config,
    write_run,
)
from tests.warm import warm

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 4
RUNS: dict[str, dict[str, Any]] = {
    "run_a": {"model": {"lora": {"rank": 4}}, "scheduler": {"type": "cosine"}},
    "run_b": {"optim": {"type": "sgd", "lr": 1e-2}, "ckpt": {"interval": 2, "keep_last": 3}},
}


@pytest.fixture(scope="module")
def config(model: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainerConfig:
    """A workspace in which both runs were trained; run_a kept all its rollouts, run_b those after step 2."""
    workspace = tmp_path_factory.mktemp("workspace")
    config = trainer_config(workspace, model, num_threads=1)
    runs = []
    for run_id, changes in RUNS.items():
        run = write_run(workspace, run_id, model, max_steps=NUM_STEPS, **{"ckpt": {"keep_rollouts": True}, **changes})
        put_batches(run, NUM_STEPS, num_samples=4, seed=len(run_id))
        runs.append(run)
    for step in (2, NUM_STEPS):
        runs[0].orchestrator_checkpoint(step).mkdir(parents=True)
        (runs[0].orchestrator_checkpoint(step) / "state.json").write_text("{}")
    runs[1].orchestrator_checkpoint(2).mkdir(parents=True)
    (runs[1].orchestrator_checkpoint(2) / "state.json").write_text("{}")
    train_until(config, lambda: all(published(run) == NUM_STEPS for run in runs))
    assert list_rollout_steps(runs[0]) == [1, 2, 3, 4] and list_rollout_steps(runs[1]) == [3, 4]
    path = OutputDir(workspace).component_config("trainer")
    path.parent.mkdir(parents=True)
    path.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True, exclude_unset=True)))
    return config


def listing(workspace: Path) -> list[tuple[str, int, int]]:
    return [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(workspace.rglob("*"))]


def run_of(config: TrainerConfig, run_id: str) -> RunDir:
    return RunDir(config.output_dir / run_id)


def test_a_recording_begins_at_step_0_or_at_a_checkpoint(config: TrainerConfig, tmp_path: Path) -> None:
    whole, part = (find_recording(run_of(config, run_id)) for run_id in RUNS)
    assert (whole.start, whole.last, part.start, part.last) == (0, 4, 2, 4)
    shutil.copytree(part.run.path, tmp_path / "run_b")
    shutil.rmtree(tmp_path / "run_b" / "checkpoints" / "step_2")
    with pytest.raises(ReplayError, match=r"set ckpt.keep_rollouts = true in its control/orch.toml"):
        find_recording(RunDir(tmp_path / "run_b"))


def test_the_trainer_is_set_up_as_it_was_or_with_room_for_all(config: TrainerConfig, tmp_path: Path) -> None:
    recordings = [find_recording(run_of(config, run_id)) for run_id in RUNS]
    as_it_was = config_of_trainer(config.output_dir, recordings)
    assert (as_it_was.model, as_it_was.seq_len) == (config.model, config.seq_len)
    guessed = config_of_trainer(tmp_path, recordings)
    assert guessed.model.name == config.model.name and guessed.model.lora is not None
    assert guessed.model.lora.rank == 4, "what the runs ask for"
    path = OutputDir(tmp_path).component_config("trainer")
    path.parent.mkdir(parents=True)
    path.write_text("max_concurrent_runs = 0\n")
    with pytest.raises(ConfigError, match="max_concurrent_runs"):
        config_of_trainer(tmp_path, recordings)


def test_a_workspace_of_one_whole_model_has_no_neighbours(
    config: TrainerConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(config.output_dir / "run_a", tmp_path / "run_a")
    path = OutputDir(tmp_path).component_config("trainer")
    path.parent.mkdir(parents=True)
    whole = {"max_concurrent_runs": 1, "model": {"name": config.model.name}}
    path.write_text(tomli_w.dumps(whole))
    assert selfcheck([str(tmp_path)]) == 2
    assert "the whole model for one run" in capsys.readouterr().err


def test_progress_is_one_line_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Progress(8)
    progress.part("alone")(4)
    progress.part("together")(2)
    progress.close()
    shown = capsys.readouterr().err
    assert "replaying alone: step 4 of 8" in shown and "replaying together: step 6 of 8" in shown
    assert "\n" not in shown and shown.endswith("\r\033[K")


def test_a_replay_that_is_refused_says_why(config: TrainerConfig) -> None:
    recording = find_recording(run_of(config, "run_a"))
    other = config.model_copy(update={"seq_len": 8})
    with pytest.raises(ReplayError, match=r"run_a cannot be replayed: .*sampling.max_tokens"):
        replay(other, solo_world(), [recording], Setting(64, 1))


@pytest.mark.numeric
def test_a_replay_reaches_what_the_workspace_reached(config: TrainerConfig) -> None:
    recordings = [find_recording(run_of(config, run_id)) for run_id in RUNS]
    again = replay(config, solo_world(), recordings, Setting(config.max_tokens_per_micro_batch, 2))
    for recording in recordings:
        published_adapter = adapter(recording.run, NUM_STEPS)
        assert relative_difference(again[recording.run.run_id], published_adapter) <= 1e-4


def test_a_published_adapter_that_no_replay_reaches_is_named(config: TrainerConfig, tmp_path: Path) -> None:
    """run_a's is ruined; run_b's too, but its rollback to step 3 explains that."""
    shutil.copytree(config.output_dir, tmp_path, dirs_exist_ok=True)
    runs = [RunDir(tmp_path / run_id) for run_id in RUNS]
    for run in runs:
        ruin(run)
    runs[1].resumed.write_bytes(msgspec.json.encode(ResumeRequest(3, "")))
    verdicts = check(config, solo_world(), [find_recording(run) for run in runs], 1e-4, Progress(0))
    assert [(each.is_isolated, each.reached.ok, each.ok) for each in verdicts] == [
        (True, False, False),
        (True, None, True),
    ]
    lines = as_lines(verdicts)
    assert "run_a: version 4 as published, relative difference " in lines[1] and "FAILED" in lines[1]
    assert lines[3].startswith("run_b: version 4 as published: not compared: the run was rolled back to step 3")
    told = as_json(verdicts, 1e-4)["runs"]
    assert told[0]["reached"]["version"] == 4 and told[0]["reached"]["difference"] > 1
    assert not told[0]["ok"] and told[1]["ok"]


def ruin(run: RunDir) -> None:
    path = run.broadcast_dir(NUM_STEPS) / ADAPTER_FILE
    save_file({name: 3 * tensor + 1 for name, tensor in load_file(path).items()}, path)


def test_what_is_compared_is_the_newest_version(config: TrainerConfig, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run_a")
    shutil.copytree(config.output_dir / "run_a", run.path)
    assert read_published(find_recording(run)).keys() == adapter(run, NUM_STEPS).keys()
    path = run.broadcast_dir(NUM_STEPS) / ADAPTER_FILE
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="not an adapter"):
        read_published(find_recording(run))
    shutil.rmtree(run.broadcast_dir(NUM_STEPS))
    assert find_recording(run).last == NUM_STEPS - 1, "its last batch is still to be trained on"
    shutil.rmtree(run.broadcast)
    with pytest.raises(ReplayError, match="version 4 is not in "):
        read_published(find_recording(run))


def test_neighbours_that_leak_are_found(config: TrainerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter of slot 1 acts on rows of slot 0 a little: only together, and only for that run."""
    recordings = [find_recording(run_of(config, run_id)) for run_id in RUNS]
    fine = check(config, solo_world(), recordings, 1e-4, Progress(0))
    assert [(verdict.run_id, verdict.num_steps, verdict.ok) for verdict in fine] == [
        ("run_a", 4, True),
        ("run_b", 2, True),
    ]
    real = linear.AdapterRouting.set_rows

    def leaking(self: linear.AdapterRouting, adapter_idxs: Any, lengths: Any = None) -> None:
        taken = [
            1 if idx == 0 and len(set(adapter_idxs)) > 1 and row == 0 else idx for row, idx in enumerate(adapter_idxs)
        ]
        real(self, taken, lengths)

    monkeypatch.setattr(linear.AdapterRouting, "set_rows", leaking)
    assert not any(verdict.ok for verdict in check(config, solo_world(), recordings, 1e-4, Progress(0)))


@pytest.mark.numeric
@pytest.mark.slow
def test_the_command_says_ok_or_failed_and_only_reads(config: TrainerConfig) -> None:
    workspace = config.output_dir
    before = listing(workspace)
    done = run_command(str(workspace), "--json", "--tolerance", "0")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told["numbers"] == "float32 on cpu"
    assert told["version"] == 1 and [run["run_id"] for run in told["runs"]] == list(RUNS)
    assert all(0 < run["difference"] < 1e-4 and not run["ok"] for run in told["runs"]), "packs differ, so bits do"
    assert all(run["reached"]["version"] == NUM_STEPS and run["reached"]["difference"] < 1e-4 for run in told["runs"])
    assert done.stderr == "", "no progress without a terminal"
    assert listing(workspace) == before


@pytest.mark.slow
def test_the_command_in_words(config: TrainerConfig) -> None:
    done = run_command(str(config.output_dir), "--run", "run_b")
    assert done.returncode == 0, done.stderr
    numbers, neighbours, reached = done.stdout.splitlines()
    assert numbers == "in float32 on cpu"
    assert neighbours.startswith("run_b: 2 steps, relative difference ") and neighbours.endswith(": ok")
    assert reached.startswith("run_b: version 4 as published, relative difference ") and reached.endswith(": ok")


@pytest.mark.slow
def test_the_command_fails_where_the_published_adapter_is_ruined(config: TrainerConfig, tmp_path: Path) -> None:
    """Quicker: test_a_published_adapter_that_no_replay_reaches_is_named."""
    shutil.copytree(config.output_dir, tmp_path, dirs_exist_ok=True)
    ruin(RunDir(tmp_path / "run_b"))
    done = run_command(str(tmp_path), "--run", "run_b")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "run_b: version 4 as published, relative difference " in done.stdout and "FAILED" in done.stdout


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm("benchmarks.selfcheck").run(arguments, env=os.environ, cwd=ROOT, timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{workspace}/none"], "folder not found"),
        (["{workspace}/run_a"], "has no runs: give the output_dir of a trainer"),
        (["{workspace}", "--run", "run_c"], "run_c not found in "),
        (["{workspace}", "--run", "../x"], "invalid run id"),
        (["{empty}", "--run", "run_new"], "set ckpt.keep_rollouts = true"),
        (["{empty}"], "set ckpt.keep_rollouts = true"),
    ],
)
def test_wrong_use_is_one_line(
    config: TrainerConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    write_run(tmp_path, "run_new", Path("m"))
    places = {"workspace": config.output_dir, "empty": tmp_path}
    assert selfcheck([argument.format(**places) for argument in arguments]) == 2
    shown = capsys.readouterr()
    assert words in shown.err and shown.err.count("\n") == 1 and not shown.out
