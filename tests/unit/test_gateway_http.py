"""The gateway as a server: keys, limits, hang-ups, what is hostile, and the routes beside the models' APIs."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.contract.calls import Answer, Call, Delivered, Open, Refusal, Reward, Turn
from prime_rl.gateway.app import MAX_BODY_BYTES
from prime_rl.gateway.forms import MAX_BRACKETS, MAX_COMMAS
from prime_rl.gateway.keys import run_key, run_of, session_key
from prime_rl.gateway.openai_forms import MAX_KEPT_BYTES, MAX_RESPONSES, Histories
from prime_rl.gateway.serve import serving_here
from tests.budgets import examples
from tests.gateway_support import RUN, RUN_HEADERS, SECRET, SESSION, Scripted, Served, answer, gateway, headers
from tests.orchestrator_support import until
from tests.page_attacks import attacks
from tests.patience import PATIENCE_S

CHAT: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PATHS = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": CHAT,
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": CHAT,
}


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=PATIENCE_S)


def test_a_session_belongs_to_its_run() -> None:
    assert run_of("run_a.b.abcd1234") == "run_a.b"
    for wrong in ("", "run_a", "run_a.abc", "a.abcd1234", "run_a.abcd_1234", "run_a/b.abcd1234", "run_a.abcd1234\n"):
        assert run_of(wrong) is None


def test_each_key_is_for_one_purpose() -> None:
    keys = [session_key(SECRET, SESSION), session_key(SECRET, RUN), run_key(SECRET, RUN), session_key(b"x", SESSION)]
    assert len(set(keys)) == 4 and session_key(SECRET, SESSION) == keys[0]


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"authorization": f"Bearer {session_key(SECRET, SESSION)}"}, 200),
        ({"authorization": f"bearer {run_key(SECRET, RUN)}"}, 200),
        ({"x-api-key": session_key(SECRET, SESSION), "authorization": "Bearer other"}, 200),
        ({"authorization": f"Basic {session_key(SECRET, SESSION)}"}, 401),
        ({"authorization": f"Bearer {session_key(SECRET, RUN + '.othersession')}"}, 401),
        ({"authorization": f"Bearer {run_key(SECRET, 'run_other')}"}, 401),
        ({"x-api-key": "\xe9"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({}, 401),
    ],
)
@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_a_session_has_its_key_and_that_of_its_run(path: str, given: dict[str, str], status: int) -> None:
    async with gateway() as served, client() as http:
        sent = {name.encode(): value.encode("latin-1") for name, value in given.items()}
        done = await http.post(f"{served.base()}/v1/{path}", json=CHAT, headers=sent)
    assert done.status_code == status
    assert len(served.backend.calls) == (status == 200)
    if status == 401:
        assert done.json()["error"]["type"] == "authentication_error"


async def test_paths_that_do_not_exist_are_not_found() -> None:
    async with gateway() as served, client() as http:
        for path in (
            "s/run_a/v1/chat/completions",
            "s/..%2Frun_a.abcd1234/v1/models",
            f"s/{SESSION}/v1/files",
            "nothing",
        ):
            done = await http.post(f"{served.url}/{path}", json=CHAT, headers=headers())
            assert done.status_code in (404, 405) and done.json()["error"]["message"]
        assert (await http.get(f"{served.url}/health")).json() == {"status": "ok"}
        assert (await http.get(f"{served.base()}/v1/chat/completions", headers=headers())).status_code == 405
    assert served.backend.asked == []


async def test_what_a_page_can_send_is_refused() -> None:
    async with gateway() as served, client() as http:
        port = int(served.url.rpartition(":")[2])
        # The key takes the place of the name of the host.
        for attack in [attack for attack in attacks(port) if "host" not in attack.what.lower()]:
            done = await http.request(attack.method, f"{served.base()}/v1/models", headers=attack.headers)
            assert done.status_code == attack.status, attack
    assert served.backend.asked == []


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_hangs_up_frees_its_place(path: str, is_streamed: bool) -> None:
    async with gateway(keep_alive_s=0.01) as served:
        served.backend.hold = asyncio.Event()
        asking = asyncio.create_task(_ask(served, path, {**BODIES[path], "stream": is_streamed}))
        await until(lambda: bool(served.backend.calls), "the call")
        asking.cancel()
        await until(lambda: served.backend.num_cancelled == 1, "the call to be cancelled")
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert served.backend.delivered == []


async def _ask(served: Served, path: str, body: dict[str, Any]) -> bytes:
    async with client() as http:
        done = await http.post(f"{served.base()}/v1/{path}", json=body, headers=headers())
    return done.content


async def test_a_stream_is_kept_alive_in_chunks() -> None:
    for path, waiting in (("chat/completions", b": waiting\n\n"), ("messages", b"event: ping\n")):
        async with gateway(keep_alive_s=0.01) as served, client() as http:
            served.backend.hold = asyncio.Event()
            body, seen = {**CHAT, "stream": True}, b""
            async with http.stream("POST", f"{served.base()}/v1/{path}", json=body, headers=headers()) as stream:
                assert stream.headers["transfer-encoding"] == "chunked" and stream.status_code == 200
                async for part in stream.aiter_raw():
                    seen += part
                    if seen.count(waiting) > 2:
                        served.backend.hold.set()
            assert seen.startswith(waiting) and b"hello" in seen
        assert served.backend.delivered == [0]


async def test_an_answer_is_delivered_before_the_same_request_comes_again() -> None:
    async with gateway() as served, client() as http:
        for is_streamed in (False, True) * 10:
            await http.post(
                f"{served.base()}/v1/chat/completions", json={**CHAT, "stream": is_streamed}, headers=headers()
            )
    kinds = [type(request) for _, request in served.backend.asked]
    assert kinds == [Call, Delivered] * 20 and served.backend.delivered == list(range(20))


async def test_a_session_whose_client_has_hung_up_is_not_noted_as_opened() -> None:
    async with gateway() as served:
        served.backend.hold = asyncio.Event()
        async with client() as http:
            opening = asyncio.create_task(
                http.post(f"{served.url}/v1/runs/{RUN}/sessions", json={}, headers=RUN_HEADERS)
            )
            await until(lambda: bool(served.backend.asked), "the opening")
            opening.cancel()
            await asyncio.wait([opening])
        served.backend.hold.set()
        async with client() as http:
            await http.get(f"{served.base()}/v1/models", headers=headers())
    assert [type(request) for _, request in served.backend.asked] == [Open]


async def test_why_a_call_is_refused_is_told_to_the_run_and_an_empty_model_is_its_own() -> None:
    async with gateway() as served, client() as http:
        url = f"{served.base()}/v1/chat/completions"
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        done = await http.post(url, json={"messages": image}, headers=headers())
        assert done.status_code == 400 and served.backend.refused == [done.json()["error"]["message"]]
        for path, body in BODIES.items():
            for model in ("", None):
                done = await http.post(f"{served.base()}/v1/{path}", json={**body, "model": model}, headers=headers())
                assert done.json()["model"] == RUN


async def test_a_body_has_a_limit() -> None:
    async with gateway() as served, client() as http:

        async def endless() -> Any:
            for _ in range(MAX_BODY_BYTES // 2**20 + 2):
                yield b" " * 2**20

        done = await http.post(f"{served.base()}/v1/messages", content=endless(), headers=headers())
        assert (done.status_code, done.json()["error"]["type"]) == (413, "request_too_large")
        done = await http.post(f"{served.base()}/v1/messages", json=CHAT, headers=headers())
        assert done.status_code == 200
    assert len(served.backend.calls) == 1


async def test_large_bodies_that_come_have_a_limit_together_and_calls_in_work_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("prime_rl.gateway.app.MAX_BODY_BYTES", 700_000)
    monkeypatch.setattr("prime_rl.gateway.app.MAX_HELD_BYTES", 2_000_000)  # one run has half
    large, go_on = json.dumps({"messages": [{"role": "user", "content": "x" * 600_000}]}).encode(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield large[:-1]
        await go_on.wait()
        yield large[-1:]

    async with gateway() as served, client() as http:
        served.backend.hold = asyncio.Event()

        def post(content: Any) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(http.post(f"{served.base()}/v1/messages", content=content, headers=headers()))

        in_work = []
        for number in range(1, 4):
            in_work.append(post(large))
            await until(lambda number=number: len(served.backend.calls) == number, "a call in work")  # type: ignore[misc]
        for _ in range(3):
            coming = post(slow())
            while (refused := await post(b"x" * 600_000)).status_code == 400:
                pass  # the other one has not come that far
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert (await post(b"x" * 800_000)).status_code == 413
            coming.cancel()
            await asyncio.wait([coming])
        while (await post(b"x" * 600_000)).status_code == 429:
            pass  # it has not seen yet that the last one has gone
        go_on.set()
        served.backend.hold.set()
        assert [(await call).status_code for call in (*in_work, post(slow()))] == [200] * 4


async def test_one_run_leaves_room_for_others_and_what_is_refused_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.gateway.app.MAX_BODY_BYTES", 700_000)
    monkeypatch.setattr("prime_rl.gateway.app.MAX_HELD_BYTES", 2_000_000)
    whole, other, go_on, arrived = json.dumps(CHAT).encode(), "run_b.abcd1234", asyncio.Event(), asyncio.Semaphore(0)

    async def stalls(num_bytes: int) -> AsyncIterator[bytes]:
        yield b" " * num_bytes
        arrived.release()
        await go_on.wait()
        yield whole

    async with gateway() as served, httpx.AsyncClient(timeout=PATIENCE_S, limits=httpx.Limits()) as http:

        def post(content: Any, session: str = SESSION) -> asyncio.Task[httpx.Response]:
            given = headers(session_key(SECRET, session))
            return asyncio.create_task(http.post(f"{served.base(session)}/v1/messages", content=content, headers=given))

        async def stalled(num_bytes: int, number: int) -> list[asyncio.Task[httpx.Response]]:
            begun = [post(stalls(num_bytes)) for _ in range(number)]
            for _ in begun:
                await arrived.acquire()
            return begun

        too_large = await stalled(800_000, 4)
        assert (await post(b" " * 600_000 + whole)).status_code == 200
        many = await stalled(600_000, 9)
        assert (await post(b" " * 500_000 + whole, other)).status_code == 200
        filling = post(stalls(600_000), other)
        await arrived.acquire()
        for session in (SESSION, other):
            assert (await post(whole, session)).status_code == 200
        go_on.set()
        assert [(await call).status_code for call in (*too_large, filling)] == [413] * 4 + [200]
        assert sorted([(await call).status_code for call in many]) == [200] + [429] * 8
    assert len(served.backend.refused) == 4, "what the gateway has no room for is no fault of a call"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages":' * 100_000,
        b'{"x":' + b"[" * 100_000 + b"}",
        b'{"x":[' + b"0," * MAX_COMMAS + b"0]}",
        b'{"x":[' + b"{}," * MAX_BRACKETS + b"0]}",
        b'{"prompt":"\\ud800","input":"\\udfff","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"prompt":"\xed\xa0\x80","input":"\xed\xa0\x80","messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
        b'{"prompt":"a","input":"a","messages":[{"role":"user","content":"a"}],"max_tokens":NaN,"max_output_tokens":NaN}',
        b'{"prompt":"a","input":"a","messages":[{"role":"user","content":"a"}],"max_tokens":1e999,"max_output_tokens":1.5}',
        b'{"prompt":"a","input":"a","messages":[{"role":"user","content":"a"}],"max_tokens":'
        + b"9" * 9000
        + b',"max_output_tokens":'
        + b"9" * 9000
        + b"}",
    ],
    ids=lambda body: repr(body[:30]),
)
async def test_hostile_bodies_are_refused(path: str, body: bytes) -> None:
    async with gateway() as served, client() as http:
        done = await http.post(f"{served.base()}/v1/{path}", content=body, headers=headers())
    message = done.json()["error"]["message"]
    assert done.status_code == 400 and message and "\n" not in message and len(message) <= 1000
    assert served.backend.asked == []


TEXT = st.text(max_size=5) | st.sampled_from(
    ["user", "assistant", "tool", "text", "tool_use", "tool_result", "function"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
PART = st.fixed_dictionaries({}, optional={"type": TEXT | JSON, "text": TEXT | JSON, "input": JSON, "content": JSON})
MESSAGE = st.fixed_dictionaries(
    {"role": TEXT},
    optional={
        **{"type": TEXT | JSON, "content": TEXT | JSON | st.lists(PART | JSON, max_size=3), "reasoning": JSON},
        **{
            "tool_calls": JSON,
            "call_id": JSON,
            "name": TEXT,
            "arguments": TEXT | JSON,
            "output": JSON,
            "summary": JSON,
        },
    },
)
TOOL = st.fixed_dictionaries(
    {},
    optional={
        **{"type": st.just("function") | JSON, "name": TEXT | JSON, "parameters": JSON, "input_schema": JSON},
        "function": JSON | st.fixed_dictionaries({"name": TEXT}, optional={"parameters": JSON, "description": JSON}),
    },
)
SOME = st.lists(MESSAGE | JSON, max_size=3) | JSON
BODY = (
    st.fixed_dictionaries(
        {},
        optional={
            **{"messages": SOME, "input": SOME | TEXT, "prompt": TEXT | JSON, "system": JSON, "instructions": JSON},
            **{"tools": st.lists(TOOL, max_size=2) | JSON, "tool_choice": JSON, "stop": JSON, "stop_sequences": JSON},
            **{"max_tokens": st.integers() | JSON, "stream": st.booleans() | JSON, "stream_options": JSON, "n": JSON},
            **{"logprobs": JSON, "response_format": JSON, "text": JSON, "model": TEXT | JSON, "thread": JSON},
            **{"previous_response_id": JSON, "store": JSON, "echo": JSON, "reward": JSON, "rewards": JSON},
            **{"answer": JSON, "done": JSON, "example": JSON, "group": JSON, "error": JSON},
        },
    )
    | JSON
)


@pytest.fixture(scope="module")
def hostile() -> Iterator[Served]:
    """A gateway in a thread of its own."""
    begun: queue.Queue[Served] = queue.Queue()
    ended = threading.Event()

    async def serve() -> None:
        async with gateway() as served:
            begun.put(served)
            await asyncio.to_thread(ended.wait)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(asyncio.run, serve())
        yield begun.get(timeout=PATIENCE_S)
        ended.set()
        done.result(PATIENCE_S)


BESIDE = (f"s/{SESSION}/reward", f"v1/runs/{RUN}/sessions")


@settings(max_examples=examples(300))
@given(path=st.sampled_from([*(f"s/{SESSION}/v1/{path}" for path in PATHS), *BESIDE]), body=BODY)
def test_any_body_is_answered_or_refused(hostile: Served, path: str, body: Any) -> None:
    """Whatever reaches the backend is of the types of the contract, and can be passed on to another process."""
    asked = hostile.backend.asked
    asked.clear()
    done = httpx.post(f"{hostile.url}/{path}", content=json.dumps(body), headers=RUN_HEADERS, timeout=PATIENCE_S)
    assert done.status_code in (200, 400), done.text
    if done.status_code == 400:
        # That what was asked before this has been delivered may be noted only now.
        assert all(isinstance(request, Delivered) for _, request in asked), asked
        assert "\n" not in done.json()["error"]["message"]
    for _, request in asked:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=type(request)) == request
        assert not isinstance(request, Call) or request.messages or request.prompt


async def test_a_reward_ends_a_session_or_is_that_of_an_answer() -> None:
    async with gateway() as served, client() as http:

        async def post(body: Any, status: int = 200) -> None:
            done = await http.post(f"{served.base()}/reward", json=body, headers=headers())
            assert done.status_code == status, done.text

        await post({"reward": 0.5, "rewards": {"style": 1}})
        await post({"reward": 1, "answer": 3})
        await post({"reward": 0.25, "answer": None, "done": False})
        await post({"reward": None, "error": "the test could not be run"})
        for wrong in (
            {"rewards": {"x" * 300: 1}},
            {"rewards": {str(number): 1 for number in range(100)}},
            {"reward": 1, "answer": 2**70},
            {"reward": "1"},
            {"rewards": [1]},
            {"reward": 1, "answer": -1},
            {"answer": 3},
            {"rewards": {"a": "b"}},
        ):
            await post(wrong, 400)
        assert (await http.delete(served.base(), headers=headers())).status_code == 200
        assert (await http.post(f"{served.base()}/close", json={}, headers=RUN_HEADERS)).status_code == 200
    assert [request for _, request in served.backend.asked] == [
        Reward(0.5, {"style": 1.0}),
        Reward(1.0, {}, 3, closes=False),
        Reward(0.25, closes=False),
        Reward(error="the test could not be run"),
        Reward(),
        Reward(),
    ]


async def test_a_run_opens_sessions_for_others() -> None:
    async with gateway() as served, client() as http:
        url = f"{served.url}/v1/runs/{RUN}/sessions"
        assert (await http.post(url, json={}, headers=headers())).status_code == 401
        assert (await http.post(f"{served.url}/v1/runs/a/sessions", json={}, headers=RUN_HEADERS)).status_code == 404
        opened = (await http.post(url, json={"example": "e1", "group": "g"}, headers=RUN_HEADERS)).json()
        assert (await http.post(url, content=b"", headers=RUN_HEADERS)).status_code == 200
        session = opened["session"]
        assert opened["example"] == {"question": "e1"} and opened["api_key"] == session_key(SECRET, session)
        assert opened["base_url"] == f"{opened['anthropic_base_url']}/v1" == f"{served.base(session)}/v1"
        own = headers(opened["api_key"])
        done = await http.post(f"{opened['base_url']}/chat/completions", json=CHAT, headers=own)
        assert done.status_code == 200
    asked = served.backend.asked
    assert asked[:2] == [(RUN, Open("e1", "g")), (session, Delivered())], "its client has it"
    assert [each for each, request in asked if isinstance(request, Call)] == [session]


async def test_sessions_are_opened_at_the_public_url() -> None:
    async with gateway(told="https://agents.example.org/prl") as served, client() as http:
        opened = (await http.post(f"{served.url}/v1/runs/{RUN}/sessions", json={}, headers=RUN_HEADERS)).json()
        assert opened["base_url"] == f"https://agents.example.org/prl/s/{opened['session']}/v1"


async def test_another_gateway_with_the_secret_takes_the_keys() -> None:
    async with gateway() as first, gateway() as second, client() as http:
        for served in (first, second):
            done = await http.get(f"{served.base()}/v1/models", headers=headers())
            assert done.status_code == 200


def test_histories_have_limits() -> None:
    histories, short = Histories(), (Turn("user", "hi"),)
    for number in range(MAX_RESPONSES + 1):
        histories.keep("a", f"resp_{number}", short)
    assert histories.find("a", f"resp_{MAX_RESPONSES}") == short
    for session, response in (("a", "resp_0"), ("b", "resp_1")):
        with pytest.raises(Refusal, match="not found"):
            histories.find(session, response)
    large = (Turn("user", "x" * (MAX_KEPT_BYTES // 3)),)
    for number in range(5):
        histories.keep("greedy", f"resp_{number}", large)
    assert histories.find("a", "resp_1") == short
    histories.drop("a")
    with pytest.raises(Refusal):
        histories.find("a", "resp_1")


async def test_a_closed_session_forgets_its_responses() -> None:
    async with gateway() as served, served.openai() as sdk, client() as http:
        first = await sdk.responses.create(model="m", input="hi")
        await http.delete(served.base(), headers=headers())
        body = {"input": "more", "previous_response_id": first.id}
        done = await http.post(f"{served.base()}/v1/responses", json=body, headers=headers())
    assert done.json()["error"]["code"] == "previous_response_not_found"


async def test_a_long_answer_arrives_whole() -> None:
    """More than fits into the buffers of a connection."""
    text = "x" * 3_000_000
    long: list[Answer] = [answer(text, number=0), answer(text, number=1)]
    async with gateway(*long) as served, served.openai() as sdk:
        whole = await sdk.chat.completions.create(model="m", messages=CHAT["messages"])
        assert whole.choices[0].message.content == text
        stream = await sdk.responses.create(model="m", input="hi", stream=True)
        last: Any = [event async for event in stream][-1]
        assert last.response.output_text == text
        await until(lambda: served.backend.delivered == [0, 1], "both to be noted")


async def test_an_answer_that_the_client_did_not_take_is_not_delivered() -> None:
    async with gateway(answer("x" * 30_000_000), answer(number=1)) as served, client() as http:
        port = int(served.url.rpartition(":")[2])
        body = json.dumps(CHAT).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
        lines = [f"POST /s/{SESSION}/v1/chat/completions HTTP/1.1", f"host: 127.0.0.1:{port}"]
        lines += [f"{name}: {value}" for name, value in {**headers(), "content-length": str(len(body))}.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        assert await reader.readexactly(12) == b"HTTP/1.1 200"
        writer.transport.abort()
        done = await http.post(f"{served.base()}/v1/chat/completions", json=CHAT, headers=headers())
        assert done.json()["choices"][0]["answer"] == 1
    assert served.backend.delivered == [1]


async def test_a_client_that_leaves_its_body_unfinished_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    async with gateway() as served, client() as http:
        for path in ("v1/messages", "reward"):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
            lines = [f"POST /s/{SESSION}/{path} HTTP/1.1", "host: localhost", "content-length: 100"]
            lines += [f"{name}: {value}" for name, value in headers().items()]
            writer.write("\r\n".join([*lines, "", "{"]).encode())
            await writer.drain()
            writer.close()
            assert await reader.read() == b""
        done = await http.get(f"{served.base()}/v1/models", headers={**headers(), "host": "a b:\t?#"})
        assert done.status_code in (200, 400)
        opened = await http.post(
            f"{served.url}/v1/runs/{RUN}/sessions", json={}, headers={**RUN_HEADERS, "host": "a b/?#@[::1"}
        )
        assert opened.status_code in (200, 400)
    assert served.backend.calls == [] and capsys.readouterr().err == "" and not served.backend.refused


async def test_fields_that_are_null_are_as_if_they_were_not_there() -> None:
    """litellm fills them in."""
    nulls = dict.fromkeys(["id", "role", "content", "name", "arguments", "output", "call_id", "phase", "summary"])
    items = [{**nulls, "role": "user", "content": "hi"}]
    items += [{**nulls, "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
    items += [{**nulls, "type": "function_call_output", "call_id": "c", "output": "1"}]
    empty = dict.fromkeys(["tools", "tool_choice", "stop", "max_tokens", "n", "stream_options", "instructions", "text"])
    blocks = [
        {**dict.fromkeys(["id", "name", "input", "thinking", "content", "is_error"]), "type": "text", "text": "hi"}
    ]
    async with gateway() as served, client() as http:
        for path, body in (
            ("responses", {**empty, "input": items}),
            ("chat/completions", {**empty, **CHAT}),
            ("messages", {**empty, "messages": [{"role": "user", "content": blocks}]}),
        ):
            done = await http.post(f"{served.base()}/v1/{path}", json=body, headers=headers())
            assert done.status_code == 200, done.text
    assert [call.messages[0] for call in served.backend.calls] == [Turn("user", "hi")] * 3
    assert [turn.role for turn in served.backend.calls[0].messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_fault_of_the_backend_is_told_in_the_form(
    is_streamed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async with gateway() as served, served.openai(max_retries=0) as sdk:
        served.backend.script.append(ZeroDivisionError("inner matters"))
        with pytest.raises(openai.InternalServerError, match="failed: see the log") as caught:
            await sdk.chat.completions.create(model="m", messages=CHAT["messages"], stream=is_streamed)
        assert "inner matters" not in str(caught.value) and "inner matters" in capsys.readouterr().err


async def test_it_listens_once_its_address_is_told() -> None:
    async with serving_here(Scripted(), SECRET) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.close()
        await writer.wait_closed()
