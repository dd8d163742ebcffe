"""The HTTP routes of the embedded engine. Checks requests, waits for answers, and returns errors in OpenAI's format.

Collaborators: `Engine` generates, `Text` turns text into ids and back. Keys, body sizes and adapter paths were checked
by the guard before a request comes here; health and whole weights are the front's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError

from prime_rl.inference.embedded.engine import Engine, EngineDead
from prime_rl.inference.embedded.metrics import EngineMetrics
from prime_rl.inference.embedded.protocol import (
    ChatRequest,
    CompletionRequest,
    LoadAdapterRequest,
    Prompt,
    UnloadAdapterRequest,
)
from prime_rl.inference.embedded.request import Job
from prime_rl.inference.embedded.responses import Finished, chat_response, completion_response
from prime_rl.inference.embedded.sampling import SamplingParams
from prime_rl.inference.embedded.text import Text
from prime_rl.inference.errors import ApiError, error_body

# OpenAI's default of /v1/completions.
DEFAULT_MAX_TOKENS = 16
# Longer texts are tokenised beside the event loop.
LONG_TEXT_CHARS = 20_000
# Tokens and logprobs of one answer: it is put together in memory, some 20 bytes each.
MAX_ANSWER_SIZE = 4_000_000
# A full queue moves on within a second or so.
RETRY_AFTER_S = 1


class Api:
    """What the routes do.

    Args:
        model: the name under which the base model is served.
        max_model_len: longest prompt and completion together, in tokens.
        max_waiting: choices that may wait for a place.
    """

    def __init__(
        self, engine: Engine, text: Text, *, model: str, max_model_len: int, max_waiting: int, created: int
    ) -> None:
        self._engine = engine
        self._text = text
        self._model = model
        self._max_model_len = max_model_len
        self._max_waiting = max_waiting
        self._created = created

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        prompts = [await self._prompt_ids(prompt, body) for prompt in body.prompts]
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        params = body.sampling(max_tokens, body.logprobs or 0)
        finished = await self._generate(prompts, params, body, request)
        return _json(
            completion_response(
                self._text,
                body.model or self._model,
                finished,
                logprobs=body.logprobs is not None,
                token_ids=bool(body.return_token_ids),
                skip_special=body.skip_special_tokens,
            )
        )

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        messages = [message.for_template() for message in body.messages]
        prompt = await asyncio.to_thread(self._text.render_chat, messages, body.chat_template_kwargs)
        max_tokens = body.max_completion_tokens or body.max_tokens or self._max_model_len
        params = body.sampling(max_tokens, body.top_logprobs or 0)
        finished = await self._generate([prompt], params, body, request)
        return _json(
            chat_response(
                self._text,
                body.model or self._model,
                finished[0],
                logprobs=bool(body.logprobs),
                token_ids=bool(body.return_token_ids),
                skip_special=body.skip_special_tokens,
            )
        )

    async def models(self) -> Response:
        base = self._card(self._model, root=self._model) | {"max_model_len": self._max_model_len}
        adapters = [
            self._card(name, root=path, parent=self._model) for name, path in self._engine.adapters.loaded().items()
        ]
        return _json({"object": "list", "data": [base, *adapters]})

    async def load_adapter(self, body: LoadAdapterRequest) -> Response:
        if body.lora_name == self._model:
            raise ApiError(400, f"{body.lora_name!r} is the name of the base model.", param="lora_name")
        await asyncio.to_thread(self._engine.adapters.load, body.lora_name, Path(body.lora_path))
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")

    async def unload_adapter(self, body: UnloadAdapterRequest) -> Response:
        self._engine.adapters.unload(body.lora_name)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")

    async def _prompt_ids(self, prompt: Prompt, body: CompletionRequest) -> Sequence[int]:
        if isinstance(prompt, str):
            encode = self._text.encode
            if len(prompt) <= LONG_TEXT_CHARS:
                return encode(prompt, add_special_tokens=body.add_special_tokens)
            return await asyncio.to_thread(encode, prompt, add_special_tokens=body.add_special_tokens)
        if prompt:
            self._check_ids(prompt, "prompt")
        return prompt

    def _check_ids(self, token_ids: Sequence[int], param: str) -> None:
        vocab_size = self._engine.served.vocab_size
        if max(token_ids) >= vocab_size:
            raise ApiError(400, f"Token id {max(token_ids)} is out of vocabulary ({vocab_size})", param=param)

    async def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        body: CompletionRequest | ChatRequest,
        request: Request,
    ) -> list[Finished]:
        rooms = [self._room(len(prompt)) for prompt in prompts]
        adapter = None if body.model in (None, self._model) else body.model
        if params.stop_token_ids:
            self._check_ids(params.stop_token_ids, "stop_token_ids")
        self._check_size(body.n * len(prompts), params)
        jobs: list[Job] = []
        try:
            for prompt, room in zip(prompts, rooms, strict=True):
                max_tokens = min(params.max_tokens, room)
                fitting = replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
                job = self._engine.submit(prompt, fitting, adapter=adapter, num_choices=body.n, seed=body.seed)
                jobs.append(job)
            results = await _unless_disconnected(jobs, request)
        except BaseException:
            for job in jobs:
                self._engine.cancel(job)
            raise
        return [Finished(job.prompt_ids, completions) for job, completions in zip(jobs, results, strict=True)]

    def _check_size(self, num_choices: int, params: SamplingParams) -> None:
        """Raises ApiError: 400 for what is too much at any time, 503 for what is too much now."""
        size = num_choices * min(params.max_tokens, self._max_model_len) * (1 + params.num_top_logprobs)
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

    def _card(self, name: str, *, root: str, parent: str | None = None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "prime-rl",
            "root": root,
            "parent": parent,
        }


async def _unless_disconnected(jobs: Sequence[Job], request: Request) -> list[Any]:
    """Wait for all jobs; raises ApiError when the client goes away first."""
    done = asyncio.gather(*(asyncio.wrap_future(job.future) for job in jobs))
    gone = asyncio.ensure_future(_disconnected(request))
    done.add_done_callback(lambda future: future.cancelled() or future.exception())  # no "never retrieved" warning
    either: set[asyncio.Future[Any]] = {done, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ApiError(400, "The client has closed the connection.")
        return done.result()
    finally:
        gone.cancel()
        if not done.done():
            done.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def build_app(api: Api, metrics: EngineMetrics) -> FastAPI:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.post("/v1/completions")(api.completions)
    app.post("/v1/chat/completions")(api.chat)
    app.get("/v1/models")(api.models)
    app.post("/v1/load_lora_adapter")(api.load_adapter)
    app.post("/v1/unload_lora_adapter")(api.unload_adapter)
    app.get("/metrics")(metrics.response)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(EngineDead, _engine_dead)
    app.add_exception_handler(Exception, _unexpected)
    return app


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    response = _json(error.body(), error.status)
    if error.retry_after_s is not None:
        response.headers["retry-after"] = str(error.retry_after_s)
    return response


def _engine_dead(request: Request, error: Exception) -> Response:
    return _json(error_body(503, str(error)), 503)


def _unexpected(request: Request, error: Exception) -> Response:
    """The traceback goes to the log (the framework raises the error again), not to the client."""
    return _json(error_body(500, f"The server failed on this request: {type(error).__name__}"), 500)


def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    return _json(error_body(400, f"{place}: {first['msg']}" if place else first["msg"], param=place or None), 400)
