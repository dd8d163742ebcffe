"""Programs as environments with the real gateway: tried without a server, and in a whole run."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from daemons.commands.envs import env_view
from daemons.commands.runs import sample_view
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.samples import read_samples
from prime_rl.contract.types import read_batch, rollouts_of
from prime_rl.contract.usage import read_usage
from prime_rl.orchestrator.orchestrator import run_to_the_end
from prime_rl.orchestrator.policy import ChatTokenizer
from prime_rl.orchestrator.try_env import run as try_file
from tests.integration.test_gateway_process import Gateway
from tests.orchestrator_support import (
    FakeInference,
    config_data,
    look_often,
    make_model,
    make_run,
    run_config,
    serving,
    stand_in_trainer,
    until,
)
from tui.widgets.rollouts_view import describe

CONFIGS = Path(__file__).parents[2] / "configs"
# Two conversations, the first of two turns, the second of which is rewarded; then max_turns refuses an answer.
PROGRAM = """
import json, os, sys, urllib.error, urllib.request

def post(url, body):
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)))

def ask(*texts):
    roles = ("user", "assistant", "user")
    body = {"model": os.environ["PRL_MODEL"], "messages": [{"role": r, "content": t} for r, t in zip(roles, texts)]}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]["content"]

example = json.load(sys.stdin)
first = ask(example["prompt"])
second = ask(example["prompt"], first, "go on")
post(os.environ["PRL_SESSION_URL"] + "/reward", {"reward": 0.25, "answer": 1, "done": False})
other = ask("other")
try:
    ask("one too many")
except urllib.error.HTTPError as error:
    print("refused", error.code)
json.dump({"reward": sum(map(ord, first + second + other)) % 7 / 7}, open("reward.json", "w"))
"""


async def test_the_example_is_tried_with_a_real_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a server its calls are answered with what was said last, which is no call of its tool."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (env,) = (await try_file(CONFIGS / "agent" / "orch.toml", 1, []))["envs"]
    ((rollout),) = env["rollouts"]
    assert (env["num_train"], env["num_eval"], rollout["error"]) == (27, 3, None)
    assert (rollout["reward"], rollout["metrics"]) == (0.0, {"tries": 0.0})
    assert "  output of the program:\n    no call of the tool" in env_view(env)
    assert rollout["prompt"] == [{"role": "user", "content": "Find my number from 1 to 30 with the tool guess."}]
    assert rollout["turns"][-1]["role"] == "assistant"


async def test_all_branches_are_tried_and_shown_with_their_tokens(tmp_path: Path) -> None:
    model, file = make_model(tmp_path / "model"), tmp_path / "own.toml"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "the question"}), encoding="utf-8")
    args = {"command": [sys.executable, "-c", PROGRAM], "path": "rows.jsonl", "max_turns": 3, "num_eval_examples": 0}
    file.write_text(tomli_w.dumps(config_data(model, env=[{"id": "agent", "args": args}])), encoding="utf-8")
    async with serving(FakeInference(model)) as url:
        (env,) = (await try_file(file, 1, [url, str(model), "256"]))["envs"]
    ((rollout),) = env["rollouts"]
    first, second = rollout["branches"]
    assert [turn["role"] for turn in first["turns"]] == ["read", "assistant", "read", "assistant"]
    assert [turn["reward"] for turn in first["turns"]] == [None, None, None, 0.25]
    for branch in (first, second):
        own = sum(turn["num_tokens"] for turn in branch["turns"])
        assert branch["num_tokens"] == branch["num_shared"] + own
    shown = env_view(env)
    for line in (
        f"  branch 1 of 2, {first['num_tokens']} tokens:",
        f"  branch 2 of 2, {second['num_tokens']} tokens, the first {second['num_shared']} as in branch 1:",
        f"  assistant ({first['turns'][3]['num_tokens']} tokens, reward 0.250):",
    ):
        assert f"\n{line}\n" in shown
    assert "the question" in shown and "go on" in shown and "other" in shown
    async with serving(FakeInference(model)) as url:
        file.write_text(file.read_text(encoding="utf-8").replace("json.dump({", "sys.exit(3)#"), encoding="utf-8")
        (failed,) = (await try_file(file, 1, [url, str(model), "256"]))["envs"][0]["rollouts"]
    assert (failed["reward"], len(failed["branches"])) == (None, 2) and failed["branches"][1]["num_tokens"]
    assert "the program ended with exit code 3" in failed["error"]
    (env,) = (await try_file(file, 1, []))["envs"]
    shown = env_view(env)  # nothing is sampled, so there are no tokens
    assert "\n  branch 1 of 2:\n" in shown and "\n  branch 2 of 2:\n  user:\n    other\n" in shown


async def trained(tmp_path: Path, inference: FakeInference, model: Path, args: dict[str, Any], **over: Any) -> RunDir:
    """A run of two steps whose rollouts are those of PROGRAM, at its end."""
    output = OutputDir(tmp_path / "out")
    output.path.mkdir()
    run, gateway = make_run(output.path), Gateway(output.path)
    rows = [json.dumps({"prompt": f"q{number}"}) for number in range(6)]
    run.data.mkdir(exist_ok=True)
    run.data_file("rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    args = {"command": [sys.executable, "-c", PROGRAM], "path": "rows.jsonl", "max_turns": 3, **args}
    async with serving(inference) as url:
        settings = {"client": {"base_url": url}, "max_steps": 2, **over}
        config = run_config(model, env=[{"id": "agent", "args": args}], **settings)
        training = asyncio.create_task(stand_in_trainer(run))
        running = asyncio.create_task(run_to_the_end(config, run, lambda: False))
        try:
            gateway.start()
            await until(lambda: run.rollout_file(1).exists() or running.done(), "a batch")
            assert await running == 0
        finally:
            running.cancel()
            training.cancel()
            await asyncio.wait([running, training])
            gateway.end(signal.SIGTERM)
    return run


async def test_a_run_records_what_its_programs_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_often(monkeypatch)
    model = make_model(tmp_path / "model")
    run = await trained(tmp_path, FakeInference(model), model, {})
    for step in (1, 2):
        samples = read_batch(run.rollout_file(step)).samples
        assert [len(sample.turn_versions) for sample in samples] == [2, 1] * (len(samples) // 2)
        assert [sample.turn_rewards for sample in samples] == [[None, 0.25], []] * (len(samples) // 2)
    (first, second, *_) = (each for each in read_samples(run.samples, 1))
    assert (first.turn_rewards, second.turn_rewards) == ([None, 0.25], [])
    assert "\n  policy (reward 0.250):\n" in sample_view(first) and "reward 0.250" not in sample_view(second)
    assert "policy 3 of 3, reward 0.250" in describe(first).plain
    lines = [json.loads(line) for line in run.samples.read_text(encoding="utf-8").splitlines()]
    assert {line["output"] for line in lines if "prompt" in line} == {"refused 400"}


async def test_the_base_model_ranks_the_groups_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rewards are those of the judge, evaluations are judged too, and its tokens are in the usage of the run."""
    look_often(monkeypatch)
    model = make_model(tmp_path / "model")
    tokenizer, inference, numbers = ChatTokenizer.load(str(model)), FakeInference(model), itertools.count()

    def answer(body: dict[str, Any]) -> list[int]:
        read = tokenizer.decode(body["prompt"])
        num = read.count(": rollout ")
        rows = [{"id": at, "explanation": "so", "score": at / 4} for at in range(1, num + 1)]
        return tokenizer.encode(json.dumps({"scores": rows}) if num else f"say {next(numbers)}")

    inference.answer = answer
    judge = {"judge": {"rubric": "Be polite.", "mode": "rank"}, "reward": "judge"}
    evaluation = {"interval": 1, "num_examples": 1}
    run = await trained(tmp_path, inference, model, judge, seq_len=8192, eval=evaluation)
    for step in (1, 2):
        samples = read_batch(run.rollout_file(step)).samples
        assert [samples[places[0]].reward for places in rollouts_of(samples)] == [0.25, 0.5] * 2
    metrics = [json.loads(line) for line in run.orchestrator_metrics.read_text(encoding="utf-8").splitlines()]
    assert {line["eval/agent/reward"] for line in metrics if "eval/agent/reward" in line} == {0.25}
    assert all(line["env/agent/judge_tokens"] > 0 for line in metrics if "reward/mean" in line)
    asked = [body for body in inference.completions if ": rollout 1]" in tokenizer.decode(body["prompt"])]
    (line,) = read_usage(OutputDir(run.path.parent).run_usage(run.run_id)).values()
    assert line.judge_completion_tokens > 0 and 0 < line.judge_prompt_tokens <= sum(len(b["prompt"]) for b in asked)
    assert {(body["model"], body["temperature"]) for body in asked} == {(str(model), 0.0)}
