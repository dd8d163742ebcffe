"""What is too long for the model whatever its tokenizer makes of it: refused before anything is computed from it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from prime_rl.inference.bodies import decoded, replay
from prime_rl.inference.errors import ApiError

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
