"""Sending a run back to a checkpoint: what is written, what is kept, what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from daemons.actions import ActionError, edited, rollback_run
from daemons.cli import app
from daemons.cli import run as prl
from daemons.workspace_reader import read_workspace
from prime_rl.configs.base import merge, parse_toml
from prime_rl.configs.validate import load_run_config
from prime_rl.contract.layout import OutputDir, RunDir, list_steps
from prime_rl.contract.notes import pending_request
from prime_rl.contract.status import RunStatus, StatusWriter
from tests.tui_support import add_checkpoint, add_run, orch_toml


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = add_run(OutputDir(tmp_path), "run_a", step=40)
    for step in (10, 20):
        add_checkpoint(run, step)
    add_checkpoint(run, 30, stable=False)
    return run


@pytest.mark.parametrize(
    "text",
    [
        orch_toml(), "a = 1", "[ckpt]\ninterval = 3", "[ckpt]\nresume_step = 5\n[x]\ny = 1\n",
        "ckpt = { interval = 2 }",
        "[ckpt] # c\n  resume_step = -1 # old\nkeep_last = 2\n[[env]]\nid = 'a'\n", "[x]\nresume_step = 7\n",
        "ckpt.interval = 2\n", "text = '''\n[ckpt]\nresume_step = 1\n'''\n",
    ],
)  # fmt: skip
def test_only_the_step_changes(text: str) -> None:
    changed = edited(text, {"ckpt": {"resume_step": 20}}, "asked for")
    assert parse_toml(changed, "x") == merge(parse_toml(text, "x"), {"ckpt": {"resume_step": 20}})
    assert "asked for" in changed


def test_of_lines_that_look_like_the_key_only_the_key_itself_changes() -> None:
    text = "[ckpt]\nresume_step = 1  # old\nnote = '''\nresume_step = 2\n'''  # kept\n"
    changed = edited(text, {"ckpt": {"resume_step": 20}}, "new")
    assert changed == text.replace("resume_step = 1  # old", "resume_step = 20  # new")


def test_comments_stay(run: RunDir) -> None:
    rollback_run(run.path.parent, "run_a", 20)
    text = run.orch_toml.read_text()
    assert text.startswith("# A run of reverse-text") and "resume_step = 20  # requested at" in text
    assert load_run_config(run.orch_toml).ckpt.resume_step == 20
    assert pending_request(run, 20) is not None


def test_until_it_is_carried_out_the_run_is_at_the_step_that_it_goes_on_from(run: RunDir, capsys: Any) -> None:
    rollback_run(run.path.parent, "run_a", 20)
    assert (view := read_workspace(run.path.parent).run("run_a")) is not None and view.step == 20
    assert prl(["runs", "set", "run_a", "max_steps=90", "--output-dir", str(run.path.parent)]) == 0
    assert "run_a continues from step 20 after prl up" in capsys.readouterr().out


def test_evicted_and_failed_runs_train_again(run: RunDir) -> None:
    run.evicted.write_text("no")
    rollback_run(run.path.parent, "run_a", 10, reason="try again")
    assert not run.evicted.exists()
    events = [json.loads(line) for line in OutputDir(run.path.parent).audit.read_text().splitlines()]
    assert [(event["action"], event["reason"]) for event in events] == [
        ("rollback", "try again"), ("readmit", "rolled back to step 10"),
    ]  # fmt: skip
    assert events[0]["detail"] == "to step 10"


def files_of(run: RunDir, step: int) -> dict[str, int]:
    folder = run.checkpoint_dir(step)
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def test_a_run_in_use_is_evicted_and_waited_for(run: RunDir) -> None:
    before, files = run.orch_toml.read_text(), files_of(run, 20)
    writer = StatusWriter(run.status, RunStatus(run_id="run_a", state="running"))
    try:
        with pytest.raises(ActionError, match=r"did not release it within 0\.3 s; it stays evicted"):
            rollback_run(run.path.parent, "run_a", 20, wait_s=0.3)
        assert run.evicted.read_text() == "rolls back to step 20" and run.orch_toml.read_text() == before
        said: list[str] = []

        def let_go(message: str) -> None:
            said.append(message)
            shutil.rmtree(run.checkpoint_dir(20))  # as the trainer does when it has got so many steps further
            writer.close(state="stopped")
            run.status.unlink()

        rollback_run(run.path.parent, "run_a", 20, wait_s=20, on_progress=let_go)
        assert "waiting for" in said[0] and not run.evicted.exists()
        assert list_steps(run.checkpoints, stable_only=True) == [10, 20] and files_of(run, 20) == files
        assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_10", "step_20", "step_30"]
    finally:
        writer.close()


@pytest.mark.parametrize("step", [30, 40])
def test_what_is_no_complete_checkpoint_is_refused(run: RunDir, step: int) -> None:
    before = run.orch_toml.read_text()
    with pytest.raises(ActionError, match=rf"no complete checkpoint of step {step}; complete ones: 10, 20"):
        rollback_run(run.path.parent, "run_a", step)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(ActionError, match=rf"no complete checkpoint of step {step}; complete ones: none"):
        rollback_run(run.path.parent, "run_a", step)
    assert run.orch_toml.read_text() == before and not run.evicted.exists()


def test_an_invalid_or_missing_run_is_refused(run: RunDir) -> None:
    run.orch_toml.write_text("batch_size = ")
    with pytest.raises(ActionError, match="not valid TOML"):
        rollback_run(run.path.parent, "run_a", 20)
    run.orch_toml.write_text("batch_size = 3")
    with pytest.raises(ActionError, match="would be invalid"):
        rollback_run(run.path.parent, "run_a", 20)
    with pytest.raises(ActionError):
        rollback_run(run.path.parent, "run_none", 20)


def test_a_workspace_with_daemons_is_asked_to_start_it(run: RunDir) -> None:
    workspace = OutputDir(run.path.parent)
    workspace.daemons.mkdir()
    os.chmod(run.orch_toml, 0o600)
    rollback_run(workspace.path, "run_a", 0)
    assert workspace.start_request("run_a").exists() and read_workspace(workspace.path).run("run_a") is not None
    assert run.orch_toml.stat().st_mode & 0o777 == 0o600


def test_the_command(run: RunDir) -> None:
    at = ["run_a", "--step", "20", "--output-dir", str(run.path.parent)]
    done = CliRunner().invoke(app, ["runs", "rollback", *at])
    assert (done.exit_code, done.output.strip()) == (0, "run_a: rolled back to step 20")
