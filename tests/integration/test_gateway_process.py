"""The gateway as a process: killed, started again, refused a place; sessions go on, and nothing is recorded twice."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from prime_rl.configs.base import SamplingConfig
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.gateway.keys import workspace_secret
from prime_rl.orchestrator.envs.base import Outcome
from prime_rl.orchestrator.policy import ChatTokenizer, TurnSampler
from prime_rl.orchestrator.recorder import PolicySession
from prime_rl.orchestrator.sessions import Link, OpenSession, Sessions
from prime_rl.utils.runtime import bound_socket
from tests.gateway_daemon import Gateway
from tests.orchestrator_support import FakeInference, connected, make_model, make_run, serving, until
from tests.patience import PATIENCE_S


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    started = Gateway(tmp_path)
    started.start()
    yield started
    if started.process is not None and started.process.poll() is None:
        started.end(signal.SIGKILL)


@dataclass
class Orchestrator:
    """A run's sessions with the link, in this process. `let_go`: inference answers."""

    inference: FakeInference
    policy: PolicySession
    sessions: Sessions
    link: asyncio.Task[None]
    let_go: asyncio.Event


@contextlib.asynccontextmanager
async def orchestrating(workspace: Path) -> AsyncIterator[Orchestrator]:
    model, let_go = make_model(workspace / "model"), asyncio.Event()
    inference, tokenizer = FakeInference(model), ChatTokenizer.load(str(model))
    inference.gate = lambda body: let_go.wait()  # type: ignore[assignment,return-value]
    sessions = Sessions("run_a", workspace_secret(OutputDir(workspace)), tokenizer)
    async with serving(inference) as url:
        client, policy = connected(url, RunDir(workspace / "run_a"), model)
        turns = TurnSampler(client, policy, SamplingConfig(max_tokens=16), seq_len=256)
        link = asyncio.create_task(Link(OutputDir(workspace), sessions).keep())
        try:
            yield Orchestrator(inference, PolicySession(turns, tokenizer, seed=1), sessions, link, let_go)
        finally:
            link.cancel()
            await asyncio.wait([link])
            await client.close()


async def post(session: OpenSession, content: str, **headers: str) -> httpx.Response:
    """One request of an agent, not repeated."""
    body = {"model": "any", "messages": [{"role": "user", "content": content}]}
    headers["authorization"] = f"Bearer {session.key}"
    async with httpx.AsyncClient(headers=headers, timeout=PATIENCE_S) as client:
        return await client.post(f"{session.base_url}/chat/completions", json=body)


async def insist(session: OpenSession, content: str) -> httpx.Response:
    """The same as SDKs do it, but for longer."""
    while True:
        with contextlib.suppress(httpx.TransportError):
            answer = await post(session, content)
            if answer.headers.get("x-should-retry") != "true":
                return answer
        await asyncio.sleep(0.05)


async def test_a_session_outlives_its_gateway_and_no_answer_is_sampled_twice(tmp_path: Path, gateway: Gateway) -> None:
    make_run(tmp_path)
    async with orchestrating(tmp_path) as run:
        await run.sessions.served()
        async with run.sessions.open(run.policy) as session:
            agent = asyncio.create_task(insist(session, "a"))
            await until(lambda: len(run.inference.completions) == 1, "the request")
            old_port = gateway.status.base_url
            gateway.end(signal.SIGKILL)
            with pytest.raises(httpx.ConnectError):
                await post(session, "a")
            gateway.start()
            await until(gateway.is_up, "the gateway")
            await run.sessions.served()
            assert gateway.status.base_url == old_port
            run.let_go.set()
            answer = await agent
            assert answer.status_code == 200 and len(run.inference.completions) == 1
            assert (await post(session, "b")).status_code == 200
            await until(lambda: gateway.status.num_sessions == 1, "the count of open sessions")
            assert gateway.status.num_runs == 1 and gateway.status.calls_per_min > 0
        rollout = run.policy.finished(Outcome(1.0))
        assert [branch.num_completion_tokens for branch in rollout.branches] == [3, 3]
        assert (await post(session, "c")).status_code == 410
    code, log = gateway.end(signal.SIGTERM)
    assert (code, gateway.status.state, gateway.status.waiting_on) == (0, "stopped", None)
    assert "run_a is connected" in log and session.key not in log


async def test_without_its_orchestrator_a_session_waits_and_then_is_over(tmp_path: Path, gateway: Gateway) -> None:
    make_run(tmp_path)
    async with orchestrating(tmp_path) as first:
        first.let_go.set()
        await first.sessions.served()
        async with first.sessions.open(first.policy) as session:
            assert (await post(session, "a")).status_code == 200
            first.link.cancel()  # as by kill -9: the session is lost with its process
            await until(lambda: gateway.status.num_runs == 0, "the loss")
            away = await post(session, "b")
            assert (away.status_code, away.headers["retry-after"], away.headers["x-should-retry"]) == (503, "1", "true")
            assert "run_a's orchestrator is not connected" in away.json()["error"]["message"]
    async with orchestrating(tmp_path) as second:
        await second.sessions.served()
        over = await insist(session, "b")
        assert (over.status_code, over.headers["x-should-retry"]) == (410, "false")
        assert not second.inference.completions


@pytest.mark.parametrize("fault", ["port", "secret", "config"])
def test_what_it_cannot_start_with_is_one_line(fault: str, tmp_path: Path) -> None:
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        workspace_secret(OutputDir(tmp_path))
        config: dict[str, Any] = {}
        if fault == "port":
            config["port"] = taken.getsockname()[1]
        elif fault == "secret":
            OutputDir(tmp_path).gateway_secret.chmod(0o644)
        else:
            config["public_url"] = "gateway.example.org"
        gateway = Gateway(tmp_path, **config)
        gateway.start()
        assert gateway.process is not None
        _, log = gateway.process.communicate(timeout=PATIENCE_S)
    said = {"port": "is in use", "secret": "readable by others", "config": "public_url"}[fault]
    assert gateway.process.returncode == (1 if fault == "port" else 2) and said in log.decode()
    assert len(log.splitlines()) <= 2 and not OutputDir(tmp_path).gateway_status.exists()


def test_its_url_is_the_public_one_and_its_ports_are_its_own(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, public_url="https://agents.example.org/prl/")
    gateway.start()
    try:
        asyncio.run(until(gateway.is_up, "the gateway"))
        assert gateway.status.base_url == "https://agents.example.org/prl"
        assert gateway.status.waiting_on == "the orchestrator of a run to connect"
        ports = gateway.status.address, gateway.status.link
        gateway.end(signal.SIGTERM)
        gateway.start()
        asyncio.run(until(gateway.is_up, "the gateway"))
        assert (gateway.status.address, gateway.status.link) == ports
        assert gateway.output.gateway_secret.stat().st_mode & 0o777 == 0o600
    finally:
        gateway.end(signal.SIGTERM)
