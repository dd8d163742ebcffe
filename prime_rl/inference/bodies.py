"""Bodies of requests and answers, for both engines: JSON in, decoded once and checked by its type, JSON out.

`/inference/v1/generate` takes and gives token ids and logprobs, as the training clients of others ask: a translation to
and from `/v1/completions`, so that both engines answer alike whatever their own version of it is. What is too long for
the model whatever its tokenizer makes of it is refused before anything is computed from it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


MAX_MESSAGES = 1024
# Parts of a message that are not text.
_MEDIA = frozenset({"image_url", "input_audio", "audio_url", "video_url", "file"})


class Room(NamedTuple):
    """What the model takes: `max_model_len` tokens, in `max_chars` characters at most."""

    max_model_len: int
    max_chars: int

    @classmethod
    def of(cls, max_model_len: int, vocabulary: Collection[str]) -> Room:
        """Return the room of a model with the tokens `vocabulary`: no text has more characters than so many longest."""
        return cls(max_model_len, max_model_len * max(map(len, vocabulary)))

    def check(self, what: str, num_chars: int) -> None:
        """Raise ApiError (400) when a text of `num_chars` characters cannot fit."""
        if num_chars > self.max_chars:
            message = (
                f"{what}: found {num_chars} characters: must be at most {self.max_chars} to fit into the "
                f"{self.max_model_len} tokens of max_model_len"
            )
            raise ApiError(400, message, param=what)


class _Texts(msgspec.Struct):
    """What a model is given to read; other fields are the engine's to check."""

    prompt: Any = None
    messages: Any = None
    tools: Any = None
    documents: Any = None
    chat_template_kwargs: Any = None


class Lengths:
    """Middleware of what generates: `app` gets requests whose texts may fit."""

    def __init__(self, app: ASGIApp, room: Room) -> None:
        self._app = app
        self._room = room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raise ApiError (400), or pass the request on."""
        request = Request(scope, receive)
        texts = await decoded(request, _Texts)
        for prompt in texts.prompt if isinstance(texts.prompt, list) else [texts.prompt]:
            self._room.check("prompt", len(prompt) if isinstance(prompt, str) else 0)
        if isinstance(texts.messages, list) and len(texts.messages) > MAX_MESSAGES:
            message = f"messages: found {len(texts.messages)}: must be at most {MAX_MESSAGES}"
            raise ApiError(400, message, param="messages")
        beside = num_chars([texts.tools, texts.documents, texts.chat_template_kwargs])
        self._room.check("messages", num_chars(texts.messages, _MEDIA) + beside)
        await self._app(scope, replay(await request.body(), receive), send)


def num_chars(value: Any, without: Collection[str] = ()) -> int:
    """Return the characters of all texts in decoded JSON, those of the fields `without` apart."""
    total, rest = 0, [value]
    while rest:
        each = rest.pop()
        if isinstance(each, str):
            total += len(each)
        elif isinstance(each, list):
            rest += each
        elif isinstance(each, dict):
            rest += [inner for name, inner in each.items() if name not in without]
    return total
