"""Bodies of requests and answers, for both engines: JSON in, decoded once and checked by its type, JSON out."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from prime_rl.inference.errors import ApiError

T = TypeVar("T")


async def decoded(request: Request, kind: type[T]) -> T:
    """The body as `kind`. Raises ApiError (400)."""
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise refused(error) from error


def checked(data: Any, kind: type[T]) -> T:
    """Decoded JSON as `kind`. Raises ApiError (400)."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.MsgspecError as error:
        raise refused(error) from error


def refused(error: Exception) -> ApiError:
    """The error that a client sees for one of msgspec's, with the field that is wrong."""
    problem, _, place = str(error).partition(" - at `$")
    field = place.strip(".`")
    return ApiError(400, f"{field}: {problem}" if field else f"The body is refused: {problem}", param=field or None)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer with `body` as JSON."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    """The answer for a refused request, with the headers that belong to its status."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status in (408, 413):  # the rest of the body is not read
        headers["connection"] = "close"
    return json_response(error.body(), error.status, headers)


def replay(body: bytes, receive: Receive) -> Receive:
    """What gives `body` whole first, then what comes after it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
