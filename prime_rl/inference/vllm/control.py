"""vLLM, as the gateway asks for it: completions, a token, adapters, other weights for all of its workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

from prime_rl.configs.inference import InferenceConfig
from prime_rl.contract.files import UNDECODABLE
from prime_rl.inference.guard import (
    NOT_FINITE,
    ApiError,
    adapter_refused,
    check_ranges,
    check_weight_file,
    decoded,
    error_response,
    meta_model,
    model_shapes,
    num_chars,
    prompts_of,
    replay,
    run_of,
    weights_label,
)
from prime_rl.inference.serve import Snapshot
from prime_rl.lora.adapter_state import DIVERGED, AdapterConfig, mismatch, served_parts
from prime_rl.lora.linear import AdapterRouting, MultiLoRALinear, apply_lora_to_model

logger = logging.getLogger(__name__)

# The gateway has let all requests end: what vLLM may still have is a probe of its health or a client that went away.
PAUSE_TIMEOUT_S = 30.0
# More than one token: of a single one an attention that overflows may show nothing.
PROBE_PROMPT = [0, 1, 2, 3]
_RUNNING, _WAITING, _TOKENS = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total"
_KV_USE = "vllm:kv_cache_usage_perc"  # a share, not a percentage
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
    ) -> None:
        self._app = ToldAsOurs(app)
        self._engine = engine
        self._requests = requests
        self._gate = gate
        self._output_dir = config.output_dir.resolve()
        self._broadcast = config.broadcast
        self._shapes = model_shapes(config.model.name)
        self._order = FairOrder()
        self.adapters = requests.keys
        self.failed = False
        self.endpoints: dict[str, Callable[..., Any]] = {
            **dict.fromkeys(ENDPOINTS, self._app),
            COMPLETIONS: self._checked,
            CHATS: self._checked,
        }
        self.lifespan = lambda _: app.router.lifespan_context(app)

    def alive(self) -> bool:
        """True when vLLM works, with weights in a known state."""
        return not (self._engine.errored or self.failed)

    def stats(self) -> Snapshot:
        """The figures of this moment, which vLLM measures for its /metrics, in this process's registry."""
        from prometheus_client import REGISTRY

        # The values of each data-parallel engine.
        values: dict[str, list[float]] = {name: [] for name in (_RUNNING, _WAITING, _TOKENS, _KV_USE)}
        for metric in REGISTRY.restricted_registry(values).collect():
            for sample in metric.samples:
                if sample.name in values:
                    values[sample.name].append(sample.value)
        return Snapshot(
            adapters=sorted(self._requests),
            num_running=int(sum(values[_RUNNING])),
            num_waiting=int(sum(values[_WAITING])),
            num_tokens=int(sum(values[_TOKENS])),
            kv_use=min(sum(values[_KV_USE]) / max(len(values[_KV_USE]), 1), 1.0),
        )

    async def complete(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of vLLM's /v1/completions to `body`. Raises ApiError, also when the client goes away."""
        check_ranges(body)
        with self._order.place(run_of(request), num_places(body)) as place:
            asked = {**body, "priority": place.priority}
            answered: dict[str, Any] | None = msgspec.json.decode(await self._answer(request, COMPLETIONS, asked))
            if answered is None:
                raise ApiError(400, "The client has closed the connection.")
            place.is_served = True
        return answered

    async def _checked(self, request: Request) -> ASGIApp:
        """Return vLLM's answer to `request`, once its sampling parameters are found to be in range. Raises ApiError."""
        body = await decoded(request, dict[str, Any])
        check_ranges(body)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            with self._order.place(run_of(request), num_places(body)) as place:
                is_lost = False

                async def watch() -> Message:
                    nonlocal is_lost
                    message = await receive()
                    is_lost |= message["type"] == "http.disconnect"
                    return message

                async def tell(message: Message) -> None:
                    nonlocal is_lost
                    is_lost |= message.get("status", 200) >= 400
                    is_whole = message["type"] == "http.response.body" and not message.get("more_body")
                    place.is_served = is_whole and not is_lost
                    await send(message)

                asked = msgspec.json.encode({**body, "priority": place.priority})
                await self._app(_with_length(scope, asked), replay(asked, watch), tell)

        return answer

    async def load_adapter(self, request: Request, name: str, folder: Path) -> None:
        """Have vLLM load the adapter, and unload it again if its layers do not hold it, or its logits are not finite.

        Raises ApiError.
        """
        path = await asyncio.to_thread(self._gate, name, folder)
        await self._answer(request, LOAD, {"lora_name": name, "lora_path": path})
        loaded = self._requests[name]
        found = await self._workers("prl_adapter_size", loaded.lora_int_id)
        try:
            self._gate.check_sizes(name, found)
        except ValueError as error:
            await self.unload_adapter(name)
            logger.error("adapter %s has no effect in vLLM: %s", name, error)
            message = f"vLLM does not serve adapter {name!r} correctly: {error}."
            raise ApiError(400, message, param="lora_name") from error
        if not math.isfinite(await self.generate_one(loaded)):
            await self.unload_adapter(name)
            raise adapter_refused(name, ValueError(NOT_FINITE))

    async def unload_adapter(self, name: str) -> None:
        """Take `name` out of vLLM's table and free its weights. Raises ApiError 404."""
        if name not in self._requests:
            raise ApiError(404, f"The lora adapter {name!r} cannot be found.", param="lora_name")
        number = self._requests[name].lora_int_id
        del self._requests[name]
        await self._engine.remove_lora(number)

    async def _answer(self, request: Request, path: str, body: Any) -> bytes:
        """Return what vLLM's application answers to `body` at `path`. Raises ApiError with its reason to refuse."""
        data, sent = msgspec.json.encode(body), list[Message]()
        scope = {**_with_length(request.scope, data), "path": path, "raw_path": path.encode()}

        async def hold(message: Message) -> None:
            sent.append(message)

        await self._app(scope, replay(data, request.receive), hold)
        answered = b"".join(message.get("body", b"") for message in sent[1:])
        if (status := sent[0]["status"]) == 200:
            return answered
        raise _error_of(status, answered)

    async def generate_one(self, adapter: Any = None) -> float:
        """Generate one token with `adapter` (of vLLM's table; None: the base model), and return its logprob."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=1)
        prompt, request_id = {"prompt_token_ids": PROBE_PROMPT}, f"probe-{uuid.uuid4()}"
        async for answer in self._engine.generate(prompt, params, request_id, lora_request=adapter):
            (choice,) = answer.outputs
        return float(choice.logprobs[0][choice.token_ids[0]].logprob)

    async def load_weights(self, folder: Path | None) -> None:
        """Give all workers the new weights while nothing generates; none takes them over before all have them.

        None: all workers reload the weights of the start. Raises ApiError. A failure of the takeover itself sets
        `failed`.
        """
        source = await self._source(folder) if folder else None
        async with self._paused():
            if source:
                await self._stage(*source)
            try:
                await self._workers("prl_apply_weights")
            except BaseException:
                self.failed = True
                raise

    async def _source(self, folder: Path) -> tuple[Any, ...]:
        """The source that the workers get: the folder, or the address of the trainer that published it."""
        broadcast = self._broadcast
        if broadcast.type == "filesystem":
            await asyncio.to_thread(check_weight_file, folder, self._shapes)
            return (str(folder),)
        label = weights_label(self._output_dir, folder)
        parallel = self._engine.vllm_config.parallel_config
        num_workers = parallel.world_size * parallel.data_parallel_size
        return (broadcast.host, broadcast.port, label, uuid.uuid4().hex, num_workers, broadcast.timeout_s)

    async def _stage(self, *source: Any) -> None:
        staged = [each for workers in await self._workers("prl_stage_weights", *source) for each in workers]
        problems = (
            each if isinstance(each, str) else mismatch({name: tuple(each[name]) for name in each}, self._shapes)
            for each in staged
        )
        if problem := next(filter(None, problems), None):
            await self._workers("prl_drop_weights")
            status = 422 if problem.endswith(DIVERGED) else 400
            raise ApiError(status, f"The weights were not changed: {problem}", param="weight_dir")

    async def _workers(self, method: str, *args: Any) -> list[list[Any]]:
        """Call all workers of all data-parallel engines; returns the answer of each.

        vLLM's own `collective_rpc` asks all engines too, but returns the answers of the first engine only.
        """
        core = self._engine.engine_core
        answers: list[list[Any]] = await core.call_utility_all_async("collective_rpc", method, None, args, None)
        return answers

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Nothing runs inside, and what was computed before is forgotten: vLLM's prefix cache too."""
        try:
            try:
                async with asyncio.timeout(PAUSE_TIMEOUT_S):
                    await self._engine.pause_generation(mode="wait", clear_cache=True)
            except TimeoutError as error:
                message = f"vLLM did not come to rest in {PAUSE_TIMEOUT_S:g} s: the weights stay as they are."
                raise ApiError(503, message) from error
            yield
        finally:
            await self._engine.resume_generation()


def _with_length(scope: Scope, body: bytes) -> Scope:
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}


# About as much work to read as a choice is to generate.
PROMPT_TOKENS, PROMPT_CHARS = 64, 256


def num_places(body: Mapping[str, Any]) -> int:
    """Return how many choices a request asks for, and its prompts in as many; vLLM takes 200.0 as 200."""
    many, n = prompts_of(body), body.get("n")
    num_tokens = sum(len(each) for each in many if isinstance(each, list))
    texts = [each for each in many if isinstance(each, str)]
    chars = num_chars([texts, body.get("messages")])
    return (
        max(1, len(many)) * int(n if isinstance(n, int | float) else 1)
        + num_tokens // PROMPT_TOKENS
        + chars // PROMPT_CHARS
    )


@dataclass
class Place:
    """Of a request in `FairOrder`; the lower `priority` is served first."""

    priority: int
    is_served: bool = False


class FairOrder:
    """Priorities for vLLM by which runs get places in turn, however many one asks for (self-clocked fair queueing).

    A request ends, in places, behind those of its own run, and behind what was served last. The lowest end goes first.
    """

    def __init__(self) -> None:
        self._served = 0
        self._ends: dict[str, int] = {}

    @contextlib.contextmanager
    def place(self, run_id: str, num_places: int) -> Iterator[Place]:
        """Hold a place for a request; one that is not served in the end takes none from its run."""
        end = self._ends[run_id] = max(self._served, self._ends.get(run_id, 0)) + num_places
        place = Place(end)
        try:
            yield place
        finally:
            if place.is_served:
                self._served = max(self._served, end)
            last = self._ends.get(run_id, 0) - (0 if place.is_served else num_places)
            if last > self._served:
                self._ends[run_id] = last
            else:
                self._ends.pop(run_id, None)


def _error_of(status: int, body: bytes, model: object = None) -> ApiError:
    """The error for a refusal of vLLM's, which has many lines at times, and not always the form of its own."""
    try:
        error = msgspec.json.decode(body, type=dict[str, Any])["error"]
        if str(error["message"]).startswith("Out of range float values"):  # of log-probabilities, with status 400
            return ApiError(422, f"{model or 'the base model'}: {NOT_FINITE}")
        return ApiError(status, str(error["message"]), param=error.get("param"))
    except (*UNDECODABLE, KeyError, TypeError):
        return ApiError(status, body.decode(errors="replace") or "vLLM refuses this request without a reason.")


class ToldAsOurs:
    """An application whose refusals have the form of ours. What it does not refuse is sent as it comes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        refusal: list[Message] = []

        async def tell(message: Message) -> None:
            if not refusal and message.get("status", 0) < 400:
                await send(message)
                return
            refusal.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                body = b"".join(each.get("body", b"") for each in refusal)
                model = scope.get("state", {}).get("model")
                await error_response(_error_of(refusal[0]["status"], body, model))(scope, receive, send)

        await self._app(scope, receive, tell)


# Sum of squares of all A and of all scaled B.
AdapterSize = tuple[float, float]
# Rounding to bfloat16 changes the sum of many squares by far less; a layer that is missing by more.
SIZE_TOLERANCE = 5e-4


def _size(tensors: Mapping[str, Tensor], config: AdapterConfig) -> AdapterSize:
    def squares(kind: str) -> float:
        return math.fsum(float(t.double().square().sum()) for key, t in tensors.items() if f".{kind}." in key)

    return squares("lora_A"), squares("lora_B") * (config.alpha / config.rank) ** 2


def _fits(found: float, expected: float, *, is_whole: bool) -> bool:
    if is_whole:
        return math.isclose(found, expected, rel_tol=SIZE_TOLERANCE)
    # vLLM decides how layers are cut over several workers, so only check that each holds something where it should.
    return math.isfinite(found) and (found > 0) == (expected > 0)


class AdapterGate:
    """The check that vLLM leaves out: that every tensor of an adapter belongs to the model.

    vLLM serves an adapter whose names match nothing as the base model. That is refused here, before vLLM sees the
    request, with the words of the embedded engine. And after it has loaded an adapter, what its layers hold is measured
    against the file: an adapter that it ignored or cut is not served.

    Call it with name and folder of an adapter; it returns the path that vLLM is to load, or raises ApiError.
    """

    def __init__(self, config: InferenceConfig) -> None:
        self._base = config.model.name
        self._num_loads: Counter[str] = Counter()
        self._sizes: dict[str, AdapterSize] = {}
        self._layers: dict[str, MultiLoRALinear] = {}
        if config.model.lora is not None:
            lora, model = config.model.lora, meta_model(config.model.name)
            self._layers = apply_lora_to_model(model, lora.rank, 1, lora.target_modules, AdapterRouting(1))

    def __call__(self, name: str, folder: Path) -> str:
        """Check the adapter's names, shapes and numbers, and keep its size for `check_sizes`."""
        try:
            parts = served_parts(self._layers, folder, base=self._base)
            sizes_A, sizes_B = zip(*(_size(part.tensors, part.config) for part in parts), strict=True)
        except (ValueError, OSError) as error:
            raise adapter_refused(name, error) from error
        self._sizes[name] = math.fsum(sizes_A), math.fsum(sizes_B)
        # The same folder, spelled differently every time a name is loaded again: vLLM's prefix cache identifies an
        # adapter by name and path. A run that was rolled back publishes other weights under a version that was served
        # before, and must not meet the keys and values of those.
        spelling = str(folder) + "/." * self._num_loads[name]
        self._num_loads[name] += 1
        return spelling

    def check_sizes(self, name: str, found: Sequence[Sequence[AdapterSize | None]]) -> None:
        """Raises ValueError unless vLLM's layers, on each worker of each engine, hold what the adapter's file holds."""
        expected = self._sizes.pop(name)
        for workers in found:
            for size in workers:
                if size is None or not all(map(partial(_fits, is_whole=len(workers) == 1), size, expected)):
                    raise ValueError(f"its layers hold {size}, the file holds {expected}")
