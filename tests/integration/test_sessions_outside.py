"""Rollouts that an application makes: real sessions over HTTP, with OpenAI's client, in a run beside a real gateway."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from daemons.cli import run
from prime_rl.contract.calls import Open, Opened, Refusal
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import GatewayStatus, RunStatus, read_status
from prime_rl.contract.types import TrainingSample, read_batch
from prime_rl.gateway.keys import run_key, workspace_secret
from prime_rl.gateway.link import LinkServer
from prime_rl.orchestrator.envs.checked import MIN_EXAMPLES
from prime_rl.orchestrator.orchestrator import run_to_the_end
from tests.gateway_daemon import gateway_here
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

BATCH = {"batch_size": 4, "max_steps": 2, "max_async_level": 1, "seq_len": 400, "sampling": {"max_tokens": 8}}


class Application:
    """A service whose users' questions are answered by the run's policy."""

    def __init__(self, url: str, key: str, gateway: LinkServer) -> None:
        self.gateway = gateway
        self._http = httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE_S)

    async def open(self, **body: Any) -> httpx.Response:
        return await self._http.post("/v1/runs/run_a/sessions", json=body)

    async def opened(self, **body: Any) -> dict[str, Any]:
        """A session, once there is a place for it."""
        while (response := await self.open(**body)).status_code == 429:
            assert "taken" in response.text and response.headers["retry-after"]
            await asyncio.sleep(0.05)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    async def ask(self, session: dict[str, Any], *said: str) -> str:
        client = openai.AsyncOpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0)
        roles = itertools.cycle(["user", "assistant"])
        messages: Any = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
        async with client:
            response = await client.chat.completions.create(model="run_a", messages=messages)
        return response.choices[0].message.content or ""

    async def post(self, session: dict[str, Any], **body: Any) -> httpx.Response:
        url = session["base_url"].removesuffix("/v1") + "/reward"
        return await self._http.post(url, json=body, headers={"Authorization": f"Bearer {session['api_key']}"})

    async def work(self, question: str, reward: float, **body: Any) -> None:
        """One session from its opening to its reward: two turns."""
        session = await self.opened(**body)
        answer = await self.ask(session, question)
        await self.ask(session, question, answer, "and more?")
        assert (await self.post(session, reward=reward)).status_code == 200

    async def close(self) -> None:
        await self._http.aclose()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    look_often(monkeypatch)


@contextlib.asynccontextmanager
async def a_run(tmp_path: Path, **changes: Any) -> AsyncIterator[tuple[Application, asyncio.Task[int], FakeInference]]:
    """A run with sessions from outside, its orchestrator at work."""
    model, folder = make_model(tmp_path / "model"), make_run(tmp_path)
    fake = FakeInference(model)
    async with serving(fake) as inference, gateway_here(tmp_path) as gateway:
        own = {"env": [{"id": "sessions"}], "client": {"base_url": inference}, **changes}
        config = run_config(model, **BATCH, **own)
        trainer = asyncio.create_task(stand_in_trainer(folder))
        orchestrator = asyncio.create_task(run_to_the_end(config, folder, lambda: False))
        status = read_status(OutputDir(tmp_path).gateway_status, GatewayStatus)
        assert status is not None
        application = Application(status.base_url, run_key(workspace_secret(OutputDir(tmp_path)), "run_a"), gateway)

        def waits() -> bool:
            status = read_status(folder.status, RunStatus)
            return status is not None and "somebody to open a session" in (status.waiting_on or "")

        await until(waits, "the run to wait for sessions")
        try:
            yield application, orchestrator, fake
        finally:
            for task in (orchestrator, trainer):
                task.cancel()
            await asyncio.gather(orchestrator, trainer, return_exceptions=True)
            await application.close()


def samples_of(tmp_path: Path) -> list[TrainingSample]:
    folder = OutputDir(tmp_path).run("run_a")
    return [sample for step in (1, 2) for sample in read_batch(folder.rollout_file(step)).samples]


async def test_an_application_trains_the_run_with_what_its_users_do(tmp_path: Path) -> None:
    alone = {"rollouts_per_example": 1, "advantage": {"type": "batch"}}
    async with a_run(tmp_path, **alone) as (application, orchestrator, fake):
        await asyncio.gather(*(application.work(f"question {number}", number / 8) for number in range(8)))
        assert await asyncio.wait_for(orchestrator, PATIENCE_S) == 0
    samples = samples_of(tmp_path)
    assert sorted(sample.reward for sample in samples) == [number / 8 for number in range(8)]
    for sample in samples:
        assert len(sample.turn_versions) == 2
    for step in (samples[:4], samples[4:]):
        rewards = [sample.reward for sample in step]
        for sample in step:
            others = (sum(rewards) - sample.reward) / 3
            assert sample.advantage == pytest.approx(sample.reward - others)
    asked = [body["prompt"] for path, body in fake.requests if path == "/v1/completions"]
    trained = [sample.token_ids for sample in samples]
    assert len(asked) == 16 and all(any(ids[: len(prompt)] == prompt for ids in trained) for prompt in asked)


def test_prl_tells_where_a_run_takes_sessions_and_which_key_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = OutputDir(tmp_path)
    for run_id, env in (("run_a", "sessions"), ("run_b", "reverse-text")):
        text = f'batch_size = 4\nrollouts_per_example = 1\nmodel.name = "m"\n[[env]]\nid = "{env}"\n'
        make_run(tmp_path, run_id).orch_toml.write_text(text)
    where = ["--output-dir", str(tmp_path)]
    assert run(["runs", "endpoint", "run_a", "--json", *where]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"version": 1, "url": None, "key": run_key(workspace_secret(output), "run_a")}
    status = GatewayStatus(base_url="http://127.0.0.1:9", state="running")
    write_atomic(output.gateway_status, msgspec.json.encode(status))
    assert run(["runs", "endpoint", "run_a", *where]) == 0
    assert "http://127.0.0.1:9/v1/runs/run_a/sessions" in capsys.readouterr().out
    assert run(["runs", "endpoint", "run_b", *where]) == 1
    assert "takes no sessions from outside" in capsys.readouterr().err


async def test_sessions_of_one_group_are_compared_with_each_other(tmp_path: Path) -> None:
    async with a_run(tmp_path, rollouts_per_example=2) as (application, orchestrator, _):
        refused = await application.open()
        assert refused.status_code == 400 and "group" in refused.text
        work = [
            application.work(f"question {number}", float(number % 2), group=f"user {number // 2}")
            for number in (0, 2, 4, 6, 1, 3, 5, 7)
        ]
        await asyncio.gather(*work)
        assert await asyncio.wait_for(orchestrator, PATIENCE_S) == 0
    samples = samples_of(tmp_path)
    for first, second in zip(samples[::2], samples[1::2], strict=True):
        assert first.example_id == second.example_id
        assert {first.reward, second.reward} == {0.0, 1.0} and first.advantage == -second.advantage != 0


async def test_sessions_that_come_to_nothing_cost_nothing(tmp_path: Path) -> None:
    env = {"id": "sessions", "args": {"max_turns": 3}}
    alone = {"rollouts_per_example": 1, "advantage": {"type": "batch"}, "env": [env]}
    async with a_run(tmp_path, **alone) as (application, orchestrator, _):
        given_up = await application.opened()
        await application.ask(given_up, "hello")
        assert (await application.post(given_up, reward=7.0)).status_code == 400, "out of reward_range"
        await application.ask(given_up, "hello again")
        parts = [await application.post(given_up, reward=0.75, answer=number, done=False) for number in (0, 1)]
        parts += [await application.post(given_up, done=True)]
        assert [each.status_code for each in parts] == [200, 200, 400], "their sum is out of it"
        assert (await application.post(given_up, error="the user left", done=True)).status_code == 200
        with pytest.raises(openai.APIStatusError) as late:
            await application.ask(given_up, "hello?")
        assert late.value.status_code == 410 and "ended" in late.value.message
        limited = await application.opened()
        for number in range(3):
            await application.ask(limited, f"question {number}")
        with pytest.raises(openai.BadRequestError, match="max_turns = 3"):
            await application.ask(limited, "question 3")
        for _ in range(2):  # the answer to the first may be lost
            assert (await application.post(limited, reward=0.5)).status_code == 200
        assert (await application.post(limited, reward=0.6)).status_code == 410
        same = [await application.opened(example="a constant") for _ in range(2)]
        assert len({each["session"] for each in same}) == 2
        for each in same:
            assert (await application.post(each, error="not needed", done=True)).status_code == 200
        await asyncio.gather(*(application.work(f"question {number}", number / 8) for number in range(7)))
        assert await asyncio.wait_for(orchestrator, PATIENCE_S) == 0
    samples = samples_of(tmp_path)
    rewards = {sample.rollout_id or str(number): sample.reward for number, sample in enumerate(samples)}
    assert sorted(rewards.values()) == sorted([0.5, *(number / 8 for number in range(7))])
    branches = [sample for sample in samples if sample.rollout_id]
    assert len(branches) == 3, "three questions that go on from nothing"


async def test_sessions_that_ask_what_is_refused_do_not_end_the_run(tmp_path: Path) -> None:
    alone = {"rollouts_per_example": 1, "advantage": {"type": "batch"}}
    async with a_run(tmp_path, **alone) as (application, orchestrator, _):
        for _ in range(3 * MIN_EXAMPLES):
            session = await application.opened()
            with pytest.raises(openai.BadRequestError):
                await application.ask(session, "x" * 1000)
            assert (await application.post(session, error="its call is refused", done=True)).status_code == 200
        parts = await application.opened()
        for number, reward in enumerate((0.75, 0.75, -0.5)):
            await application.ask(parts, f"question {number}")
            assert (await application.post(parts, reward=reward, answer=number, done=False)).status_code == 200
        assert (await application.post(parts, done=True)).status_code == 200
        await asyncio.gather(*(application.work(f"question {number}", number / 8) for number in range(7)))
        assert await asyncio.wait_for(orchestrator, PATIENCE_S) == 0
    assert 1.0 in [sample.reward for sample in samples_of(tmp_path)]


async def test_a_session_that_never_came_to_its_client_gives_its_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_rl.orchestrator.envs.sessions_env.UNDELIVERED_S", 0.05)
    alone = {"rollouts_per_example": 1, "advantage": {"type": "batch"}}
    async with a_run(tmp_path, **alone) as (application, _, fake):
        lost = set[str]()
        for _ in range(2 * BATCH["batch_size"] + 1):  # as a gateway that is killed before it has answered
            with contextlib.suppress(Refusal):
                opened = await application.gateway.ask("run_a", Open())
                assert isinstance(opened, Opened)
                lost.add(opened.session)
        assert len(lost) >= BATCH["batch_size"]
        found = await application.opened()
        assert found["session"] not in lost and not fake.completions


async def test_a_session_that_nobody_uses_ends_and_its_place_is_free(tmp_path: Path) -> None:
    env = {"id": "sessions", "args": {"expire_s": 0.05}}
    alone = {"rollouts_per_example": 1, "advantage": {"type": "batch"}, "env": [env]}
    async with a_run(tmp_path, **alone) as (application, _, fake):
        silent = await application.opened()
        status = 0

        async def has_ended() -> bool:
            nonlocal status
            status = (await application.post(silent, rewards={"unused": 1.0}, done=False)).status_code
            return status == 410

        while not await has_ended():  # each look is a use of it, so the next one comes later
            assert status == 200
            await asyncio.sleep(0.2)
        others = [await application.opened() for _ in range(4)]
        assert len({silent["session"], *(each["session"] for each in others)}) == 5 and not fake.completions
