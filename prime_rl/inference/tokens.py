"""`/inference/v1/generate`: token ids in, token ids and logprobs out, as the training clients of others ask.

A translation to and from `/v1/completions`, so that both engines answer alike whatever their own version of it is.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import msgspec

from prime_rl.inference.errors import ApiError
from prime_rl.inference.guard import AsgiApp, Message, Receive, Send, answer, refuse, replay, with_length

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
# What completions do not have: bookkeeping of one engine's own tools.
NOT_PASSED_ON = frozenset({"routed_experts_prompt_start"})


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    stream: bool = False


class TokensInOut:
    """An engine's `app` with this route. Requests come with their whole body in one message."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope.get("path") != GENERATE:
            await self._app(scope, receive, send)
            return
        try:
            asked = _read((await receive()).get("body", b""))
        except ApiError as error:
            await refuse(send, error)
            return
        body = msgspec.json.encode(completion_request(asked))
        held: list[Message] = []

        async def hold(message: Message) -> None:
            held.append(message)

        inner = with_length({**scope, "path": COMPLETIONS, "raw_path": COMPLETIONS.encode()}, body)
        whole = {"type": "http.request", "body": body, "more_body": False}
        await self._app(inner, replay(whole, receive), hold)
        if not held or held[0].get("status") != 200:
            for message in held:
                await send(message)
            return
        answered = msgspec.json.decode(b"".join(message.get("body", b"") for message in held[1:]))
        await answer(send, 200, generate_response(asked, answered))


def _read(body: bytes) -> _Asked:
    try:
        asked = msgspec.json.decode(body, type=_Asked)
    except msgspec.MsgspecError as error:
        raise ApiError(400, f"The body must be {{model, token_ids, sampling_params}}: {error}") from error
    if asked.stream or asked.sampling_params.get("stream"):
        raise ApiError(400, "stream: this route answers at once only.", param="stream")
    return asked


def completion_request(asked: _Asked) -> dict[str, Any]:
    """Body of /v1/completions."""
    own = {"model": asked.model, "cache_salt": asked.cache_salt, "priority": asked.priority}
    params = {name: value for name, value in asked.sampling_params.items() if name not in NOT_PASSED_ON}
    given = {name: value for name, value in own.items() if value is not None}
    return {**params, **given, "prompt": asked.token_ids, "return_token_ids": True}


def generate_response(asked: _Asked, answered: dict[str, Any]) -> dict[str, Any]:
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
