"""What the server takes of a client before it works for it: its time, the size of a head, the length of texts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from prime_rl.configs.inference import InferenceConfig
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import InferenceStatus, StatusWriter
from prime_rl.inference import guard
from prime_rl.inference import serve as serving_module
from prime_rl.inference.gateway import build_app
from prime_rl.inference.guard import MAX_MESSAGES, MAX_PARTS, MAX_PROMPTS, Room
from prime_rl.inference.serve import MAX_HEAD_BYTES, Connection, ServerContext, Snapshot, serve
from prime_rl.inference.server import bind
from tests.patience import PATIENCE_S
from tests.unit.test_inference_front import Engine
from tests.unit.test_inference_http import ask

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BODY = b'{"prompt": [1]}'
ROOM = Room.of(4, {"a", "bcd"})


@contextlib.asynccontextmanager
async def serving(tmp_path: Path, engine: Engine | None = None) -> AsyncIterator[tuple[str, int]]:
    """The address of a server with an engine that answers at once."""
    writer = StatusWriter(OutputDir(tmp_path).inference_status, InferenceStatus())
    app, sock = build_app(engine or Engine(), InferenceConfig(output_dir=tmp_path)), bind("127.0.0.1", 0)
    over = asyncio.Event()
    context = ServerContext(InferenceConfig(), sock, None, over.is_set, writer)
    task = asyncio.create_task(serve(app, context, alive=lambda: True, stats=Snapshot))
    try:
        while writer.status.state != "serving":
            await asyncio.sleep(0.01)
        yield sock.getsockname()
    finally:
        over.set()
        await task
        writer.close()


async def said(address: tuple[str, int], *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Send the pieces one after the other; return all that comes until the server closes."""
    reader, writer = await asyncio.open_connection(*address)
    came: list[bytes] = []

    async def listen() -> None:
        with contextlib.suppress(ConnectionError):  # closed while this end still sends
            while chunk := await reader.read(2**16):
                came.append(chunk)

    answer = asyncio.create_task(listen())
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.wait({answer}, timeout=pause_s)
    await asyncio.wait_for(answer, PATIENCE_S)
    writer.close()
    return b"".join(came)


def trickle(*, after: bytes = b"") -> list[bytes]:
    """`after`, and then a byte at a time, without an end in sight."""
    return [after, *[b"x"] * 100_000]


async def test_a_head_that_trickles_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "head_timeout_s", 0.2)
    async with serving(tmp_path) as address:
        assert await said(address) == b"", "nothing at all"
        assert await said(address, *trickle(after=HEAD + b"x-slow: "), pause_s=0.02) == b""
        whole = HEAD + f"content-length: {len(BODY)}\r\n\r\n".encode() + BODY
        answered = await said(address, *trickle(after=whole), pause_s=0.02)
        assert answered.startswith(b"HTTP/1.1 200") and answered.count(b"HTTP/1.1") == 1, "nor the next on a connection"


async def test_the_oldest_that_have_sent_no_request_give_way_to_new_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_module, "_most_connections", lambda: 3)
    whole = HEAD + f"content-length: {len(BODY)}\r\n\r\n".encode() + BODY
    async with serving(tmp_path) as address, asyncio.timeout(PATIENCE_S):
        answered_reader, answered = await asyncio.open_connection(*address)
        answered.write(whole)
        assert (await answered_reader.read(1000)).startswith(b"HTTP/1.1 200")
        slow = [await asyncio.open_connection(*address) for _ in range(6)]
        for _, writer in slow:
            writer.write(HEAD + b"content-length: 1000000\r\n\r\n{")
        for reader, _ in slow[:3]:
            assert await reader.read() == b""
        last = HEAD + b"connection: close\r\n" + whole.removeprefix(HEAD)
        assert (await said(address, last)).startswith(b"HTTP/1.1 200")
        for _, writer in [*slow, (answered_reader, answered)]:
            writer.close()


async def test_requests_of_whom_has_the_most_connections_give_way_to_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that each have one request in work: those of the others stay, also the oldest without a request."""
    monkeypatch.setattr(serving_module, "_most_connections", lambda: 8)
    engine, go_on, num_begun = Engine(), asyncio.Event(), 0
    engine.loaded = ["run_bad@v1", "run_a@v1"]

    async def complete(request: Request, body: dict[str, Any]) -> dict[str, Any]:
        nonlocal num_begun
        num_begun += 1
        await go_on.wait()
        return {"model": body["model"]}

    engine.complete = complete  # type: ignore[method-assign]

    def asking(model: str) -> bytes:
        body = json.dumps({"model": model}).encode()
        return HEAD + f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    async with serving(tmp_path, engine) as address, asyncio.timeout(PATIENCE_S):
        idle_reader, idle = await asyncio.open_connection(*address)
        asked = list[asyncio.Task[bytes]]()
        for model in ("run_a@v1", *["run_bad@v1"] * 20, "run_a@v1"):
            asked.append(asyncio.create_task(said(address, asking(model))))
            while num_begun < len(asked):
                await asyncio.sleep(0.01)
        idle.write(asking("run_a@v1"))
        go_on.set()
        good, *flood, late = await asyncio.gather(*asked)
        for answered in (good, late, await idle_reader.read()):
            assert answered.startswith(b"HTTP/1.1 200") and b"run_a@v1" in answered
        assert sum(each != b"" for each in flood) == 5, "eight less those of the others"
        idle.close()


async def test_a_body_that_trickles_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(Connection, "head_timeout_s", 0.2)
    async with serving(tmp_path) as address:
        slow = await said(address, *trickle(after=HEAD + b"content-length: 1000000\r\n\r\n"), pause_s=0.02)
        assert slow.startswith(b"HTTP/1.1 408") and b"The body did not come within 0.2 s." in slow
        refused = HEAD.replace(b"application/json", b"text/plain") + b"content-length: 1000000\r\n\r\n"
        slow = await said(address, *trickle(after=refused), pause_s=0.02)
        assert slow.startswith(b"HTTP/1.1 415"), "what is refused has no more time for the rest of its body"


async def test_an_answer_that_nobody_reads_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, size, lost = Engine(), 50_000_000, asyncio.Event()
    connection_lost = Connection.connection_lost

    async def complete(request: Request, body: dict[str, Any]) -> dict[str, Any]:
        return {"text": "x" * size}

    def note_end(connection: Connection, error: Exception | None) -> None:
        connection_lost(connection, error)
        lost.set()

    engine.complete = complete  # type: ignore[method-assign]
    whole = HEAD + f"connection: close\r\ncontent-length: {len(BODY)}\r\n\r\n".encode() + BODY
    async with serving(tmp_path, engine) as address, asyncio.timeout(PATIENCE_S):
        assert len(await said(address, whole)) > size
        monkeypatch.setattr(serving_module, "READ_TIMEOUT_S", 0.1)
        monkeypatch.setattr(Connection, "connection_lost", note_end)
        reader, writer = await asyncio.open_connection(*address, limit=1000)
        writer.write(whole)
        await lost.wait()
        with contextlib.suppress(ConnectionError):
            assert len(await reader.read()) < size
        writer.close()


async def test_what_is_not_http_is_an_error_of_the_common_form(tmp_path: Path) -> None:
    async with serving(tmp_path) as address:
        for piece in (
            b"\x16\x03\x01 hello\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            HEAD + b"host: x\r\n\r\n",
            HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        ):
            head, _, body = (await said(address, piece)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400") and b"application/json" in head, piece
            assert json.loads(body)["error"]["code"] == 400 and "head of at most 32768 bytes" in body.decode()


async def test_a_head_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "head_timeout_s", 2 * PATIENCE_S)  # it is its size for which it is refused
    most = MAX_HEAD_BYTES
    async with serving(tmp_path) as address:
        for piece in (HEAD + b"x: " + b"y" * 9 * most, HEAD + b"x: y\r\n" * most, b"GET /" + b"a" * 9 * most):
            # Where the client still sends, the system may drop the answer with the connection.
            assert (await said(address, piece))[:12] in (b"HTTP/1.1 400", b""), piece[:60]
        end = f"content-length: {len(BODY)}\r\nconnection: close\r\n\r\n".encode() + BODY
        assert (await said(address, HEAD + b"x: " + b"y" * (most - 500) + b"\r\n" + end)).startswith(b"HTTP/1.1 200")


async def test_others_are_served_between_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """To decode one takes long, and nothing else goes on meanwhile."""
    came, hosts = asyncio.Queue[str](), [(b"host", b"localhost"), (b"content-type", b"application/json")]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        came.put_nowait(scope["path"])

    async def send(message: Any) -> None:
        came.put_nowait(str(message.get("status")))

    guarded = guard.Guard(app, api_key=None)

    async def post(path: str, body: bytes) -> None:
        scope = {"type": "http", "method": "POST", "path": path, "headers": hosts}
        await guarded(scope, guard.replay(body, asyncio.Event().wait), send)  # type: ignore[arg-type]

    async def large(path: str) -> None:
        await post(path, b" " * (guard.LARGE_BODY_BYTES + 1))

    await asyncio.gather(*(large(f"/{number}") for number in range(3)))
    assert [came.get_nowait() for _ in range(3)] == ["/0", "/1", "/2"]
    monkeypatch.setattr(guard, "LARGE_BYTES_PER_S", 1)
    monkeypatch.setattr(guard, "LARGE_WAIT_S", 10 * guard.LARGE_BODY_BYTES)
    waiting = [asyncio.create_task(large(f"/{number}")) for number in range(3)]
    assert await asyncio.wait_for(came.get(), PATIENCE_S) == "/0"
    await post("/small", BODY)
    await post("/brackets", b"[" * (guard.MAX_BRACKETS + 1))
    assert [came.get_nowait() for _ in range(2)] == ["/small", "400"]
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert came.get_nowait() == "None" and came.empty(), "of the body of that refusal"
    monkeypatch.setattr(guard, "LARGE_WAIT_S", 5)  # no body waits in memory for longer
    for number in range(3):
        await large(f"/late {number}")
    assert [came.get_nowait() for _ in range(6)] == ["429", "None"] * 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "x" * 12}, None),
        ({"prompt": "x" * 13}, "prompt: found 13 characters: must be at most 12 to fit into the 4 tokens"),
        ({"prompt": ["x" * 12] * 9}, None),
        ({"prompt": ["x", "x" * 13]}, "prompt: found 13 characters"),
        ({"messages": [{"role": "u", "content": "x" * 11}]}, None),
        ({"messages": [{"role": "u", "content": "x" * 12}]}, "messages: found 13 characters"),
        ({"messages": [{"content": "x" * 7}] * 2}, "messages: found 14 characters"),
        ({"messages": [{"content": [{"text": "x" * 7}, {"text": "y" * 6}]}]}, "messages: found 13 characters"),
        ({"messages": [{"content": [{"image_url": {"url": "x" * 99}}]}]}, None),
        ({"messages": [{}], "tools": [{"file": "x" * 13}]}, "messages: found 13 characters"),
        ({"messages": [], "chat_template_kwargs": {"a": {"b": ["x" * 13]}}}, "messages: found 13 characters"),
        ({"messages": [{}] * MAX_MESSAGES}, None),
        ({"messages": [{}] * (MAX_MESSAGES + 1)}, f"messages: found {MAX_MESSAGES + 1}: must be at most"),
        ({"prompt": [1] * (MAX_PROMPTS + 1)}, f"prompt: found {MAX_PROMPTS + 1} items: must be at most"),
        ({"prompt": [[]] * (MAX_PROMPTS + 1)}, f"prompt: found {MAX_PROMPTS + 1} items: must be at most"),
        ({"messages": [{"a": [1] * (MAX_PARTS - 3)}]}, None),
        ({"messages": [{"a": [1] * MAX_PARTS}]}, f"messages: found more than {MAX_PARTS} values"),
        ({"messages": [], "tools": [{"a": [{}, []] * MAX_PARTS}]}, f"messages: found more than {MAX_PARTS} values"),
        ([], "The body is refused: Expected `object`"),
    ],
)
async def test_texts_that_cannot_fit_reach_no_engine(tmp_path: Path, body: Any, message: str | None) -> None:
    """Three characters is the longest of the tokens, and four tokens fit."""
    app = build_app(Engine(), InferenceConfig(output_dir=tmp_path), room=ROOM)
    given = {"prompt": [1], **body} if isinstance(body, dict) else body
    status, answered = await ask(app, "/v1/completions", json.dumps(given).encode())
    if message is None:
        assert status == 200, answered
    else:
        assert status == 400 and answered["error"]["message"].startswith(message)
