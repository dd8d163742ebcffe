"""Programs as environments with the real gateway: tried without a server, and in a whole run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import tomli_w

from daemons.commands.envs import env_view
from daemons.commands.runs import sample_view
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.samples import read_samples
from prime_rl.contract.types import read_batch
from prime_rl.orchestrator.orchestrator import run_to_the_end
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
    (env,) = (await try_file(file, 1, []))["envs"]
    shown = env_view(env)  # nothing is sampled, so there are no tokens
    assert "\n  branch 1 of 2:\n" in shown and "\n  branch 2 of 2:\n  user:\n    other\n" in shown


async def test_a_run_records_what_its_programs_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_often(monkeypatch)
    output = OutputDir(tmp_path / "out")
    output.path.mkdir()
    model, run, gateway = make_model(tmp_path / "model"), make_run(output.path), Gateway(output.path)
    rows = [json.dumps({"prompt": f"q{number}"}) for number in range(6)]
    run.data.mkdir(exist_ok=True)
    run.data_file("rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    args = {"command": [sys.executable, "-c", PROGRAM], "path": "rows.jsonl", "max_turns": 3}
    async with serving(FakeInference(model)) as url:
        config = run_config(model, env=[{"id": "agent", "args": args}], client={"base_url": url}, max_steps=2)
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
