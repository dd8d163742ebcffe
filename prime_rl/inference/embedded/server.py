"""Puts the embedded engine together and serves it, with the routes that it answers itself.

Called by `prime_rl.inference.server`. `Engine` generates, `Text` turns text into ids and back, `protocol` checks
requests and writes answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.batch import Job
from prime_rl.inference.embedded.engine import Engine
from prime_rl.inference.embedded.model import Served, load_model
from prime_rl.inference.embedded.protocol import (
    ChatRequest,
    CompletionRequest,
    Generation,
    Text,
    chat_events,
    parsed,
    response,
)
from prime_rl.inference.embedded.sampling import SamplingParams
from prime_rl.inference.errors import ApiError, StartError
from prime_rl.inference.front import serve_engine
from prime_rl.inference.guard import Room, decoded, json_response, run_of
from prime_rl.inference.serve import ServerContext
from prime_rl.inference.sharing import Lanes
from prime_rl.inference.weight_files import max_model_len

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
# A full queue moves on within a second or so.
RETRY_AFTER_S = 1
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

        The front has let every request end, and the engine keeps no keys and values of those: nothing that was computed
        with other weights is left.
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
        self._check_size(asked.n * len(prompts), asked, run_id)
        adapter = None if asked.model in (None, self._model) else asked.model
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
        yield CounterMetricFamily("prl_generated_tokens", "Tokens generated.", stats.num_tokens)
        yield GaugeMetricFamily("prl_adapters_loaded", "Adapters loaded.", len(stats.adapters))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
