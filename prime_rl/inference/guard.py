"""What stands before both engines: API key, known routes, body size, and adapters from below `output_dir` only.

An ASGI application around another one, so that the rules are the same whatever engine answers. It reads a request's
body whole (bounded) and hands it on. Requests that it refuses never reach the engine.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.inference.errors import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
# Given name and resolved folder; returns the path that the engine is to load. Raises ApiError.
AdapterCheck = Callable[[str, Path], str]

# A thousand prompts of 2,000 tokens, as text.
MAX_BODY_BYTES = 16 * 2**20
# Beyond this the connection is closed in the middle of the body.
MAX_DISCARDED_BYTES = 16 * MAX_BODY_BYTES
ROUTES = {
    "/health": "GET",
    "/metrics": "GET",
    "/v1/models": "GET",
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/inference/v1/generate": "POST",
    "/v1/load_lora_adapter": "POST",
    "/v1/unload_lora_adapter": "POST",
    "/update_weights": "POST",
    "/reload_weights": "POST",
}
# The supervisor must be able to see whether the server lives without knowing the key.
OPEN_ROUTES = frozenset({"/health"})
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/-]{0,127}")


class _LoadBody(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str


class Guard:
    """The checks.

    Args:
        api_key: what `Authorization: Bearer` must carry; None: no key is required.
        output_dir: adapters are loaded from below it and from nowhere else.
        check_adapter: further checks of an adapter before the engine sees it.
    """

    def __init__(
        self, app: AsgiApp, *, api_key: str | None, output_dir: Path, check_adapter: AdapterCheck | None = None
    ) -> None:
        self._app = app
        self._api_key = api_key
        self._output_dir = output_dir
        self._check_adapter = check_adapter
        self._one_load = asyncio.Lock()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        try:
            self._check_request(scope)
            body = await _read_body(receive)
            if scope["path"] == "/v1/load_lora_adapter":
                # A large file takes long to read and to check; tokens of others must not wait for that.
                async with self._one_load:
                    body = await asyncio.to_thread(self._checked_load, body)
        except ApiError as error:
            await refuse(send, error)
            return
        whole = {"type": "http.request", "body": body, "more_body": False}
        await self._app(with_length(scope, body), replay(whole, receive), send)

    def _check_request(self, scope: MutableMapping[str, Any]) -> None:
        path, method = scope["path"], scope["method"]
        if path not in OPEN_ROUTES and self._api_key is not None and not self._knows_key(scope):
            raise ApiError(401, "A valid API key is required: Authorization: Bearer KEY.")
        if path not in ROUTES:
            raise ApiError(404, f"Not found: {path[:200]}.")
        if method != ROUTES[path]:
            raise ApiError(405, f"{path} takes {ROUTES[path]}, not {method}.")

    def _knows_key(self, scope: MutableMapping[str, Any]) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(key.strip(), (self._api_key or "").encode())

    def _checked_load(self, body: bytes) -> bytes:
        try:
            request = msgspec.json.decode(body, type=_LoadBody)
        except msgspec.MsgspecError as error:
            raise ApiError(400, f"The body must be {{lora_name, lora_path}}: {error}") from error
        if not _ADAPTER_NAME.fullmatch(request.lora_name):
            raise ApiError(
                400,
                "lora_name must be 1 to 128 of letters, digits and '._@/-', the first a letter or digit.",
                param="lora_name",
            )
        folder = confined_adapter(self._output_dir, request.lora_path)
        path = self._check_adapter(request.lora_name, folder) if self._check_adapter else str(folder)
        return msgspec.json.encode(_LoadBody(request.lora_name, path))


def confined_adapter(output_dir: Path, given: str) -> Path:
    """The adapter folder `given` with all links resolved. A relative path is taken from the working directory.

    Raises ApiError: 403 when the folder or one of its two files is outside of `output_dir`, 400 for other problems.
    """
    if "\0" in given or not given:
        raise ApiError(400, "lora_path is empty or contains a NUL.", param="lora_path")
    root = output_dir.resolve()
    try:
        folder = Path(given).resolve()
        inside = all(path.is_relative_to(root) for path in [folder, *((folder / n).resolve() for n in ADAPTER_FILES)])
        complete = inside and all((folder / name).is_file() for name in ADAPTER_FILES)
    except (OSError, RuntimeError) as error:  # a name that is too long, a loop of links
        raise ApiError(400, f"lora_path {given[:200]!r} cannot be read: {error}", param="lora_path") from error
    if not inside:
        raise ApiError(403, f"lora_path {given[:200]!r} is outside of {output_dir}.", param="lora_path")
    if not complete:
        raise ApiError(
            400,
            f"lora_path {given[:200]!r} is not an adapter: it needs {' and '.join(ADAPTER_FILES)}.",
            param="lora_path",
        )
    return folder


async def _read_body(receive: Receive) -> bytes:
    """The whole body. A too large one is read to its end without being kept, so the client gets the error."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "The client has closed the connection.")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size <= MAX_BODY_BYTES:
            chunks.append(chunk)
        else:
            chunks.clear()
        if size > MAX_DISCARDED_BYTES or not message.get("more_body", False):
            break
    if size > MAX_BODY_BYTES:
        raise ApiError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
    return b"".join(chunks)


def with_length(scope: MutableMapping[str, Any], body: bytes) -> MutableMapping[str, Any]:
    """The scope of a request that has this whole body."""
    headers = [(k, v) for k, v in scope["headers"] if k not in (b"content-length", b"transfer-encoding")]
    return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}


def replay(message: Message, receive: Receive) -> Receive:
    """What gives `message` first, then what comes after it."""
    pending = [message]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


async def refuse(send: Send, error: ApiError) -> None:
    # The rest of a body that is too large is not read.
    await answer(send, error.status, error.body(), close=error.status == 413)


async def answer(send: Send, status: int, body: Any, *, close: bool = False) -> None:
    data = msgspec.json.encode(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
