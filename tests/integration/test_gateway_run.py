"""A whole run of agents over a gateway that is killed: it waits, goes on, and records nothing twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import RunStatus, read_status
from prime_rl.contract.types import read_batch
from prime_rl.orchestrator.orchestrator import run_to_the_end
from tests.gateway_daemon import Gateway
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
from tests.patience import PATIENCE_S

# An agent that asks twice at once and then goes on from one answer; it insists as SDKs do, but for longer.
MODULE = """
import asyncio, httpx

from prime_rl.orchestrator.envs.base import Example, Outcome


class Env:
    id = "agents"

    def __init__(self, args, seed):
        pass

    def examples(self, split):
        return [Example(f"{split}-{number}", [], "") for number in range(4)]

    async def rollout(self, example, policy):
        base, key = policy.endpoint
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=600) as client:
            async def ask(*texts):
                roles = ("user", "assistant", "user")
                messages = [{"role": role, "content": text} for role, text in zip(roles, texts)]
                while True:
                    try:
                        body = {"model": "any", "messages": messages}
                        answer = await client.post(f"{base}/chat/completions", json=body)
                        if answer.headers.get("x-should-retry") != "true":
                            return answer.json()["choices"][0]["message"]["content"]
                    except httpx.TransportError:
                        pass
                    await asyncio.sleep(0.05)

            first, second = await asyncio.gather(ask(example.id), ask("other"))
            third = await ask(example.id, first, "go on")
        return Outcome((sum(map(ord, first + second + third)) % 7) / 7)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with an entry point, as pip leaves it, whose environment needs the gateway."""
    (tmp_path / "somebodys_envs.py").write_text(MODULE)
    info = tmp_path / "somebodys_envs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-envs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[prime_rl.environments]\nagents = somebodys_envs:Env\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")
    monkeypatch.setattr("prime_rl.configs.envs.GATEWAY_PROVIDERS", ("plugin",))


async def test_a_run_of_agents_outlives_its_gateway(
    tmp_path: Path, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_often(monkeypatch)
    output = OutputDir(tmp_path / "out")
    output.path.mkdir()
    model, run, gateway = make_model(tmp_path / "model"), make_run(output.path), Gateway(output.path)
    inference, let_go = FakeInference(model), asyncio.Event()

    def waits_on(words: str) -> bool:
        status = read_status(run.status, RunStatus)
        return status is not None and words in (status.waiting_on or "")

    async def gate(body: object) -> None:
        if len(inference.completions) > 8:
            await let_go.wait()

    inference.gate = gate
    async with serving(inference) as url:
        config = run_config(
            model, env=[{"id": "plugin:agents", "timeout_s": PATIENCE_S}], client={"base_url": url}, max_steps=3
        )
        training = asyncio.create_task(stand_in_trainer(run))
        running = asyncio.create_task(run_to_the_end(config, run, lambda: False))
        try:
            await until(lambda: waits_on("the gateway (not started yet)") or running.done(), "the run to wait")
            gateway.start()
            await until(lambda: len(inference.completions) > 8 or running.done(), "calls in flight")
            gateway.end(signal.SIGKILL)
            await until(lambda: waits_on("the gateway at") or running.done(), "the run to wait again")
            gateway.start()
            await until(gateway.is_up, "the gateway")
            let_go.set()
            assert await running == 0
        finally:
            running.cancel()
            training.cancel()
            await asyncio.wait([running, training])
            if gateway.process is not None:
                gateway.end(signal.SIGTERM)
    for step in (1, 2, 3):
        samples = read_batch(run.rollout_file(step)).samples
        branches = Counter(sample.rollout_id for sample in samples)
        assert list(branches.values()) == [2] * 4
        answers: Counter[int] = Counter()
        for sample in samples:
            answers[sample.rollout_id] += len(sample.turn_versions)
        assert set(answers.values()) == {3}
