"""Background tasks: none ends by an exception without a line of log, and what they serve goes on or ends with them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.distill import DistillConfig
from prime_rl.configs.orchestrator import AdvantageConfig
from prime_rl.orchestrator import orchestrator
from prime_rl.orchestrator.client import ServerClient
from prime_rl.orchestrator.envs.checked import EnvironmentFault
from prime_rl.orchestrator.envs.process import _Child
from prime_rl.orchestrator.guard import run_beside
from prime_rl.orchestrator.rollout import Group
from prime_rl.utils.runtime import Background
from tests.orchestrator_support import FakeInference, make_client, make_model, make_run, run_config, serving, until
from tests.patience import PATIENCE_S

# Nothing listens there.
NOWHERE = "http://127.0.0.1:9/v1"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def messages(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


class Garbled:
    """Answers as `fake` does, or with a body that is not in the encoding that its header names."""

    def __init__(self, fake: FakeInference) -> None:
        self.fake = fake
        self.is_garbled = False
        self.num_garbled = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not self.is_garbled:
            await self.fake(scope, receive, send)
            return
        self.num_garbled += 1
        headers = [(b"content-encoding", b"gzip"), (b"content-length", b"7")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"no gzip"})


async def test_a_server_whose_answers_cannot_be_decoded_returns_when_they_can(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    garbled = Garbled(FakeInference(model))
    async with serving(garbled) as url:
        client = make_client(url, tmp_path)
        garbled.is_garbled = True
        waiting = asyncio.create_task(client.list_models())
        await until(lambda: garbled.num_garbled > 3 or waiting.done(), "the server to be asked again and again")
        assert not waiting.done() and url in str(client.trouble) and "decompress" in str(client.trouble)
        garbled.is_garbled = False
        assert [served.id for served in await waiting] == [str(model)]
        await client.close()


async def test_no_failure_of_one_try_ends_the_bringing_back_and_its_cause_is_logged_once(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    num_tries = 0

    async def equip(server: ServerClient) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries < 4:
            raise RecursionError("too deep")

    async with serving(FakeInference(model)) as url:
        client = make_client([NOWHERE, url], tmp_path, equip=equip)
        await client.list_models()
        await until(lambda: bool(client.metrics()["inference/0/living"]), "the server to be asked again")
        await client.close()
    (said,) = messages(caplog, "cannot restore")
    assert NOWHERE in said and "RecursionError: too deep" in said


async def test_a_background_task_that_fails_is_logged_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("broken")

    background = Background()
    failed, endless = background.start(fail(), "the failing one"), background.start(asyncio.sleep(600), "the endless")
    await asyncio.wait([failed])
    await background.cancel()
    assert endless.cancelled()
    (record,) = caplog.records
    assert record.getMessage() == "a background task failed: the failing one"
    assert record.exc_info is not None and str(record.exc_info[1]) == "broken"


async def test_what_fails_while_it_is_cancelled_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def loop() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            raise OSError("disk full")

    await run_beside(asyncio.sleep(0), loop())
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["disk full"]


class LostProcess:
    """A process whose output fails in another way than the end of a stream."""

    pid = 2**22 + 1  # no process has it

    class stdout:
        @staticmethod
        async def readexactly(count: int) -> bytes:
            raise ConnectionResetError("connection lost")

    async def wait(self) -> int:
        return -9


async def test_rollouts_in_a_process_that_cannot_be_read_end_with_the_reason() -> None:
    child = _Child(LostProcess(), "words", Background())  # type: ignore[arg-type]
    inbox = child.inboxes[1] = asyncio.Queue()
    await child.read()
    with pytest.raises(EnvironmentFault, match="ConnectionResetError: connection lost"):
        await child.ready
    assert isinstance(inbox.get_nowait(), EnvironmentFault) and child.dead


async def test_a_group_that_cannot_be_judged_ends_the_run_with_the_reason(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(group: Group, advantage: AdvantageConfig, teaching: DistillConfig | None) -> bool:
        raise ZeroDivisionError("no advantage")

    monkeypatch.setattr(orchestrator, "has_signal", fail)
    run = make_run(tmp_path / "workspace")
    async with serving(FakeInference(model)) as url:
        config = run_config(model, client={"base_url": url}, filter_zero_advantage=True)
        async with asyncio.timeout(PATIENCE_S):
            assert await orchestrator.run_to_the_end(config, run, lambda: False) == 1
    assert "ZeroDivisionError: no advantage" in caplog.text
