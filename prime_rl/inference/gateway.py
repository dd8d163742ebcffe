"""The server's application, the same for both engines: its routes, whole weights, and a tenant's share of the adapters.

A request goes through `Guard`, then to one of the routes: those below, or one that the engine answers itself. Whole
weights change while nothing generates: requests under way end first, new ones wait, so each is answered by one set of
weights, which its answer names in the header `x-weights`. Adapters belong to the base model: while one is loaded the
weights stay, and while other weights are served no adapter is loaded. A run holds no more adapters than its share, and
a chat has a slot of its own, so that no chat takes the room of a run. What a run learns from is loaded beside its
share, where the slots of runs are free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from prime_rl.configs.inference import InferenceConfig
from prime_rl.contract.layout import LayoutError, OutputDir, RunDir, stable_marker
from prime_rl.contract.notes import Item, WorkNote
from prime_rl.contract.served import (
    BASE_WEIGHTS,
    CHAT_PREFIX,
    LOGPROBS_HEADER,
    MAX_TEACHER_ADAPTERS,
    NUM_CHAT_ADAPTERS,
    RUN_HEADER,
    TEACHER_PREFIX,
    WEIGHTS_HEADER,
    is_chat,
    is_teacher,
    kept_name,
    parse_adapter_name,
    served_run,
)
from prime_rl.contract.status import RunStatus, TrainerStatus, read_status
from prime_rl.inference.guard import (
    ApiError,
    GenerateRequest,
    Guard,
    Room,
    Wanted,
    confined_adapter,
    confined_weights,
    decoded,
    error_response,
    json_response,
    replay,
    weights_label,
)
from prime_rl.inference.serve import ServerContext, Snapshot, serve
from prime_rl.inference.sharing import AdapterUsers, Asked, Lanes, Outcome, ReadWriteLock, StillInUse, Turns

logger = logging.getLogger(__name__)

# How long requests under way may hold up new weights. Shorter than what a client waits for an answer.
DRAIN_S = 60.0
# A run that trains keeps its adapters for minutes.
FULL_RETRY_S = 10
GENERATING = frozenset({"/v1/completions", "/v1/chat/completions", "/inference/v1/generate"})
READING = frozenset({"/health", "/metrics", "/v1/models"})
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/-]{0,127}")


class EngineControl(Protocol):
    """The engine, as the gateway needs it. `request` is what is answered: it shows when the client goes away."""

    @property
    def endpoints(self) -> Mapping[str, Callable[..., Any]]:
        """The routes that the engine answers itself, each a function of a request or an ASGI application."""

    @property
    def lifespan(self) -> Lifespan[Any] | None:
        """The context that must be around the server."""

    def alive(self) -> bool:
        """True when it still works: one that has failed answers nothing more, and its server ends."""

    def adapters(self) -> Collection[str]:
        """Names of the adapters that are loaded."""

    def stats(self) -> Snapshot:
        """The figures of this moment."""

    async def complete(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of /v1/completions to `body`. Raises ApiError."""

    async def load_adapter(self, request: Request, name: str, folder: Path) -> None:
        """Load the adapter in `folder` (confined), and make sure that it answers under its name, which no other has.

        One at a time. Raises ApiError, and the adapter is not loaded, when it cannot be.
        """

    async def unload_adapter(self, name: str) -> None:
        """Forget `name`; requests that use it may end. Raises ApiError 404."""

    async def generate_one(self) -> object:
        """Generate one token with the base model. Raises when that fails."""

    async def load_weights(self, folder: Path | None) -> None:
        """Take over the weights of `folder` (confined, complete), and forget what was computed with others.

        None: the weights that the server was started with. Nothing generates meanwhile. Raises ApiError; then the
        weights of before are in force.
        """


class _UpdateRequest(msgspec.Struct, forbid_unknown_fields=True):
    weight_dir: str


class _LoadRequest(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str


def build_app(
    engine: EngineControl,
    config: InferenceConfig,
    *,
    room: Room | None = None,
    api_key: str | None = None,
    drain_s: float = DRAIN_S,
) -> Starlette:
    """The application that a server serves; `api_key` None: no key is required; `room` None: texts of any length."""
    gateway = Gateway(engine, config, drain_s)
    endpoints = {**engine.endpoints, **gateway.endpoints}
    generating = [Middleware(_in_turn, gateway=gateway, room=room)]
    guard = Middleware(Guard, api_key=api_key, hosts=config.allowed_hosts)
    app = Starlette(
        routes=[
            Route(
                path,
                endpoint,
                methods=["GET" if path in READING else "POST"],
                middleware=generating if path in GENERATING else None,
            )
            for path, endpoint in endpoints.items()
        ],
        middleware=[Middleware(_tells_logprobs, mode=config.logprobs_mode), guard],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _failed),
        lifespan=engine.lifespan,
    )
    app.router.redirect_slashes = False
    app.state.tick = gateway.turns.tick
    return app


async def serve_engine(
    engine: EngineControl, context: ServerContext, room: Room, *, abort: Callable[[], None] = lambda: None
) -> None:
    """Serve the application of `engine` until a stop is asked for; `abort` is as in `serve`. Raises StartError."""
    app = build_app(engine, context.config, room=room, api_key=context.api_key)
    await serve(app, context, alive=engine.alive, stats=engine.stats, abort=abort, tick=app.state.tick)


class Gateway:
    """See the module."""

    def __init__(self, engine: EngineControl, config: InferenceConfig, drain_s: float) -> None:
        self._engine = engine
        self._config = config
        self._output_dir = config.output_dir
        self._drain_s = drain_s
        self._health = HealthProbe(engine)
        self._loads = Lanes()
        self._users = AdapterUsers(engine.adapters)
        self.weights_lock = ReadWriteLock()
        note = WorkNote(OutputDir(config.output_dir).replica_work(config.replica))
        self.turns = Turns(note, engine.alive, self._health.check)
        self.weights = BASE_WEIGHTS
        self.endpoints: dict[str, Callable[..., Any]] = {
            "/health": self._prove,
            "/inference/v1/generate": self._generate,
            "/v1/load_lora_adapter": self._load,
            "/update_weights": self._update,
            "/reload_weights": self._reload,
        }

    async def _prove(self, request: Request) -> Response:
        await self._health.check()
        return json_response({"weights": self.weights})

    async def _generate(self, request: Request) -> Response:
        asked = await decoded(request, GenerateRequest)
        return json_response(asked.answer(await self._engine.complete(request, asked.completion())))

    async def _load(self, request: Request) -> Response:
        asked = await decoded(request, _LoadRequest)
        name = asked.lora_name
        if not _ADAPTER_NAME.fullmatch(name):
            message = "lora_name must be 1 to 128 of letters, digits and '._@/-', the first a letter or digit."
            raise ApiError(400, message, param="lora_name")
        await self._load_adapter(request, name, asked.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _load_adapter(self, request: Request, name: str, path: str) -> None:
        folder = await asyncio.to_thread(confined_adapter, self._output_dir, path)
        _check_owner(name, OutputDir(self._output_dir.resolve()), folder)
        # A large file takes long to read and to check: nothing else waits for that.
        async with self.turns.work(Item(served_run(name), f"loaded {name}")), self._loads.turn(served_run(name)):
            with await self.weights_lock.enter():
                self._check_room(name)
                await self._make_room(name)
                await self._users.make_room(name, self._config.max_loras)
                await self._engine.load_adapter(request, name, folder)
                # Nothing would unload it: its client has gone, and may have unloaded the name before it was there.
                if await request.is_disconnected():
                    await self._engine.unload_adapter(name)
                    logger.info("unloaded %s again: the client that asked for it has gone", name)
                    raise ApiError(400, "The client has closed the connection.")

    async def find(self, request: Request, model: Any) -> None:
        """Load the version `model` when it is kept served and was unloaded, by a restart or because it gave way.

        Raises ApiError: 404 that says what to do for a run or a version that is not served, 503 while no slot is free.
        """
        name = model if isinstance(model, str) else ""
        run_id = served_run(name) or name
        if name in self._engine.adapters() or is_teacher(name) or not self._known(run_id):
            return
        run = OutputDir(self._output_dir).run(run_id)
        kept, trainer = await asyncio.to_thread(kept_name, run), await asyncio.to_thread(self._trainer)
        trains = trainer is not None and run_id in trainer.runs
        if kept is None or name != kept or trains:
            loaded = [each for each in self._engine.adapters() if served_run(each) == run_id and not is_teacher(each)]
            raise ApiError(404, _not_served(run, name, loaded or [kept] * (kept is not None), trains), param="model")
        try:
            await self._load_adapter(request, name, str(_published(run, name)))
        except ApiError as error:
            if name not in self._engine.adapters():  # else another request had the same
                message = f"{name} is not loaded now: {error.message}"
                raise ApiError(503, message, param="model", retry_after_s=FULL_RETRY_S) from error

    async def _make_room(self, name: str) -> None:
        """Where all slots are taken, unload an adapter of a run that does not train for one that does.

        For a version of such a run also a teacher of one that would have more than its share. Raises ApiError when
        nothing gives way: beyond the slots vLLM would drop another.
        """
        loaded = [each for each in self._engine.adapters() if not is_chat(each)]
        if is_chat(name) or len(loaded) < self._config.max_run_loras:
            return
        trainer = await asyncio.to_thread(self._trainer)
        training = trainer.runs if trainer else {}
        others = [each for each in loaded if served_run(each) not in training]
        if not is_teacher(name):
            held, most = Counter(map(served_run, [*loaded, name])), self._config.max_versions_per_run
            others += [each for each in loaded if is_teacher(each) and held[served_run(each)] > most]
        if served_run(name) in training and others:
            logger.warning("unloading %s to have room for %s", others[0], name)
            await self._engine.unload_adapter(others[0])
            return
        problem = f"All {self._config.max_run_loras} adapter slots are in use: unload an adapter first"
        problem += ", or raise inference.max_versions_per_run." if is_teacher(name) else "."
        raise ApiError(400, problem, param="lora_name")

    def _trainer(self) -> TrainerStatus | None:
        return read_status(OutputDir(self._output_dir).trainer_status, TrainerStatus)

    def _check_room(self, name: str) -> None:
        """Raises ApiError unless an adapter may be loaded as `name` where a slot is free."""
        if self.weights != BASE_WEIGHTS:
            message = f"Adapters belong to the base model, and {self.weights} is in force: reload_weights first."
            raise ApiError(409, message)
        model, loaded = self._config.model, self._engine.adapters()
        run_id = served_run(name)
        own = [each for each in loaded if served_run(each) == run_id and is_teacher(each) == is_teacher(name)]
        chats = [each for each in loaded if is_chat(each)]
        if model.lora is None:
            problem = "This server serves no adapters (model.lora is null)."
        elif name in loaded:
            problem = f"The lora adapter {name!r} has already been loaded."
        elif is_teacher(name) and len(own) >= MAX_TEACHER_ADAPTERS:
            problem = f"{run_id} has {len(own)} teachers loaded, the most of a run: unload one first."
        elif run_id and not is_teacher(name) and len(own) >= self._config.max_versions_per_run:
            problem = f"{run_id} holds its {len(own)} adapter slots: unload one first."
        elif is_chat(name) and len(chats) >= NUM_CHAT_ADAPTERS:
            problem = f"The adapter slot for chats is in use by {chats[0]}: unload it first."
        else:
            return
        raise ApiError(400, problem, param="lora_name")

    async def _update(self, request: Request) -> Response:
        asked = await decoded(request, _UpdateRequest)
        folder = await asyncio.to_thread(confined_weights, self._output_dir, asked.weight_dir)
        trainer = await asyncio.to_thread(self._trainer)
        # Other whole weights would take the base from all runs. Also while the trainer is away: it comes back.
        if trainer is not None and trainer.max_rank is not None:
            message = "The trainer of this workspace trains adapters: the weights are those of the base model."
            raise ApiError(409, message, param="weight_dir")
        # It goes into a header, where not every character of a file name may stand.
        label = quote(weights_label(self._output_dir.resolve(), folder))
        async with self.turns.work(Item(self._known(label.partition("/")[0]), f"loaded {label}")):
            return await self._change_weights(folder, label)

    async def _reload(self, request: Request) -> Response:
        return await self._change_weights(None, BASE_WEIGHTS)

    async def _change_weights(self, folder: Path | None, label: str) -> Response:
        # What changes nothing must not hold up all requests until those under way have ended.
        self._check_no_adapters()
        if label == self.weights == BASE_WEIGHTS:
            return json_response({"weights": label})
        try:
            async with self.weights_lock.alone(self._drain_s, label.partition("/")[0] if folder else ""):
                self._check_no_adapters()
                await self._engine.load_weights(folder)
                self.weights = label
        except StillInUse as error:
            message = f"{error.num_users} requests still run after {self._drain_s:g} s: the weights stay as they are."
            raise ApiError(503, message) from error
        logger.info("now serving %s", f"the weights of {folder}" if folder else "the base model")
        return json_response({"weights": label})

    def _check_no_adapters(self) -> None:
        if loaded := sorted(self._engine.adapters()):
            raise ApiError(409, f"Adapters are loaded ({', '.join(loaded[:3])}): unload them first.")

    def item_of(self, headers: Headers, model: Any) -> Item | None:
        """The item of work of a request that generates; None for one that is refused, since no such model is served."""
        name = model if isinstance(model, str) else None
        if name in (None, "", self._config.model.name):
            run_id = self._known(headers.get(RUN_HEADER, ""))
            served = "the base model" if self.weights == BASE_WEIGHTS else self.weights
            return Item(run_id, f"served {served}{f' for {run_id}' if run_id else ''}")
        return Item(served_run(name), f"served {name}") if name in self._engine.adapters() else None

    def using(self, model: Any, asked: Asked) -> contextlib.AbstractContextManager[None]:
        """Note a request to `model`, which may have to end when that is an adapter and is unloaded."""
        is_adapter = isinstance(model, str) and model in self._engine.adapters()
        return self._users.using(model, asked) if is_adapter else contextlib.nullcontext()

    def _known(self, run_id: str) -> str:
        """The run that a header names; "" for one that is not there: made-up names get no places of their own."""
        with contextlib.suppress(LayoutError):
            if os.path.exists(OutputDir(self._output_dir).run(run_id).orch_toml):
                return run_id
        return ""


def _check_owner(name: str, output: OutputDir, folder: Path) -> None:
    """Raises ApiError unless `name` says which version of which run is in `folder`: no run answers for another.

    What is evaluated has the name of its folder below `evaluations/`, in the slot of chats.
    """
    own = name.removeprefix(TEACHER_PREFIX if is_teacher(name) else CHAT_PREFIX)
    parsed = parse_adapter_name(own)
    if parsed is None and is_chat(name) and folder == output.evaluations / own:
        return
    if parsed is None:
        message = f"lora_name {name!r} names no version of a run: it must be like run_a@v3."
        raise ApiError(400, message, param="lora_name")
    try:
        run = output.run(parsed[0])
    except LayoutError as error:
        raise ApiError(403, str(error), param="lora_name") from error
    places = [run.broadcast_dir(parsed[1]), run.trainer_checkpoint(parsed[1])]
    if is_teacher(name):
        places = [run.teacher_dir(parsed[1])]
    if not (folder.is_relative_to(run.path) if is_chat(name) else folder in places):
        message = f"{name!r} is published at {places[0]}, not at {folder}."
        raise ApiError(403, message, param="lora_path")


def _published(run: RunDir, name: str) -> Path:
    """The folder of a version: its checkpoint's where it is published no more."""
    parsed = parse_adapter_name(name)
    assert parsed is not None
    folder = run.broadcast_dir(parsed[1])
    return folder if stable_marker(folder).exists() else run.trainer_checkpoint(parsed[1])


def _not_served(run: RunDir, name: str, served: Sequence[str | None], trains: bool) -> str:
    """The message about a run, or a version of it, that a request names and inference does not have."""
    if served and name == run.run_id:
        return f"{name} is served as {', '.join(sorted(map(str, served)))}: name a version"
    status = read_status(run.status, RunStatus)
    state = "training" if trains else status.state if status else "not running"
    what = "its newest version is served as soon as it is published" if trains else f"prl serve {name} loads it"
    return f"{run.run_id} is {state}; {what}"


def _in_turn(app: ASGIApp, gateway: Gateway, room: Room | None) -> ASGIApp:
    """Middleware of what generates: it waits for its turn and while weights change; its answer names the weights.

    What cannot fit into `room` is refused at once.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body, wanted = await request.body(), await decoded(request, Wanted)
        if room:
            room.check(wanted)
        await gateway.find(request, wanted.model)
        item = gateway.item_of(request.headers, wanted.model)
        asked = Asked(item.run_id if item else "")
        request.state.run_id, request.state.model = asked.run_id, wanted.model
        async with gateway.turns.work(item) if item else contextlib.nullcontext(Outcome()) as outcome:
            with await gateway.weights_lock.enter(asked), gateway.using(wanted.model, asked):
                sent = streams = False

                async def tell(message: Message) -> None:
                    nonlocal sent, streams
                    if asked.refusal and not sent:
                        return
                    if message["type"] == "http.response.start":
                        outcome.is_refused = message["status"] >= 400
                        streams = (b"content-type", b"text/event-stream") in (
                            (name, value.partition(b";")[0]) for name, value in message["headers"]
                        )
                    elif not message.get("more_body"):
                        streams = False
                    sent = True
                    await send(message)

                told = _with_header(tell, WEIGHTS_HEADER, gateway.weights)
                await app(scope, replay(body, lambda: asked.listen(receive)), told)
            if asked.refusal and not sent:
                raise asked.refusal
            if asked.refusal and streams:  # begun, and not at its end
                event = b"data: " + msgspec.json.encode(asked.refusal.body()) + b"\n\n"
                await send({"type": "http.response.body", "body": event})

    return answer


def _tells_logprobs(app: ASGIApp, mode: str) -> ASGIApp:
    """Middleware: every answer has the kind of its log-probabilities in a header."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, _with_header(send, LOGPROBS_HEADER, mode))

    return answer


def _with_header(send: Send, name: str, value: str) -> Send:
    async def with_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (name.encode(), value.encode())]}
        await send(message)

    return with_header


async def _failed(request: Request, error: Exception) -> Response:
    """The answer for `error`. The framework raises one that is none of ours again: its traceback goes to the log."""
    if isinstance(error, ApiError):
        return error_response(error)
    if not isinstance(error, HTTPException):
        return error_response(ApiError(500, f"The server failed on this request: {type(error).__name__}."))
    path = request.url.path
    method = "GET" if path in READING else "POST"
    message = f"{path} takes {method}, not {request.method}." if error.status_code == 405 else error.detail
    if error.status_code == 404:
        message = f"Not found: {path[:200]}."
    return error_response(ApiError(error.status_code, message))


TIMEOUT_S = 10.0
# An answer is good for so long, so that polling costs no tokens.
FRESH_S = 1.0
# A full engine gives our one token no place for a long time, and proves itself by the tokens of others.
LOOK_EVERY_S = 0.05


class HealthProbe:
    """The proof that `engine` generates: a token of its own, or of others that it works on."""

    def __init__(
        self, engine: EngineControl, *, timeout_s: float = TIMEOUT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._clock = clock
        self._asked: asyncio.Task[str | None] | None = None
        self._answered_at = 0.0

    async def check(self) -> None:
        """Raises ApiError (503) when the engine does not generate."""
        if self._asked is None or (self._asked.done() and self._clock() - self._answered_at >= FRESH_S):
            self._asked = asyncio.create_task(self._ask())
        # A client that goes away must not take the answer from those that wait for the same one.
        problem = await asyncio.shield(self._asked)
        if problem is not None:
            raise ApiError(503, problem)

    async def _ask(self) -> str | None:
        """Ask the engine for a token; returns what is wrong, None when it generates."""
        before = self._engine.stats().num_tokens
        ours = asyncio.ensure_future(self._engine.generate_one())
        try:
            async with asyncio.timeout(self._timeout_s):
                while not ours.done() and self._engine.stats().num_tokens == before:
                    await asyncio.wait({ours}, timeout=LOOK_EVERY_S)
        except TimeoutError:
            return f"The engine has generated no token in {self._timeout_s:g} s."
        finally:
            self._answered_at = self._clock()
            if not ours.done():
                ours.cancel()
        # Whatever the engine raises: health is the question whether it raises.
        error = ours.exception() if ours.done() and not ours.cancelled() else None
        return None if error is None else f"The engine does not generate: {type(error).__name__}."
