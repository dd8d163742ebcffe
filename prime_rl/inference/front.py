"""What both engines' servers do alike behind the guard: health, whole weights, and a tenant's share of the adapters.

An ASGI application around the engine's own. Whole weights change while nothing generates: requests under way end first,
new ones wait, so each is answered by one set of weights, which its answer names in the header `x-weights`. Adapters
belong to the base model: while one is loaded the weights stay, and while other weights are in force none is loaded.
A run holds no more adapters than its share, so that no run takes the room of another.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, MutableMapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import msgspec

from prime_rl.configs.inference import InferenceConfig
from prime_rl.contract.layout import BASE_WEIGHTS, LOGPROBS_HEADER, WEIGHTS_HEADER, parse_adapter_name
from prime_rl.inference.errors import ApiError
from prime_rl.inference.guard import AsgiApp, Message, Receive, Send, answer, refuse, replay
from prime_rl.inference.health import HealthProbe
from prime_rl.inference.tokens import COMPLETIONS, GENERATE, TokensInOut
from prime_rl.inference.turnstile import StillInUse, Turnstile
from prime_rl.inference.weight_files import confined_folder, weights_label

logger = logging.getLogger(__name__)

# How long requests under way may hold up new weights. Shorter than what a client waits for an answer.
DRAIN_S = 60.0
LOAD_ADAPTER = "/v1/load_lora_adapter"
GENERATING = frozenset({COMPLETIONS, "/v1/chat/completions", GENERATE})


class EngineControl(Protocol):
    """What the front needs of an engine."""

    def adapters(self) -> Collection[str]:
        """Names of the adapters that are loaded."""

    def num_tokens(self) -> int:
        """Tokens generated since the start."""

    async def verify_adapter(self, name: str) -> None:
        """Make sure that an adapter that was just loaded is what answers under its name. Raises ApiError, and the
        adapter is no longer loaded, when it is not."""

    async def generate_one(self) -> None:
        """Generate one token with the base model. Raises when that fails."""

    async def load_weights(self, folder: Path) -> None:
        """Take over the weights of `folder` (confined, complete), and forget what was computed with
        others. Nothing generates meanwhile. Raises ApiError; then the weights of before are in force."""

    async def load_base(self) -> None:
        """The same with the weights that the server was started with."""


class _UpdateBody(msgspec.Struct, forbid_unknown_fields=True):
    weight_dir: str


class _LoadBody(msgspec.Struct):
    lora_name: str


class Front:
    """See the module."""

    def __init__(
        self, app: AsgiApp, engine: EngineControl, config: InferenceConfig, *, drain_s: float = DRAIN_S
    ) -> None:
        self._app = TokensInOut(app)
        self._engine = engine
        self._output_dir = config.output_dir
        self._max_versions = config.max_versions_per_run
        self._logprobs_mode = config.logprobs_mode
        self._drain_s = drain_s
        self._health = HealthProbe(engine.generate_one, engine.num_tokens)
        self._turnstile = Turnstile()
        self._weights = BASE_WEIGHTS

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        send = _with_header(send, LOGPROBS_HEADER, self._logprobs_mode)
        path = scope.get("path")
        own: dict[Any, Callable[[bytes], Awaitable[None]]] = {
            "/health": self._prove,
            "/update_weights": self._update,
            "/reload_weights": self._reload,
        }
        if path in own:
            await self._reply(own[path], receive, send)
        elif path in GENERATING:
            with await self._turnstile.enter():
                await self._app(scope, receive, _with_header(send, WEIGHTS_HEADER, self._weights))
        elif path == LOAD_ADAPTER:
            with await self._turnstile.enter():
                await self._load(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _reply(self, handler: Callable[[bytes], Awaitable[None]], receive: Receive, send: Send) -> None:
        try:
            await handler((await receive()).get("body", b""))
        except Exception as error:
            await refuse(send, _as_api_error(error))
        else:
            await answer(send, 200, {"weights": self._weights})

    async def _load(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        message = await receive()
        name = msgspec.json.decode(message["body"], type=_LoadBody).lora_name
        held: list[Message] = []

        async def hold(message: Message) -> None:
            held.append(message)

        try:
            self._check_share(name)
            await self._app(scope, replay(message, receive), hold)
            if held and held[0].get("status") == 200:
                await self._engine.verify_adapter(name)
        except Exception as error:
            await refuse(send, _as_api_error(error))
            return
        for message in held:
            await send(message)

    def _check_share(self, name: str) -> None:
        if self._weights != BASE_WEIGHTS:
            message = f"Adapters belong to the base model, and {self._weights} is in force: reload_weights first."
            raise ApiError(409, message)
        if parsed := parse_adapter_name(name):
            run_id, loaded = parsed[0], self._engine.adapters()
            own = [each for each in loaded if (parse_adapter_name(each) or ("",))[0] == run_id]
            if name not in own and len(own) >= self._max_versions:
                raise ApiError(
                    400, f"{run_id} holds its {self._max_versions} adapter slots: unload one first.", param="lora_name"
                )

    async def _prove(self, body: bytes) -> None:
        await self._health.check()

    async def _update(self, body: bytes) -> None:
        try:
            given = msgspec.json.decode(body, type=_UpdateBody).weight_dir
        except msgspec.MsgspecError as error:
            raise ApiError(400, f"The body must be {{weight_dir}}: {error}") from error
        folder = confined_folder(self._output_dir, given)
        async with self._alone():
            await self._engine.load_weights(folder)
            # It goes into a header, where not every character of a file name may stand.
            self._weights = quote(weights_label(self._output_dir.resolve(), folder))
        logger.info("now serving the weights of %s", folder)

    async def _reload(self, body: bytes) -> None:
        async with self._alone():
            await self._engine.load_base()
            self._weights = BASE_WEIGHTS
        logger.info("now serving the base model")

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        try:
            async with self._turnstile.alone(self._drain_s):
                if loaded := sorted(self._engine.adapters()):
                    raise ApiError(409, f"Adapters are loaded ({', '.join(loaded[:3])}): unload them first.")
                yield
        except StillInUse as error:
            message = f"{error.num_users} requests still run after {self._drain_s:g} s: the weights stay as they are."
            raise ApiError(503, message) from error


def _as_api_error(error: Exception) -> ApiError:
    """Any exception of an engine: the client gets an error, the log the reason."""
    if isinstance(error, ApiError):
        return error
    logger.error("the server failed on a request", exc_info=error)
    return ApiError(500, f"The server failed on this request: {type(error).__name__}.")


def _with_header(send: Send, name: str, value: str) -> Send:
    async def with_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (name.encode(), value.encode())]}
        await send(message)

    return with_header
