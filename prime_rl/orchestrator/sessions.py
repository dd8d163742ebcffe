"""The open sessions of a run: each is the policy of one rollout, asked through an endpoint for agents.

`Sessions` answers what the gateway asks of it, in this process or at the end of a link (`Link`). Clients repeat
themselves: an identical call joins the first one while that is in flight, gets the same answer while that was not
delivered, and is sampled anew after that, unless the client says that it repeats itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import secrets
import string
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Never

import msgspec

from prime_rl.configs.envs import SessionLimits
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.calls import (
    Answer,
    Call,
    Count,
    Delivered,
    Done,
    Invalid,
    Open,
    Opened,
    Refusal,
    Reply,
    Request,
    Reward,
)
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import GatewayStatus, SessionStatus, read_status
from prime_rl.gateway import link
from prime_rl.gateway.keys import new_secret, session_key, workspace_secret
from prime_rl.orchestrator.envs.base import MAX_REWARDS, AnswersCalls, RolloutError
from prime_rl.orchestrator.envs.checked import MAX_REWARD, METRIC_NAME, EnvironmentFault, Interrupted, TimedOut
from prime_rl.orchestrator.policy import ChatTokenizer, TokenizerError, TooLong
from prime_rl.orchestrator.recorder import pieces
from prime_rl.utils.runtime import Background, cancel_all
from prime_rl.utils.text import counted, one_line

# 22 letters and digits: as much as 128 bits.
ID_LEN = 22
_LETTERS = string.ascii_letters + string.digits
# Of one session: an agent of many sub-agents; beyond it something loops.
MAX_AT_ONCE = 16
# The newest answers of a session, by which repeated requests are known.
MAX_ANSWERS_KEPT = 64
# Rewards of one session.
MAX_POSTED = 1024
# Sessions that are closed, whose last reward is known when it comes again.
MAX_FINAL_KEPT = 1024
# A client that hung up comes back within this, when it does: SDKs try again after a half to several seconds.
LINGER_S = 5.0
# Of the reason of a refusal, where it is told as that of a rollout.
MAX_REASON_CHARS = 300
# All clients end on an error whose message has these words in it.
TOO_LONG = "maximum context length"
NO_LIMITS = SessionLimits()
# The status file, which is written often, has so many of them.
MAX_SHOWN = 32


@dataclass(eq=False)
class _Asked:
    """One call that is being answered or was. `leaving`: nobody waits for it, so it will be given up."""

    task: asyncio.Task[Answer]
    num_waiting: int = 0
    is_delivered: bool = False
    leaving: asyncio.TimerHandle | None = None

    @property
    def answer(self) -> Answer | None:
        """None while there is none, and where it failed."""
        has_one = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return self.task.result() if has_one else None


@dataclass(eq=False)
class OpenSession:
    """One open session. `on_reward` is called with each reward that is posted; `closed` once no more calls are taken.

    Attributes:
        base_url, key: for the client.
        num_requests: of any kind, so far.
        opened_at: in Unix seconds.
        used_s: when something happened in it last, in the event loop's time; `opened_s` is when it was opened.
        refusal: why a call was refused since the last answer, in words; "" when none was.
        asked: its newest calls, by their content.
        tasks: those in flight.
    """

    id: str
    base_url: str
    key: str
    policy: AnswersCalls
    limits: SessionLimits
    on_reward: Callable[[Reward], None]
    example: str = ""
    opened_at: float = field(default_factory=time.time)
    opened_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    rewards: list[Reward] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    num_answers: int = 0
    num_tokens: int = 0
    num_requests: int = 0
    used_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    refusal: str = ""
    asked: dict[bytes, _Asked] = field(default_factory=dict)
    tasks: set[asyncio.Task[Answer]] = field(default_factory=set)

    @property
    def idle_s(self) -> float:
        """Seconds in which nothing has happened in it; 0 while a call is in flight."""
        return 0.0 if self.tasks else asyncio.get_running_loop().time() - self.used_s

    def status(self, waiting_on: str | None) -> SessionStatus:
        """It as others see it; `waiting_on`: what all sessions of the run wait for."""
        num, used_at = len(self.tasks), self.opened_at + self.used_s - self.opened_s
        waits = f"inference ({counted(num, 'call')} in flight)" if num else waiting_on or "its client"
        times = {"since": round(self.opened_at), "used_at": round(used_at)}
        return SessionStatus(
            id=self.id, example=one_line(self.example, 80), num_calls=self.num_requests, waiting_on=waits, **times
        )

    def give_up(self, key: bytes, asked: _Asked) -> None:
        """End a call that is in flight. The same one, asked again, is another one from now on."""
        if not asked.task.done():
            asked.task.cancel()
            if self.asked.get(key) is asked:
                del self.asked[key]

    def ended(self, key: bytes, task: asyncio.Task[Answer]) -> None:
        """Note the end of a call. It is forgotten where it failed, and so are the oldest ones."""
        self.tasks.discard(task)
        self.used_s = asyncio.get_running_loop().time()
        if (asked := self.asked.get(key)) and asked.task is task and asked.answer is None:
            del self.asked[key]
        done = [key for key, asked in self.asked.items() if asked.task.done()]
        for old in done[: max(0, len(self.asked) - MAX_ANSWERS_KEPT)]:
            del self.asked[old]


class Sessions:
    """The open sessions of one run, a `contract.calls.Backend`.

    Args:
        tokenizer: None where nothing is sampled.
        max_model_len: the longest sequence of the run, where it is known.
        linger_s: for so long a call goes on for which nobody waits.

    Attributes:
        waiting_on: why `served` waits, in words; None when it does not.
        on_open: makes sessions for somebody outside; None where the run takes none.
        num_places: rollouts that wait for somebody outside.
    """

    def __init__(
        self,
        run_id: str,
        secret: bytes,
        tokenizer: ChatTokenizer | None,
        *,
        max_model_len: int | None = None,
        linger_s: float = LINGER_S,
    ) -> None:
        self.run_id = run_id
        self.secret = secret
        self.run_max_model_len = max_model_len
        self.on_open: Callable[[Open], Awaitable[Opened]] | None = None
        self.num_places = 0
        self.waiting_on: str | None = "the gateway"
        self._tokenizer = tokenizer
        self._linger_s = linger_s
        self._open: dict[str, OpenSession] = {}
        # By the ids of closed sessions.
        self._final: dict[str, Reward] = {}
        self._base_url = ""
        self._is_served = asyncio.Event()
        self._num_lost = 0  # how often the gateway went away
        self._trouble: str | None = None
        self._num_troubles = 0  # how often inference did

    @classmethod
    def of(cls, run: RunDir, tokenizer: ChatTokenizer, max_model_len: int) -> Sessions:
        """Those of a run, with the keys of its workspace. Raises SecretError."""
        return cls(run.run_id, workspace_secret(OutputDir(run.path.parent)), tokenizer, max_model_len=max_model_len)

    @property
    def waits_for(self) -> str | None:
        """The wait of its rollouts, in words; None when they do not wait."""
        places = f"somebody to open a session ({self.num_places} places)" if self.num_places else None
        return self.waiting_on or places

    def num_open(self) -> int:
        """The number of open sessions."""
        return len(self._open)

    def figures(self) -> dict[str, object]:
        """Those of the status file: how many sessions are open, and the oldest of them."""
        shown = islice(self._open.values(), MAX_SHOWN)
        return {"num_sessions": len(self._open), "sessions": [each.status(self.waiting_on) for each in shown]}

    def served_at(self, base_url: str | None, waiting_on: str | None = None) -> None:
        """Note the URL of the gateway that asks here, before /s/ID; None: there is none now."""
        self._base_url, self.waiting_on = base_url or self._base_url, waiting_on
        if base_url is None:
            self._num_lost += self._is_served.is_set()
            self._is_served.clear()
        else:
            self._is_served.set()

    def note_trouble(self, trouble: str | None) -> None:
        """Note what is wrong with inference from now on; None when nothing is."""
        self._num_troubles += trouble is not None
        self._trouble = trouble

    async def served(self) -> None:
        """Wait until the gateway is there."""
        await self._is_served.wait()

    @contextlib.asynccontextmanager
    async def open(
        self,
        policy: AnswersCalls,
        limits: SessionLimits = NO_LIMITS,
        on_reward: Callable[[Reward], None] = lambda reward: None,
        example: str = "",
    ) -> AsyncIterator[OpenSession]:
        """A session for as long as the block runs. Its URL is that of the gateway, or of the last one (`served`).

        A fault of the environment in the block gets the reason why a call was refused last; it becomes Interrupted
        where the gateway went away meanwhile, and so does a time limit that was reached while inference was away.
        """
        session_id = f"{self.run_id}.{''.join(secrets.choice(_LETTERS) for _ in range(ID_LEN))}"
        base_url, key = f"{self._base_url}/s/{session_id}/v1", session_key(self.secret, session_id)
        session = self._open[session_id] = OpenSession(session_id, base_url, key, policy, limits, on_reward, example)
        num_lost, num_troubles, trouble = self._num_lost, self._num_troubles, self._trouble
        try:
            yield session
            if session.refusal and not session.num_answers:
                raise EnvironmentFault("no call was answered")
        except EnvironmentFault as fault:
            kind, words = type(fault), str(fault)
            was_away = trouble is not None or self._num_troubles != num_troubles
            if self._num_lost != num_lost:
                kind, words = Interrupted, f"the gateway went away meanwhile: {words}"
            elif isinstance(fault, TimedOut) and was_away:
                kind, words = Interrupted, f"inference was away meanwhile: {words}"
            raise kind(words + f"; a call was refused: {session.refusal}" * bool(session.refusal)) from fault
        finally:
            del self._open[session_id]
            session.closed.set()
            if session.rewards and session.rewards[-1].closes:
                self._final[session_id] = session.rewards[-1]
                for old in [*self._final][:-MAX_FINAL_KEPT]:
                    del self._final[old]
            await cancel_all(session.tasks)

    def _last_reward(self, session: str, number: int | None) -> Reward | None:
        """The newest of a session, for the whole or for one answer; of one that is closed, what closed it."""
        if (found := self._open.get(session)) is None:
            return self._final.get(session)
        return next((each for each in reversed(found.rewards) if each.number == number), None)

    def max_model_len(self, session: str) -> int | None:
        """The longest sequence of the run."""
        return self.run_max_model_len

    async def ask(self, session: str, request: Request) -> Reply:
        """The reply to a request in `session`. Raises Refusal."""
        if isinstance(request, Open):
            if self.on_open is None:
                words = f'{self.run_id} takes no sessions from outside: it has no [[env]] with id = "sessions"'
                raise Refusal(404, "invalid_request", words)
            return await self.on_open(request)
        found = self._open.get(session)
        if isinstance(request, Reward) and request == self._last_reward(session, request.number):
            return Done()  # the answer to the first was lost
        if found is None or found.closed.is_set():
            raise Refusal(410, "closed", f"session {one_line(session, 100)} is closed: its rollout has ended")
        found.num_requests += 1
        found.used_s = asyncio.get_running_loop().time()
        if isinstance(request, Call):
            try:
                return await self._answer(found, request)
            except Refusal as refusal:
                if refusal.status == 400:
                    found.refusal = one_line(refusal.message, MAX_REASON_CHARS)
                raise
        if isinstance(request, Invalid):
            found.refusal = one_line(request.reason, MAX_REASON_CHARS)
            return Done()
        if isinstance(request, Count):
            return Done(self._count(request.call))
        if isinstance(request, Delivered):
            for asked in found.asked.values():
                if (answer := asked.answer) and answer.number == request.number:
                    asked.is_delivered = True
            return Done()
        return self._rewarded(found, request)

    async def _answer(self, session: OpenSession, call: Call) -> Answer:
        key = _content(call)
        asked = session.asked.get(key)
        if asked is None or (asked.is_delivered and not call.again):
            asked = session.asked[key] = self._begin(session, key, call)
        answer = await self._wait(session, key, asked)
        if call.pieces and self._tokenizer is not None:
            return msgspec.structs.replace(answer, pieces=pieces(answer.token_ids, self._tokenizer.decode))
        return answer

    def _begin(self, session: OpenSession, key: bytes, call: Call) -> _Asked:
        """Start to sample. Raises Refusal at a limit of the session."""
        limits, num_at_once = session.limits, len(session.tasks)
        if num_at_once >= MAX_AT_ONCE:
            raise Refusal(429, "busy", f"{num_at_once} calls of this session are in flight, as many as may be", 1)
        left = None if limits.max_tokens_total is None else limits.max_tokens_total - session.num_tokens
        if limits.max_turns is not None and session.num_answers + num_at_once >= limits.max_turns:
            reached = f"max_turns = {limits.max_turns}"
        elif left is not None and left <= 0:
            reached = f"max_tokens_total = {limits.max_tokens_total}"
        else:
            max_tokens = call.max_tokens if left is None else min(call.max_tokens or left, left)
            asked = msgspec.structs.replace(call, max_tokens=max_tokens, pieces=False)
            task = asyncio.get_running_loop().create_task(self._sample(session, asked))
            session.tasks.add(task)
            task.add_done_callback(lambda task: session.ended(key, task))
            return _Asked(task)
        raise Refusal(400, "limit", f"No more answers, as beyond the {TOO_LONG}: the session has reached {reached}")

    async def _sample(self, session: OpenSession, call: Call) -> Answer:
        try:
            answer = await session.policy.call(call)
        except TooLong as error:
            raise Refusal(400, "context_length_exceeded", f"The {TOO_LONG} is exceeded: {error}") from error
        except RolloutError as error:
            raise Refusal(400, "invalid_request", one_line(str(error), 1000)) from error
        except Exception as error:  # what inference raises ends the run: no agent can do anything about it
            raise Refusal(500, "unavailable", one_line(f"{type(error).__name__}: {error}", 1000)) from error
        answer = msgspec.structs.replace(answer, number=session.num_answers)
        session.num_answers, session.refusal = session.num_answers + 1, ""
        session.num_tokens += len(answer.token_ids)
        return answer

    async def _wait(self, session: OpenSession, key: bytes, asked: _Asked) -> Answer:
        """Its answer. A call for which nobody waits any more is given up after a while."""
        asked.num_waiting += 1
        if asked.leaving is not None:
            asked.leaving.cancel()
        try:
            return await asyncio.shield(asked.task)
        except asyncio.CancelledError:
            if not asked.task.cancelled():
                raise
            raise Refusal(410, "closed", "the session was closed: its rollout has ended") from None
        finally:
            asked.num_waiting -= 1
            if not asked.num_waiting and not asked.task.done():
                asked.leaving = asyncio.get_running_loop().call_later(self._linger_s, session.give_up, key, asked)

    def _count(self, call: Call) -> int:
        if self._tokenizer is None:
            return len(call.prompt.split()) + sum(len(turn.content.split()) for turn in call.messages)
        try:
            if not call.messages:
                return len(self._tokenizer.encode(call.prompt))
            return len(self._tokenizer.prompt(call.messages, call.tools))
        except TokenizerError as error:
            raise Refusal(400, "invalid_request", one_line(str(error), 1000)) from error

    @staticmethod
    def _rewarded(session: OpenSession, reward: Reward) -> Done:
        if problem := reward_problem(reward, session.num_answers):
            raise Refusal(400, "invalid_request", problem)
        if len(session.rewards) == MAX_POSTED and not reward.closes:
            raise Refusal(400, "limit", f"this session has had {MAX_POSTED} rewards, as many as it may")
        session.on_reward(reward)
        session.rewards.append(reward)
        if reward.closes:
            session.closed.set()
            for task in session.tasks:
                task.cancel()
        return Done()


def reward_problem(reward: Reward, num_answers: int) -> str | None:
    """Why a reward is refused, in words; None for one that is taken."""
    numbers = {"the reward": reward.value or 0.0, **reward.rewards}
    if wrong := [name for name in reward.rewards if not METRIC_NAME.fullmatch(name)]:
        return f"{one_line(repr(wrong[0]), 80)} is not a valid name of a reward"
    if len(reward.rewards) > MAX_REWARDS:
        return f"there are {len(reward.rewards)} rewards: at most {MAX_REWARDS} are allowed"
    if far := [name for name, value in numbers.items() if not (math.isfinite(value) and abs(value) <= MAX_REWARD)]:
        return f"{far[0]} is {numbers[far[0]]:g}: must be a number of at most {MAX_REWARD:g}"
    if reward.number is not None and not 0 <= reward.number < num_answers:
        return f"there is no answer {reward.number}: this session has had {num_answers}"
    return None


_sorted = msgspec.msgpack.Encoder(order="sorted")


def _content(call: Call) -> bytes:
    """A digest of what is asked, whichever way it is answered."""
    plain = msgspec.structs.replace(call, again=False, pieces=False)
    return hashlib.blake2b(_sorted.encode(plain), digest_size=16).digest()


async def sessions_here(
    config: OrchestratorConfig,
    run_id: str,
    tokenizer: ChatTokenizer | None,
    max_model_len: int | None,
    cleanup: AsyncExitStack,
) -> Sessions | None:
    """Sessions whose endpoint is served by this process, which has no gateway; None where no environment needs any."""
    if not config.needs_gateway:
        return None
    from prime_rl.gateway.serve import serving_here  # an HTTP server, which an orchestrator has no use for

    sessions = Sessions(run_id, new_secret(), tokenizer, max_model_len=max_model_len)
    sessions.served_at(await cleanup.enter_async_context(serving_here(sessions, sessions.secret)))
    return sessions


def link_up(run: RunDir, sessions: Sessions, cleanup: AsyncExitStack) -> None:
    """Let the gateway of the run's workspace ask `sessions`, until the `cleanup`."""
    tasks = Background()
    cleanup.push_async_callback(tasks.cancel)
    tasks.start(Link(OutputDir(run.path.parent), sessions).keep(), "the link to the gateway")


logger = logging.getLogger("orchestrator")

# Between two attempts to reach the gateway.
MIN_RETRY_S, MAX_RETRY_S = 0.1, 2.0


class Link:
    """Lets the gateway of the workspace ask `sessions`, whenever there is one and wherever it listens."""

    def __init__(self, output: OutputDir, sessions: Sessions) -> None:
        self._status = output.gateway_status
        self._sessions = sessions

    async def keep(self) -> Never:
        """Connect, and connect again, until it is cancelled."""
        wait_s = MIN_RETRY_S
        while True:
            status = read_status(self._status, GatewayStatus)
            trouble = "the gateway (not started yet)"
            if status is not None and status.link:
                try:
                    await self._connected(status)
                except (OSError, ValueError, link.Lost) as error:
                    trouble = f"the gateway at {status.link} ({one_line(str(error), 200)})"
            was_served = self._sessions.waiting_on is None
            self._sessions.served_at(None, trouble)
            if was_served:
                logger.warning("lost: %s", trouble)
            wait_s = MIN_RETRY_S if was_served else min(2 * wait_s, MAX_RETRY_S)
            await asyncio.sleep(wait_s)

    async def _connected(self, status: GatewayStatus) -> None:
        """Until the connection ends. Requests under way go on without it."""
        host, _, port = status.link.rpartition(":")
        async with asyncio.timeout(link.HELLO_TIMEOUT_S):
            wire = link.Wire(*await asyncio.open_connection(host.strip("[]"), int(port)))
        with contextlib.ExitStack() as stack:
            stack.callback(wire.close)
            await self._greet(wire)
            stack.callback(asyncio.create_task(link.beat(wire, lambda: link.Beat(self._sessions.num_open()))).cancel)
            logger.info("the gateway at %s asks for the sessions of %s", status.base_url, self._sessions.run_id)
            self._sessions.served_at(status.base_url)
            await self._answer(wire)

    async def _greet(self, wire: link.Wire) -> None:
        """Prove that this is the run's orchestrator, and see that the other end is the gateway. Raises Lost."""
        secret, run_id, nonce = self._sessions.secret, self._sessions.run_id, new_secret().decode()
        challenge = await wire.read(link.decode_asked, link.HELLO_TIMEOUT_S, link.MAX_HELLO_BYTES)
        if not isinstance(challenge, link.Challenge):
            raise link.Lost("its first message is no Challenge")
        proof = link.prove(secret, "orchestrator", run_id, challenge.nonce)
        wire.send(link.Hello(run_id, proof, nonce, self._sessions.max_model_len(run_id)))
        welcome = await wire.read(link.decode_asked, link.HELLO_TIMEOUT_S, link.MAX_HELLO_BYTES)
        if not (isinstance(welcome, link.Welcome) and link.is_proof(welcome.proof, secret, "gateway", run_id, nonce)):
            raise link.Lost("it does not prove that it is this workspace's gateway")

    async def _answer(self, wire: link.Wire) -> Never:
        """Answer what the gateway asks, side by side. Raises Lost at the end of the connection."""
        under_way: dict[int, asyncio.Task[None]] = {}

        async def answer(asked: link.Ask) -> None:
            try:
                await self._reply(wire, asked)
            finally:
                del under_way[asked.key]

        while True:
            message = await wire.read(link.decode_asked, link.LOST_AFTER_S)
            if isinstance(message, link.Ask):
                under_way[message.key] = asyncio.create_task(answer(message))
            elif isinstance(message, link.Cancel) and (found := under_way.get(message.key)):
                found.cancel()

    async def _reply(self, wire: link.Wire, asked: link.Ask) -> None:
        try:
            wire.send(link.Replied(asked.key, await self._sessions.ask(asked.session, asked.request)))
            return
        except Refusal as refusal:
            words = one_line(refusal.message, 2000)
            refused = link.Refused(refusal.status, refusal.code, words, refusal.retry_after_s)
        except Exception as error:  # a fault of ours, or too large: the gateway's client must not wait for ever
            logger.exception("a request of the gateway failed")
            refused = link.Refused(500, "error", one_line(f"{type(error).__name__}: {error}", 1000))
        wire.send(link.Replied(asked.key, refused))
