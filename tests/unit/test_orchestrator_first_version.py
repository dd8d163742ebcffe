"""A run that starts from an adapter: its version 0 is published like all others, and nothing is sampled before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from prime_rl.contract.layout import RunDir
from prime_rl.contract.status import RunStatus, read_status
from prime_rl.contract.types import read_batch
from prime_rl.orchestrator.orchestrator import run_to_the_end
from tests.orchestrator_support import (
    FakeInference,
    make_model,
    make_run,
    publish,
    run_config,
    serving,
    stand_in_trainer,
    until,
)
from tests.patience import PATIENCE_S


@pytest.fixture
async def life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[RunDir, FakeInference, asyncio.Task[int]]]:
    """An orchestrator of a run of two steps that starts from an adapter, with nothing published yet."""
    monkeypatch.setattr("prime_rl.orchestrator.policy.CLOSE_TIMEOUT_S", PATIENCE_S)
    model, run = make_model(tmp_path / "model"), make_run(tmp_path)
    fake = FakeInference(model)
    async with serving(fake) as url:
        client = {"base_url": url}
        config = run_config(model, max_steps=2, max_async_level=0, init={"from": "run_z@v3"}, client=client)
        task = asyncio.create_task(run_to_the_end(config, run, lambda: False))
        yield run, fake, task
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def finish(run: RunDir, task: asyncio.Task[int]) -> None:
    trainer = asyncio.create_task(stand_in_trainer(run))
    assert await asyncio.wait_for(task, PATIENCE_S) == 0
    trainer.cancel()


def sampled_from(fake: FakeInference) -> set[str]:
    return {body["model"] for body in fake.completions}


async def test_version_0_is_waited_for_and_sampled_from(life: tuple[RunDir, FakeInference, asyncio.Task[int]]) -> None:
    run, fake, task = life

    def waits() -> bool:
        status = read_status(run.status, RunStatus)
        return status is not None and "policy version 0 (have none)" in (status.waiting_on or "")

    await until(waits, "version 0 to be waited for")
    assert sampled_from(fake) == set()
    publish(run, 0)
    await finish(run, task)
    assert sampled_from(fake) == {"run_a@v0", "run_a@v1"}, "never the base model"
    assert {sample.policy_version for sample in read_batch(run.rollout_file(1)).samples} == {0}
    assert fake.adapters == {}, "all adapters of the run are unloaded"


async def test_a_server_that_lost_version_0_gets_it_again(
    life: tuple[RunDir, FakeInference, asyncio.Task[int]],
) -> None:
    run, fake, task = life
    lost: list[str] = []

    def lose(path: str, body: dict[str, Any]) -> int | None:
        if path == "/v1/completions" and not lost:
            lost.append(body["model"])
            fake.adapters.clear()
        return None

    fake.fault = lose
    publish(run, 0)
    await finish(run, task)
    assert lost == ["run_a@v0"] and sampled_from(fake) == {"run_a@v0", "run_a@v1"} and fake.num_unknown > 0
