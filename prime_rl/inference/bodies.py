"""Bodies of requests and answers, for both engines: JSON in, decoded once and checked by its type, JSON out.

`/inference/v1/generate` takes and gives token ids and logprobs, as the training clients of others ask: a translation to
and from `/v1/completions`, so that both engines answer alike whatever their own version of it is.
"""

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


# What completions do not have: bookkeeping of one engine's own tools.
NOT_PASSED_ON = frozenset({"routed_experts_prompt_start"})


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /inference/v1/generate; `stream` must be false."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    stream: bool = False


def completion_request(asked: GenerateRequest) -> dict[str, Any]:
    """Body of /v1/completions. Raises ApiError (400)."""
    if asked.stream or asked.sampling_params.get("stream"):
        raise ApiError(400, "stream: this route answers at once only.", param="stream")
    own = {"model": asked.model, "cache_salt": asked.cache_salt, "priority": asked.priority}
    params = {name: value for name, value in asked.sampling_params.items() if name not in NOT_PASSED_ON}
    given = {name: value for name, value in own.items() if value is not None}
    return {**params, **given, "prompt": asked.token_ids, "return_token_ids": True}


def generate_response(asked: GenerateRequest, answered: dict[str, Any]) -> dict[str, Any]:
    """From the answer of /v1/completions. Tokens have their ids, as `token_id:7`, where a text is expected."""
    choices = [
        {
            "index": choice["index"],
            "token_ids": choice["token_ids"],
            "logprobs": choice.get("logprobs") and {"content": _by_id(choice)},
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice.get("stop_reason"),
        }
        for choice in answered["choices"]
    ]
    known = {name: answered.get(name) for name in ("model", "created", "usage")}
    empty = {"prompt_logprobs": None, "kv_transfer_params": None}
    return {"request_id": asked.request_id or answered["id"], "choices": choices, **known, **empty}


def _by_id(choice: dict[str, Any]) -> list[dict[str, Any]]:
    logprobs = choice["logprobs"]["token_logprobs"]
    return [
        {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token_id, logprob in zip(choice["token_ids"], logprobs, strict=True)
    ]
