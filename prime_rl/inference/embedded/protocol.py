"""Requests as clients send them, and the answers to them, whole or as they are generated; and between text and ids.

OpenAI's fields, and those of vLLM that this engine has.

Fields of vLLM's that this engine does not have are accepted at the value that changes nothing, and refused otherwise:
a setting must never be ignored in silence.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from itertools import accumulate, repeat
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, field
from transformers import AutoTokenizer

from prime_rl.inference.embedded.batch import Job, Row
from prime_rl.inference.embedded.sampling import MAX_TOP_LOGPROBS, SamplingParams, TokenId
from prime_rl.inference.errors import ApiError, check_ranges
from prime_rl.inference.guard import refused
from prime_rl.utils.chat_template import RESERVED, ChatTemplate, TokenizerError

MAX_PROMPTS = 1024
# JSON has no minus infinity; vLLM writes this too.
MIN_LOGPROB = -9999.0
# The reader of a streamed answer does not see a difference below this.
POLL_S = 0.03
# What a decoder gives for the first bytes of a character whose rest has not come.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"

# Neither the text nor the tokens depend on them.
_IGNORED = {
    *("cache_salt", "include_reasoning", "metadata", "parallel_tool_calls", "priority", "prompt_cache_key"),
    *("request_id", "safety_identifier", "service_tier", "session_id", "spaces_between_special_tokens", "store"),
    *("stream_options", "user"),
}
# Field -> value at which it changes nothing. Null never does, and is the only one for fields with None here.
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("stream", "echo", "use_beam_search", "include_stop_str_in_output"), False),
    **{"return_tokens_as_token_ids": False, "best_of": 1, "length_penalty": 1, "tool_choice": "none", "suffix": ""},
    **{"logit_bias": {}, "bad_words": [], "tools": [], "response_format": {"type": "text"}},
    **dict.fromkeys(("truncate_prompt_tokens", "allowed_token_ids", "prompt_logprobs", "logprob_token_ids")),
    **dict.fromkeys(("structured_outputs", "chat_template", "reasoning_effort")),
}

R = TypeVar("R", bound="Generation")


class Text:
    """Tokenizer and chat template of the model in folder (or of hub name) `name`; several threads may call it."""

    def __init__(self, name: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        self._template: ChatTemplate | str
        try:
            self._template = ChatTemplate.load(name)
        except TokenizerError as error:  # a model without one has completions
            self._template = str(error)
        self._token_texts: dict[int, str] = {}

    def vocabulary(self) -> Collection[str]:
        """All tokens, as the tokenizer writes them."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids` together; special tokens are left out unless asked for."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str:
        """One token as text, special tokens too."""
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return self._token_texts[token_id]

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], **flags: bool
    ) -> list[int]:
        """Token ids of a chat; `flags` are those of `ChatTemplate.render`. Raises ApiError 400."""
        if isinstance(self._template, str):
            raise ApiError(400, f"{self._template}: use /v1/completions.", param="messages")
        if taken := sorted(RESERVED & arguments.keys()):
            raise ApiError(400, f"chat_template_kwargs may not set {taken}", param="chat_template_kwargs")
        try:
            return self.encode(self._template.render(messages, arguments, **flags), False)
        except TokenizerError as error:
            raise ApiError(400, str(error), param="messages") from error


class Generation(SamplingParams, kw_only=True):
    """The fields of both kinds of requests."""

    model: str | None = None
    skip_special_tokens: bool = True
    return_token_ids: bool = False

    def __post_init__(self) -> None:
        self.top_k = max(self.top_k, 0)  # -1 is off too
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: found {self.min_tokens}: must be at most max_tokens = {self.max_tokens}")

    def text_of(self, row: Row, text: Text) -> str:
        """The text of the row, without the stop string that ended it."""
        return text.decode(row.token_ids, skip_special_tokens=self.skip_special_tokens)[: row.stop_at]


class CompletionRequest(Generation, kw_only=True):
    """POST /v1/completions. `prompt` becomes a list of prompts, each a text or a list of token ids."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.top_logprobs = self.logprobs or 0
        are_ids = {isinstance(each, int) for each in self.prompt}
        if are_ids == {True, False}:
            raise ValueError("prompt: found token ids next to whole prompts")
        if isinstance(self.prompt, str) or are_ids != {False}:
            self.prompt = [self.prompt]  # type: ignore[list-item]
        if len(self.prompt) > MAX_PROMPTS:
            raise ValueError(f"prompt: found {len(self.prompt)} prompts: must be at most {MAX_PROMPTS}")

    def choice(self, row: Row, text: Text) -> dict[str, Any]:
        """The fields of one choice that /v1/completions has of its own: text, logprobs, ids of the prompt."""
        prompt_ids = row.prompt_ids if self.return_token_ids else None
        found = {"text": self.text_of(row, text), "logprobs": None, "prompt_token_ids": prompt_ids}
        if self.logprobs is None:
            return found
        tokens = [text.token(token_id) for token_id in row.token_ids]
        top = [
            {text.token(token_id): max(value, MIN_LOGPROB) for token_id, value in [*pairs, (token_id, logprob)]}
            for pairs, token_id, logprob in zip(row.top, row.token_ids, row.logprobs, strict=False)
        ]
        logprobs = {"tokens": tokens, "token_logprobs": row.logprobs, "top_logprobs": top or None}
        return {**found, "logprobs": {**logprobs, "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0))}}


class TextPart(Struct, forbid_unknown_fields=True):
    """A part of a message's content; parts of OpenAI's other types are refused."""

    type: Literal["text"]
    text: str


class ChatMessage(Struct, forbid_unknown_fields=True):
    """One message; pictures, sounds and tool calls are refused."""

    role: Annotated[str, Meta(max_length=64)]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates take it, its parts joined to one text, as in vLLM."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class ChatRequest(Generation, kw_only=True):
    """POST /v1/chat/completions. Without a limit an answer goes on to the end of the model's context."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: int = 2**31
    max_completion_tokens: int | None = None
    logprobs: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    stream: bool = False

    def __post_init__(self) -> None:
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        super().__post_init__()
        if self.stream and (self.logprobs or self.return_token_ids):
            raise ValueError("stream: text only, without logprobs and return_token_ids")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt = false")

    def choice(self, row: Row, text: Text) -> dict[str, Any]:
        """The fields of one choice that /v1/chat/completions has of its own: message and logprobs."""

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            token = text.token(token_id)
            return {"token": token, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(token.encode())}

        found = {"message": {"role": "assistant", "content": self.text_of(row, text)}, "logprobs": None}
        if not self.logprobs:
            return found
        content = [
            {**entry(token_id, logprob), "top_logprobs": [entry(*pair) for pair in top]}
            for token_id, logprob, top in zip(row.token_ids, row.logprobs, row.top or repeat([]), strict=False)
        ]
        return {**found, "logprobs": {"content": content}}


def parsed(body: dict[str, Any], kind: type[R]) -> R:
    """The decoded `body` as a request. Raises ApiError (400)."""
    given = {name: value for name, value in body.items() if value is not None}
    if kind is CompletionRequest and "top_logprobs" in given:
        raise ApiError(400, "'top_logprobs' is a field of chats: use logprobs", param="top_logprobs")
    for name in given.keys() - set(kind.__struct_fields__) - _IGNORED:
        if name not in _NEUTRAL:
            raise ApiError(400, f"{name!r} is not a field of this server", param=name)
        if given[name] != _NEUTRAL[name]:
            message = f"{name!r} is not supported by the embedded engine: remove it or use vLLM"
            raise ApiError(400, message, param=name)
    check_ranges(given)
    try:
        return msgspec.convert(given, kind)
    except msgspec.MsgspecError as error:
        raise refused(error) from error


def response(asked: CompletionRequest | ChatRequest, job: Job, text: Text, model: str) -> dict[str, Any]:
    """The body of the answer: the choices of all prompts in order."""
    is_chat = isinstance(asked, ChatRequest)
    num_prompt, num_generated = sum(map(len, job.prompts)), sum(len(row.token_ids) for row in job.rows)
    choices = [
        {
            "index": index,
            **asked.choice(row, text),
            "finish_reason": row.finish_reason,
            "stop_reason": row.stop_reason,
            "token_ids": row.token_ids if asked.return_token_ids else None,
        }
        for index, row in enumerate(job.rows)
    ]
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": asked.model or model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        },
        **({"prompt_token_ids": job.prompts[0] if asked.return_token_ids else None} if is_chat else {}),
    }


async def chat_events(
    text: Text, model: str, asked: ChatRequest, job: Job, cancel: Callable[[Job], None]
) -> AsyncIterator[bytes]:
    """A chat whose answer is sent as it is generated: server-sent events. `job` is cancelled when the client goes away.

    The engine's thread appends tokens to its rows. They are read from there, so a client that reads slowly holds up
    nothing. Text is sent when later tokens cannot change it.
    """
    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
    }

    def event(index: int, delta: dict[str, str], finish_reason: str | None = None) -> bytes:
        return _event({**head, "choices": [{"index": index, "delta": delta, "finish_reason": finish_reason}]})

    sent = [0] * len(job.rows)
    try:
        for index in range(len(job.rows)):
            yield event(index, {"role": "assistant", "content": ""})
        while True:
            if is_done := job.ended.is_set():
                await job.result()  # raises what ended the engine
            started = time.monotonic()
            texts = await asyncio.to_thread(_shown, text, job, asked, is_whole=is_done)
            for index, (row, shown) in enumerate(zip(job.rows, texts, strict=True)):
                if len(shown) > sent[index]:
                    yield event(index, {"content": shown[sent[index] :]})
                    sent[index] = len(shown)
                if is_done:
                    yield event(index, {}, row.finish_reason)
            if is_done:
                break
            # All of a text is decoded each time: a long one is looked at less often, so it takes no more of the CPU.
            await asyncio.sleep(max(POLL_S, 9 * (time.monotonic() - started)))
        yield b"data: [DONE]\n\n"
    except ApiError as error:
        yield _event(error.body())
    finally:
        cancel(job)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _shown(text: Text, job: Job, asked: ChatRequest, *, is_whole: bool) -> list[str]:
    """The text and tokens of each row that may be sent now."""
    if is_whole:
        return [asked.text_of(row, text) for row in job.rows]
    shown = []
    for row in job.rows:
        decoded = text.decode(list(row.token_ids), skip_special_tokens=asked.skip_special_tokens)
        # A stop string is not part of the answer, neither when the engine is about to end the row nor the beginning of
        # one.
        found = [at for stop in asked.stops if (at := decoded.find(stop)) >= 0]
        end = min(found, default=len(decoded) - max(map(len, asked.stops), default=1) + 1)
        shown.append(decoded[: max(end, 0)].rstrip(_UNFINISHED))
    return shown
