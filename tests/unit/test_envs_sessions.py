"""Environments whose rollouts ask the policy through the gateway, each in a session of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from prime_rl.configs.base import SamplingConfig
from prime_rl.configs.envs import EnvConfig
from prime_rl.gateway.serve import serving_here
from prime_rl.orchestrator.envs import Example, ProcessEnvironment
from prime_rl.orchestrator.envs.checked import CheckedEnvironment, EnvironmentFault, RolloutMeter
from prime_rl.orchestrator.policy import ChatTokenizer, TurnSampler
from prime_rl.orchestrator.recorder import PolicySession
from prime_rl.orchestrator.sessions import Sessions
from prime_rl.orchestrator.try_env import try_all
from tests.orchestrator_support import FakeInference, connected, make_model, make_run, run_config, serving, until

SECRET = b"s" * 43
# Asks over HTTP as an agent does; the word of its example selects what it does then.
MODULE = """
import asyncio, httpx

from prime_rl.orchestrator.envs.base import Example, Outcome


class Env:
    id = "somebody's"

    def __init__(self, args, seed):
        pass

    def examples(self, split):
        return [Example(word, [], "") for word in ("posts", "raises", "waits")]

    async def rollout(self, example, policy):
        base, key = policy.endpoint
        with open(__file__ + ".endpoint", "w") as file:
            file.write(f"{base} {key}")
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=600) as client:
            async def ask(text):
                body = {"model": "any", "messages": [{"role": "user", "content": text}]}
                answer = await client.post(f"{base}/chat/completions", json=body)
                return answer.json()["choices"][0]["message"]["content"]

            texts = await asyncio.gather(*map(ask, ("a", "b")))
            if example.id == "raises":
                raise RuntimeError("no good")
            if example.id == "waits":
                await ask("c")
            session = base.removesuffix("/v1")
            await client.post(f"{session}/reward", json={"answer": 1, "reward": 0.25})
            await client.post(f"{session}/reward", json={"reward": 0.5, "rewards": {"form": 1.0}})
            await policy.posted.closed.wait()
            late = {"model": "any", "messages": [{"role": "user", "content": "c"}]}
            refused = await client.post(f"{base}/chat/completions", json=late)
        own = [policy.posted.by_answer.get(number, 0.0) for number in range(len(texts))]
        metrics = {"refused": float(refused.status_code), "texts": float(len("".join(texts)))}
        return Outcome(policy.posted.value, metrics, policy.posted.rewards, own)
"""


class Agents(EnvConfig):
    """A plugin whose rollouts are agents."""

    needs_gateway = property(lambda self: True)  # type: ignore[assignment]


class Meter(RolloutMeter):
    """Where rollouts are."""

    def __init__(self) -> None:
        self.num_in_environment = self.num_in_turn = 0

    def move(self, *, in_environment: int, in_turn: int = 0) -> None:
        self.num_in_environment += in_environment
        self.num_in_turn += in_turn


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path, meter: RolloutMeter | None = None
) -> AsyncIterator[tuple[CheckedEnvironment, PolicySession, FakeInference, Sessions]]:
    model = make_model(tmp_path / "model")
    inference, tokenizer = FakeInference(model), ChatTokenizer.load(str(model))
    sessions = Sessions("run_a", SECRET, tokenizer)
    config = Agents.model_validate({"id": "plugin:words"})
    env = ProcessEnvironment(config, seed=1, sessions=sessions)
    async with serving(inference) as url, serving_here(sessions, SECRET) as here:
        client, policy = connected(url, make_run(tmp_path), model)
        sampler = TurnSampler(client, policy, SamplingConfig(max_tokens=16), seq_len=256)
        try:
            await env.start()
            checked = CheckedEnvironment(env, config, max_failure_share=1.0, meter=meter)
            sessions.served_at(here)
            yield checked, PolicySession(sampler, tokenizer, seed=1), inference, sessions
        finally:
            await env.close()
            await client.close()


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with an entry point, as pip leaves it."""
    (tmp_path / "somebodys_envs.py").write_text(MODULE)
    info = tmp_path / "somebodys_envs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-envs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[prime_rl.environments]\nwords = somebodys_envs:Env\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")


def example_of(env: CheckedEnvironment, word: str) -> Example:
    return next(example for example in env.examples("train") if example.id == word)


async def test_what_an_agent_asks_is_recorded_and_what_it_posts_is_the_outcome(tmp_path: Path) -> None:
    async with running(tmp_path) as (env, policy, _, sessions):
        outcome = await env.rollout(example_of(env, "posts"), policy)
        assert (outcome.reward, outcome.rewards) == (0.5, {"form": 1.0})
        assert outcome.metrics == {"refused": 410.0, "texts": 4.0} and outcome.advantages == (0.0, 0.25)
        rollout = policy.finished(outcome)
        assert [branch.num_completion_tokens for branch in rollout.branches] == [3, 3]
        assert [branch.token_advantages_T[-3:] for branch in rollout.branches] == [[0.0] * 3, [0.25] * 3]
        assert sessions.num_open() == 0


async def test_a_rollout_that_fails_takes_its_session_with_it(tmp_path: Path) -> None:
    async with running(tmp_path) as (env, policy, _, sessions):
        with pytest.raises(EnvironmentFault, match="RuntimeError: no good"):
            await env.rollout(example_of(env, "raises"), policy)
        base, key = (tmp_path / "somebodys_envs.py.endpoint").read_text().split()
        async with httpx.AsyncClient(headers={"x-api-key": key}) as client:
            body = {"model": "any", "messages": [{"role": "user", "content": "late"}]}
            answer = await client.post(f"{base}/chat/completions", json=body)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (410, "false") and sessions.num_open() == 0


async def test_time_is_the_policys_while_any_call_is_in_work_and_cancelled_with_the_rollout(tmp_path: Path) -> None:
    meter, let_go, never = Meter(), asyncio.Event(), asyncio.Event()
    async with running(tmp_path, meter) as (env, policy, inference, sessions):
        # A request is counted before it comes to the gate.
        inference.gate = lambda body: (let_go if len(inference.completions) < 3 else never).wait()  # type: ignore
        rollout = asyncio.create_task(env.rollout(example_of(env, "waits"), policy))
        await until(lambda: len(inference.completions) == 2, "both calls")
        assert (meter.num_in_environment, meter.num_in_turn) == (0, 1) and env.problem() is None
        (asked,) = env._at_work
        assert asked.deadline.when() is None
        let_go.set()
        await until(lambda: len(inference.completions) == 3, "the third call")
        rollout.cancel()
        await asyncio.wait([rollout])
        assert rollout.cancelled() and sessions.num_open() == 0
        await until(lambda: inference.num_cancelled == 1, "the place to be free")
        assert (meter.num_in_environment, meter.num_in_turn) == (0, 0)


async def test_rollouts_wait_for_the_gateway(tmp_path: Path) -> None:
    async with running(tmp_path) as (env, policy, inference, sessions):
        url = sessions._base_url
        sessions.served_at(None, "the gateway")
        rollout = asyncio.create_task(env.rollout(example_of(env, "posts"), policy))
        await asyncio.sleep(0)
        assert not env._at_work and not inference.completions
        sessions.served_at(url)
        assert (await rollout).reward == 0.5


async def test_env_try_serves_its_own_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.configs.envs.GATEWAY_PROVIDERS", ("plugin",))
    config = run_config(make_model(tmp_path / "model"), env=[{"id": "plugin:words"}])
    async with contextlib.AsyncExitStack() as cleanup:
        (found,) = await try_all(config, 2, Path, None, None, cleanup)
    posts, raises = found["rollouts"]
    assert (posts["reward"], posts["error"], posts["rewards"]) == (0.5, None, {"form": 1.0})
    assert posts["prompt"][0]["content"] in ("a", "b") and raises["error"] == "RuntimeError: no good"
