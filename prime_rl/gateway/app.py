"""The application: its routes, keys, bodies, and the way of one call from a request to an answer that was delivered.

It holds nothing that must outlive it. Whoever answers is its `Backend`. A client that hangs up while its call is in
work gives its place back: what asks the backend is cancelled. Headers of a stream are sent when the answer is there, or
after `keep_alive_s`: a client that is refused earlier than that sees the status, and repeats itself where that helps.
Bodies that are being read have a limit together, so that none has to wait for calls in work.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prime_rl.contract.calls import (
    Answer,
    Backend,
    Call,
    Count,
    Delivered,
    Done,
    Invalid,
    Open,
    Opened,
    Refusal,
    Reward,
)
from prime_rl.contract.layout import LayoutError, check_run_id
from prime_rl.gateway.anthropic_forms import Messages
from prime_rl.gateway.forms import BodyError, Form, decoded, sse
from prime_rl.gateway.keys import run_key, run_of, session_key
from prime_rl.gateway.openai_forms import Chat, Completion, Histories, Responses
from prime_rl.utils.http_server import BodyRefused, read_body
from prime_rl.utils.runtime import cancel_all, http_refusal

# A request is a whole conversation with what its tools returned; the context of the model is the real limit.
MAX_BODY_BYTES = 64 * 2**20
# Of all bodies that are not decoded yet.
MAX_HELD_BYTES = 8 * MAX_BODY_BYTES
BODY_TIMEOUT_S = 60.0
# Each waits until the client has taken most of what was sent before it.
PART_BYTES = 2**16
KEEP_ALIVE_S = 10.0
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
FORMS: dict[str, type[Form]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completion,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
}

T = TypeVar("T")
_Name = Annotated[str, msgspec.Meta(max_length=256)]


class _Opening(msgspec.Struct, forbid_unknown_fields=True):
    example: _Name | None = None
    group: _Name | None = None


class _Reward(msgspec.Struct, forbid_unknown_fields=True):
    """`answer` is the number of one; without it the reward is that of the session, which ends with it by default."""

    reward: float | None = None
    rewards: Annotated[dict[_Name, float], msgspec.Meta(max_length=64)] = {}
    answer: Annotated[int, msgspec.Meta(ge=0, le=2**62)] | None = None
    done: bool | None = None
    error: Annotated[str, msgspec.Meta(max_length=1000)] = ""


def build_app(backend: Backend, secret: bytes, *, url: str = "", keep_alive_s: float = KEEP_ALIVE_S) -> Starlette:
    """The application. `secret` is what all keys follow from, `url` what clients are told; "": as they came."""
    return _Gateway(backend, secret, url, keep_alive_s).app


class _Gateway:
    def __init__(self, backend: Backend, secret: bytes, url: str, keep_alive_s: float) -> None:
        self._backend, self._secret, self._url, self._keep_alive_s = backend, secret, url, keep_alive_s
        self._histories = Histories()
        self._num_held = 0

        def route(method: str, path: str, handle: Callable[..., Awaitable[Any]], form: type[Form] = Form) -> Route:
            async def endpoint(request: Request) -> Any:
                try:
                    return await handle(request, form)
                except Refusal as error:
                    return _refused(error, form)

            return Route(path, endpoint, methods=[method])

        base = "/s/{session}"
        self.app = Starlette(
            routes=[
                route("GET", "/health", self._health),
                route("POST", "/v1/runs/{run}/sessions", self._open),
                *(route("POST", base + path, self._answer, form) for path, form in FORMS.items()),
                route("POST", f"{base}/v1/messages/count_tokens", self._count, Messages),
                route("GET", f"{base}/v1/models", self._models),
                route("GET", f"{base}/v1/models/{{model:path}}", self._models),
                route("POST", f"{base}/reward", self._reward),
                route("POST", f"{base}/close", self._close),
                route("DELETE", base, self._close),
            ],
            middleware=[Middleware(_Guard)],
            exception_handlers={HTTPException: _failed, Exception: _failed},
        )
        self.app.router.redirect_slashes = False

    async def _health(self, request: Request, form: type[Form]) -> Response:
        return _json({"status": "ok"})

    async def _answer(self, request: Request, form: type[Form]) -> ASGIApp:
        session = self._session(request)
        try:
            body = await self._body(request, form)
            body.model = body.model or run_of(session)
            previous = body.previous_response_id if isinstance(body, Responses) else None
            call = body.call(self._histories.find(session, previous) if previous else ())
        except Refusal as refusal:
            await _tell(self._backend, session, Invalid(refusal.message))
            raise
        if request.headers.get("x-stainless-retry-count", "0") != "0":
            call = msgspec.structs.replace(call, again=True)
        return _Exchange(self._backend, self._histories, session, body, call, self._keep_alive_s)

    async def _count(self, request: Request, form: type[Form]) -> Response:
        session = self._session(request)
        call = (await self._body(request, form)).call()
        counted = await self._backend.ask(session, Count(call))
        assert isinstance(counted, Done)
        return _json({"input_tokens": counted.num_tokens})

    async def _models(self, request: Request, form: type[Form]) -> Response:
        """The policy, under the run's id or the name that the client has for it, with the fields of both APIs."""
        session = self._session(request)
        named = request.path_params.get("model")
        name = named or run_of(session)
        card = {"id": name, "object": "model", "created": 0, "owned_by": "prime-rl"}
        card |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        card["max_model_len"] = self._backend.max_model_len(session)
        ends = {"first_id": name, "last_id": name, "has_more": False}
        return _json(card if named else {"object": "list", "data": [card], **ends})

    async def _reward(self, request: Request, form: type[Form]) -> Response:
        session = self._session(request)
        given = await self._body(request, _Reward)
        if given.reward is None and given.done is None and not (given.error or given.rewards):
            raise BodyError("reward", "must be a number; `error` or `done` end a session without one")
        ends = given.answer is None and (given.reward is not None or given.error != "")
        closes = ends if given.done is None else given.done
        if given.answer is not None and given.reward is None:
            raise BodyError("reward", "must be a number with `answer`")
        reward = Reward(given.reward, given.rewards, given.answer, closes, given.error)
        return await self._done(session, reward)

    async def _close(self, request: Request, form: type[Form]) -> Response:
        return await self._done(self._session(request), Reward())

    async def _done(self, session: str, reward: Reward) -> Response:
        await self._backend.ask(session, reward)
        if reward.closes:
            self._histories.drop(session)
        return _json({"status": "ok"})

    async def _open(self, request: Request, form: type[Form]) -> Response:
        try:
            run_id = check_run_id(request.path_params["run"])
        except LayoutError as error:
            raise Refusal(404, "not_found", str(error)) from error
        self._check_key(request, run_key(self._secret, run_id))
        asked = await self._body(request, _Opening, empty=b"{}")
        opened = await self._backend.ask(run_id, Open(asked.example or "", asked.group or ""))
        assert isinstance(opened, Opened)
        url, key = self._url or str(request.base_url).rstrip("/"), session_key(self._secret, opened.session)
        base = f"{url}/s/{opened.session}"
        where = {"base_url": f"{base}/v1", "anthropic_base_url": base, "api_key": key}
        response = _json({"session": opened.session, **where, "example": opened.example})
        if not await request.is_disconnected():
            response.background = BackgroundTask(_tell, self._backend, opened.session, Delivered())
        return response

    async def _body(self, request: Request, kind: type[T], *, empty: bytes = b"") -> T:
        """The body as `kind`; `empty` stands for one without bytes. Raises Refusal."""
        held: list[int] = []

        def hold(num_bytes: int) -> bool:
            held.append(num_bytes)
            self._num_held += num_bytes
            return self._num_held <= MAX_HELD_BYTES

        limits = MAX_BODY_BYTES, MAX_HELD_BYTES
        try:
            body = await read_body(request.receive, *limits, timeout_s=BODY_TIMEOUT_S, hold=hold)
            return decoded(body or empty, kind)
        except BodyRefused as error:
            code = {408: "timeout", 413: "request_too_large", 429: "busy"}.get(error.status, "gone")
            raise Refusal(error.status, code, error.message, 1 if error.status == 429 else None) from None
        finally:
            self._num_held -= sum(held)

    def _session(self, request: Request) -> str:
        """The session of a request that has its key, or that of its run. Raises Refusal."""
        session: str = request.path_params["session"]
        run_id = run_of(session)
        if run_id is None:
            raise Refusal(404, "not_found", "invalid session: must be RUN_ID, a dot, and 8 to 64 letters or digits")
        self._check_key(request, session_key(self._secret, session), run_key(self._secret, run_id))
        return session

    @staticmethod
    def _check_key(request: Request, *keys: str) -> None:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        given = [token.strip() if kind.lower() == "bearer" else "", request.headers.get("x-api-key", "")]
        if not any(hmac.compare_digest(each.encode(), key.encode()) for each in given for key in keys):
            message = "a valid key is required: Authorization: Bearer KEY, or x-api-key: KEY"
            raise Refusal(401, "invalid_api_key", message)


@dataclass
class _Exchange:
    """One call, as an ASGI application: asked, answered in its form, noted as delivered."""

    _backend: Backend
    _histories: Histories
    _session: str
    _body: Form
    _call: Call
    _keep_alive_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_disconnected(receive))
        asking = asyncio.create_task(self._ask())
        is_begun = False
        try:
            while not (gone.done() or asking.done()):
                waits = asyncio.wait({gone, asking}, timeout=self._keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
                ended, _ = await waits
                if self._body.stream and not ended:
                    if not is_begun:
                        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                        is_begun = True
                    await send(_part(self._body.waiting))
            if gone.done():
                return
            try:
                answer = asking.result()
            except Refusal as error:
                if is_begun:
                    await send(_part(sse(self._body.error(error), "error"), more=False))
                else:
                    await _refused(error, type(self._body))(scope, receive, send)
                return
            await self._send(answer, is_begun, gone, send)
        finally:
            await cancel_all((gone, asking))

    async def _ask(self) -> Answer:
        answer = await self._backend.ask(self._session, self._call)
        assert isinstance(answer, Answer)
        return answer

    async def _send(self, answer: Answer, is_begun: bool, gone: asyncio.Task[None], send: Send) -> None:
        whole = self._body.answer(answer)
        if isinstance(self._body, Responses) and self._body.store is not False:
            self._histories.keep(self._session, whole["id"], self._body.history(self._call, answer))
        if not self._body.stream:
            encoded = msgspec.json.encode(whole)
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(encoded))]
            parts = [encoded[at : at + PART_BYTES] for at in range(0, len(encoded), PART_BYTES)]
        else:
            headers, parts = STREAM_HEADERS, [*self._body.events(whole)]
        if not is_begun:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts[:-1]:
            await send(_part(part))
        await asyncio.sleep(0)  # whether the client has gone is noted meanwhile
        if gone.done():
            return
        # Nothing comes between the last byte and the note: the client's next request is read after it.
        await send(_part(parts[-1], more=False))
        if not gone.done():
            await _tell(self._backend, self._session, Delivered(answer.number))


async def _tell(backend: Backend, session: str, noted: Delivered | Invalid) -> None:
    """Have something noted that the client does not wait for."""
    with contextlib.suppress(Refusal):
        await backend.ask(session, noted)


class _Guard:
    """Middleware: what no server of the project answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        # All that matters asks for a key, and no page of a browser has one.
        if refused := http_refusal(scope["method"], headers, None):
            await _refused(Refusal(refused[0], "refused", refused[1]), Form)(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def _refused(error: Refusal, form: type[Form]) -> Response:
    """The answer of HTTP to a refusal. What SDKs make of a status alone would repeat what does not help."""
    headers = {"x-should-retry": "false"}
    if error.retry_after_s is not None:
        headers = {"x-should-retry": "true", "retry-after": str(math.ceil(error.retry_after_s))}
    if error.status in (408, 413):  # the rest of the body is not read
        headers["connection"] = "close"
    return _json(form.error(error), error.status, headers)


def _failed(request: Request, error: Exception) -> Response:
    """The answer where no route has one: the path is unknown, or there is a fault, which the log has as well."""
    path = f"{request.method} {request.url.path}"
    if isinstance(error, HTTPException):
        return _refused(Refusal(error.status_code, "not_found", f"{path}: {error.detail}"), Form)
    return _refused(Refusal(500, "internal_error", f"{path}: failed: see the log of this server"), Form)
