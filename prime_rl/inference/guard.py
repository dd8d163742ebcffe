"""What stands before both engines: who may ask, the size of bodies, and folders from below `output_dir` only."""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from prime_rl.contract.layout import stable_marker
from prime_rl.inference.bodies import error_response, replay
from prime_rl.inference.errors import ApiError
from prime_rl.inference.weight_files import WEIGHTS_FILE
from prime_rl.utils.http_rule import refusal

# A thousand prompts of 2,000 tokens, as text.
MAX_BODY_BYTES = 16 * 2**20
# A client that sends so slowly would hold its connection, and what it has sent, for ever.
BODY_TIMEOUT_S = 60.0
# Beyond this the connection is closed in the middle of the body.
MAX_DISCARDED_BYTES = 16 * MAX_BODY_BYTES
# The supervisor must be able to see whether the server runs, without the key.
OPEN_ROUTES = frozenset({"/health"})
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


class Guard:
    """Middleware that refuses what `http_rule` does and what has no key, and reads a body whole before `app` gets it.

    Args:
        api_key: what `Authorization: Bearer` must carry; None: no key is required.
        hosts: names of the server beside those of the loopback. With a key any will do: no page of a browser has it.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, hosts: Collection[str] = ()) -> None:
        self._app = app
        self._api_key = api_key
        self._hosts = hosts if api_key is None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is refused, and pass any other to `app`."""
        if scope["type"] == "http":
            headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
            try:
                if refused := refusal(scope["method"], headers, self._hosts):
                    raise ApiError(*refused)
                if scope["path"] not in OPEN_ROUTES and not self._has_key(scope):
                    raise ApiError(401, "A valid API key is required: Authorization: Bearer KEY.")
                receive = replay(await _read_in_time(receive), receive)
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        if self._api_key is None:
            return True
        kind, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._api_key.encode())


async def _read_in_time(receive: Receive) -> bytes:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read_body(receive)
    except TimeoutError:
        raise ApiError(408, f"The body did not come within {BODY_TIMEOUT_S:g} s.") from None


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


def confined_adapter(output_dir: Path, given: str) -> Path:
    """The adapter folder `given` with all links resolved. A relative path is taken from the working directory.

    Raises ApiError: 403 when the folder or one of its two files is outside of `output_dir`, 400 for other problems.
    """
    folder = _confined(output_dir, given, ADAPTER_FILES, "lora_path")
    if not all(os.path.isfile(folder / name) for name in ADAPTER_FILES):
        needed = " and ".join(ADAPTER_FILES)
        raise ApiError(400, f"lora_path {given[:200]!r} is not an adapter: it needs {needed}.", param="lora_path")
    return folder


def confined_weights(output_dir: Path, given: str) -> Path:
    """The same for a folder of whole weights, which must have its STABLE marker."""
    folder = _confined(output_dir, given, (WEIGHTS_FILE,), "weight_dir")
    if not os.path.isdir(folder):
        raise ApiError(400, f"weight_dir {given[:200]!r} is not a folder.", param="weight_dir")
    if not os.path.isfile(stable_marker(folder)):
        raise ApiError(400, f"weight_dir {given[:200]!r} is not complete: it has no STABLE.", param="weight_dir")
    return folder


def _confined(output_dir: Path, given: str, files: Sequence[str], param: str) -> Path:
    # These functions of `os.path` take every path without a NUL: one that is too long or a loop is not a file.
    if "\0" in given or not given:
        raise ApiError(400, f"{param} is empty or contains a NUL.", param=param)
    root, folder = os.path.realpath(output_dir), Path(os.path.realpath(given))
    if not all(Path(os.path.realpath(path)).is_relative_to(root) for path in (folder, *(folder / f for f in files))):
        raise ApiError(403, f"{param} {given[:200]!r} is outside of {output_dir}.", param=param)
    return folder
