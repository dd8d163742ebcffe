"""Programs as environments with the real gateway: tried without a server, and in a whole run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from daemons.commands.envs import env_view
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.types import read_batch
from prime_rl.orchestrator.orchestrator import run_to_the_end
from prime_rl.orchestrator.try_env import run as try_file
from tests.integration.test_gateway_process import Gateway
from tests.orchestrator_support import (
    FakeInference,
    look_often,
    make_model,
    make_run,
    run_config,
    serving,
    stand_in_trainer,
    until,
)

CONFIGS = Path(__file__).parents[2] / "configs"
# Two conversations, the first of two turns; a third answer is refused by max_turns where the example asks for it.
PROGRAM = """
import json, os, sys, urllib.error, urllib.request

def ask(*texts):
    roles = ("user", "assistant", "user")
    body = {"model": os.environ["PRL_MODEL"], "messages": [{"role": r, "content": t} for r, t in zip(roles, texts)]}
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

example = json.load(sys.stdin)
first = ask(example["prompt"])
second = ask(example["prompt"], first, "go on")
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
    lines = [json.loads(line) for line in run.samples.read_text(encoding="utf-8").splitlines()]
    assert {line["output"] for line in lines if "prompt" in line} == {"refused 400"}
