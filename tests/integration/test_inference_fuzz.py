"""A living server under requests that are drawn from its own types and bent: it refuses in words, and goes on."""

from __future__ import annotations

import contextlib
import http.client
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.budgets import FUZZ_REQUESTS, IS_FULL
from tests.inference_support import LOADED, RunningServer, adapter_dir
from tests.patience import PATIENCE_S
from tests.request_fuzz import Asked, requests
from tests.text_attacks import check_clean

BATCH = 16
NUM_CLIENTS = 4
# Between two requests of who asks beside them.
PAUSE_S = 0.05
STATUSES = {200, 400, 403, 404, 405, 409, 415}
# An error without a field says that it is about the body, or about the request as a whole.
WHOLE = ("The body ", "The request ", "Not found", "Invalid HTTP", "stream: ")
ORDINARY = b'{"prompt": [9, 6, 13], "max_tokens": 8, "n": 4, "temperature": 1, "logprobs": 1}'


@pytest.fixture(autouse=True, scope="module")
def _as_it_was(server: RunningServer) -> Iterator[None]:
    """Other tests find on the server the adapters that they share, in their order."""
    yield
    for name in LOADED:
        server.post("/v1/unload_lora_adapter", lora_name=name)
    for name in LOADED:
        server.load(name, adapter_dir(server, name))


def send(server: RunningServer, asked: Asked) -> tuple[int, bytes]:
    """Status and body of the answer; every request has its own connection."""
    url = httpx.URL(server.root_url)
    connection = http.client.HTTPConnection(url.host, url.port, timeout=PATIENCE_S)
    try:
        connection.putrequest(asked.method, asked.path)
        connection.putheader("Content-Type", asked.kind.encode("latin-1"))
        connection.putheader("Authorization", f"Bearer {server.api_key}")
        connection.putheader("Content-Length", str(len(asked.body)))
        connection.endheaders(asked.body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def check(asked: Asked, status: int, body: bytes, *, names_fields: bool) -> None:
    """Raise AssertionError unless the answer is one that a client can work with."""
    told = f"{asked.method} {asked.path} {asked.body[:300]!r}: {status} {body[:300]!r}"
    assert status in STATUSES, told
    if status == 200 or asked.method == "HEAD":
        return
    error = msgspec.json.decode(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["code"] == status, told
    message, param = error["message"], error["param"]
    assert check_clean(told, iter((message,))) == message and "\n" not in message, told
    assert len(message) <= 1000 and "Traceback" not in message, told
    if status == 400 and names_fields:
        assert param.partition(".")[0].partition("[")[0] in message if param else message.startswith(WHOLE), told


@contextlib.contextmanager
def neighbour(server: RunningServer) -> Iterator[list[float]]:
    """A client that asks one thing again and again; the seconds that each answer took. It must always get the same."""
    seconds: list[float] = []
    wrong: list[Any] = []
    over = threading.Event()

    def ask() -> None:
        expected = None
        while not over.is_set() and not wrong:
            began = time.perf_counter()
            body = server.complete([9, 6, 13], max_tokens=4, temperature=0)
            seconds.append(time.perf_counter() - began)
            answer = body["choices"][0]["token_ids"]
            expected = expected or answer
            wrong.extend([answer] if answer != expected else [])
            over.wait(PAUSE_S)

    with ThreadPoolExecutor(1) as pool:
        life = pool.submit(ask)
        try:
            yield seconds
        finally:
            over.set()
    life.result()
    assert not wrong


def is_of_vllm(server: RunningServer) -> bool:
    return server.output_dir.name.startswith("vllm")


def num_requests(server: RunningServer) -> int:
    """FUZZ_REQUESTS, an eighth of them to vLLM."""
    return FUZZ_REQUESTS // (8 if is_of_vllm(server) else 1)


def attack(server: RunningServer) -> None:
    """Send drawn requests, some at a time; vLLM's own refusals name no field."""

    @settings(
        max_examples=max(1, num_requests(server) // BATCH),
        deadline=None,
        derandomize=not IS_FULL,
        database=None,
        phases=[Phase.generate],  # to make an example smaller takes the server many more requests
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(requests(), min_size=BATCH, max_size=BATCH))
    def several(batch: list[Asked]) -> None:
        for asked, answer in zip(batch, pool.map(lambda each: send(server, each), batch), strict=True):
            check(asked, *answer, names_fields=not is_of_vllm(server))
        assert server.process.poll() is None, server.log.read_text()[-3000:]

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        several()


@pytest.mark.budget
def test_no_request_that_can_be_drawn_harms_the_server(server: RunningServer) -> None:
    said_before = len(server.log.read_text())
    with neighbour(server) as seconds:
        attack(server)
    assert seconds, "the neighbour was answered meanwhile"
    assert is_of_vllm(server) or "Traceback" not in server.log.read_text()[said_before:]
    assert [each["id"] for each in server.get("/v1/models").json()["data"]][:1] == [server.model]


@pytest.mark.release
def test_a_neighbour_waits_no_longer_than_beside_ordinary_requests(server: RunningServer) -> None:
    with neighbour(server) as seconds, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        ordinary = Asked("POST", "/v1/completions", ORDINARY)
        list(pool.map(lambda _: send(server, ordinary), range(num_requests(server) // 2)))
    before = statistics.median(seconds)
    with neighbour(server) as seconds:
        attack(server)
    assert statistics.median(seconds) < 3 * before
