"""The servers of a workspace behind one client: found by their status files, taken and left as they come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import LOST_AFTER_S, InferenceStatus, StatusWriter
from prime_rl.orchestrator.pool import InferenceClient, Replicas, Standing
from prime_rl.orchestrator.publication import AdapterPublication, connect
from prime_rl.utils.process import ProcessId
from tests.orchestrator_support import (
    FakeInference,
    look_often,
    make_model,
    make_run,
    publish,
    run_config,
    sample,
    serving,
    until,
)


class Place:
    """A workspace with fake servers in this process; each has a status file."""

    def __init__(self, path: Path, stack: AsyncExitStack) -> None:
        self.output = OutputDir(path / "workspace")
        self.output.inference.mkdir(parents=True)
        self.model = make_model(path / "model")
        self.fakes: dict[int, FakeInference] = {}
        self.writers: dict[int, StatusWriter] = {}
        self._stack = stack

    async def start(self, replica: int) -> FakeInference:
        fake = self.fakes[replica] = FakeInference(self.model)
        url = await self._stack.enter_async_context(serving(fake))
        path = self.output.inference_statuses()[0] if replica == 0 else self.output.replica_status(replica)
        self.writers[replica] = StatusWriter(path, InferenceStatus(state="serving", base_url=url))
        self._stack.callback(self.writers[replica].abandon)
        return fake


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    look_often(monkeypatch)
    async with AsyncExitStack() as stack:
        yield Place(tmp_path, stack)


def connected(place: Place, run: RunDir) -> tuple[InferenceClient, AdapterPublication]:
    adapters = AdapterPublication(run)
    return connect(run_config(place.model), run, adapters), adapters


def living(client: InferenceClient) -> list[int]:
    return [number for number in range(4) if client.metrics().get(f"inference/{number}/living")]


async def test_all_servers_are_used_and_get_each_version_also_one_that_comes_later(place: Place) -> None:
    first, second = await place.start(0), await place.start(1)
    run = make_run(place.output.path)
    publish(run, 1)
    client, adapters = connected(place, run)
    await adapters.begin(client)
    await adapters.publish(client, 1)
    assert [set(fake.adapters) for fake in (first, second)] == [{"run_a@v1"}] * 2
    third = await place.start(2)
    await until(lambda: living(client) == [0, 1, 2], "the third server to be used")
    assert [path for path, _ in third.requests][:2] == ["/v1/models", "/v1/load_lora_adapter"]
    fakes = (first, second, third)

    async def together(body: dict[str, Any]) -> None:
        await until(lambda: sum(len(fake.completions) for fake in fakes) == 9, "all nine to be under way")

    for fake in fakes:
        fake.gate = together
    await asyncio.gather(*(sample(client, "run_a@v1", seed=seed) for seed in range(9)))
    assert [len(fake.completions) for fake in fakes] == [3, 3, 3]
    await client.close()


async def test_one_that_leaves_gets_nothing_more_and_is_taken_back_when_it_returns(place: Place) -> None:
    first, second = await place.start(0), await place.start(1)
    client, _ = connected(place, make_run(place.output.path))
    place.writers[1].update(state="stopping")
    await until(lambda: living(client) == [0], "the server that stops to be left alone")
    for seed in range(4):
        await sample(client, place.model, seed=seed)
    assert (len(first.completions), len(second.completions)) == (4, 0)
    place.writers[1].update(state="stopped")
    await until(lambda: "inference/1/living" not in client.metrics(), "it to be forgotten")
    place.writers[1].update(state="serving")
    await until(lambda: living(client) == [0, 1], "it to be taken back")
    assert client.trouble is None
    await client.close()


async def test_requests_to_a_server_whose_process_is_gone_are_made_again_elsewhere(place: Place) -> None:
    """As when its machine is: no connection is reset."""
    first, second = await place.start(0), await place.start(1)
    client, _ = connected(place, make_run(place.output.path))

    async def hang(body: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    second.gate = hang
    pending = asyncio.gather(*(sample(client, place.model, seed=seed) for seed in range(2)))
    await until(lambda: len(second.completions) == 1, "a request that hangs")
    place.writers[1].abandon()
    status = place.writers[1].status
    status.sign(ProcessId(2**22, 1.0))
    write_atomic(place.writers[1].path, msgspec.json.encode(status))
    assert len(await pending) == 2 and len(first.completions) == 2
    assert living(client) == [0]
    await client.close()


async def test_one_without_heartbeat_is_left_only_when_it_does_not_answer(place: Place, tmp_path: Path) -> None:
    await place.start(0)
    await place.start(1)
    now_s = [0.0]
    replicas = Replicas(place.output.path, clock=lambda: now_s[0])
    for writer in place.writers.values():
        writer.abandon()
    assert set(replicas.look().values()) == {Standing.SERVING}
    now_s[0] += LOST_AFTER_S + 1
    assert set(replicas.look().values()) == {Standing.SILENT}
    client, _ = connected(place, make_run(place.output.path))
    client.follow(replicas)
    place.fakes[1].fault = lambda path, body: 503
    await until(lambda: living(client) == [0], "the one that does not answer to be left alone")
    place.fakes[1].fault = lambda path, body: None
    await until(lambda: living(client) == [0, 1], "it to be taken back when it answers")
    await client.close()
