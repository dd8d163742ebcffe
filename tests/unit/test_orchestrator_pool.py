"""Several inference servers behind one client, over real HTTP: which is asked, left out, or comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.base import ConfigError
from prime_rl.contract.layout import RunDir
from prime_rl.orchestrator import publication
from prime_rl.orchestrator.client import InferenceUnavailable, RequestRefused, ServerClient
from prime_rl.orchestrator.pool import BACKOFF_MAX_S, Standing
from prime_rl.orchestrator.publication import AdapterPublication
from tests.orchestrator_support import (
    IM_END,
    FakeInference,
    make_client,
    make_model,
    make_run,
    publish,
    run_config,
    sample,
    serving,
    until,
)
from tests.patience import PATIENCE_S
from tests.ports import free_port

# Nothing listens there.
NOWHERE = "http://127.0.0.1:9/v1"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path)
    for version in (1, 2, 3):
        publish(run, version)
    return run


def paths(fake: FakeInference) -> list[str]:
    return [path.removeprefix("/v1/") for path, _ in fake.requests]


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


async def test_requests_go_where_the_fewest_tokens_are_outstanding(model: Path, tmp_path: Path) -> None:
    fakes = [FakeInference(model) for _ in range(2)]
    go = asyncio.Event()

    async def wait(body: dict[str, Any]) -> None:
        await go.wait()

    for fake in fakes:
        fake.gate = wait
    async with serving(fakes[0]) as first, serving(fakes[1]) as second:
        client = make_client([first, second], tmp_path)
        pending = [asyncio.create_task(sample(client, model, max_tokens=100))]
        await until(lambda: len(fakes[0].completions) == 1, "the long request")
        for number in range(1, 10):  # 10 tokens each: nine of them are less than the long one
            pending.append(asyncio.create_task(sample(client, model, seed=number)))
            await until(lambda n=number: len(fakes[1].completions) == n, "a short request at the other server")
        assert client.metrics()["inference/0/outstanding_tokens"] == 102
        assert client.metrics()["inference/1/outstanding_tokens"] == 90
        go.set()
        await asyncio.gather(*pending)
        for number in range(4):  # nothing outstanding: in turn
            await sample(client, model, seed=number)
        metrics = client.metrics()
        await client.close()
    assert [metrics[f"inference/{n}/outstanding_tokens"] for n in (0, 1)] == [0, 0]
    assert [metrics[f"inference/{n}/requests"] for n in (0, 1)] == [len(fake.completions) for fake in fakes]
    assert sum(metrics[f"inference/{n}/sampled_tokens"] for n in (0, 1)) == client.num_sampled_tokens == 3 * 14


async def test_a_dead_server_is_taken_out_in_silence_and_comes_back_with_its_adapters(
    model: Path, run: RunDir, tmp_path: Path
) -> None:
    fakes = [FakeInference(model) for _ in range(3)]
    async with serving(fakes[0]) as first:
        async with serving(fakes[1], free_port()) as second:
            adapters, troubles = AdapterPublication(run), list[str | None]()
            client = make_client([first, second], tmp_path, equip=adapters.equip, on_trouble=troubles.append)
            for version in (1, 2):
                await adapters.publish(client, version)
        for seed in range(6):
            assert (await sample(client, "run_a@v2", seed=seed))[-1] == IM_END
        await adapters.publish(client, 3)
        adapters.retain(client, lambda version: version > 1)
        await until(lambda: set(fakes[0].adapters) == {"run_a@v2", "run_a@v3"}, "version 1 to be unloaded")
        assert client.metrics()["inference/1/living"] == 0 and client.metrics()["inference/1/failures"] == 1
        fakes[2].adapters = dict.fromkeys(("run_a@v1", "run_a@v9", "run_b@v1"), "before it was cut off")
        async with serving(fakes[2], port_of(second)):
            await until(lambda: bool(client.metrics()["inference/1/living"]), "the server to be asked again")
            assert set(fakes[2].adapters) == {"run_a@v2", "run_a@v3", "run_b@v1"}
            assert Counter(paths(fakes[2])) == {"models": 1, "load_lora_adapter": 2, "unload_lora_adapter": 2}
            await asyncio.gather(*(sample(client, "run_a@v3", seed=seed) for seed in range(6)))
        await client.close()
    assert len(fakes[2].completions) == 3
    assert troubles == []


async def test_versions_of_the_run_that_somebody_else_loaded_give_way_to_its_own(
    model: Path, run: RunDir, tmp_path: Path
) -> None:
    fake = FakeInference(model)
    foreign = {"run_a@v7", "run_a@v8"}
    fake.adapters = dict.fromkeys((*foreign, "run_b@v1"), "somebody else's")
    fake.fault = lambda path, body: 400 if path == "/v1/load_lora_adapter" and foreign & fake.adapters.keys() else None
    async with serving(fake) as url:
        adapters = AdapterPublication(run)
        client = make_client([url], tmp_path, equip=adapters.equip)
        await adapters.publish(client, 1)
        assert set(fake.adapters) == {"run_b@v1", "run_a@v1"}
        await client.close()


async def test_only_when_none_is_left_is_that_waited_for(model: Path, run: RunDir, tmp_path: Path) -> None:
    fake = FakeInference(model)
    async with serving(fake, free_port()) as url:
        adapters = AdapterPublication(run)
        client = make_client([NOWHERE, url], tmp_path, equip=adapters.equip)
        await adapters.publish(client, 1)
        assert client.trouble is None
    waiting = asyncio.create_task(sample(client, "run_a@v1"))
    await until(lambda: client.trouble is not None, "the loss to be said")
    assert str(client.trouble).startswith("one of 2 inference servers: ")
    assert NOWHERE in str(client.trouble) and url in str(client.trouble)
    back = FakeInference(model)
    async with serving(back, port_of(url)):
        assert (await waiting)[-1] == IM_END
        assert client.trouble is None and set(back.adapters) == {"run_a@v1"}
        await client.close()


async def test_a_version_is_loaded_when_every_living_server_has_it(model: Path, run: RunDir, tmp_path: Path) -> None:
    fakes = [FakeInference(model) for _ in range(2)]
    async with serving(fakes[0]) as first, serving(fakes[1]) as second:
        adapters = AdapterPublication(run)
        client = make_client([first, NOWHERE, second], tmp_path, equip=adapters.equip)
        await adapters.publish(client, 1)
        assert [set(fake.adapters) for fake in fakes] == [{"run_a@v1"}] * 2
        fakes[1].adapters.clear()  # restarted too fast to be noticed
        await adapters.restore(client, 1)
        assert [fake.num_loads for fake in fakes] == [1, 2] and set(fakes[1].adapters) == {"run_a@v1"}
        await adapters.restore(client, 1)
        assert [fake.num_loads for fake in fakes] == [1, 2], "every server has it"
        fakes[1].fault = lambda path, body: 400 if path == "/v1/load_lora_adapter" else None
        with pytest.raises(RequestRefused):
            await adapters.publish(client, 2)
        adapters.retain(client, lambda version: version == 1)  # only one has version 2
        await until(lambda: set(fakes[0].adapters) == {"run_a@v1"}, "version 2 to be unloaded")
        assert {entry.id for entry in await client.list_models()} == {str(model), "run_a@v1"}
        await client.close()


async def test_a_full_server_is_left_alone_for_as_long_as_it_asks(model: Path, tmp_path: Path) -> None:
    fakes = [FakeInference(model) for _ in range(2)]
    fakes[0].retry_after_s = 60
    fakes[0].fault = lambda path, body: 503 if path == "/v1/completions" else None
    async with serving(fakes[0]) as first, serving(fakes[1]) as second:
        client = make_client([first, second], tmp_path)
        for seed in range(5):
            assert (await sample(client, model, seed=seed))[-1] == IM_END
        metrics = client.metrics()
        assert client.trouble is None and metrics["inference/0/living"] == 1  # full, not dead
        await client.close()
    assert paths(fakes[0]) == ["completions"] and len(fakes[1].completions) == 5


async def test_failures_that_come_together_count_as_one_and_no_pause_has_no_end(tmp_path: Path) -> None:
    client, clock = make_client([NOWHERE], tmp_path, backoff_start_s=0.5), asyncio.get_running_loop().time
    (server,) = client._servers
    for _ in range(20):
        client._note_failure(server, InferenceUnavailable("it is busy"))
    assert (server.num_failures, server.num_refused) == (20, 1)
    server.num_refused, server.not_before_s, before_s = 1000, 0.0, clock()
    client._note_failure(server, InferenceUnavailable("it is busy"))
    assert before_s + BACKOFF_MAX_S <= server.not_before_s <= clock() + BACKOFF_MAX_S + 0.5
    await client.close()


@pytest.mark.parametrize(("base_url", "follows"), [(NOWHERE, False), (None, True)])
async def test_the_servers_of_the_workspace_are_followed_unless_the_config_names_its_own(
    run: RunDir, model: Path, monkeypatch: pytest.MonkeyPatch, base_url: str | None, follows: bool
) -> None:
    looked_at: list[Path] = []

    class NoReplicas:
        def __init__(self, output_dir: Path) -> None:
            looked_at.append(output_dir)

        def look(self) -> dict[int, Any]:
            return {}

    monkeypatch.setattr(publication, "Replicas", NoReplicas)
    config = run_config(model, client={"base_url": base_url} if base_url else {})
    client = publication.connect(config, run, AdapterPublication(run))
    await client.close()
    assert looked_at == ([run.path.parent] if follows else [])


async def test_a_server_that_leaves_while_it_is_equipped_is_not_asked(tmp_path: Path) -> None:
    async def equip(client: ServerClient) -> None:
        server.retired = leaves

    client = make_client([NOWHERE], tmp_path, equip=equip)
    (server,) = client._servers
    for leaves in (True, False):
        server.living, server.retired = False, False
        await client._bring_back(server)
        assert server.living is not leaves
    await client.close()


async def test_a_silent_server_is_asked_for_one_sign_of_life_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, asked, answers = make_client([NOWHERE], tmp_path), list[int](), asyncio.Event()
    (server,) = client._servers

    async def list_models() -> list[Any]:
        asked.append(server.number)
        await answers.wait()
        return []

    monkeypatch.setattr(server.client, "list_models", list_models)
    for _ in range(3):
        client._heed(server, Standing.SILENT)
    await until(lambda: bool(asked), "the question")
    answers.set()
    await until(lambda: not server.is_doubted, "the answer")
    assert asked == [0] and server.living
    await client.close()


async def test_what_a_killed_orchestrator_left_is_not_waited_for_where_no_server_answers(
    run: RunDir, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publication, "CLEAR_TIMEOUT_S", 0.05)
    async with asyncio.timeout(PATIENCE_S):
        await publication.clear_inference(run_config(model, client={"base_url": NOWHERE}), run)
    assert "inference does not answer: it has no adapters of run_a, or keeps them" in caplog.text


def test_servers_are_named_once_and_by_url(model: Path) -> None:
    config = run_config(model, client={"base_url": ["http://a/v1", "http://b:1/v1"]})
    assert config.client.urls == ["http://a/v1", "http://b:1/v1"]
    assert run_config(model, client={"base_url": "http://a/v1"}).client.urls == ["http://a/v1"]
    assert run_config(model).client.urls == [None]
    for wrong in (["http://a/v1", "http://a/v1/"], [], "a:8000", "ftp://a/v1", ["http://a b/v1"]):
        with pytest.raises(ConfigError, match="base_url"):
            run_config(model, client={"base_url": wrong})


@pytest.mark.parametrize("num_turns", range(8))
async def test_a_cancelled_request_leaves_no_connection_open(tmp_path: Path, num_turns: int) -> None:
    answer = b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"data":[]}'
    open_connections: set[asyncio.StreamWriter] = set()
    leave, num_left = asyncio.Event(), 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_left
        open_connections.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError):  # of a connection that was cancelled before it asked
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await leave.wait()
            writer.write_eof()
            num_left += 1
        await reader.read()  # until the client closes its side
        open_connections.discard(writer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = make_client(f"http://127.0.0.1:{port}/v1", tmp_path)
        await asyncio.gather(*(client.list_models() for _ in range(5)))
        leave.set()
        await until(lambda: num_left == 5, "the ends of the idle connections, which the next request closes")
        asking = asyncio.create_task(client.list_models())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        await client.close()
        await until(lambda: not open_connections, "all connections to be closed")
