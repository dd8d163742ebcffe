"""Puts the embedded engine together and serves it, with the routes that it answers itself.

Called by `prime_rl.inference.server`. `Engine` generates, `Text` turns text into ids and back. Requests are as clients
send them: OpenAI's fields, and those of vLLM that this engine has. Fields of vLLM's that this engine does not have are
accepted at the value that changes nothing, and refused otherwise: a setting must never be ignored in silence. Answers
are given whole or as they are generated.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, islice, repeat
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import torch
from msgspec import Meta, Struct, field
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from transformers import AutoTokenizer

from prime_rl.configs.inference import InferenceConfig
from prime_rl.contract.served import MAX_TOP_LOGPROBS
from prime_rl.inference.embedded.batch import Job, Row, SamplingParams, TokenId
from prime_rl.inference.embedded.engine import Engine
from prime_rl.inference.embedded.model import Served, load_model
from prime_rl.inference.gateway import serve_engine
from prime_rl.inference.guard import (
    MAX_PROMPTS,
    RETRY_AFTER_S,
    ApiError,
    Room,
    check_ranges,
    decoded,
    json_response,
    max_model_len,
    refused,
    run_of,
)
from prime_rl.inference.serve import ServerContext
from prime_rl.inference.sharing import Lanes
from prime_rl.lora.parts import changes_logits
from prime_rl.utils.chat_template import RESERVED, ChatTemplate, TokenizerError
from prime_rl.utils.runtime import StartError

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
    **dict.fromkeys(("truncate_prompt_tokens", "allowed_token_ids", "logprob_token_ids")),
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
            raise ApiError(400, f"messages: {error}", param="messages") from error


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
        scores = None if self.prompt_logprobs is None else self._scores(row, text)
        found: dict[str, Any] = {"text": self.text_of(row, text), "logprobs": None}
        found |= {"prompt_token_ids": prompt_ids, "prompt_logprobs": scores}
        if self.logprobs is None:
            return found
        tokens = [text.token(token_id) for token_id in row.token_ids]
        top = [
            {text.token(token_id): max(value, MIN_LOGPROB) for token_id, value in [*pairs, (token_id, logprob)]}
            for pairs, token_id, logprob in zip(row.top, row.token_ids, row.logprobs, strict=False)
        ]
        logprobs = {"tokens": tokens, "token_logprobs": row.logprobs, "top_logprobs": top or None}
        return {**found, "logprobs": {**logprobs, "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0))}}

    def _scores(self, row: Row, text: Text) -> list[msgspec.Raw | None]:
        """Of each token of the prompt but the first what the model says of it, then of the likeliest ones there.

        Encoded one by one: there may be millions, and the event loop encodes the rest.
        """
        scores: list[msgspec.Raw | None] = [None]
        lists = (each.tolist() for each in row.scored or ())
        for token_id, logprob, rank, top_ids, top_logprobs in zip(row.prompt_ids[1:], *lists, strict=False):
            best = enumerate(zip(top_ids, top_logprobs, strict=True), 1)
            entries = {token_id: (logprob, rank)}
            entries |= {top_id: (value, number) for number, (top_id, value) in islice(best, self.prompt_logprobs)}
            position = {
                each: {"logprob": max(value, MIN_LOGPROB), "rank": number, "decoded_token": text.token(each)}
                for each, (value, number) in entries.items()
            }
            scores.append(msgspec.Raw(msgspec.json.encode(position)))
        return scores


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


logger = logging.getLogger(__name__)


def run(context: ServerContext) -> None:
    """Load the model, serve, clean up. Raises StartError."""
    config = context.config
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    try:
        text, served = Text(config.model.name), load_model(config)
    except (OSError, ValueError) as error:
        raise StartError(f"model.name: {config.model.name} cannot be loaded: {error}") from error
    logger.info("loaded %s: capacity for %d adapters", config.model.name, config.max_loras if served.layers else 0)
    asyncio.run(_serve(context, served, text))


async def _serve(context: ServerContext, served: Served, text: Text) -> None:
    config = context.config
    room = Room.of(max_model_len(config), text.vocabulary())
    engine = Engine(
        served,
        text.decode,
        max_num_seqs=config.num_seqs_on(served.device.type),
        max_model_len=room.max_model_len,
        raw_logprobs=config.logprobs_mode == "raw_logprobs",
    )
    running = asyncio.create_task(engine.run())
    try:
        await serve_engine(Api(engine, text, config), context, room, abort=engine.stop)
    finally:
        engine.stop()
        await running


# Tokens and logprobs of one answer: it is put together in memory, some 20 bytes each.
MAX_ANSWER_SIZE = 4_000_000
# Each holds some hundred bytes for each character of its text.
NUM_TEXT_THREADS = 2
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PROBE_PROMPT = (0,)
T = TypeVar("T")
_PROBE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class _UnloadRequest(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None


class Api:
    """An `EngineControl`."""

    lifespan = None

    def __init__(self, engine: Engine, text: Text, config: InferenceConfig) -> None:
        self._engine = engine
        self._text = text
        self._model = config.model.name
        self._max_waiting = config.embedded.max_waiting
        self._created = int(time.time())
        # Apart from asyncio's own threads, which long texts must not keep from adapters and the status file.
        self._threads, self._text_turns = ThreadPoolExecutor(NUM_TEXT_THREADS, "text"), Lanes(NUM_TEXT_THREADS)
        self._registry = CollectorRegistry()
        self._registry.register(_Metrics(engine))
        self.alive = lambda: engine.alive
        self.adapters = lambda: engine.adapters()
        self.stats = lambda: engine.stats()
        self.endpoints = {
            "/v1/completions": self._completions,
            "/v1/chat/completions": self._chat,
            "/v1/models": self._models,
            "/v1/unload_lora_adapter": self._unload,
            "/metrics": self._metrics,
        }

    async def generate_one(self) -> None:
        """Generate one token with the base model, behind the requests that wait. Raises ApiError."""
        job = self._engine.submit([PROBE_PROMPT], _PROBE)
        try:
            await job.result()
        finally:
            self._engine.cancel(job)

    async def load_adapter(self, request: Request, name: str, folder: Path) -> None:
        """Load the adapter into a free slot. Raises ApiError 400."""
        await self._engine.load_adapter(name, folder)

    async def unload_adapter(self, name: str) -> None:
        """Forget `name` at once; requests that use it go on to their end. Raises ApiError 404."""
        self._engine.unload_adapter(name)

    async def load_weights(self, folder: Path | None) -> None:
        """Put the weights of `folder`, or those of the start, in place of those that are served.

        The gateway has let every request end, and the engine forgets the keys and values of those: nothing that was
        computed with other weights is left.
        """
        weights = self._engine.served.weights
        tensors = await asyncio.to_thread(weights.read, folder) if folder else None
        await self._engine.change(lambda: weights.apply(tensors))

    async def complete(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of /v1/completions to `body`. Raises ApiError, also when the client goes away first."""
        asked = parsed(body, CompletionRequest)
        prompts: Any = asked.prompt
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                prompts[index] = await self._off_loop(request, self._text.encode, prompt, asked.add_special_tokens)
        job = await self._generate(prompts, asked, request)
        # As much work of the tokenizer as the prompts were.
        return await self._off_loop(request, response, asked, job, self._text, self._model)

    async def _completions(self, request: Request) -> Response:
        return json_response(await self.complete(request, await decoded(request, dict[str, Any])))

    async def _chat(self, request: Request) -> Response:
        asked = parsed(await decoded(request, dict[str, Any]), ChatRequest)
        messages = [message.for_template() for message in asked.messages]
        flags = {name: getattr(asked, name) for name in ("add_generation_prompt", "continue_final_message")}
        render = partial(self._text.render_chat, messages, asked.chat_template_kwargs, **flags)
        prompt = await self._off_loop(request, render)
        if asked.stream:
            job = self._submit([prompt], asked, run_of(request))
            events = chat_events(self._text, asked.model or self._model, asked, job, self._engine.cancel)
            return StreamingResponse(events, media_type="text/event-stream")
        job = await self._generate([prompt], asked, request)
        return json_response(await self._off_loop(request, response, asked, job, self._text, self._model))

    async def _off_loop(self, request: Request, make: Callable[..., T], *arguments: Any) -> T:
        """Return what `make` makes with the tokenizer, in a thread, by turns of runs. ApiError: the client has gone."""
        async with self._text_turns.turn(run_of(request)):
            if await request.is_disconnected():
                raise ApiError(400, "The client has closed the connection.")
            return await asyncio.get_running_loop().run_in_executor(self._threads, make, *arguments)

    async def _models(self, request: Request) -> Response:
        base = self._card(self._model, self._model, None) | {"max_model_len": self._engine.max_model_len}
        adapters = [self._card(name, path, self._model) for name, path in self._engine.adapters().items()]
        return json_response({"object": "list", "data": [base, *adapters]})

    def _card(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "prime-rl"}
        return {**card, "root": root, "parent": parent}

    async def _unload(self, request: Request) -> Response:
        name = (await decoded(request, _UnloadRequest)).lora_name
        await self.unload_adapter(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=METRICS_TYPE)

    async def _generate(self, prompts: Sequence[Sequence[int]], asked: Generation, request: Request) -> Job:
        """The job of all prompts, ended. Raises ApiError, also when the client goes away first."""
        job = self._submit(prompts, asked, run_of(request))
        ended, gone = asyncio.ensure_future(job.result()), asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({ended, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                raise ApiError(400, "The client has closed the connection.")
            ended.result()
        finally:
            self._engine.cancel(job)
            ended.cancel()
            gone.cancel()
        return job

    def _submit(self, prompts: Sequence[Sequence[int]], asked: Generation, run_id: str) -> Job:
        """Raises ApiError."""
        self._check_ids(asked.stop_token_ids, "stop_token_ids")
        for prompt in prompts:
            self._check_ids(prompt, "prompt")
            if not prompt:
                raise ApiError(400, "The prompt is empty.", param="prompt")
            # At least one token must have room after the prompt; as in vLLM, a larger max_tokens is cut to the rest.
            if len(prompt) >= (most := self._engine.max_model_len):
                message = f"The prompt has {len(prompt)} tokens: with one more it would exceed the {most} tokens of "
                raise ApiError(400, f"{message}max_model_len.", param="prompt")
        if asked.prompt_logprobs is not None and (changed := changes_logits(self._engine.served.model.config)):
            message = f"prompt_logprobs: not for this model in the embedded engine: its config.json sets {changed}"
            raise ApiError(400, message, param="prompt_logprobs")
        self._check_size(asked.n * len(prompts), asked, run_id)
        adapter = None if asked.model in (None, "", self._model) else asked.model  # "" as in vLLM
        return self._engine.submit(prompts, asked, adapter=adapter, run_id=run_id)

    def _check_ids(self, token_ids: Sequence[int], param: str) -> None:
        vocab_size = self._engine.served.vocab_size
        if (largest := max(token_ids, default=0)) >= vocab_size:
            raise ApiError(400, f"{param}: token id {largest} is out of vocabulary ({vocab_size})", param=param)

    def _check_size(self, num_choices: int, params: SamplingParams, run_id: str) -> None:
        """Raises ApiError: 400 for what is too much at any time, 429 and 503 for what is too much now."""
        size = num_choices * min(params.max_tokens, self._engine.max_model_len) * (1 + params.top_logprobs)
        if num_choices > self._max_waiting or size > MAX_ANSWER_SIZE:
            raise ApiError(
                400,
                f"The request is too large: {num_choices} choices (at most {self._max_waiting}) with up to {size} "
                f"tokens and logprobs (at most {MAX_ANSWER_SIZE}). Ask for fewer prompts or choices at a time.",
            )
        if self._engine.lacks_memory:
            message = f"Inference is out of memory and computes earlier requests again: try again in {RETRY_AFTER_S} s."
            raise ApiError(429, message, retry_after_s=RETRY_AFTER_S)
        num_waiting = self._engine.num_waiting_of(run_id)
        if num_waiting + num_choices > self._max_waiting:
            message = (
                f"{num_waiting} choices{f' of {run_id}' if run_id else ''} already wait, at most "
                f"{self._max_waiting} may (embedded.max_waiting): try again in {RETRY_AFTER_S} s."
            )
            raise ApiError(503, message, retry_after_s=RETRY_AFTER_S)


class _Metrics(Collector):
    """Numbers read from the engine at each request."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield GaugeMetricFamily("prl_requests_running", "Choices that are being generated.", stats.num_running)
        yield GaugeMetricFamily("prl_requests_waiting", "Choices that wait for room.", stats.num_waiting)
        yield CounterMetricFamily("prl_prompt_tokens", "Prompt tokens since the start.", stats.num_prompt_tokens)
        queries, hits = stats.num_prefix_queries, stats.num_prefix_hits
        yield CounterMetricFamily("prl_prefix_cache_queries", "Tokens looked for in the prefix cache.", queries)
        yield CounterMetricFamily("prl_prefix_cache_hits", "Tokens found there, not computed.", hits)
        yield CounterMetricFamily("prl_generated_tokens", "Tokens generated.", stats.num_tokens)
        yield GaugeMetricFamily("prl_adapters_loaded", "Adapters loaded.", len(stats.adapters))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
