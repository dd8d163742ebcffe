"""HTTP to one inference server: completions, adapters and weights in and out, and what went wrong in words.

Every request is one attempt with a deadline. The server may come back at another address: without a fixed `base_url`
its status file is read again after each lost connection. Trying again, and which of several servers is asked, is the
business of `pool`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import anyio
import httpx
import msgspec

from prime_rl.configs.base import SamplingConfig
from prime_rl.contract.files import UNDECODABLE
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.served import BASE_WEIGHTS, LOGPROBS_HEADER, WEIGHTS_HEADER, served_run
from prime_rl.contract.status import InferenceStatus, is_there, read_status

MAX_ERROR_TEXT = 500
# Whatever a server asks for, it is looked at again after this.
MAX_RETRY_AFTER_S = 60.0
# A sure token's logprob may come out of rounding a little above zero.
LOGPROB_SLACK = 1e-3


class InferenceError(RuntimeError):
    """A request that cannot succeed as it is."""


class InferenceUnavailable(InferenceError):
    """The server is not able to answer this request now; trying again helps.

    `retry_after_s`: the pause that the server asks for, if any; `is_overload`: it has too much to do.
    """

    def __init__(self, message: str, retry_after_s: float | None = None, *, is_overload: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_overload = is_overload


class ServerDown(InferenceUnavailable):
    """The server does not answer: it is gone, starting, or stuck."""


class AccessDenied(InferenceError):
    """The API key is missing or wrong."""


class RequestRefused(InferenceError):
    """The server refuses this request (4xx)."""


class AdapterRefused(InferenceError):
    """The version is at fault (422): its files, or logits that are not finite. A server's message is its own."""


class UnknownModel(RequestRefused):
    """The server does not have the model or adapter (404), for example because it has been restarted."""


@dataclass(frozen=True)
class Completion:
    """One sampled turn. `logprobs` has one a token, by the server's `logprobs_mode`.

    `weights`: the whole weights that it was sampled from, by the server's header; None without one. `stop`: the text
    that ended it, which is a part of it; None when none did.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    weights: str | None = None
    stop: str | None = None


@dataclass(frozen=True)
class CompletionRequest:
    """`num_choices` completions of `prompt` (token ids), all from one seed, each of at most `max_tokens`.

    `num_prefix`: tokens with which all prompts of its conversation and of its group begin; 0 when nothing is known.
    """

    model: str
    prompt: Sequence[int]
    sampling: SamplingConfig
    max_tokens: int
    seed: int
    num_choices: int = 1
    num_prefix: int = 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the server may have to read and generate for it."""
        return len(self.prompt) + self.max_tokens * self.num_choices

    def body(self) -> dict[str, Any]:
        """The JSON of /v1/completions, which asks for token ids and the logprob of each token too."""
        return {
            "model": self.model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "min_tokens": min(self.sampling.min_tokens, self.max_tokens),
            **self.sampling.request_fields,
            "seed": self.seed,
            "n": self.num_choices,
            "logprobs": 1,
            "return_token_ids": True,
        }


@dataclass(frozen=True)
class Scores:
    """What a model says of given tokens. `weights`: as of a `Completion`.

    Attributes:
        logprobs_T: of each token behind those before it, at temperature 1; 0 of the first, which has none.
        top_T: the likeliest (token id, logprob) of each position, likeliest first; [] at the first, and [] altogether
            when none were asked for.
    """

    logprobs_T: list[float]
    top_T: list[list[tuple[int, float]]]
    weights: str | None = None


@dataclass(frozen=True)
class ScoreRequest:
    """The log-probabilities of `token_ids` under `model`, and the `top_k` likeliest tokens of each position.

    The server needs room for one more token than these.
    """

    model: str
    token_ids: Sequence[int]
    top_k: int = 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the server has to read."""
        return len(self.token_ids)

    def body(self) -> dict[str, Any]:
        """The JSON of /v1/completions, as vLLM takes it."""
        asked = {"model": self.model, "prompt": list(self.token_ids), "prompt_logprobs": self.top_k}
        return {**asked, "max_tokens": 1, "temperature": 0}


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]  # None: of a number that JSON does not have


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str
    stop_reason: str | int | None = None


class _Completions(msgspec.Struct):
    choices: list[_Choice]


class _Logprob(msgspec.Struct):
    logprob: float | None


class ScoredChoice(msgspec.Struct):
    """Of each token those that are told of its place, itself among them; None of the first."""

    prompt_logprobs: list[dict[int, _Logprob] | None]


class ScoredCompletions(msgspec.Struct):
    """An answer with `prompt_logprobs`."""

    choices: list[ScoredChoice]


class _Weights(msgspec.Struct):
    weights: str


class ServedModel(msgspec.Struct, frozen=True):
    """A base model or an adapter; `root` is the folder (or hub name) that it came from."""

    id: str
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[ServedModel]


_AnswerT = TypeVar("_AnswerT")


class Endpoint:
    """Where inference is: a fixed URL, or the one that a server of the workspace wrote to its status file."""

    def __init__(self, output_dir: Path, base_url: str | None, *, replica: int = 0) -> None:
        output = OutputDir(output_dir)
        self._status_path = output.replica_status(replica) if replica else output.inference_status
        self._fixed = base_url.rstrip("/") if base_url else None
        self._found: str | None = None

    def url(self) -> str:
        """The URL that ends in /v1; raises ServerDown that names what is missing."""
        if self._fixed:
            return self._fixed
        if self._found is None:
            self._found = self._look()
        return self._found

    @property
    def address(self) -> str:
        """The URL, or the status file while it has none; never raises."""
        return self._fixed or self._found or str(self._status_path)

    def forget(self) -> None:
        """Read the status file again before the next request."""
        self._found = None

    def _look(self) -> str:
        status = read_status(self._status_path, InferenceStatus)
        if status is None:
            raise ServerDown(f"{self._status_path} (not found: is inference running?)")
        if not is_there(status) or not status.base_url:
            raise ServerDown(f"{self._status_path} (its state is {status.state!r}, but its server is not running)")
        if status.state != "serving":
            raise ServerDown(f"the inference server to be ready (it is {status.state})")
        return status.base_url.rstrip("/")


class ServerClient:
    """One inference server, one attempt a call: what fails is raised as one of the errors above.

    Args:
        http: shared by all servers of a run; carries the API key.

    Attributes:
        weights: the whole weights that it answered with last; None before the first answer.
        logprobs_mode: the `logprobs_mode` of its newest answer; None when that does not tell.
    """

    def __init__(self, endpoint: Endpoint, http: httpx.AsyncClient, *, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._http = http
        self._timeout_s = timeout_s
        self.weights: str | None = None
        self.logprobs_mode: str | None = None
        self._under_way: set[asyncio.Timeout] = set()

    @property
    def address(self) -> str:
        """The server's URL, or the status file that is to have it."""
        return self._endpoint.address

    def abandon(self) -> None:
        """End the requests under way, which fail with ServerDown, and look for its address again."""
        under_way, self._under_way = self._under_way, set()
        for deadline in under_way:
            deadline.reschedule(asyncio.get_running_loop().time())
        self._endpoint.forget()

    def forget(self) -> None:
        """Look for its address again before the next request."""
        self._endpoint.forget()

    async def list_models(self) -> list[ServedModel]:
        """The base model and all loaded adapters, also those of other runs."""
        response, url = await self._request("GET", "models", None)
        return _decoded(response, url, _Models).data

    async def complete(self, request: CompletionRequest) -> list[Completion]:
        """The completions, one for each choice; notes in `weights` which whole weights answered.

        Raises InferenceError for an answer with another number of choices.
        """
        response, url = await self._request("POST", "completions", request.body())
        answer = _decoded(response, url, _Completions)
        if len(answer.choices) != request.num_choices:
            found = f"{len(answer.choices)} completions instead of {request.num_choices}"
            raise InferenceError(f"inference at {url} returned {found}")
        self.weights = response.headers.get(WEIGHTS_HEADER)
        return [_checked(choice, url, self.weights, request.model) for choice in answer.choices]

    async def score(self, request: ScoreRequest) -> Scores:
        """What the model says of the tokens. Raises InferenceError for an answer that does not fit them."""
        response, url = await self._request("POST", "completions", request.body())
        self.weights = weights = response.headers.get(WEIGHTS_HEADER)

        def scores() -> Scores:
            return scores_of(_decoded(response, url, ScoredCompletions), request, url, weights)

        return await asyncio.to_thread(scores)  # of a long text it takes a second

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load the PEFT folder `path` under `name`. Loading it twice is not an error: names are never reused."""
        try:
            await self._request("POST", "load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        except RequestRefused:
            if not any(model.id == name for model in await self.list_models()):
                raise

    async def unload_adapter(self, name: str) -> None:
        """Unload the adapter `name`. Raises UnknownModel when the server does not have it."""
        await self._request("POST", "unload_lora_adapter", {"lora_name": name})

    async def load_weights(self, folder: Path | None) -> None:
        """Take over the whole weights of a broadcast folder, with None those that the server was started with."""
        path, body = ("/update_weights", {"weight_dir": str(folder)}) if folder else ("/reload_weights", {})
        self.weights = None  # whether the request succeeds or not
        response, url = await self._request("POST", path, body)
        self.weights = _decoded(response, url, _Weights).weights

    async def _request(self, method: str, path: str, body: Any) -> tuple[httpx.Response, str]:
        """The answer, and the URL that gave it. A `path` from / on is that of the server, any other follows /v1."""
        url = self._endpoint.url()
        whole_url = url.removesuffix("/v1") + path if path.startswith("/") else f"{url}/{path}"
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                self._under_way.add(deadline)
                response = await self._send(method, whole_url, body)
        except TimeoutError:
            if deadline not in self._under_way:
                raise ServerDown(f"inference at {url} (its process is gone, or shows no sign of life)") from None
            raise ServerDown(f"inference at {url} (no answer in {self._timeout_s:g} s)", is_overload=True) from None
        except httpx.RequestError as error:  # no connection, a lost one, or a body that cannot be decoded
            self._endpoint.forget()
            words = " ".join(str(error).split()) or type(error).__name__
            reason = "connection refused" if isinstance(error, httpx.ConnectError) else words
            raise ServerDown(f"inference at {url} ({reason})") from error
        finally:
            self._under_way.discard(deadline)
        _raise_for(response, url)
        self.logprobs_mode = response.headers.get(LOGPROBS_HEADER)
        return response, url

    async def _send(self, method: str, url: str, body: Any) -> httpx.Response:
        """The response. Cancelled, it returns once its connection is closed.

        It is a task of its own that anyio cancels: httpx closes idle connections, also those of other requests, behind
        anyio's shields. asyncio's cancellation goes through these and would leave connections open.
        """
        scope = anyio.CancelScope()

        async def request() -> httpx.Response:
            with scope:
                return await self._http.request(method, url, json=body)
            raise asyncio.CancelledError

        sending = asyncio.create_task(request())
        try:
            return await asyncio.shield(sending)
        finally:
            if not sending.done():
                scope.cancel()
                await asyncio.wait([sending])
                if not sending.cancelled():
                    sending.exception()  # of one that failed meanwhile; asyncio would report it as never retrieved


def _decoded(response: httpx.Response, url: str, kind: type[_AnswerT]) -> _AnswerT:
    try:
        return msgspec.json.decode(response.content, type=kind)
    except UNDECODABLE as error:
        path = response.request.url.path
        raise InferenceError(f"inference at {url}: {path} returned an invalid answer: {error}") from error


def _checked(choice: _Choice, url: str, weights: str | None, model: str) -> Completion:
    logprobs = [math.nan if each is None else each for each in choice.logprobs.token_logprobs]
    if not choice.token_ids or len(choice.token_ids) != len(logprobs):
        found = f"{len(choice.token_ids)} tokens with {len(logprobs)} logprobs"
        raise InferenceError(f"inference at {url} returned {found}")
    _check_logprobs(logprobs, url, weights, model)
    stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
    return Completion(choice.token_ids, logprobs, choice.finish_reason, weights, stop)


def _check_logprobs(logprobs: Sequence[float], url: str, weights: str | None, model: str) -> None:
    version = model if served_run(model) else weights
    if not math.isfinite(sum(logprobs)) and version not in (None, BASE_WEIGHTS):  # a NaN in it makes the sum one
        raise AdapterRefused(f"{version}: its log-probabilities are not finite: its weights are too large")
    if not max(logprobs) <= LOGPROB_SLACK or not math.isfinite(sum(logprobs)):
        raise InferenceError(f"inference at {url} returned an invalid logprob: must be a finite number and at most 0")


def scores_of(answer: ScoredCompletions, request: ScoreRequest, url: str, weights: str | None = None) -> Scores:
    """What an answer says of the tokens of `request`. Raises InferenceError where it does not fit them."""
    found = answer.choices[0].prompt_logprobs if answer.choices else []
    if len(found) != len(request.token_ids):
        raise InferenceError(f"inference at {url} returned logprobs of {len(found)} tokens, not {request.num_tokens}")
    logprobs_T, top_T = [0.0], list[list[tuple[int, float]]]([[]])
    for token_id, given in zip(request.token_ids[1:], found[1:], strict=True):
        position = {each: math.nan if it.logprob is None else it.logprob for each, it in (given or {}).items()}
        top = sorted(position.items(), key=lambda each: each[1], reverse=True)[: request.top_k]
        if token_id not in position or len(top) < request.top_k:
            problem = f"{len(position)} logprobs of a position, not token {token_id} and the likeliest {request.top_k}"
            raise InferenceError(f"inference at {url} returned {problem}")
        logprobs_T.append(position[token_id])
        _check_logprobs([logprobs_T[-1], *(logprob for _, logprob in top)], url, weights, request.model)
        if sum(math.exp(logprob) for _, logprob in top) > 1 + LOGPROB_SLACK:
            raise InferenceError(f"inference at {url} returned probabilities of one position that are more than 1")
        top_T.append(top)
    return Scores(logprobs_T, top_T if request.top_k else [], weights)


def _raise_for(response: httpx.Response, url: str) -> None:
    code = response.status_code
    if code < 400:
        return
    message = f"inference at {url}: {code} {_error_text(response)}"
    if code in (401, 403):
        raise AccessDenied(f"{message} (set the API key in the variable that client.api_key_var names)")
    if code in (408, 429, 500) or "retry-after" in response.headers:
        wanted = response.headers.get("retry-after", "")  # seconds; a date is left out
        retry_after_s = min(float(wanted), MAX_RETRY_AFTER_S) if wanted.isascii() and wanted.isdigit() else None
        raise InferenceUnavailable(message, retry_after_s, is_overload=code in (429, 503))
    if code > 500:
        raise ServerDown(message, is_overload=code == 503)
    if code == 422:
        raise AdapterRefused(_error_text(response))
    raise UnknownModel(message) if code == 404 else RequestRefused(message)


def _error_text(response: httpx.Response) -> str:
    """The server's own words: both engines wrap them as {"error": {"message"}} or {"message"} or {"detail"}."""
    try:
        body = response.json()
        error = body.get("error", body)
        text = error if isinstance(error, str) else str(error.get("message") or error.get("detail") or error)
    except (ValueError, AttributeError):
        text = response.text
    return " ".join(text.split())[:MAX_ERROR_TEXT]
