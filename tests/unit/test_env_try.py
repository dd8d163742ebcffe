"""`prl env try`: examples, prompts and rollouts of a config's environments, without a run."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
from typer.testing import CliRunner

from daemons.cli import app, run
from daemons.specs import save_devices, save_folder
from prime_rl.contract.layout import OutputDir
from prime_rl.orchestrator.policy import ChatTokenizer
from prime_rl.orchestrator.recorder import as_turns
from prime_rl.orchestrator.try_env import run as try_file
from tests.daemons_support import ROOT
from tests.orchestrator_support import FakeInference, config_data, make_model, serving

ROWS = [{"prompt": f"capital {number}?", "answer": f"City\x1b[31m {number}"} for number in range(12)]
REWARD = """
def score(answer, row):
    if answer.endswith("3"):
        raise RuntimeError("red")
    return 0.25
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A config with two environments, and its data and reward beside it."""
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    talks = {"id": "guess-number", "args": {"num_examples": 5, "num_eval_examples": 1, "max_turns": 2}}
    envs = [{"id": "jsonl", "args": {"path": "rows.jsonl", "reward": "reward.py:score"}}, talks]
    data = config_data(make_model(tmp_path / "model"), env=envs)
    (tmp_path / "own.toml").write_text(tomli_w.dumps(data), encoding="utf-8")
    return tmp_path / "own.toml"


def prl(*args: object) -> Any:
    return CliRunner().invoke(app, ["env", "try", *map(str, args)])


def test_the_echo_needs_no_model_and_tells_prompt_tokens_reward_and_time(file: Path) -> None:
    done = prl(file, "-n", 2, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["version"], found["model"], found["file"]) == (1, "echo", str(file))
    rows, talks = found["envs"]
    assert (rows["env"], rows["id"], rows["num_train"], rows["num_eval"]) == ("jsonl", "jsonl", 10, 2)
    good, bad = rows["rollouts"]
    assert [each["example_id"] for each in (good, bad)] == ["3", "4"], "the first two are for evaluation"
    messages = [{"role": "user", "content": "capital 2?"}]
    tokenizer = ChatTokenizer.load(str(file.parent / "model"))
    assert good["prompt"] == messages and good["prompt_tokens"] == tokenizer.prompt(as_turns(messages))
    assert good["prompt_text"] == "<|im_start|>user\ncapital 2?<|im_end|>\n<|im_start|>assistant\n"
    assert (good["reward"], good["error"], good["answer_tokens"]) == (0.25, None, None) and good["time_s"] > 0
    assert (bad["reward"], bad["error"]) == (None, "RuntimeError: red (reward.py line 4)")
    assert "\x1b" not in done.stdout and good["turns"] == [{"role": "assistant", "content": "City 2"}]
    assert [each["metrics"]["found"] for each in talks["rollouts"]] == [1.0, 1.0]


def test_people_read_the_same(file: Path) -> None:
    done = prl(file, "-n", 2)
    assert done.exit_code == 0, done.output
    assert "env jsonl (jsonl): 10 examples to train on, 2 to evaluate on, loaded in" in done.output
    assert "example 3  reward 0.250  " in done.output and "example 4  no reward  " in done.output
    for line in (
        "  error: RuntimeError: red (reward.py line 4)",
        "    capital 2?<|im_end|>",
        "  found 1, turns 1, valid_share 1",
    ):
        assert f"\n{line}\n" in done.output
    (file.parent / "model" / "tokenizer.json").unlink()
    done = prl(file, "-n", 2)
    assert done.exit_code == 0 and "\n  user:\n    capital 2?\n" in done.output
    assert done.output.count("the model's tokenizer is not on this machine") == 1


def test_what_is_wrong_is_named_in_one_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = file.parent / "nowhere"
    for target in ("base@v1", "run_a"):
        assert run(["env", "try", str(file), "--model", target, "--output-dir", str(nowhere)]) == 1
        assert "is not running: start the workspace with prl up" in capsys.readouterr().err
    outside = file.parent / "outside.toml"
    data = config_data(file.parent / "model", env=[{"id": "sessions"}])
    outside.write_text(tomli_w.dumps(data), encoding="utf-8")
    assert run(["env", "try", str(outside)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "env.0.id: found 'sessions': its rollouts are made by an application: prl runs add FILE, then prl" in line
    (file.parent / "rows.jsonl").unlink()
    assert run(["env", "try", str(file)]) == 2
    assert f"env.0.args.path: {file.parent}/rows.jsonl not found" in capsys.readouterr().err
    assert not nowhere.exists()


def test_a_relative_base_model_is_found_from_any_folder(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It means the folder in which the workspace was started first, as with `prl up`; the file's data is beside it."""
    output = OutputDir(file.parent / "outputs")
    output.component_config("x").parent.mkdir(parents=True)
    save_devices(output, None)
    save_folder(output, file.parent)
    (file.parent / "elsewhere").mkdir()
    monkeypatch.chdir(file.parent / "elsewhere")
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(str(file.parent / "model"), "model"), encoding="utf-8")
    done = prl("../own.toml", "-n", 1, "--json", "--output-dir", output.path)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["envs"][0]["rollouts"][0]["prompt_tokens"]
    file.write_text(text.replace(str(file.parent / "model"), "models/none"), encoding="utf-8")
    assert run(["env", "try", "../own.toml", "--model", "base", "--output-dir", str(output.path)]) == 1
    assert f"folder models/none not found (from {file.parent}): give the path" in capsys.readouterr().err


async def test_a_model_answers_as_in_a_run(file: Path) -> None:
    fake = FakeInference(file.parent / "model")
    fake.adapters["chat/run_a@v3"] = ""
    async with serving(fake) as url:
        found = await try_file(file, 2, [url, "chat/run_a@v3", "256"])
        few = await try_file(file, 1, [url, "chat/run_a@v3", "20"])
    rows, talks = found["envs"]
    assert [each["reward"] for each in rows["rollouts"]] == [0.25, 0.25]
    assert [each["answer_tokens"] for each in rows["rollouts"]] == [[3], [3]]
    (prompt, _) = ([each[key] for each in rows["rollouts"]] for key in ("prompt_tokens", "turns"))
    asked = fake.completions
    assert {body["model"] for body in asked} == {"chat/run_a@v3"} and [body["prompt"] for body in asked[:2]] == prompt
    assert asked[0]["seed"] != asked[1]["seed"] and asked[0]["max_tokens"] == 16
    turns = [message["role"] for message in talks["rollouts"][0]["turns"]]
    assert turns == ["assistant", "user", "assistant"] and len(talks["rollouts"][0]["answer_tokens"]) == 2
    assert "prompt tokens leave no room in seq_len = 20" in few["envs"][0]["rollouts"][0]["error"]


SERVER = """
import asyncio, sys
from pathlib import Path
from prime_rl.configs.base import parse_argv
from prime_rl.configs.inference import InferenceConfig
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import InferenceStatus, StatusWriter
from tests.orchestrator_support import FakeInference, serving

class Serves(FakeInference):
    async def _answer(self, path, body, headers):
        return (200, {}) if path == "/health" else await super()._answer(path, body, headers)

async def main():
    config = parse_argv(InferenceConfig, sys.argv[1:])
    async with serving(Serves(Path(config.model.name))) as url:
        status = InferenceStatus(state="serving", base_url=url, engine=config.engine, model=config.model.name)
        StatusWriter(OutputDir(config.output_dir).inference_status, status)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_without_inference_the_base_model_has_a_server_of_its_own_for_as_long(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the place of the real one, which tests/integration/test_chat.py starts, one that answers the same."""
    (file.parent / "stub_server.py").write_text(SERVER)
    folders = file.parent / "folders"
    folders.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{file.parent}{os.pathsep}{ROOT}")
    monkeypatch.setattr("daemons.commands.envs.module_of", lambda kind: "stub_server")
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    nowhere = file.parent / "nowhere"
    assert run(["env", "try", str(file), "-n", "1", "--model", "base", "--output-dir", str(nowhere), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["rollouts"][0]["answer_tokens"] for each in found["envs"]] == [[3], [3, 3]]
    assert list(folders.iterdir()) == [] and not nowhere.exists()
    below = psutil.process_iter(["cmdline", "status"])
    living = [each.info["cmdline"] or [] for each in below if each.info["status"] != psutil.STATUS_ZOMBIE]
    assert not [words for words in living if "stub_server" in words]
