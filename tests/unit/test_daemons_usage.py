"""`prl usage`: sums by run, tag and day, also of runs that are gone; and continuing a run that was ended early."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from daemons import cli
from daemons.actions import ActionError, readmit_run
from daemons.commands.results import NO_TAG, By, Use, read_workspace_usage
from daemons.observe import Observer
from daemons.specs import RunNow, wants_orchestrator
from daemons.workspace_reader import read_workspace
from prime_rl.contract.files import append_line
from prime_rl.contract.layout import OutputDir, RunDir, stable_marker
from prime_rl.contract.status import RunState, RunStatus, StatusWriter
from prime_rl.contract.usage import UsageLog

TOML = """\
batch_size = 8
rollouts_per_example = 4
max_steps = 5
[model]
name = "m"
[budget]
max_tokens = {max_tokens}
[[env]]
id = "reverse-text"
"""


@pytest.fixture
def output(tmp_path: Path) -> OutputDir:
    """Two days of two runs, of which run_b is gone, and a trainer that counted both."""
    now = [0.0]
    output = OutputDir(tmp_path)
    logs = {name: UsageLog(output.run_usage(name), lambda: now[0]) for name in ("run_a", "run_b", "trainer")}
    for day in (0, 1):
        now[0] = day * 86_400.0
        logs["run_a"].add("run_a", tags=["lr", "big"], used={"tokens": 100, "inference_s": 2.0, "work_s": 1800.0})
        logs["trainer"].add("run_a", used={"trainer_s": 6.0, "trained_tokens": 80, "computed_tokens": 20})
    logs["run_b"].add("run_b", tags=["lr"], used={"tokens": 40, "inference_s": 1.0, "work_s": 3600.0})
    logs["trainer"].add("run_b", used={"trainer_s": 9.0, "trained_tokens": 30})
    logs["trainer"].add("run_c", used={"trainer_s": 1.0, "trained_tokens": 5})
    run_a = RunDir(tmp_path / "run_a")
    run_a.control.mkdir(parents=True)
    run_a.orch_toml.write_text(TOML.format(max_tokens=200))
    return output


RUN_A = Use("run_a", 12.0, 200, 160, 40, 4.0, 1.0)
RUN_B = Use("run_b", 9.0, 40, 30, 0, 1.0, 1.0)
RUN_C = Use("run_c", 1.0, 0, 5)
TOTAL = Use("total", 22.0, 240, 195, 40, 5.0, 2.0)


@pytest.mark.parametrize(
    ("by", "rows"),
    [
        (By.RUN, [RUN_A, RUN_B, RUN_C]),
        (By.TAG, [Use("lr", 21.0, 240, 190, 40, 5.0, 2.0), replace(RUN_A, name="big"), replace(RUN_C, name=NO_TAG)]),
        (By.DAY, [Use("1970-01-01", 6.0, 100, 80, 20, 2.0, 0.5), Use("1970-01-02", 16.0, 140, 115, 20, 3.0, 1.5)]),
    ],
)
def test_rows_and_total(output: OutputDir, by: By, rows: list[Use]) -> None:
    found = read_workspace_usage(output.path, by)
    assert (list(found.rows), found.total, found.unread) == (rows, TOTAL, ())


def test_what_others_put_there_is_left_out(output: OutputDir) -> None:
    with output.run_usage("run_b").open("a") as file:
        file.write('{"run_id": "run_a", "day": "1970-01-01", "tokens": 1000000}\n{"run_id": "../x", "day": ""}\n')
        file.write('{"run_id": "run_b", "day": "1970-01-03", "work_s": 1e999}\n[]\n\xff\n')
    link = output.usage / "run_z.jsonl"
    link.symlink_to(output.run_usage("run_a"))
    found = read_workspace_usage(output.path)
    assert found.total == TOTAL and len(found.unread) == 1 and "run_z.jsonl" in found.unread[0]


def test_the_command(output: OutputDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["usage", "--json", "--output-dir", str(output.path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["version"] == 1 and shown["by"] == "run"
    assert shown["rows"][0] == {
        "name": "run_a",
        "trainer_s": 12.0,
        "tokens_sampled": 200,
        "tokens_trained": 160,
        "tokens_computed": 40,
        "inference_s": 4.0,
        "hours": 1.0,
        "judge_prompt_tokens": 0,
        "judge_completion_tokens": 0,
        "teacher_tokens": 0,
    }
    assert shown["total"]["tokens_trained"] == sum(row["tokens_trained"] for row in shown["rows"])
    assert cli.run(["usage", "--by", "day", "--output-dir", str(output.path)]) == 0
    table = capsys.readouterr().out
    assert "1970-01-02" in table and "total" in table and "22.0 s" in table
    assert "judge" not in table.casefold() and "teacher" not in table.casefold(), "no run has one"
    append_line(output.run_usage("run_j"), '{"run_id": "run_j", "day": "1970-01-03", "judge_prompt_tokens": 1200}')
    assert cli.run(["usage", "--output-dir", str(output.path)]) == 0
    table = capsys.readouterr().out
    assert "judge" in table.casefold() and "1,200 + 0" in table and "teacher" not in table.casefold()
    append_line(output.run_usage("run_t"), '{"run_id": "run_t", "day": "1970-01-03", "teacher_tokens": 3400}')
    assert cli.run(["usage", "--output-dir", str(output.path)]) == 0
    table = capsys.readouterr().out
    assert "teacher" in table.casefold() and "3,400" in table
    (output.path / "nothing").mkdir()
    assert cli.run(["usage", "--output-dir", str(output.path / "nothing")]) == 0
    assert "no usage yet" in capsys.readouterr().out


def test_a_run_that_was_ended_goes_on_when_it_would_not_end_again(output: OutputDir) -> None:
    run = output.run("run_a")
    run.finished.write_text("budget used up: 200 of 200 tokens")
    view = read_workspace(output.path).run("run_a")
    assert view is not None and (view.state, view.reason) == (RunState.FINISHED, "budget used up: 200 of 200 tokens")
    with pytest.raises(ActionError, match=r"run_a would end again at once: budget used up: 200 of 200 tokens: raise"):
        readmit_run(output.path, "run_a")
    assert run.finished.exists()
    run.orch_toml.write_text(TOML.format(max_tokens=300))
    assert readmit_run(output.path, "run_a") and not run.finished.exists()
    assert not readmit_run(output.path, "run_a"), "there is nothing left to take back"
    assert json.loads(output.audit.read_text().splitlines()[-1])["action"] == "readmit"
    shutil.rmtree(run.path)
    assert read_workspace_usage(output.path).total == TOTAL, "a deleted run stays in the sums"


@pytest.mark.parametrize(
    ("metric", "mode", "file"), [("reward/mean", "max", "orchestrator"), ("held_out/loss", "min", "trainer")]
)
def test_a_run_that_its_stop_rule_has_ended_goes_on_when_the_rule_would_not_end_it_again(
    output: OutputDir, metric: str, mode: str, file: str
) -> None:
    run, sign = output.run("run_a"), 1 if mode == "max" else -1
    lines = [{"step": step, metric: sign * value} for step, value in ((1, 0.5), (2, 0.4), (3, 0.3), (4, 0.9))]
    run.metrics.mkdir()
    (run.metrics / f"{file}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run.broadcast_dir(3).mkdir(parents=True)
    stable_marker(run.broadcast_dir(3)).touch()
    run.finished.write_text("stopped early")
    rule = TOML.format(max_tokens=300) + f'[stop]\nmetric = "{metric}"\nmode = "{mode}"\npatience = {{patience}}\n'
    run.orch_toml.write_text(rule.format(patience=2))
    with pytest.raises(ActionError, match=r"again at once: stopped early: .*/.* .*: change or remove \[stop\]"):
        readmit_run(output.path, "run_a")
    run.orch_toml.write_text(rule.format(patience=3))
    assert readmit_run(output.path, "run_a") and not run.finished.exists()


def test_an_ended_run_has_no_orchestrator_and_one_that_goes_on_has(output: OutputDir) -> None:
    run = output.run("run_a")
    run.finished.write_text("enough")
    StatusWriter(run.status, RunStatus(run_id="run_a")).close(state="finished", reason="enough", max_steps=5)

    def now() -> RunNow:
        seen = Observer(output).runs({"run_a"})["run_a"]
        return RunNow(**{**seen.__dict__, "in_slot": True})

    assert now().ended and not wants_orchestrator(now())
    run.finished.unlink()
    assert not now().ended and wants_orchestrator(now()), "its old status is of its early end"
    StatusWriter(run.status, RunStatus(run_id="run_a")).close(state="finished", max_steps=5)
    assert not wants_orchestrator(now())
