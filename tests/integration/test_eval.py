"""`prl eval` and `prl serve` through a real inference server, which two runs have used."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from daemons.chat import Chat
from daemons.cli import run as prl
from prime_rl.contract.files import wait_for
from prime_rl.orchestrator.metrics import pass_at
from scripts.outputs import OUTPUTS
from tests.budgets import in_full
from tests.chat_support import GREEDY, answer_of, ask, chat_server, loaded
from tests.daemons_support import ROOT
from tests.inference_support import KEY, RunningServer, adapter_dir
from tests.patience import PATIENCE_S
from tests.test_reference import check

ENV_TOML = """
[sampling]
max_tokens = 8
[[env]]
id = "reverse-text"
args = { wording = "short" }
[eval]
pass_reward = 0.05
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    yield from chat_server(tmp_path_factory.mktemp("eval"))


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRL_API_KEY", KEY)


@pytest.fixture
def place(server: RunningServer) -> list[str]:
    return ["--output-dir", str(server.output_dir)]


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("env") / "env.toml"
    path.write_text(ENV_TOML)
    return str(path)


def rows_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_several_targets_are_evaluated_on_the_same_examples(
    server: RunningServer, place: list[str], env: str, tmp_path: Path, capsys: Any
) -> None:
    folder = tmp_path / "own"
    shutil.copytree(adapter_dir(server, "run_a@v2"), folder)
    wanted = ["base", "run_a@v0", "run_a@v1", "run_a", str(folder)]
    assert prl(["eval", *wanted, "--env", env, "-n", "3", "-k", "3", *place, "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    check({key: value for key, value in done.items() if key != "version"}, OUTPUTS["prl eval TARGET"], "prl eval")
    labels = ["base", "run_a@v0", "run_a@v1", "run_a@v2", str(folder)]
    assert [result["target"] for result in done["results"]] == labels and done["interrupted"] is False
    rows = rows_of(done["samples"])
    by_target = {label: [row for row in rows if row["target"] == label] for label in labels}
    answers = {label: {(r["example_id"], r["number"]): r["completion"] for r in of} for label, of in by_target.items()}
    assert len({frozenset(of) for of in answers.values()}) == 1 and len(answers["base"]) == 9
    # The same weights give the same answers, and each adapter its own.
    assert answers["base"] == answers["run_a@v0"] and answers["run_a@v2"] == answers[str(folder)]
    assert len({tuple(sorted(of.items())) for of in answers.values()}) == 3
    for result in done["results"]:
        rewards: dict[str, list[float]] = {}
        for row in by_target[result["target"]]:
            rewards.setdefault(row["example_id"], []).append(row["reward"])
        figures = result["figures"]
        assert figures["reward"] == pytest.approx(sum(map(sum, rewards.values())) / 9)
        passed = [sum(reward >= 0.05 for reward in of) for of in rewards.values()]
        for k in (1, 3):
            assert figures[f"pass@{k}"] == pytest.approx(sum(pass_at(k, 3, each) for each in passed) / 3)
        assert (result["num_examples"], result["num_rollouts"], result["num_failed"]) == (3, 9, 0)
        assert figures["reward_se"] >= 0 and result["problem"] is None
    assert loaded(server) == [] and sorted(p.name for p in Path(done["samples"]).parent.iterdir()) == [
        "job.json",
        "samples.jsonl",
    ]


def test_rows_of_a_file_are_asked_and_scored(place: list[str], tmp_path: Path, capsys: Any) -> None:
    """All of them: none is kept back to train on."""
    rows = [{"prompt": "hello", "answer": "(?s).*"}, {"prompt": "bye", "answer": "^never$ever"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ["eval", "base", "run_a@v1", "--data", str(file), "--scorer", "regex", "--set", "sampling.max_tokens=4"]
    assert prl([*words, "-k", "2", *place, "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    for result in done["results"]:
        counts = (result["num_examples"], result["num_rollouts"], result["num_failed"])
        assert (counts, result["figures"]["reward"], result["problem"]) == ((2, 4, 0), 0.5, None)
    assert {(row["example_id"], row["reward"]) for row in rows_of(done["samples"])} == {("1", 1.0), ("2", 0.0)}


def test_a_table_names_what_failed_and_the_others_go_on(
    server: RunningServer, place: list[str], env: str, tmp_path: Path, capsys: Any
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(adapter_dir(server, "run_a@v2"), broken)
    text = (broken / "adapter_config.json").read_text()
    (broken / "adapter_config.json").write_text(text.replace('"r": 4', '"r": 64').replace('"r":4', '"r":64'))
    assert prl(["eval", str(broken), "run_b@v1", "--env", env, "-n", "2", *place]) == 1
    shown = capsys.readouterr()
    assert "run_b@v1" in shown.out and "pass@1" in shown.out and " ± " in shown.out and "samples.jsonl" in shown.out
    assert f"prl: {broken} : " in shown.err and "is refused" in shown.err and loaded(server) == []


def test_wrong_use_is_one_line(server: RunningServer, place: list[str], env: str, tmp_path: Path, capsys: Any) -> None:
    for args, code, words in (
        (["base"], 2, "no environment: name a TOML file"),
        (["run_x", "--env", env], 1, "run 'run_x' not found"),
        (["run_x@v0", "--env", env], 1, "run 'run_x' not found"),
        (["nothing", "--env", env], 2, "prl: 'nothing' not found: must be a run"),
        (["run_a@v9", "--env", env], 1, "run_a does not have a version of step 9"),
        (["base", "--env", str(tmp_path / "none.toml")], 2, "none.toml"),
        (["base", "--env", env, "--data", env], 2, "only one of them"),
        (["base", "--data", str(tmp_path / "none.jsonl")], 1, "none.jsonl not found"),
        (["base", "--env", env, "--set", "sampling.temperature=9"], 2, "temperature"),
    ):
        assert prl(["eval", *args, *place]) == code, args
        error = capsys.readouterr().err
        assert words in error and len(error.strip().splitlines()) <= 2, error
    assert prl(["eval", "base", "--env", env, "--output-dir", str(tmp_path)]) == 1
    assert "start the workspace with prl up" in capsys.readouterr().err


@pytest.mark.release  # it waits for TURN_S; test_eval.py has the rest, test_chat.py the slot
def test_a_chat_takes_the_slot_for_an_answer_and_no_rollout_is_lost(
    server: RunningServer, place: list[str], env: str
) -> None:
    command = [sys.executable, "-m", "daemons.cli", "eval", "run_a", "--env", env, "-n", "60", "-k", "10", "--json"]
    found = server.output_dir / "evaluations"
    before = set(found.glob("*/samples.jsonl"))
    with subprocess.Popen([*command, *place], stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        wait_for(lambda: set(found.glob("*/samples.jsonl")) - before, "its first rollout", timeout_s=PATIENCE_S)
        with Chat(server.output_dir, "run_b@v1", GREEDY) as chat:
            assert ask(chat) == answer_of(server, "chat/run_b@v1", "hello")
            assert len(loaded(server)) == 1
        out, _ = process.communicate(timeout=PATIENCE_S)
    (result,) = json.loads(out)["results"]
    assert (process.returncode, result["num_failed"]) == (0, 0) and result["num_rollouts"] == 10 * result[
        "num_examples"
    ]
    assert loaded(server) == []


@pytest.mark.parametrize("how", ["Ctrl-C", *in_full("a closed terminal")])
def test_an_interrupt_shows_what_is_done(server: RunningServer, place: list[str], env: str, how: str) -> None:
    """The kernel tells all processes of a terminal that it is closed, and then its shell does so again."""
    command = [sys.executable, "-m", "daemons.cli", "eval", "run_a", "run_b", "--env", env, "-n", "100", "-k", "50"]
    args: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, "COLUMNS": "200"}, "text": True}
    args["start_new_session"] = True
    process = subprocess.Popen([*command, *place], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **args)
    try:
        found = server.output_dir / "evaluations"
        before = set(found.glob("*/samples.jsonl"))
        wait_for(lambda: set(found.glob("*/samples.jsonl")) - before, "its first rollout", timeout_s=PATIENCE_S)
        if how == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            os.killpg(process.pid, signal.SIGHUP)
            os.killpg(process.pid, signal.SIGHUP)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "run_a@v2" in out and "run_b" not in out and "interrupted; ± is" in out and "Traceback" not in err
    assert loaded(server) == []


@pytest.mark.parametrize("how", ["to all processes of the terminal", *in_full("to the command")])
def test_an_interrupt_ends_a_wait_for_inference(
    place: list[str], server: RunningServer, tmp_path: Path, how: str
) -> None:
    """A server elsewhere that never answers; the second way also reaches a process that has just begun."""
    file = tmp_path / "env.toml"
    file.write_text(ENV_TOML + f'[client]\nbase_url = "http://127.0.0.1:1/v1"\n[model]\nname = "{server.model}"\n')
    command = [sys.executable, "-m", "daemons.cli", "eval", "base", "--env", str(file), *place]
    found = server.output_dir / "evaluations"
    before = set(found.glob("*/job.json"))
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(command, cwd=ROOT, text=True, **options) as process:
        try:
            wait_for(lambda: set(found.glob("*/job.json")) - before, "it to begin", timeout_s=PATIENCE_S)
            if how == "to the command":
                wait_for(lambda: psutil.Process(process.pid).children(), "its process", timeout_s=PATIENCE_S)
                process.send_signal(signal.SIGINT)
            else:
                os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert (process.returncode, out) == (130, "") and "interrupted before the first rollout" in err, err
    assert "Traceback" not in err


def test_a_finished_run_is_served_under_its_name_until_stop(
    server: RunningServer, place: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def ask(model: str) -> tuple[int, str]:
        response = server.post("/v1/completions", model=model, prompt="hello", max_tokens=3, temperature=0)
        body = response.json()
        return response.status_code, body["choices"][0]["text"] if "choices" in body else body["error"]["message"]

    assert ask("run_a@v2") == (404, "run_a is not running; prl serve run_a@v2 loads it")
    assert prl(["serve", "run_a", *place]) == 0 and prl(["serve", "run_b@v1", *place]) == 0
    assert f"run_a@v2: served at {server.base_url}" in capsys.readouterr().out
    assert loaded(server) == ["run_a@v2", "run_b@v1"]
    status, text = ask("run_a@v2")
    assert status == 200 and text != ask("run_b@v1")[1]
    server.unload("run_a@v2")  # as after a restart
    assert ask("run_a@v2") == (200, text)
    assert prl(["serve", *place, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["served"] == ["run_a@v2", "run_b@v1"]
    assert prl(["serve", "run_a@v1", *place]) == 0, "one version of a run"
    assert loaded(server) == ["run_b@v1", "run_a@v1"]
    for run_id in ("run_a", "run_b"):
        assert prl(["serve", "--stop", run_id, *place]) == 0
    assert loaded(server) == [] and ask("run_a@v1")[0] == 404
    capsys.readouterr()
    assert prl(["serve", "--stop", "run_a", *place]) == 0 and "nothing to do" in capsys.readouterr().out
    for args, code, words in (
        (["run_c"], 1, "run 'run_c' not found"),
        (["base"], 2, "invalid version 'base'"),
        (["run_a@v9"], 1, "run_a does not have a version of step 9"),
        (["--stop"], 2, "name the run"),
    ):
        assert prl(["serve", *args, *place]) == code and words in capsys.readouterr().err
    monkeypatch.delenv("PRL_API_KEY")
    assert prl(["serve", "run_a", *place]) == 1 and "asks for its API key" in capsys.readouterr().err
    assert prl(["serve", *place]) == 0 and "no version is kept served" in capsys.readouterr().out
