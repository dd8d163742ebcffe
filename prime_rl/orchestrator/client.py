"""HTTP to the inference server: completions, adapters in and out, and what went wrong in words.

Every request has a deadline. What may pass (no connection, no answer in time, 429, 5xx) is tried again with back-off
for as long as the caller waits, and `trouble` says meanwhile what is missing. What will not pass is raised. The server
may come back at another address: without a fixed `base_url` its status file is read again after each failure.

Which version a request asks for, and loading what a restarted server has lost, is the business of `policy`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential, wait_random

from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import InferenceStatus, is_alive, read_status

# Short enough that a restarted server is found at once, long enough that 200 runs do not storm one that comes up.
BACKOFF_START_S = 0.2
BACKOFF_MAX_S = 5.0
MAX_ERROR_TEXT = 500
# A sure token's logprob may come out of rounding a little above zero.
LOGPROB_SLACK = 1e-3


class InferenceError(RuntimeError):
    """A request that cannot succeed as it is."""


class InferenceUnavailable(InferenceError):
    """The server cannot be reached or is not able to answer now; trying again helps."""


class AccessDenied(InferenceError):
    """The API key is missing or wrong."""


class RequestRefused(InferenceError):
    """The server refuses this request (4xx)."""


class UnknownModel(RequestRefused):
    """The server does not have the model or adapter (404), for example because it has been restarted."""


@dataclass(frozen=True)
class Completion:
    """One sampled turn. `logprobs` are those of the distribution that was sampled, one a token."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str


class _Completions(msgspec.Struct):
    choices: list[_Choice]


class ServedModel(msgspec.Struct, frozen=True):
    """A base model or an adapter; `root` is the folder (or hub name) that it came from."""

    id: str
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[ServedModel]


_AnswerT = TypeVar("_AnswerT")


class Endpoint:
    """Where inference is: a fixed URL, or the one that the house's server wrote to its status file."""

    def __init__(self, output_dir: Path, base_url: str | None) -> None:
        self._status_path = OutputDir(output_dir).inference_status
        self._fixed = base_url.rstrip("/") if base_url else None
        self._found: str | None = None

    def url(self) -> str:
        """The URL that ends in /v1; raises InferenceUnavailable that names what is missing."""
        if self._fixed:
            return self._fixed
        if self._found is None:
            self._found = self._look()
        return self._found

    def forget(self) -> None:
        """Read the status file again before the next request."""
        self._found = None

    def _look(self) -> str:
        status = read_status(self._status_path, InferenceStatus)
        if status is None:
            raise InferenceUnavailable(f"{self._status_path} (not there yet: is inference started?)")
        if not is_alive(status, time.time()) or not status.base_url:
            raise InferenceUnavailable(f"{self._status_path} (says {status.state!r}, and no such server runs)")
        if status.state != "serving":
            raise InferenceUnavailable(f"the inference server to be ready (it is {status.state})")
        return status.base_url.rstrip("/")


class InferenceClient:
    """One run's connection to the inference server.

    Args:
        on_change: called when `trouble` comes or goes.
        transport: of httpx, for tests.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        max_concurrent_requests: int = 64,
        backoff_start_s: float = BACKOFF_START_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self.slots = asyncio.Semaphore(max_concurrent_requests)
        self.trouble: str | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.num_sampled_tokens = 0
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=max_concurrent_requests)
        self._http = httpx.AsyncClient(headers=headers, timeout=None, limits=limits, transport=transport)
        self._retrying = AsyncRetrying(
            retry=retry_if_exception_type(InferenceUnavailable),
            wait=wait_exponential(multiplier=backoff_start_s, max=BACKOFF_MAX_S) + wait_random(0, backoff_start_s),
            before_sleep=self._note_trouble,
            reraise=True,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def list_models(self) -> list[ServedModel]:
        """The base model and all loaded adapters, also those of other runs."""
        return (await self._retry("GET", "models", None, _Models)).data

    async def serves(self, name: str) -> bool:
        return any(model.id == name for model in await self.list_models())

    async def complete(
        self,
        model: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        num_choices: int = 1,
    ) -> list[Completion]:
        """Sample `num_choices` completions of `prompt` (token ids). Call it while holding one of `slots`."""
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "n": num_choices,
            "logprobs": 1,
            "return_token_ids": True,
        }
        answer = await self._retry("POST", "completions", body, _Completions)
        if len(answer.choices) != num_choices:
            raise InferenceError(f"inference gave {len(answer.choices)} completions instead of {num_choices}")
        completions = [_checked(choice) for choice in answer.choices]
        self.num_sampled_tokens += sum(len(completion.token_ids) for completion in completions)
        return completions

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load the PEFT folder `path` under `name`. That it is loaded already is no error: names are never reused."""
        try:
            await self._retry("POST", "load_lora_adapter", {"lora_name": name, "lora_path": str(path)}, None)
        except RequestRefused:
            if not await self.serves(name):
                raise

    async def unload_adapter(self, name: str) -> None:
        """Unload `name`, in one attempt: what stays behind after a failure is found and unloaded at the next start."""
        await self._attempt("POST", "unload_lora_adapter", {"lora_name": name}, None)

    async def _retry(self, method: str, path: str, body: Any, kind: type[_AnswerT] | None) -> _AnswerT:
        retrying = self._retrying.copy()  # it keeps the state of one call
        answer: _AnswerT = await retrying(self._attempt, method, path, body, kind)
        if self.trouble is not None:
            self.trouble = None
            self.on_change()
        return answer

    async def _attempt(self, method: str, path: str, body: Any, kind: type[_AnswerT] | None) -> _AnswerT | None:
        url = self._endpoint.url()
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._http.request(method, f"{url}/{path}", json=body)
        except TimeoutError:
            raise InferenceUnavailable(f"inference at {url} (no answer in {self._timeout_s:g} s)") from None
        except httpx.TransportError as error:
            self._endpoint.forget()
            raise InferenceUnavailable(f"inference at {url} ({_reason(error)})") from error
        _raise_for(response, url)
        if kind is None:
            return None
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.MsgspecError as error:
            raise InferenceError(f"inference at {url}: {path} has an answer of another form: {error}") from error

    def _note_trouble(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if str(error) != self.trouble:
            self.trouble = str(error)
            self.on_change()


def _checked(choice: _Choice) -> Completion:
    logprobs = choice.logprobs.token_logprobs
    if not choice.token_ids or len(choice.token_ids) != len(logprobs):
        raise InferenceError(f"inference gave {len(choice.token_ids)} tokens with {len(logprobs)} logprobs")
    if not all(math.isfinite(value) and value <= LOGPROB_SLACK for value in logprobs):
        raise InferenceError("inference gave a logprob that is none: it must be finite and at most 0")
    return Completion(choice.token_ids, logprobs, choice.finish_reason)


def _raise_for(response: httpx.Response, url: str) -> None:
    code = response.status_code
    if code < 400:
        return
    message = f"inference at {url}: {code} {_error_text(response)}"
    if code in (401, 403):
        raise AccessDenied(f"{message} (set the API key in the variable that client.api_key_var names)")
    if code in (408, 429) or code >= 500:
        raise InferenceUnavailable(message)
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


def _reason(error: httpx.TransportError) -> str:
    if isinstance(error, httpx.ConnectError):
        return "connection refused"
    return " ".join(str(error).split()) or type(error).__name__
