"""A run on three inference servers of which one is killed and comes back: the same batches as if nothing had been."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from prime_rl.contract.layout import RunDir, list_rollout_steps
from prime_rl.contract.status import RunStatus, read_status
from prime_rl.contract.types import TrainingBatch, read_batch
from prime_rl.orchestrator.orchestrator import run_to_the_end
from tests.orchestrator_support import FakeInference, make_model, make_run, run_config, serving, stand_in_trainer, until
from tests.patience import PATIENCE_S
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
NUM_STEPS = 12
NUM_SERVERS = 3


class Stub:
    """One server process at a fixed port."""

    def __init__(self, model: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self._argv = [sys.executable, "-m", "tests.stub_inference", str(model), str(port)]
        self.process = self.spawn()

    def spawn(self) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(self._argv, cwd=ROOT)
        return self.process

    def models(self) -> list[str]:
        """What it serves; nothing as long as it does not answer."""
        assert self.process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            return [model["id"] for model in httpx.get(f"{self.url}/models", timeout=PATIENCE_S).json()["data"]]
        return []

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
async def stubs(tmp_path: Path) -> AsyncIterator[list[Stub]]:
    model = make_model(tmp_path / "model")
    started = [Stub(model, free_port()) for _ in range(NUM_SERVERS)]
    try:
        for stub in started:
            await until(lambda stub=stub: bool(stub.models()), f"{stub.url} to answer")
        yield started
    finally:
        for stub in started:
            stub.kill()


def batches(run: RunDir) -> list[TrainingBatch]:
    return [read_batch(run.rollout_file(step)) for step in list_rollout_steps(run)]


async def run_out(run: RunDir, model: Path, urls: str | list[str]) -> asyncio.Task[int]:
    """Strictly on-policy, so that the batches are a function of the seed alone."""
    config = run_config(
        model,
        batch_size=16,
        rollouts_per_example=2,
        max_steps=NUM_STEPS,
        max_async_level=0,
        client={"base_url": urls},
        ckpt={"keep_rollouts": True},
    )
    return asyncio.create_task(run_to_the_end(config, run, lambda: False))


@pytest.mark.release
async def test_a_server_that_is_killed_and_comes_back_costs_no_rollout_and_doubles_none(
    stubs: list[Stub], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    run, quiet = make_run(tmp_path / "workspace"), make_run(tmp_path / "quiet")
    waits: set[str | None] = set()

    def at_step(number: int) -> bool:
        status = read_status(run.status, RunStatus)
        waits.add(status.waiting_on if status else None)
        return number in list_rollout_steps(run)

    trainer = asyncio.create_task(stand_in_trainer(run))
    running = await run_out(run, model, [stub.url for stub in stubs])
    await until(lambda: at_step(3), "the third batch")
    stubs[1].kill()
    await until(lambda: at_step(6), "batches of the two that are left")
    trainer.cancel()  # the run waits for its next version until the server is back
    stubs[1].spawn()
    await until(lambda: any("@v" in name for name in stubs[1].models()), "it to get the run's adapter")
    trainer = asyncio.create_task(stand_in_trainer(run))
    assert await running == 0
    trainer.cancel()
    assert stubs[1].models() == [str(model)], "its adapters were unloaded"
    assert not any("one of" in (wait or "") for wait in waits), waits

    trainer = asyncio.create_task(stand_in_trainer(quiet))
    async with serving(FakeInference(model)) as url:
        assert await (await run_out(quiet, model, url)) == 0
    trainer.cancel()
    assert batches(run) == batches(quiet) and len(batches(run)) == NUM_STEPS
