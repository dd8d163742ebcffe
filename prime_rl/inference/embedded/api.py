"""What the front asks of the embedded engine, and the routes that this engine answers itself.

Collaborators: `Engine` generates, `Text` turns text into ids and back, `protocol` checks requests and writes answers.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.bodies import decoded, json_response
from prime_rl.inference.embedded.batch import Job
from prime_rl.inference.embedded.engine import Engine
from prime_rl.inference.embedded.protocol import (
    ChatRequest,
    CompletionRequest,
    Generation,
    chat_response,
    completion_response,
    parsed,
)
from prime_rl.inference.embedded.sampling import SamplingParams
from prime_rl.inference.embedded.text import Text
from prime_rl.inference.errors import ApiError
from prime_rl.inference.weight_files import weights_label

# Longer texts are tokenised beside the event loop.
LONG_TEXT_CHARS = 20_000
# Tokens and logprobs of one answer: it is put together in memory, some 20 bytes each.
MAX_ANSWER_SIZE = 4_000_000
# A full queue moves on within a second or so.
RETRY_AFTER_S = 1
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PROBE_PROMPT = (0,)
_PROBE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class _UnloadRequest(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None


class Api:
    """An `EngineControl`.

    Args:
        max_model_len: longest prompt and completion together, in tokens.
    """

    lifespan = None

    def __init__(self, engine: Engine, text: Text, config: InferenceConfig, *, max_model_len: int) -> None:
        self._engine = engine
        self._text = text
        self._config = config
        self._model = config.model.name
        self._max_model_len = max_model_len
        self._max_waiting = config.embedded.max_waiting
        self._created = int(time.time())
        self._registry = CollectorRegistry()
        self._registry.register(_Metrics(engine))
        self.endpoints = {
            "/v1/completions": self._completions,
            "/v1/chat/completions": self._chat,
            "/v1/models": self._models,
            "/v1/unload_lora_adapter": self._unload,
            "/metrics": self._metrics,
        }

    def adapters(self) -> Collection[str]:
        return self._engine.adapters.loaded().keys()

    def num_tokens(self) -> int:
        return self._engine.stats().num_tokens

    async def generate_one(self) -> None:
        job = self._engine.submit(PROBE_PROMPT, _PROBE)
        try:
            await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            self._engine.cancel(job)
            raise

    async def load_adapter(self, request: Request, name: str, folder: Path) -> None:
        if name == self._model:
            raise ApiError(400, f"{name!r} is the name of the base model.", param="lora_name")
        await asyncio.to_thread(self._engine.adapters.load, name, folder)

    async def load_weights(self, folder: Path) -> None:
        """The front has let every request end, and the engine keeps no keys and values of those: nothing that was
        computed with other weights is left."""
        weights, broadcast = self._engine.served.weights, self._config.broadcast
        if broadcast.type == "filesystem":
            tensors = await asyncio.to_thread(weights.read, folder)
        else:
            label = weights_label(self._config.output_dir.resolve(), folder)
            tensors = await asyncio.to_thread(weights.fetch, broadcast, label)
        await self._between_steps(lambda: weights.apply(tensors))

    async def load_base(self) -> None:
        await self._between_steps(self._engine.served.weights.apply_base)

    async def _between_steps(self, action: Callable[[], None]) -> None:
        await asyncio.wrap_future(self._engine.run_between_steps(action))

    async def complete(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        asked = parsed(body, CompletionRequest)
        prompts = [await self._prompt_ids(prompt, asked) for prompt in asked.prompt]
        jobs = await self._generate(prompts, asked, request)
        return completion_response(self._text, asked.model or self._model, asked, jobs)

    async def _completions(self, request: Request) -> Response:
        return json_response(await self.complete(request, await decoded(request, dict[str, Any])))

    async def _chat(self, request: Request) -> Response:
        asked = parsed(await decoded(request, dict[str, Any]), ChatRequest)
        messages = [message.for_template() for message in asked.messages]
        prompt = await asyncio.to_thread(self._text.render_chat, messages, asked.chat_template_kwargs)
        [job] = await self._generate([prompt], asked, request)
        return json_response(chat_response(self._text, asked.model or self._model, asked, job))

    async def _models(self, request: Request) -> Response:
        base = self._card(self._model, self._model, None) | {"max_model_len": self._max_model_len}
        loaded = self._engine.adapters.loaded()
        adapters = [self._card(name, path, self._model) for name, path in loaded.items()]
        return json_response({"object": "list", "data": [base, *adapters]})

    def _card(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "prime-rl"}
        return {**card, "root": root, "parent": parent}

    async def _unload(self, request: Request) -> Response:
        name = (await decoded(request, _UnloadRequest)).lora_name
        self._engine.adapters.unload(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=METRICS_TYPE)

    async def _prompt_ids(self, prompt: Any, asked: CompletionRequest) -> Sequence[int]:
        if isinstance(prompt, list):
            self._check_ids(prompt, "prompt")
            return prompt
        if len(prompt) <= LONG_TEXT_CHARS:
            return self._text.encode(prompt, add_special_tokens=asked.add_special_tokens)
        return await asyncio.to_thread(self._text.encode, prompt, add_special_tokens=asked.add_special_tokens)

    def _check_ids(self, token_ids: Sequence[int], param: str) -> None:
        vocab_size = self._engine.served.vocab_size
        if (largest := max(token_ids, default=0)) >= vocab_size:
            raise ApiError(400, f"Token id {largest} is out of vocabulary ({vocab_size})", param=param)

    async def _generate(self, prompts: Sequence[Sequence[int]], asked: Generation, request: Request) -> list[Job]:
        """The finished jobs of all prompts."""
        rooms = [self._room(len(prompt)) for prompt in prompts]
        self._check_ids(asked.stop_token_ids, "stop_token_ids")
        self._check_size(asked.n * len(prompts), asked)
        adapter = None if asked.model in (None, self._model) else asked.model
        jobs: list[Job] = []
        try:
            for prompt, room in zip(prompts, rooms, strict=True):
                params = copy.copy(asked)
                params.max_tokens = min(asked.max_tokens, room)
                job = self._engine.submit(prompt, params, adapter=adapter, num_choices=asked.n, seed=asked.seed)
                jobs.append(job)
            await _unless_disconnected(jobs, request)
        except BaseException:
            for job in jobs:
                self._engine.cancel(job)
            raise
        return jobs

    def _check_size(self, num_choices: int, params: SamplingParams) -> None:
        """Raises ApiError: 400 for what is too much at any time, 503 for what is too much now."""
        size = num_choices * min(params.max_tokens, self._max_model_len) * (1 + params.top_logprobs)
        if num_choices > self._max_waiting or size > MAX_ANSWER_SIZE:
            raise ApiError(
                400,
                f"The request is too large: {num_choices} choices (at most {self._max_waiting}) with up to {size} "
                f"tokens and logprobs (at most {MAX_ANSWER_SIZE}). Ask for fewer prompts or choices at a time.",
            )
        num_waiting = self._engine.stats().num_waiting
        if num_waiting + num_choices > self._max_waiting:
            message = f"{num_waiting} choices wait already, {self._max_waiting} may."
            raise ApiError(503, message, retry_after_s=RETRY_AFTER_S)

    def _room(self, num_prompt: int) -> int:
        """How many tokens may follow the prompt; as in vLLM, a larger max_tokens is cut to it."""
        if num_prompt == 0:
            raise ApiError(400, "The prompt is empty.", param="prompt")
        if num_prompt >= self._max_model_len:
            raise ApiError(
                400,
                f"The prompt has {num_prompt} tokens: with one more it would exceed the {self._max_model_len} tokens "
                "of max_model_len.",
                param="prompt",
            )
        return self._max_model_len - num_prompt


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


async def _unless_disconnected(jobs: Sequence[Job], request: Request) -> None:
    """Wait for all jobs; raises ApiError when the client goes away first."""
    done = asyncio.gather(*(asyncio.wrap_future(job.future) for job in jobs))
    done.add_done_callback(lambda future: future.cancelled() or future.exception())  # no "never retrieved" warning
    gone = asyncio.ensure_future(_disconnected(request))
    either: set[asyncio.Future[Any]] = {done, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ApiError(400, "The client has closed the connection.")
        done.result()
    finally:
        gone.cancel()
        done.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
