"""`prl` as a person types it: exit codes, one-line errors, stable JSON; mostly with the daemons down."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w

from daemons.cli import run
from prime_rl.contract.files import append_line, wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.samples import Sample, SampleFile
from tests.budgets import in_full, in_release
from tests.daemons_support import PATIENCE_S, ROOT, RUN_TOML, Prl, fake_workspace
from tests.warm import warm


@pytest.fixture
def prl(tmp_path: Path) -> Prl:
    return fake_workspace(tmp_path)


@dataclass
class Inline:
    """`prl` in this very process: the same entry without half a second of imports. Not for what handles signals."""

    prl: Prl
    capture: pytest.CaptureFixture[str]

    def __call__(self, *args: str, exit_code: int = 0) -> SimpleNamespace:
        code = run([*args, "--output-dir", str(self.prl.output_dir)])
        out, err = self.capture.readouterr()
        assert code == exit_code, (args, code, out, err)
        return SimpleNamespace(stdout=out, stderr=err)

    def json(self, *args: str) -> Any:
        return json.loads(self(*args, "--json").stdout)


@pytest.fixture
def inline(prl: Prl, capsys: pytest.CaptureFixture[str]) -> Inline:
    return Inline(prl, capsys)


def test_the_life_of_a_run_with_the_daemons_down(inline: Inline) -> None:
    prl = inline
    workspace = inline.prl.output_dir
    file = str(inline.prl.run_file())
    assert prl("runs", "validate", file).stdout.startswith(
        f"{file}: valid; model and limits not checked: no trainer has run in {workspace}"
    )
    assert "would add run_reverse" in prl("runs", "add", file, "--dry-run").stdout
    assert prl("runs", "add", file).stdout == f"added run_reverse to {workspace}\n"
    prl("runs", "add", file, "--id", "run_b", "--set", "max_steps=7", "--set", "tags=['x', 'y']")
    prl("runs", "evict", "run_b", "--reason", "no [bold]more[/bold]\x1b[31m")
    runs = {run["run_id"]: run for run in prl.json("runs", "list")["runs"]}
    assert {run_id: (run["state"], run["max_steps"]) for run_id, run in runs.items()} == {
        "run_reverse": ("stopped", 3),
        "run_b": ("evicted", 7),
    }
    assert "no [bold]more[/bold]\n" in prl("runs", "list").stdout.replace("  ", "").replace(" \n", "\n")
    assert "run_b" not in prl("runs", "list", "--state", "stopped").stdout
    none = prl("runs", "list", "--state", "failed", "--tag", "z").stdout
    assert none == "no run is failed and has the tag z: prl runs list shows all\n"
    assert [run["run_id"] for run in prl.json("runs", "list", "--tag", "x", "--tag", "y")["runs"]] == ["run_b"]
    prl("runs", "readmit", "run_b")
    assert prl.json("runs", "show", "run_b")["run"]["state"] == "stopped"
    prl("runs", "delete", "run_b", "--yes")
    prl("runs", "undelete", "run_b")
    prl("runs", "delete", "run_b", "--yes")
    assert prl("runs", "purge", "--yes").stdout == "deleted runs removed: 1\n"
    audit = (workspace / "logs" / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["action"] for line in audit] == [
        *("add", "add", "evict", "readmit", "delete", "undelete", "delete", "purge")
    ]


def test_validate_prints_every_problem_with_its_place(inline: Inline) -> None:
    file = inline.prl.run_file(max_steps=0)
    file.write_text(file.read_text().replace("= 4", "= 3") + "[optim]\nrl = 1\n")
    lines = inline("runs", "validate", str(file), exit_code=2).stderr.splitlines()
    assert lines == [
        f"prl: {file}: max_steps: found 0: must be greater than or equal to 1",
        f"prl: {file}: optim.rl: unknown key; did you mean 'lr'?",
        f"prl: {file}: batch_size: found 8: must be a multiple of rollouts_per_example = 3",
    ]
    args = ("runs", "validate", str(file), "--set", "max_steps=x", "--json")
    report = json.loads(inline(*args, exit_code=2).stdout)
    assert (report["version"], report["valid"], report["trainer"]) == (1, False, None)
    assert [(each["key"], each["found"], each["line"]) for each in report["problems"]] == [
        *(("max_steps", "x", None), ("optim.rl", 1, None), ("batch_size", 8, None))
    ]
    assert report["problems"][2]["allowed"] == "must be a multiple of rollouts_per_example = 3"
    file.write_text("a = 1\nb = \n")
    (torn,) = json.loads(inline("runs", "validate", str(file), "--json", exit_code=2).stdout)["problems"]
    assert (torn["line"], torn["key"]) == (2, None)


def test_several_runs_in_one_command(inline: Inline) -> None:
    prl, file = inline, str(inline.prl.run_file())
    for name in ("run_a", "run_b"):
        prl("runs", "add", file, "--id", name)
    done = prl("runs", "evict", "run_a", "run_none", "run_b", "--reason", "x", exit_code=1)
    assert (done.stdout, done.stderr.count("\n")) == ("run_a: evicted\nrun_b: evicted\n", 1)
    assert "run 'run_none' not found" in done.stderr
    assert prl("runs", "readmit", "run_a", "a/b", "run_b", exit_code=2).stdout.count("readmitted") == 2
    assert prl("runs", "delete", "run_a", "run_b", "run_a", "--yes", "--reason", "old").stdout.count("moved to") == 2
    prl("runs", "undelete", "run_b", "run_a")
    assert {run["run_id"] for run in prl.json("runs", "list", "--state", "stopped,active")["runs"]} == {
        "run_a",
        "run_b",
    }
    prl("runs", "delete", "run_a", "--yes")
    assert prl("runs", "purge", "--older-than", "7d").stdout == "deleted runs removed: 0\n"
    assert "invalid duration" in prl("runs", "purge", "--older-than", "soon", exit_code=2).stderr


def test_json_is_stable(inline: Inline) -> None:
    prl = inline
    prl("runs", "add", str(inline.prl.run_file()))
    listed = prl.json("runs", "list")
    assert listed["version"] == 1
    assert list(listed["runs"][0]) == [
        *("run_id", "state", "step", "max_steps", "reward", "reason", "waiting_on", "updated_at", "run_idx"),
        *("queue_position", "tokens_per_s", "async_level", "policy_version", "lr", "bottleneck", "model"),
        *("batch_size", "num_restarts", "added_at", "stalled_since", "tags", "weight", "priority"),
        *("max_tokens", "max_hours", "problem", "examples_unusable", "signs", "crash_loop", "edited", "sound_step"),
        *("started_at", "kind", "troubles"),
    ]
    assert list(prl.json("status")) == [
        *("version", "output_dir", "supervisor_alive", "daemons", "slots", "runs", "refused", "disk", "bottleneck"),
        *("clocks", "inference"),
    ]
    shown = prl.json("runs", "show", "run_reverse")
    parts = ["run", "config", "metrics", "errors", "data_changed", "changes", "checkpoints", "disk"]
    assert list(shown) == ["version", *parts]
    assert shown["config"]["max_steps"] == 3 and shown["disk"]["num_bytes"] > 0


def test_show_and_status_for_people(inline: Inline) -> None:
    inline("runs", "add", str(inline.prl.run_file()))
    log = inline.prl.output_dir / "run_reverse" / "logs" / "orchestrator.log"
    append_line(log, "2026-01-01T00:00:00Z ERROR   x: it went \x1b[31mwrong")
    shown = inline("runs", "show", "run_reverse").stdout
    assert "max_steps = 3" in shown and "it went wrong" in shown and "\x1b" not in shown
    status = inline("status").stdout
    assert "disk: the workspace takes " in status and "nothing is running" in status
    assert " age " in inline("runs", "list").stdout


READING = """
runs list|runs best|usage|serve|runs show run_x|runs samples run_x|runs export-metrics|runs diff run_a run_b|runs purge
runs evict run_x --reason a|runs undelete run_x|logs trainer|restart trainer|chat base|alerts|multinode status
""".replace("\n", "|").strip("|")


@pytest.mark.parametrize("command", READING.split("|"))
def test_a_folder_that_is_not_there_is_named(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "typo"
    assert run([*command.split(), "--output-dir", str(missing)]) == 2
    line = f"prl: no workspace at {missing}: start one with prl up, or name another\n"
    assert capsys.readouterr() == ("", line) and not missing.exists()
    (tmp_path / "typos").mkdir()  # holds nothing
    (tmp_path / "type" / "run_a").mkdir(parents=True)
    assert run([*command.split(), "--output-dir", str(missing)]) == 2
    assert capsys.readouterr() == ("", f"prl: no workspace at {missing}: did you mean {tmp_path / 'type'}?\n")


def test_with_json_a_missing_workspace_is_an_empty_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, key in (("runs list", "runs"), ("runs best", "standings"), ("usage", "rows"), ("status", "daemons")):
        assert run([*command.split(), "--json", "--output-dir", str(tmp_path / "typo")]) == 0
        assert json.loads(capsys.readouterr().out)[key] == []


def test_a_folder_without_a_workspace_is_told_and_one_without_runs_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "daemons").mkdir()
    place = ["--output-dir", str(tmp_path)]
    for command in (["runs", "list"], ["status"]):
        assert run([*command, *place]) == 2
        line = f"prl: no workspace in {tmp_path}: prl up --output-dir {tmp_path} makes one\n"
        assert capsys.readouterr() == ("", line)
        assert run([*command, "--json", *place]) == 0, "an empty one, as one that is not there"
        assert json.loads(capsys.readouterr().out)["runs"] == []
    OutputDir(tmp_path).supervisor_lock.touch()
    assert run(["status", *place]) == 0
    assert run(["runs", "list", *place]) == 0
    assert "no runs yet: add one with prl runs add" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("name", ["demo/system.toml", "reverse_text/trainer.toml", "reverse_text/inference.toml"])
def test_a_file_of_another_kind_is_told_in_one_short_line(name: str, inline: Inline) -> None:
    file, run_file = ROOT / "configs" / name, ROOT / "configs" / "demo" / "reverse.toml"
    use = "prl up @" if "system" in name else f"prl {file.stem} @"
    for command in ("add", "validate", "sweep --set seed=1"):
        verb, *more = command.split()
        said = inline("runs", verb, str(file), *more, exit_code=2).stderr
        assert said.count("\n") == 1 and said.endswith(f", not like a run's config: use {use} {file}\n"), said
    said = inline("up", "@", str(run_file), "--dry-run", exit_code=2).stderr
    assert said == (
        f"prl: {run_file}: looks like a run's config, not like a workspace's system file: use prl runs add {run_file}\n"
    )
    assert not inline.prl.output_dir.exists()


def test_entries_of_a_list_are_set_by_their_number(inline: Inline) -> None:
    file = str(inline.prl.run_file())
    inline("runs", "add", file, "--id", "run_a", "--set", "env.0.id=sort-letters", "--set", "env.0.args.min_len=3")
    assert inline.json("runs", "show", "run_a")["config"]["env"] == [{"id": "sort-letters", "args": {"min_len": 3}}]
    inline("runs", "set", "run_a", "env.0.id=reverse-text", "env.0.args=null")
    inline("runs", "sweep", file, "--set", "env.0.id=reverse-text,sort-letters", "--name", "s")
    said = inline("runs", "add", file, "--set", "env.1.id=x", exit_code=2).stderr
    assert said.endswith("env: '1' is not an entry: expected the number of one, such as env.0\n"), said


def test_without_a_terminal_nothing_is_cut_and_figures_are_short(inline: Inline) -> None:
    why = "no reward " * 500 + "end"
    inline("runs", "add", str(inline.prl.run_file()), "--id", "run_a", "--set", "weight=0.30000000000000004")
    inline("runs", "evict", "run_a", "--reason", why)
    for command in (["status"], ["runs", "list"], ["runs", "show", "run_a"]):
        assert why in inline(*command).stdout
    shown = inline("runs", "show", "run_a").stdout.partition("config")[0]
    assert "0.3\n" in shown.replace(" ", "") + "\n" and "0.30000" not in shown and "tags" not in shown


def test_a_port_that_is_taken_is_told_before_anything_is_made(inline: Inline, monkeypatch: Any) -> None:
    monkeypatch.setattr("daemons.up_and_down.need_daemons", lambda system: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        said = inline("up", "--inference.port", port, "--model.name", str(inline.prl.model), exit_code=1).stderr
    assert f"inference cannot listen on 127.0.0.1:{port}" in said and not inline.prl.output_dir.exists()


def test_several_files_are_added_or_none(inline: Inline, tmp_path: Path) -> None:
    files = [str(inline.prl.run_file(name)) for name in "ab"]
    bad = tmp_path / "bad.toml"
    bad.write_text("batch_size = 4")
    refused = inline("runs", "add", *files, str(bad), exit_code=2)
    assert "bad.toml: rollouts_per_example: required" in refused.stderr and inline.json("runs", "list")["runs"] == []
    assert inline("runs", "add", *files, "--dry-run").stdout.count("would add") == 2
    assert inline("runs", "add", *files, "--dry-run").stderr == "" and not inline.prl.output_dir.exists()
    done = inline("runs", "add", *files)
    assert done.stdout.count("added run_") == 2
    made = f"prl: made a new workspace at {inline.prl.output_dir}: prl up starts it; --output-dir names another\n"
    assert done.stderr == made, "perhaps in a wrong folder"
    assert inline("runs", "sweep", files[0], "--set", "seed=1,2").stderr == ""
    assert {"run_a", "run_b"} < {run["run_id"] for run in inline.json("runs", "list")["runs"]}


@pytest.mark.parametrize("command", ["add {0}", "sweep {0} --set seed=1,2"])
def test_no_run_goes_to_a_misspelt_workspace_beside_the_one_that_is_meant(
    inline: Inline, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, meant = inline.prl.run_file(), inline.prl.output_dir
    typo = meant.with_name(meant.name[:-1])
    words = ["runs", *command.format(file).split(), "--output-dir", str(typo)]
    assert run([*words, "--dry-run"]) == 0 and not typo.exists(), "nothing is like it yet"
    inline("runs", "add", str(file))
    capsys.readouterr()
    assert run(words) == 2 and not typo.exists()
    question = f"no workspace at {typo}: did you mean {meant}? make a new workspace?"
    assert capsys.readouterr() == ("", f"prl: {question} cannot ask without a terminal: add --yes\n")
    assert run([*words, "--yes"]) == 0
    made = f"prl: made a new workspace at {typo}: prl up starts it; --output-dir names another\n"
    assert capsys.readouterr().err == made and list(typo.glob("run_*"))


def test_workspaces_of_a_series_are_none_that_another_meant(inline: Inline) -> None:
    file, first = inline.prl.run_file(), inline.prl.output_dir.with_name("2026-11-01")
    assert run(["runs", "add", str(file), "--output-dir", str(first)]) == 0
    for name in ("2026-11-02", "2026-11-10"):
        assert run(["runs", "add", str(file), "--output-dir", str(first.with_name(name))]) == 0


def test_a_folder_that_becomes_a_workspace_is_told(inline: Inline, tmp_path: Path) -> None:
    inline.prl.output_dir.mkdir()
    (inline.prl.output_dir / "notes.txt").write_text("mine")
    assert "prl: made a new workspace at" in inline("runs", "add", str(inline.prl.run_file())).stderr


def test_the_doctor_says_what_to_do(inline: Inline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checks = inline.json("doctor", "--quick")
    assert checks["version"] == 1 and checks["ok"]
    assert inline("doctor", "--quick").stdout.count("\n") == len(checks["checks"])
    (tmp_path / "key").write_text("k")
    (tmp_path / "key").chmod(0o644)
    monkeypatch.setenv("PRL_API_KEY_FILE", str(tmp_path / "key"))
    assert "chmod 600" in inline("doctor", "--quick", exit_code=1).stdout


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("runs", "add", "none.toml"), 2, "not found: none.toml"),
        (("runs", "validate", "none.toml"), 2, "not found: none.toml"),
        (("runs", "add", "{file}", "--id", "run_a/../../x"), 2, "invalid run id 'run_a/../../x'"),
        (("runs", "add", "{file}", "--id", ".."), 2, "invalid run id '..'"),
        (("runs", "add", "{file}", "{file}", "--id", "run_a"), 2, "--id names one run, and there are 2 files"),
        (("runs", "add", "{file}", "--set", "max_steps"), 2, "invalid 'max_steps': expected KEY=VALUE"),
        (("runs", "add", "{file}", "--set", "optim.rl=1"), 2, "optim.rl: unknown key; did you mean 'lr'?"),
        (("runs", "show", "run_none"), 1, "run 'run_none' not found"),
        (("runs", "show", "../etc"), 2, "invalid run id"),
        (("runs", "evict", "run_none", "--reason", "x"), 1, "run 'run_none' not found"),
        (("runs", "delete", "run_none", "--yes"), 1, "run 'run_none' not found"),
        (("runs", "undelete", "run_none"), 1, "nothing to restore"),
        (("runs", "list", "--state", "active,odd"), 2, "'odd': expected one of invalid, waiting, active"),
        (("logs", "nothing"), 2, "'nothing' not found: expected supervisor"),
        (("logs", "trainer", "--grep", "("), 2, "invalid regular expression"),
        (("logs", "trainer"), 1, "trainer has not been started yet"),
        (("restart", "trainer"), 1, "start the workspace with prl up"),
    ],
)
def test_errors_are_one_line_with_the_right_exit_code(
    inline: Inline, args: tuple[str, ...], code: int, message: str
) -> None:
    file = inline.prl.run_file()
    inline.prl.output_dir.mkdir()
    done = inline(*[arg.replace("{file}", str(file)) for arg in args], exit_code=code)
    assert done.stderr.startswith("prl: ") and message in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [(("up", "--nothing.known", "1"), "unknown key"), (("up", "stray"), "unexpected argument 'stray'")],
)
def test_wrong_settings_are_one_line_too(prl: Prl, args: tuple[str, ...], message: str) -> None:
    done = prl(*args, exit_code=2)
    assert message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("args", [("runs", "evict", "run_a"), ("nonsense",), ("runs", "list", "--state", "odd"), ()])
def test_wrong_use_exits_2(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args) == 2
    assert "Traceback" not in "".join(capsys.readouterr())


@pytest.mark.slow
def test_a_question_that_has_no_answer_is_wrong_use(prl: Prl) -> None:
    prl("runs", "add", str(prl.run_file()))
    done = prl("runs", "delete", "run_reverse", exit_code=None)
    assert (done.returncode, "add --yes" in done.stderr) == (2, True)
    assert prl.json("runs", "list")["runs"] != []


def test_a_traceback_only_with_debug(prl: Prl) -> None:
    prl.output_dir.mkdir()
    assert "Traceback" not in prl("runs", "show", "run_none", exit_code=1).stderr
    assert "Traceback" in prl("--debug", "runs", "show", "run_none", exit_code=1).stderr


def test_the_output_dir_comes_from_the_option_else_the_environment(prl: Prl, tmp_path: Path) -> None:
    env = {**prl.env, "PRL_OUTPUT_DIR": str(tmp_path / "from_env")}
    for given, said in ((env, str(tmp_path / "from_env")), (prl.env, "outputs")):
        done = warm("daemons.cli").run(["status", "--json"], env=given, cwd=tmp_path, timeout_s=PATIENCE_S)
        assert done.returncode == 0 and json.loads(done.stdout)["output_dir"] == said
    assert not (tmp_path / "outputs").exists() and not (tmp_path / "from_env").exists(), "looking makes no folders"


@pytest.mark.slow
def test_logs_are_shown_without_what_a_terminal_obeys_and_followed(prl: Prl) -> None:
    prl("runs", "add", str(prl.run_file()))
    log = prl.output_dir / "run_reverse" / "logs" / "orchestrator.log"
    for number in range(100):
        append_line(log, f"line {number} \x1b]2;title\x07")
    assert prl("logs", "run_reverse", "-n", "2").stdout == "line 98 \nline 99 \n"
    assert prl("logs", "run_reverse", "-n", "2", "--grep", "ne .5 $").stdout == "line 85 \nline 95 \n"
    child = prl.begin("logs", "run_reverse", "-f", "-n", "1")
    assert child.stdout.readline() == "line 99 \n"
    append_line(log, "new")
    assert child.stdout.readline() == "new\n"
    log.write_text("")
    append_line(log, "after truncation")
    assert child.stdout.readline() == "after truncation\n"
    append_line(log, "last of the old file")
    os.rename(log, f"{log}.1")
    append_line(log, "first of the new file")
    assert child.stdout.readline() == "last of the old file\n"
    assert child.stdout.readline() == "first of the new file\n"
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0


def test_output_into_a_closed_pipe_makes_no_noise(prl: Prl) -> None:
    prl("runs", "add", str(prl.run_file()))
    log = prl.output_dir / "run_reverse" / "logs" / "orchestrator.log"
    log.parent.mkdir()
    log.write_text("x" * 100 + "\n" + "y\n" * 50_000)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "daemons.cli", "logs", "run_reverse", "-n", "50000"]
    done = subprocess.run(
        [*command, "--output-dir", str(prl.output_dir)],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=prl.env,
        cwd=ROOT,
        check=False,
    )
    os.close(writer)
    assert done.stderr == b""


def test_a_component_runs_in_place_of_prl(prl: Prl) -> None:
    """It is the same process, with the component's own arguments, exit code and words."""
    (prl.output_dir.parent / "modules" / "sitecustomize.py").write_text(
        "import os, sys\nsys.orig_argv[1:2] == ['-m'] and print(os.getpid(), *sys.orig_argv[2:4], flush=True)\n"
    )
    command = [sys.executable, "-m", "daemons.cli", "trainer", "--no_such_key", "8"]
    with subprocess.Popen(
        command, env=prl.env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        out, err = child.communicate(timeout=PATIENCE_S)
    modules = ("daemons.cli trainer", "prime_rl.trainer.train --no_such_key")
    assert out.splitlines() == [f"{child.pid} {each}" for each in modules]
    assert child.returncode == 2 and err.startswith("trainer: ") and "no_such_key: unknown key" in err


def demo_configs(prl: Prl, max_steps: int = 6, grace_s: float = 2) -> str:
    configs = prl.output_dir.parent / "configs"
    configs.mkdir(exist_ok=True)
    (configs / "system.toml").write_text(
        f'max_concurrent_runs = 2\n[model]\nname = "{prl.model}"\n[supervisor]\ngrace_s = {grace_s}\n'
        + tomli_w.dumps({"deployment": {"modules": prl.modules}})
    )
    for name in ("reverse", "sort", "upper"):
        (configs / f"{name}.toml").write_text(RUN_TOML.format(max_steps=max_steps, model="models/base"))
    return str(configs)


@pytest.mark.slow
def test_demo_trains_three_runs_on_two_slots_and_leaves_nothing(prl: Prl) -> None:
    for max_steps in (1, 20):  # the second removes what the first left, and is so long that each state meets a look
        done = prl("demo", "--configs", demo_configs(prl, max_steps=max_steps))
    assert "run_upper: waiting" in done.stdout and "run_upper: active in slot" in done.stdout
    for name in ("reverse", "sort", "upper"):
        steps = [line for line in done.stdout.splitlines() if line.startswith(f"run_{name}: step ")]
        assert len(steps) == 20, done.stdout
    report = json.loads((prl.output_dir / "report.json").read_text())
    assert report["version"] == 1 and report["wall_s"] > 0
    for story in report["runs"].values():
        assert (story["steps"], story["state"]) == (20, "finished")
        assert (story["reward_first"], story["reward_last"]) == pytest.approx((0.15, 0.9)), "the mean of five"
    assert prl.members() == []


@pytest.mark.slow
def test_demo_ends_with_the_reason_when_a_run_fails(prl: Prl) -> None:
    configs = demo_configs(prl, max_steps=200)
    child = prl.begin("demo", "--configs", configs)
    wait_for((prl.output_dir / "run_sort").exists, "the demo to add its runs", timeout_s=PATIENCE_S)
    (prl.output_dir / "fail_run_sort").touch()
    _, err = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, err) == (1, "prl: run_sort is failed: told to fail\n")
    assert json.loads((prl.output_dir / "report.json").read_text())["runs"]["run_sort"]["state"] == "failed"
    assert prl.members() == []


@pytest.mark.parametrize("end", ["its pipe breaks", *in_full("ctrl-c")])
def test_a_demo_that_is_ended_ends_everything_it_started(prl: Prl, end: str) -> None:
    with prl.start("demo", "--configs", demo_configs(prl, max_steps=200)) as child:
        assert child.stdout is not None and child.stderr is not None
        wait_for((prl.output_dir / "run_sort").exists, "the demo to add its runs", timeout_s=PATIENCE_S)
        if end == "ctrl-c":
            child.send_signal(signal.SIGINT)
        else:
            child.stdout.close()
        assert child.wait(timeout=PATIENCE_S) == 130
        assert (child.stderr.read(), prl.members()) == ("", [])


DEAF = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(os.environ["DEAF"]).touch()
time.sleep(600)
"""


def test_a_demo_that_is_ended_while_its_daemons_start_does_not_wait_for_them(
    prl: Prl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that loads torch, the trainer looks at no signal; `grace_s` is longer than this test may take."""
    monkeypatch.setitem(prl.env, "DEAF", str(tmp_path / "deaf"))
    (tmp_path / "modules" / "fake_trainer.py").write_text(DEAF)
    configs = demo_configs(prl, grace_s=10 * PATIENCE_S)
    child = prl.begin("demo", "--configs", configs)
    wait_for((tmp_path / "deaf").exists, "the trainer to start", timeout_s=PATIENCE_S)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, err, prl.members()) == (130, "", [])
    assert "trainer and inference load torch, then the model; the first start on a machine takes longest\n" in out
    _, said = out.split("stopping: what is begun is finished and saved; Ctrl-C again ends it at once\n")
    assert said.startswith("stopping the supervisor") and said.endswith("stopped\n")


def test_a_second_ctrl_c_ends_a_demo_at_once(prl: Prl) -> None:
    child = prl.begin("demo", "--configs", demo_configs(prl, max_steps=200, grace_s=10 * PATIENCE_S))
    wait_for((prl.output_dir / ".prl-demo").exists, "room for the demo", timeout_s=PATIENCE_S)
    (prl.output_dir / "stubborn_trainer").touch()
    wait_for((prl.output_dir / "run_sort").exists, "the demo to add its runs", timeout_s=PATIENCE_S)
    child.send_signal(signal.SIGINT)
    while not child.stdout.readline().startswith("stopping the supervisor"):
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, err, prl.members()) == (130, "", [])


@pytest.mark.parametrize("plain", [False, *in_release(True)])
def test_a_demo_in_a_terminal_that_is_closed_leaves_nothing(prl: Prl, plain: bool) -> None:
    words = ["demo", "--configs", demo_configs(prl, max_steps=200), *["--plain"] * plain]
    pid, terminal = pty.fork()  # the kernel sends SIGHUP to the one that controls it
    if pid == 0:
        command = [sys.executable, "-m", "daemons.cli", *words, "--output-dir", str(prl.output_dir)]
        os.execve(sys.executable, command, prl.env)
    seen = b""
    while b"run_sort" not in seen:
        seen += os.read(terminal, 1 << 16)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert prl.members() == []


def test_demo_removes_no_folder_that_it_did_not_make(prl: Prl) -> None:
    prl("runs", "add", str(prl.run_file()))
    assert "was not created by a demo" in prl("demo", "--configs", demo_configs(prl), exit_code=1).stderr
    assert len(prl.json("runs", "list")["runs"]) == 1


def test_rollouts_are_shown_cleaned(inline: Inline) -> None:
    inline("runs", "add", str(inline.prl.run_file()))
    assert "has no rollouts yet" in inline("runs", "samples", "run_reverse").stdout
    text = "[bold]x[/bold]\x1b]2;owned\x07\nsecond line"
    run = OutputDir(inline.prl.output_dir).run("run_reverse")
    file = SampleFile(run.samples, keep=9)
    file.append([Sample(s, "reverse", "reverse/e1", "say x", text, 0.5, 0.25, [s - 1], 9, 4 - s) for s in (1, 2, 3)])
    shown = inline("runs", "samples", "run_reverse", "-n", "2").stdout
    assert "step 1 " not in shown and "\x1b" not in shown and "owned" not in shown
    assert shown.splitlines()[-6:] == [
        "step 3  reverse/e1  reward 0.500  advantage +0.250  policy version 2  1 token",
        "  prompt:",
        "    say x",
        "  completion:",
        "    [bold]x[/bold]",
        "    second line",
    ]
    listed = inline.json("runs", "samples", "run_reverse")
    assert listed["version"] == 1 and [sample["completion"] for sample in listed["samples"]] == [text] * 3
    assert "run 'run_x' not found" in inline("runs", "samples", "run_x", exit_code=1).stderr
    assert inline("runs", "samples", "../x", exit_code=2).stderr.count("\n") == 1
