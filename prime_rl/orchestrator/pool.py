"""A run's connection to inference: one server or several, which of them is asked, how many requests, and trying again.

A request goes to the living server that has read its prefix, by consistent hashing, as long as that has little more
than its share of the outstanding tokens; else to the one with the fewest. A server that does not answer is taken out
and looked at with back-off; before it is asked again it gets the policy versions that are in use. One that answers "not
now" is left alone for a while. A request is tried again, with the same seed, until some server has answered it; as long
as none can, `trouble` names what is missing. Permanent errors are raised. A run whose config names no address takes the
servers that the workspace's status files show.

`ConcurrencyControl` decides the number of rollouts in work at one time, from answers and overloads alone: no I/O, no
clock. Few at first, more while that pays, fewer when inference is full. `Places` makes requests wait for their turn.
What counts as an overload (429, 503, no answer in time) is decided by the client, and how many groups exist at all by
the scheduler.

`policy` decides which version a request asks for, a `Publication` how the servers get it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import random
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

import httpx

from prime_rl.contract.layout import OutputDir
from prime_rl.contract.served import RUN_HEADER
from prime_rl.contract.status import LOST_AFTER_S, InferenceStatus, is_elsewhere, is_there, read_status
from prime_rl.orchestrator.client import (
    AccessDenied,
    Completion,
    CompletionRequest,
    Endpoint,
    InferenceError,
    InferenceUnavailable,
    ScoreRequest,
    Scores,
    ServedModel,
    ServerClient,
    ServerDown,
)
from prime_rl.utils.runtime import Background

# A server that dies is noticed by the next request to it; this is for those that come, leave, or hang.
LOOK_EVERY_S = 1.0


class Standing(Enum):
    """The state of a server as a status file shows it.

    It serves; it serves, but its heartbeat is old; it starts or takes no more requests; its process is gone; there is
    no file.
    """

    SERVING = "serving"
    SILENT = "silent"
    BUSY = "busy"
    DEAD = "dead"
    GONE = "gone"


class Replicas:
    """The servers of a workspace, by their status files. `clock` is monotonic: a still heartbeat ages by it."""

    def __init__(self, output_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._output = OutputDir(output_dir)
        self._clock = clock
        self._beats: dict[int, tuple[object, float]] = {}

    def endpoint(self, number: int) -> Endpoint:
        """The address of server `number`, by its status file."""
        return Endpoint(self._output.path, None, replica=number)

    def look(self) -> dict[int, Standing]:
        """All servers by number, also those that are no more; replica 0 always."""
        try:
            return {number: self._look_at(number, path) for number, path in self._output.inference_statuses().items()}
        except OSError as error:  # the next look may succeed
            logger.warning("cannot look for inference servers: %s", error)
            return {}

    def _look_at(self, number: int, path: Path) -> Standing:
        status = read_status(path, InferenceStatus)
        if status is None or status.state == "stopped":
            return Standing.GONE
        if not is_there(status):
            return Standing.SILENT if is_elsewhere(status) else Standing.DEAD
        if status.state != "serving":
            return Standing.BUSY
        beat, now_s = (status.pid, status.updated_at), self._clock()
        if self._beats.get(number, (None, 0.0))[0] != beat:
            self._beats[number] = (beat, now_s)
        return Standing.SILENT if now_s - self._beats[number][1] > LOST_AFTER_S else Standing.SERVING


logger = logging.getLogger(__name__)

# Short enough that a restarted server is found at once, long enough that 200 runs do not storm one that comes up.
BACKOFF_START_S = 0.2
BACKOFF_MAX_S = 5.0
# Below the servers' five seconds: a connection that they are about to close must not be used again.
KEEPALIVE_S = 2.0
# So much of its share of the outstanding tokens may a server have for the sake of its cache.
LOAD_BOUND = 1.25

# An idle server answers a question without tokens in milliseconds, a loaded one within this.
SIGN_OF_LIFE_S = 10.0
_WHY_NOT_ASKED = {
    Standing.BUSY: "it takes no requests now",
    Standing.DEAD: "its process is gone",
    Standing.GONE: "it has stopped",
}

ResultT = TypeVar("ResultT")


@dataclass(eq=False)
class Server:
    """One server as the run sees it.

    Attributes:
        living: whether it is asked. One that is not is checked by its own task, unless it is `retired`.
        retired: it has left the workspace; another one of its number may come.
        error: what it last failed with, for `trouble`.
        not_before_s: it asked to be left alone until then, in the event loop's time.
        num_refused: failures since it last answered.
    """

    number: int
    client: ServerClient
    living: bool = True
    retired: bool = False
    error: str = ""
    is_doubted: bool = False
    not_before_s: float = 0.0
    num_refused: int = 0
    outstanding_tokens: int = 0
    num_requests: int = 0
    num_failures: int = 0
    num_sampled_tokens: int = 0
    request_s: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Figures of this server, `inference/<number>/...`; counts are since the start."""
        prefix = f"inference/{self.number}"
        return {
            f"{prefix}/living": float(self.living),
            f"{prefix}/outstanding_tokens": self.outstanding_tokens,
            f"{prefix}/requests": self.num_requests,
            f"{prefix}/failures": self.num_failures,
            f"{prefix}/sampled_tokens": self.num_sampled_tokens,
        }


def choose(ready: Sequence[Server], request: CompletionRequest | None) -> Server:
    """The server of those that are `ready` that gets a request.

    Requests that begin alike go to one server, which has the beginning in its cache. Another one gets them when that
    would have more than LOAD_BOUND times its share (consistent hashing with bounded loads, arXiv 1608.01350). A server
    that comes or goes moves only the requests that were or will be its own.
    """
    least = min(ready, key=lambda server: (server.outstanding_tokens, server.num_requests))
    if len(ready) == 1 or request is None or not request.num_prefix:
        return least
    token_ids = array("q", request.prompt[: request.num_prefix]).tobytes()
    prefix = hashlib.blake2b(request.model.encode() + token_ids).digest()
    share = (sum(server.outstanding_tokens for server in ready) + request.num_tokens) / len(ready)
    room = max(LOAD_BOUND * share, request.num_tokens) - request.num_tokens
    ranked = sorted(ready, key=lambda server: hashlib.blake2b(prefix, salt=str(server.number).encode()).digest())
    return next((server for server in ranked if server.outstanding_tokens <= room), least)


class InferenceClient:
    """All servers of one run. Every one of them serves the same base model and gets the same policy versions.

    Args:
        equip: gives a server that comes back what it needs before it is asked again. Once it returns, the
            server counts as living.
        on_trouble: called with `trouble` when that changes.
        run_id: whose requests these are; a server that dies of one finds it in its note.
        transport: of httpx, for tests.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        equip: Callable[[ServerClient], Awaitable[None]],
        *,
        on_trouble: Callable[[str | None], None] = lambda trouble: None,
        api_key: str | None = None,
        run_id: str = "",
        timeout_s: float = 120.0,
        max_concurrent_requests: int = 64,
        backoff_start_s: float = BACKOFF_START_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.places = Places(max_concurrent_requests)
        self.trouble: str | None = None
        self._equip = equip
        self._on_trouble = on_trouble
        headers = {RUN_HEADER: run_id} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=max_concurrent_requests, keepalive_expiry=KEEPALIVE_S
        )
        self._http = httpx.AsyncClient(headers=headers, timeout=None, limits=limits, transport=transport)
        self._timeout_s = timeout_s
        self._servers: list[Server] = []
        for number, endpoint in enumerate(endpoints):
            self._add(number, endpoint)
        self._backoff_start_s = backoff_start_s
        self._changed = asyncio.Event()
        self._background = Background()

    async def close(self) -> None:
        """Cancel the tasks in the background, and close all connections."""
        await self._background.cancel()
        await asyncio.shield(self._http.aclose())  # cancelled in the middle it would leave connections open

    @property
    def reports_raw_logprobs(self) -> bool:
        """True when any server has raw log-probabilities, by its newest answer. One that does not tell has not."""
        return any(server.client.logprobs_mode == "raw_logprobs" for server in self._servers)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens of all completions since the start."""
        return sum(server.num_sampled_tokens for server in self._servers)

    @property
    def request_s(self) -> float:
        """The durations of all requests for completions together."""
        return sum(server.request_s for server in self._servers)

    def metrics(self) -> dict[str, float]:
        """Figures of each server by its number in `client.base_url` or the workspace; counts are since the start."""
        present = [server for server in self._servers if not server.retired]
        figures = {name: value for server in present for name, value in server.metrics().items()}
        return {**figures, "inference/max_in_flight": self.places.control.limit}

    # -- requests ----

    async def complete(self, request: CompletionRequest) -> list[Completion]:
        """The completions of `request`, one for each of its choices. Call it while holding `places`."""
        server, completions, took_s = await self._ask(request, lambda client: client.complete(request))
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        server.num_sampled_tokens += num_tokens
        self.places.note_answer(request.num_choices, num_tokens, took_s)
        return completions

    async def score(self, request: ScoreRequest) -> Scores:
        """What the model says of the tokens of `request`. Call it while holding `places`."""
        _, scores, took_s = await self._ask(request, lambda client: client.score(request))
        self.places.note_answer(1, request.num_tokens, took_s)
        return scores

    async def _ask(
        self, request: CompletionRequest | ScoreRequest, ask: Callable[[ServerClient], Awaitable[ResultT]]
    ) -> tuple[Server, ResultT, float]:
        """The answer to `request`, the server that gave it, and the seconds that it took."""
        sampling = request if isinstance(request, CompletionRequest) else None
        while True:
            server = await self._pick(sampling)
            epoch, start_s = self.places.control.epoch, time.monotonic()
            server.num_requests += 1
            server.outstanding_tokens += request.num_tokens
            try:
                answer = await ask(server.client)
            except InferenceUnavailable as error:
                if error.is_overload:
                    self.places.control.note_overload(epoch)
                self._note_failure(server, error)
                continue
            finally:
                server.outstanding_tokens -= request.num_tokens
                took_s = time.monotonic() - start_s
                server.request_s += took_s if sampling else 0.0
            server.num_refused = 0
            self._set_trouble(None)
            return server, answer, took_s

    async def list_models(self) -> list[ServedModel]:
        """The base model and all adapters that some living server has, also those of other runs."""
        found = await self.everywhere(lambda server: server.list_models())
        return list({model.id: model for models in found for model in models}.values())

    async def everywhere(self, ask: Callable[[ServerClient], Awaitable[ResultT]]) -> list[ResultT]:
        """The answers of all living servers, at least one. A silent server is taken out; a refusal is raised."""
        while True:
            living = [server for server in self._servers if server.living]
            results = await asyncio.gather(*(ask(server.client) for server in living), return_exceptions=True)
            answers: list[ResultT] = []
            for server, result in zip(living, results, strict=True):
                if isinstance(result, InferenceUnavailable):
                    self._take_out(server, result)
                elif isinstance(result, BaseException):
                    raise result
                else:
                    answers.append(result)
            if answers:
                self._set_trouble(None)
                return answers
            await self._pick()

    async def once_everywhere(self, ask: Callable[[ServerClient], Awaitable[object]]) -> list[BaseException | None]:
        """Ask all living servers once; for each its error or None. No server is removed, nothing is retried."""
        living = [server for server in self._servers if server.living]
        results = await asyncio.gather(*(ask(server.client) for server in living), return_exceptions=True)
        return [result if isinstance(result, BaseException) else None for result in results]

    # -- servers ----

    def follow(self, replicas: Replicas) -> None:
        """Take the servers of the workspace as they come and go, from now until `close`."""
        for number, standing in replicas.look().items():
            if number and standing is Standing.SERVING:
                self._add(number, replicas.endpoint(number))
        self._background.start(self._follow(replicas), "looking for inference servers")

    async def _follow(self, replicas: Replicas) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for number, standing in (await asyncio.to_thread(replicas.look)).items():
                server = next((each for each in self._servers if each.number == number), None)
                if server is None and standing is Standing.SERVING:
                    server = self._add(number, replicas.endpoint(number), retired=True)
                if server is not None:
                    self._heed(server, standing)

    def _add(self, number: int, endpoint: Endpoint, *, retired: bool = False) -> Server:
        client = ServerClient(endpoint, self._http, timeout_s=self._timeout_s)
        self._servers.append(server := Server(number, client, living=not retired, retired=retired))
        return server

    def _heed(self, server: Server, standing: Standing) -> None:
        """Do what a look at the workspace asks for. Replica 0 is never retired: it is what is waited for."""
        if standing is Standing.SERVING:
            if server.retired:
                logger.info("inference server %d has come: %s", server.number, server.client.address)
                server.retired, server.error = False, f"inference at {server.client.address} (it has just come)"
                self._background.start(self._bring_back(server), f"equipping {server.client.address}")
        elif standing is Standing.SILENT:
            if server.living and not server.is_doubted:
                server.is_doubted = True
                self._background.start(self._doubt(server), f"asking {server.client.address} for a sign of life")
        else:
            if server.living:
                address = server.client.address
                server.client.abandon() if standing is Standing.DEAD else server.client.forget()
                self._take_out(server, ServerDown(f"inference at {address} ({_WHY_NOT_ASKED[standing]})"))
            if standing is Standing.GONE and server.number:
                server.retired = True

    async def _doubt(self, server: Server) -> None:
        """Take out a server that does not answer; its requests under way are made again elsewhere."""
        try:
            async with asyncio.timeout(SIGN_OF_LIFE_S):
                await server.client.list_models()
        except (InferenceError, TimeoutError):
            error = ServerDown(f"inference at {server.client.address} (no heartbeat and no answer)")
            server.client.abandon()
            self._take_out(server, error)
        finally:
            server.is_doubted = False

    async def _pick(self, request: CompletionRequest | None = None) -> Server:
        """The server for the next request; waits until there is one."""
        while True:
            now_s = asyncio.get_running_loop().time()
            living = [server for server in self._servers if server.living]
            ready = [server for server in living if server.not_before_s <= now_s]
            if ready:
                return choose(ready, request)
            self._set_trouble(self._describe_trouble())
            self._changed.clear()
            soonest_s = min((server.not_before_s for server in living), default=None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(soonest_s):
                    await self._changed.wait()

    def _note_failure(self, server: Server, error: InferenceUnavailable) -> None:
        """Take it out when it is down, else leave it alone for a while."""
        server.num_failures += 1
        if isinstance(error, ServerDown):
            self._take_out(server, error)
            return
        server.error = str(error)
        now_s = asyncio.get_running_loop().time()
        if server.not_before_s <= now_s:  # of many requests that fail together one counts
            delay_s = error.retry_after_s if error.retry_after_s is not None else self._backoff_s(server.num_refused)
            server.not_before_s = now_s + delay_s
            server.num_refused += 1

    def _take_out(self, server: Server, error: InferenceUnavailable) -> None:
        server.error = str(error)
        if not server.living:
            return
        server.living = False
        logger.warning("no more requests to inference server %d until it answers: %s", server.number, error)
        self._background.start(self._bring_back(server), f"bringing back {server.client.address}")

    async def _bring_back(self, server: Server) -> None:
        """Look at a server that was taken out until it answers and is equipped; then it is asked again."""
        logged = server.error
        for attempt in itertools.count():
            await asyncio.sleep(self._backoff_s(attempt))
            if server.retired:
                return
            try:
                await self._equip(server.client)
                break
            except AccessDenied:
                break  # raised again by the next request, which has a caller
            except Exception as error:  # nothing else would bring this server back, so no failure of one try ends it
                server.error = _describe(error, server)
                if self.trouble is not None:
                    self._set_trouble(self._describe_trouble())
                if server.error != logged and not isinstance(error, InferenceUnavailable):
                    logged = server.error
                    logger.warning("cannot restore %s yet, will retry: %s", server.client.address, server.error)
        if server.retired:
            return
        logger.info("inference server %d answers", server.number)
        server.living, server.not_before_s, server.num_refused = True, 0.0, 0
        self._changed.set()

    def _backoff_s(self, attempt: int) -> float:
        # 2.0 ** 1024 overflows.
        exponential_s = self._backoff_start_s * 2.0 ** min(attempt, 32)
        return min(BACKOFF_MAX_S, exponential_s) + random.uniform(0, self._backoff_start_s)

    # -- trouble ----

    def _describe_trouble(self) -> str:
        errors = [server.error for server in self._servers if not server.retired]
        return errors[0] if len(errors) == 1 else f"one of {len(errors)} inference servers: {'; '.join(errors)}"

    def _set_trouble(self, trouble: str | None) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            self._on_trouble(trouble)


def _describe(error: Exception, server: Server) -> str:
    if isinstance(error, InferenceError):
        return str(error)
    return f"inference at {server.client.address} ({type(error).__name__}: {' '.join(str(error).split())})"


# Low enough for a server that many runs share, high enough to be at 64 after two rounds of answers.
START_LIMIT = 16
# A rise pays when the tokens per second grow by at least this share of what the limit grew by.
MIN_GAIN = 0.25
# So many rounds later a rise that did not pay is tried again: other runs may have gone.
ROUNDS_ON_PLATEAU = 10


class ConcurrencyControl:
    """Additive increase, multiplicative decrease; doubling until the first time that a rise does not pay.

    A round is as many answered rollouts as `limit`. The limit rises after a round in which it was reached; a rise that
    did not pay is taken back. It is halved at an overload, once for all requests that were under way together.
    """

    def __init__(self, maximum: int, start: int = START_LIMIT) -> None:
        self.limit = min(start, maximum)
        self.epoch = 0  # of requests that begin now
        self._maximum = maximum
        self._is_doubling = True
        self._before: tuple[int, float] | None = None  # the limit before the last rise, and its tokens per second
        self._rounds_to_wait = 0
        self._begin_round()

    def note_answer(self, num_rollouts: int, num_tokens: int, latency_s: float, *, is_full: bool) -> None:
        """A request was answered; `is_full` when others would have liked to go beside it."""
        self._num_answered += num_rollouts
        self._num_tokens += num_tokens
        self._rollout_s += num_rollouts * latency_s
        self._was_full |= is_full
        if self._num_answered >= self.limit:
            self._end_round()

    def note_overload(self, epoch: int) -> None:
        """Inference did not take a request that began in `epoch`."""
        if epoch < self.epoch:
            return  # it went out together with one for which the limit has been lowered
        self.limit = max(1, self.limit // 2)
        self.epoch += 1
        self._is_doubling = False
        self._before = None
        self._begin_round()

    def _end_round(self) -> None:
        # Little's law: what is under way, over how long each takes.
        tokens_per_s = self.limit * self._num_tokens / self._rollout_s if self._rollout_s else float("inf")
        if self._was_full and self.limit < self._maximum:
            before, before_per_s = self._before or (self.limit, 0.0)
            if self._rounds_to_wait:
                self._rounds_to_wait -= 1
            elif tokens_per_s >= before_per_s * (1 + MIN_GAIN * (self.limit / before - 1)):
                self._before = (self.limit, tokens_per_s)
                step = self.limit if self._is_doubling else max(1, self.limit // 8)
                self.limit = min(self._maximum, self.limit + step)
            else:  # the last rise did not pay
                self.limit = before
                self._is_doubling = False
                self._before = None
                self._rounds_to_wait = ROUNDS_ON_PLATEAU
        self._begin_round()

    def _begin_round(self) -> None:
        self._num_answered = 0
        self._num_tokens = 0
        self._rollout_s = 0.0
        self._was_full = False


class Places:
    """First come, first served. A request that is larger than the limit goes alone."""

    def __init__(self, maximum: int) -> None:
        self.control = ConcurrencyControl(maximum)
        self.num_used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def hold(self, num_rollouts: int) -> AsyncIterator[None]:
        """Wait until `num_rollouts` may be sampled, and hold their places for as long as the block runs."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_rollouts, turn))
        self._let_in()
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():
                self.num_used -= num_rollouts
            self._let_in()

    def note_answer(self, num_rollouts: int, num_tokens: int, latency_s: float) -> None:
        """Count a request that was answered after `latency_s`, with all tokens of its rollouts."""
        is_full = any(not turn.done() for _, turn in self._waiting)
        self.control.note_answer(num_rollouts, num_tokens, latency_s, is_full=is_full)

    def _let_in(self) -> None:
        while self._waiting:
            num_rollouts, turn = self._waiting[0]
            if not turn.done():
                if self.num_used and self.num_used + num_rollouts > self.control.limit:
                    return
                self.num_used += num_rollouts
                turn.set_result(None)
            self._waiting.popleft()
