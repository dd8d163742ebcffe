"""The config of programs as environments, what a run copies of it, and whose it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from daemons.cli import run as prl
from daemons.data_files import copy_data, has_data
from prime_rl.configs.admitted import changed_data, config_in_effect
from prime_rl.configs.base import ConfigError, build
from prime_rl.configs.envs import EnvConfig
from prime_rl.configs.jsonl import packed, place_of
from prime_rl.configs.orchestrator import AdvantageConfig
from prime_rl.configs.reports import SamplesConfig
from prime_rl.configs.validate import load_run_config
from prime_rl.contract.layout import RunDir
from prime_rl.orchestrator.batch import assemble_batch
from prime_rl.orchestrator.envs.agent_env import (
    AgentEnvironment,
)
from prime_rl.orchestrator.recorder import Branch, Rollout
from prime_rl.orchestrator.report import SampleKeeper
from prime_rl.orchestrator.rollout import Group
from tests.agents_support import Policy, Server, once, write_rows, writes

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"command": []}, "command"),
        ({"command": [""]}, "must be a program and its arguments"),
        ({"command": ["a\0"]}, "must be a program and its arguments"),
        ({"path": ""}, "name examples with either path or tasks"),
        ({"tasks": "t"}, "name examples with either path or tasks"),
        ({"env": ["A=B"]}, "must be the name of an environment variable"),
        ({"set": {"OPENAI_BASE_URL": "x"}}, "each rollout has its own value of it; remove it"),
        ({"set": {"A": "\0"}}, "a value has a character 0 in it"),
        ({"reward": "flie"}, "must be one of file, posted, command, judge, exact, contains"),
        ({"reward": "command"}, "reward_command: name what is run"),
        ({"reward_command": ["x"]}, "reward_command: not used with reward = 'file'"),
        ({"reward": "judge"}, "add a table [env.args.judge] with a rubric"),
        ({"path": "", "tasks": "t", "reward": "number"}, "tasks have no right answers for 'number'"),
        ({"runtime": "podman"}, "image: runtime = 'podman' starts a container: name its image, such as 'python:3.11'"),
        ({"image": "i"}, "image: not used with runtime = 'process': remove it, or set runtime = 'podman' or 'docker'"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"max_turns": 0}, "max_turns"),
        (
            {"judge": {"model": "m", "rubric": "r"}},
            "model, base_url: give both, or neither for the run's own base model",
        ),
        (
            {"judge": {"model": "m", "rubric": "r", "base_url": "x"}},
            "must be an http address of an OpenAI-compatible API",
        ),
        ({"judge": {"rubric": "r", "api_key_var": "K"}}, "api_key_var: not used with the base model as the judge"),
        (
            {"judge": {"rubric": "r", "mode": "best"}},
            "judge.mode: found 'best': must be 'score' or 'rank'",
        ),
        ({"judge": {"model": "m", "rubric": "r", "base_url": "http://x", "scale": [1, 1]}}, "the lower one first"),
        ({"judge": {"model": "m", "rubric": "r", "base_url": "http://x"}}, "judge: not used with reward = 'file'"),
    ],
)
def test_a_wrong_argument_is_told_with_what_to_do(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(EnvConfig, {"id": "agent", "args": {"command": ["x"], "path": "p", **args}}, "env")
    assert message in str(caught.value)


def test_an_agent_has_no_prompt_of_the_run() -> None:
    args = {"command": ["x"], "path": "p"}
    with pytest.raises(ConfigError, match="prompt: an agent asks the policy itself: remove it"):
        build(EnvConfig, {"id": "agent", "args": args, "prompt": {"system": "s"}}, "env")
    assert build(EnvConfig, {"id": "agent", "args": args, "timeout_s": 5.0}, "env").timeout_s == 5.0


def test_a_judge_gives_rewards_from_0_to_1_and_its_key_stays_with_the_orchestrator() -> None:
    judge = {"rubric": "r", "model": "m", "base_url": "http://x", "api_key_var": "JUDGE_KEY"}
    args = {"command": ["x"], "path": "p", "reward": "judge", "judge": judge, "env": ["NAMED"]}
    assert build(EnvConfig, {"id": "agent", "args": args, "env_vars": ["OTHER"]}, "env").variables == ["OTHER", "NAMED"]
    with pytest.raises(ConfigError, match="reward_range: a judge's rewards are from 0 to 1: remove it"):
        build(EnvConfig, {"id": "agent", "args": args, "reward_range": [0.5, 1.0]}, "env")


RUN = """
batch_size = 8
rollouts_per_example = 4
model.name = "models/base"
[[env]]
id = "agent"
args = { command = ["python", "agent.py"], cwd = "agent", path = "rows.jsonl", max_turns = 4 }
"""


def test_a_run_file_is_validated_and_its_folder_is_copied(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "agent.toml", tmp_path / "agent"
    file.write_text(RUN)
    assert prl(["runs", "validate", str(file)]) == 2
    assert f"env.0.args.cwd: {folder} not found: a path is relative to the config file" in capsys.readouterr().err
    folder.mkdir()
    (folder / "agent.py").write_text("print(1)")
    assert prl(["runs", "validate", str(file)]) == 0
    first = packed(folder)
    (folder / "__pycache__").mkdir()
    assert packed(folder) == first
    config, run = load_run_config(file), RunDir(tmp_path / "run_a")
    run.data.mkdir(parents=True)
    copy_data(config, place_of(file), run, 0o644)
    assert run.data_file("agent").read_bytes() == first.read_bytes()
    assert has_data(config, place_of(file), run)
    (folder / "agent.py").write_text("print(2)")
    assert not has_data(config, place_of(file), run)
    assert changed_data(run) == {}


def test_a_program_that_is_not_here_is_warned_about(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `validate` and `add`, as the run's orchestrator may be on another machine; `try` needs it here."""
    file, folder = tmp_path / "agent.toml", tmp_path / "agent"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "go").touch()
    for command, missing in {
        "no-such-program": "on this machine 'no-such-program' was not found on PATH: install it, or name it with",
        "bin/stop": "on this machine 'bin/stop' was not found in cwd: install it",
        "bin/go": "",
        "./bin/go": "",
        "sh": "",
        "/nowhere/sh": "on this machine '/nowhere/sh' was not found",
    }.items():
        file.write_text(RUN.replace('"python"', f'"{command}"'))
        assert prl(["runs", "validate", str(file), "--output-dir", str(tmp_path / "o")]) == 0
        told = capsys.readouterr().err
        assert ("env.0.args.command: " + missing in told) if missing else "args.command" not in told
        assert prl(["runs", "add", "--dry-run", "--yes", str(file), "--output-dir", str(tmp_path / "o")]) == 0
        assert missing in capsys.readouterr().err
        if missing:
            assert prl(["env", "try", str(file)]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert missing in line
    monkeypatch.setenv("PATH", "/nowhere")
    file.write_text(RUN.replace("max_turns = 4", 'runtime = "podman", image = "i"'))
    assert prl(["runs", "validate", str(file)]) == 0
    assert "env.0.args.runtime: on this machine 'podman' was not found on PATH" in capsys.readouterr().err


async def test_a_run_uses_its_copy(rows: Path, tmp_path: Path) -> None:
    """Also where others may write it: then it is not run."""
    (folder := tmp_path / "agent").mkdir()
    (folder / "agent.py").write_text(writes("0.5"))
    copy = RunDir(tmp_path / "run_a").data_file("agent")
    copy.parent.mkdir(parents=True)
    copy.write_bytes(packed(folder).read_bytes())
    args = {"command": [sys.executable, "agent.py"], "cwd": str(copy)}
    assert (await once(rows, "", **args)).reward == 0.5
    copy.chmod(0o666)
    with pytest.raises(ValueError, match="or others may write it: its code is not run"):
        await once(rows, "", **args)


async def test_the_example_guesses_with_a_real_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """`configs/agent`, with an endpoint whose policy calls the tool with one number, then gives up."""
    file = CONFIGS / "agent" / "orch.toml"
    (env_config,) = load_run_config(file).env
    placed = env_config.placed(place_of(file))
    guess = {"id": "call_1", "type": "function", "function": {"name": "guess", "arguments": '{"number": 31}'}}
    first = {"index": 0, "finish_reason": "tool_calls", "message": {"role": "assistant", "tool_calls": [guess]}}
    last = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "I give up."}}
    server = Server()
    form = {"id": "a", "object": "chat.completion", "created": 0, "model": "run_a"}
    server.answers = [{**form, "choices": [each]} for each in (first, last)]
    env = AgentEnvironment({**placed.args, "command": [sys.executable, "agent.py"]}, seed=1)
    try:
        assert (len(env.examples("train")), len(env.examples("eval"))) == (27, 3)
        outcome = await env.rollout(env.examples("train")[0], Policy(server.url))
    finally:
        await env.close()
        server.close()
    assert (outcome.reward, outcome.metrics, outcome.output.splitlines()) == (
        0.1,
        {"tries": 1.0},
        ['{"number": 31} -> lower', "no call of the tool"],
    )
    assert server.seen[1][2]["messages"][-1] == {"role": "tool", "tool_call_id": "call_1", "content": "lower"}


def test_the_output_is_kept_with_the_rollout(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run_a")
    run.metrics.mkdir(parents=True)
    branch = Branch([1, 2, 3], [False, True, True], [0.0, -1.0, -1.0], 1, [0])
    rollouts = [Rollout([branch], reward, {}, False, output="x" * 200 + "end") for reward in (0.0, 1.0)]
    groups = [Group(0, "agent", "agent/1", rollouts)]
    batch = assemble_batch("run_a", 0, groups, advantage=AdvantageConfig(type="mean"), temperature=1.0)
    SampleKeeper(run, SamplesConfig(per_step=2, max_chars=100), lambda ids: "").keep(groups, batch)
    lines = [json.loads(line) for line in run.samples.read_text(encoding="utf-8").splitlines()]
    assert [(len(line["output"]), line["output"][-3:]) for line in lines[1:]] == [(100, "end")] * 2


def test_a_run_of_another_account_starts_no_program(rows: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run_a")
    run.orch_toml.parent.mkdir(parents=True)
    run.orch_toml.write_text(RUN)
    (env,) = load_run_config(run.orch_toml).env
    placed = env.placed(run.data_file)
    assert placed.args["cwd"] == str(run.data_file("agent"))
    run.admitted.write_text(RUN)
    env.placed(run.data_file)
    run.admitted.chmod(0o666)
    with pytest.raises(ConfigError, match=r"admitted.toml.*others may write it"):
        env.placed(run.data_file)
    run.admitted.unlink()
    run.applied.write_text(RUN)
    run.applied.chmod(0o666)
    with pytest.raises(ConfigError, match=r"apply.toml.*others may write it"):
        env.placed(run.data_file)
    run.applied.unlink()
    run.orch_toml.chmod(0o666)
    with pytest.raises(ConfigError, match="others may write it"):
        config_in_effect(run)  # so it is not admitted, in a file of the workspace's own
    with pytest.raises(ConfigError, match="or others may write it: its command is not run"):
        env.placed(run.data_file)
