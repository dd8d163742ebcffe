"""What the front asks of vLLM: completions, a token, adapters, other weights for all of its workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.bodies import decoded, replay
from prime_rl.inference.errors import NOT_FINITE, ApiError, adapter_refused, check_ranges
from prime_rl.inference.vllm.adapters import AdapterGate
from prime_rl.inference.weight_files import check_weight_file, model_shapes, weights_label
from prime_rl.lora.tensor_files import misfit

if TYPE_CHECKING:
    from prime_rl.inference.vllm.worker import Staged

logger = logging.getLogger(__name__)

# The front has let all requests end: what vLLM may still have is a probe of its health or a client that went away.
PAUSE_TIMEOUT_S = 30.0
# More than one token: of a single one an attention that overflows may show nothing.
PROBE_PROMPT = [0, 1, 2, 3]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LOAD = "/v1/load_lora_adapter"
# What vLLM answers itself.
ENDPOINTS = (COMPLETIONS, CHATS, "/v1/models", "/v1/unload_lora_adapter", "/metrics")


class VllmControl:
    """See the module. `failed`: the weights are in an unknown state, so the server must stop serving.

    Args:
        app: vLLM's application.
        engine: its engine client.
        requests: vLLM's own table of loaded adapters, by name.
    """

    def __init__(
        self,
        config: InferenceConfig,
        app: Any,
        engine: Any,
        requests: dict[str, Any],
        gate: AdapterGate,
        num_tokens: Callable[[], int],
    ) -> None:
        self._app: ASGIApp = app
        self._engine = engine
        self._requests = requests
        self._gate = gate
        self._output_dir = config.output_dir.resolve()
        self._broadcast = config.broadcast
        self._shapes = model_shapes(config.model.name)
        self.adapters = requests.keys
        self.num_tokens = num_tokens
        self.failed = False
        self.endpoints = {**dict.fromkeys(ENDPOINTS, app), COMPLETIONS: self._checked, CHATS: self._checked}
        self.lifespan = lambda _: app.router.lifespan_context(app)

    def alive(self) -> bool:
        """Whether vLLM works, with weights in a known state."""
        return not (self._engine.errored or self.failed)

    async def complete(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of vLLM's /v1/completions to `body`. Raises ApiError, also when the client goes away."""
        check_ranges(body)
        answered: dict[str, Any] | None = msgspec.json.decode(await self._answer(request, COMPLETIONS, body))
        if answered is None:
            raise ApiError(400, "The client has closed the connection.")
        return answered

    async def _checked(self, request: Request) -> ASGIApp:
        """What answers `request`: vLLM, once its sampling parameters are found to be in range. Raises ApiError."""
        check_ranges(await decoded(request, dict[str, Any]))
        body = await request.body()

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app(scope, replay(body, receive), send)

        return answer

    async def load_adapter(self, request: Request, name: str, folder: Path) -> None:
        """Have vLLM load the adapter, and unload it again if its layers do not hold it. Raises ApiError."""
        path = await asyncio.to_thread(self._gate, name, folder)
        await self._answer(request, LOAD, {"lora_name": name, "lora_path": path})
        await self._verify(name)

    async def unload_adapter(self, name: str) -> None:
        """Take `name` out of vLLM's table and free its weights. Raises ApiError 404."""
        if name not in self._requests:
            raise ApiError(404, f"The lora adapter {name!r} cannot be found.", param="lora_name")
        number = self._requests[name].lora_int_id
        del self._requests[name]
        await self._engine.remove_lora(number)

    async def _answer(self, request: Request, path: str, body: Any) -> bytes:
        """What vLLM's application answers to `body` at `path`. Raises ApiError with its message when it refuses."""
        data, sent = msgspec.json.encode(body), list[Message]()
        headers = [(name, value) for name, value in request.scope["headers"] if name != b"content-length"]
        headers.append((b"content-length", str(len(data)).encode()))
        scope = {**request.scope, "path": path, "raw_path": path.encode(), "headers": headers}

        async def hold(message: Message) -> None:
            sent.append(message)

        await self._app(scope, replay(data, request.receive), hold)
        answered = b"".join(message.get("body", b"") for message in sent[1:])
        if (status := sent[0]["status"]) == 200:
            return answered
        error = msgspec.json.decode(answered)["error"]
        raise ApiError(status, error["message"], param=error.get("param"))

    async def generate_one(self) -> None:
        """Generate one token with the base model."""
        await self._probe(None)

    async def _probe(self, adapter: Any) -> float:
        """Generate one token with `adapter` (of vLLM's table; None: the base model), and return its logprob."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=1)
        prompt, request_id = {"prompt_token_ids": PROBE_PROMPT}, f"probe-{uuid.uuid4()}"
        async for answer in self._engine.generate(prompt, params, request_id, lora_request=adapter):
            (choice,) = answer.outputs
        return float(choice.logprobs[0][choice.token_ids[0]].logprob)

    async def _verify(self, name: str) -> None:
        """Make sure that its layers hold what the adapter's file holds, and that its logits are finite."""
        request = self._requests[name]
        found = await self._workers("prl_adapter_size", request.lora_int_id)
        try:
            self._gate.check_sizes(name, found)
        except ValueError as error:
            await self.unload_adapter(name)
            logger.error("adapter %s has no effect in vLLM: %s", name, error)
            raise ApiError(
                400, f"vLLM does not serve adapter {name!r} correctly: {error}.", param="lora_name"
            ) from error
        if not math.isfinite(await self._probe(request)):
            await self.unload_adapter(name)
            raise adapter_refused(name, ValueError(NOT_FINITE))

    async def load_weights(self, folder: Path) -> None:
        """Give all workers the new weights while nothing generates; none takes them over before all have them.

        Raises ApiError. A failure of the takeover itself sets `failed`.
        """
        source = await self._source(folder)
        async with self._paused():
            await self._stage(*source)
            await self._apply()

    async def _source(self, folder: Path) -> tuple[Any, ...]:
        """What the workers get: the folder, or the address of the trainer that published it."""
        broadcast = self._broadcast
        if broadcast.type == "filesystem":
            await asyncio.to_thread(check_weight_file, folder, self._shapes)
            return (str(folder),)
        label = weights_label(self._output_dir, folder)
        parallel = self._engine.vllm_config.parallel_config
        num_workers = parallel.world_size * parallel.data_parallel_size
        return (broadcast.host, broadcast.port, label, uuid.uuid4().hex, num_workers, broadcast.timeout_s)

    async def load_base(self) -> None:
        """Have all workers reload the weights of the start, while nothing generates; a failure sets `failed`."""
        async with self._paused():
            await self._apply()

    async def _stage(self, *source: Any) -> None:
        answers = await self._workers("prl_stage_weights", *source)
        if problem := next((problem for each in answers for problem in map(self._problem, each) if problem), None):
            await self._workers("prl_drop_weights")
            raise ApiError(400, f"The weights were not changed: {problem}", param="weight_dir")

    def _problem(self, staged: Staged) -> str | None:
        if isinstance(staged, str):
            return staged
        return misfit({name: tuple(shape) for name, shape in staged.items()}, self._shapes)

    async def _apply(self) -> None:
        try:
            await self._workers("prl_apply_weights")
        except BaseException:
            self.failed = True
            raise

    async def _workers(self, method: str, *args: Any) -> list[list[Any]]:
        """What each worker of each data-parallel engine answers.

        vLLM's own `collective_rpc` asks all engines too, but returns the answers of the first engine only.
        """
        core = self._engine.engine_core
        answers: list[list[Any]] = await core.call_utility_all_async("collective_rpc", method, None, args, None)
        return answers

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Nothing runs inside, and what was computed before is forgotten: vLLM's prefix cache too."""
        try:
            await self._come_to_rest()
            yield
        finally:
            await self._engine.resume_generation()

    async def _come_to_rest(self) -> None:
        try:
            async with asyncio.timeout(PAUSE_TIMEOUT_S):
                await self._engine.pause_generation(mode="wait", clear_cache=True)
        except TimeoutError as error:
            message = f"vLLM did not come to rest in {PAUSE_TIMEOUT_S:g} s: the weights stay as they are."
            raise ApiError(503, message) from error
