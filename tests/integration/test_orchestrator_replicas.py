"""A run on the inference servers of its workspace, real processes of the embedded engine that die, come and leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from prime_rl.contract.files import mark_stable, staged_dir
from prime_rl.contract.layout import OutputDir, RunDir, list_rollout_steps, list_steps
from prime_rl.contract.status import InferenceStatus, read_status
from prime_rl.contract.types import read_batch
from prime_rl.orchestrator.orchestrator import run_to_the_end
from tests.inference_support import make_adapter, make_model, write_config
from tests.orchestrator_support import make_run, run_config, until
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
NUM_STEPS = 10
BATCH_SIZE = 16


class Servers:
    """The inference servers of a workspace, by number, each started as the supervisor does it."""

    def __init__(self, output: OutputDir, model: Path) -> None:
        self.output = output
        self.base = str(model)
        self._config = write_config(
            output.path / "inference.toml",
            output_dir=str(output.path),
            port=0,
            num_threads=1,
            max_concurrent_runs=1,
            model={"name": str(model), "dtype": "float32", "max_model_len": 256, "lora": {"rank": 4}},
        )
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, replica: int) -> None:
        argv = [sys.executable, "-m", "prime_rl.inference.server", "@", str(self._config), "--replica", str(replica)]
        with (self.output.path / f"inference-{replica}.log").open("wb") as log:
            self.processes[replica] = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def status(self, replica: int) -> InferenceStatus | None:
        """Of the process that was started last."""
        status = read_status(self.output.replica_status(replica), InferenceStatus)
        return status if status is not None and status.pid == self.processes[replica].pid else None

    def models(self, replica: int) -> list[str]:
        """What it serves; nothing as long as it does not serve."""
        status = self.status(replica)
        assert self.processes[replica].poll() is None
        if status is None or status.state != "serving":
            return []
        with contextlib.suppress(httpx.TransportError):
            return [model["id"] for model in httpx.get(f"{status.base_url}/models", timeout=PATIENCE_S).json()["data"]]
        return []

    async def serving(self, replica: int, name: str) -> None:
        await until(lambda: name in self.models(replica), f"replica {replica} to serve {name}")

    def kill(self, replica: int) -> None:
        self.processes[replica].kill()
        self.processes[replica].wait()

    def stop(self, replica: int) -> int:
        self.processes[replica].terminate()
        return self.processes[replica].wait(PATIENCE_S)


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    model = make_model(tmp_path / "model")
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    servers = Servers(OutputDir(workspace), model)
    try:
        for replica in (0, 1):
            servers.start(replica)
        for replica in (0, 1):
            await servers.serving(replica, str(model))
        yield servers
    finally:
        for replica in servers.processes:
            servers.kill(replica)


class Trainer:
    """Publishes a real adapter for every batch up to version `limit`."""

    def __init__(self, run: RunDir, adapter: Path) -> None:
        self.limit = 0
        self._run = run
        self._adapter = adapter

    async def work(self) -> None:
        while True:
            version = max(list_steps(self._run.broadcast, stable_only=True), default=0) + 1
            if version <= self.limit and version in list_rollout_steps(self._run):
                with staged_dir(self._run.broadcast_dir(version)) as folder:
                    shutil.copytree(self._adapter, folder, dirs_exist_ok=True)
                    mark_stable(folder)
            await asyncio.sleep(0.01)

    async def reach(self, version: int) -> None:
        """Train up to `version`, and wait for the batch that is made with it."""
        self.limit = version
        await until(lambda: version + 1 in list_rollout_steps(self._run), f"batch {version + 1}")


def figures(run: RunDir, step: int) -> dict[str, Any]:
    lines = [json.loads(line) for line in run.orchestrator_metrics.read_text().splitlines()]
    return next(line for line in lines if line["step"] == step and "groups_dropped" in line)


async def metrics_of(run: RunDir, step: int) -> dict[str, Any]:
    def is_there() -> bool:
        with contextlib.suppress(StopIteration, OSError):
            return bool(figures(run, step))
        return False

    await until(is_there, f"the metrics of step {step}")
    return figures(run, step)


@pytest.mark.release
async def test_servers_that_die_come_and_leave_cost_no_rollout(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_rl.orchestrator.policy.CLOSE_TIMEOUT_S", PATIENCE_S)
    run = make_run(servers.output.path)
    trainer = Trainer(run, make_adapter(tmp_path / "adapter", Path(servers.base), seed=1))
    config = run_config(
        Path(servers.base),
        batch_size=BATCH_SIZE,
        max_steps=NUM_STEPS,
        max_async_level=0,
        sampling={"max_tokens": 48},
        ckpt={"keep_rollouts": True},
    )
    working = asyncio.create_task(trainer.work())
    running = asyncio.create_task(run_to_the_end(config, run, lambda: False))
    await trainer.reach(2)
    for replica in (0, 1):
        await servers.serving(replica, "run_a@v2")
    seen = await metrics_of(run, 3)
    assert seen["inference/0/sampled_tokens"] > 0 and seen["inference/1/sampled_tokens"] > 0

    trainer.limit = 5
    await until(lambda: 4 in list_rollout_steps(run), "batch 4")
    servers.kill(0)
    await trainer.reach(5)
    seen = await metrics_of(run, 6)
    assert (seen["inference/0/living"], seen["inference/1/living"]) == (0, 1)

    servers.start(2)
    await servers.serving(2, "run_a@v5")
    await trainer.reach(7)
    assert (await metrics_of(run, 8))["inference/2/sampled_tokens"] > 0

    servers.start(0)
    await servers.serving(0, "run_a@v7")
    before = (await metrics_of(run, 8))["inference/0/sampled_tokens"]
    assert servers.stop(2) == 0
    await trainer.reach(NUM_STEPS - 1)
    trainer.limit = NUM_STEPS
    assert await running == 0
    working.cancel()
    seen = await metrics_of(run, NUM_STEPS)
    # A look a second finds that it has left, which two batches may outrun: it is asked no more in any case.
    assert seen["inference/0/sampled_tokens"] > before and not seen.get("inference/2/living")
    assert seen["groups_dropped"] == 0
    batches = [read_batch(run.rollout_file(step)) for step in range(1, NUM_STEPS + 1)]
    assert [len(batch.samples) for batch in batches] == [BATCH_SIZE] * NUM_STEPS
    assert [servers.models(replica) for replica in (0, 1)] == [[servers.base]] * 2, "its adapters were unloaded"
