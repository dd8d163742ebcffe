"""Helpers of the gateway's tests: a backend that records what it is asked and answers from a script, and clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai

from prime_rl.contract.calls import (
    Answer,
    Call,
    Count,
    Delivered,
    Done,
    Invalid,
    Open,
    Opened,
    Reply,
    Request,
    Reward,
    ToolCall,
    Turn,
)
from prime_rl.gateway.app import build_app
from prime_rl.gateway.keys import run_key, session_key
from tests.orchestrator_support import serving
from tests.patience import PATIENCE_S

SECRET = b"a secret of the workspace"
RUN = "run_a.b"
SESSION = f"{RUN}.abcd1234"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALLED = Turn("assistant", calls=(ToolCall("call_1", "weather", '{"city": "Bern"}'),))
THOUGHT = Turn("assistant", "It is cold.", "Winter, so cold.")


def answer(turn: Turn | str = "hello", **changes: Any) -> Answer:
    """An answer of two tokens."""
    turn = Turn("assistant", turn) if isinstance(turn, str) else turn
    given: dict[str, Any] = {"turn": turn, "finish": "stop", "num_prompt_tokens": 5, "token_ids": [7, 8]}
    return Answer(**{**given, "logprobs": [-0.5, -1.5], "version": 3, **changes})


@dataclass
class Scripted:
    """A `Backend`. Calls get what `script` has, an answer once it is empty; `hold` keeps them until it is set.

    `refused` are the reasons of calls that the gateway itself refuses.
    """

    script: deque[Answer | Exception] = field(default_factory=deque)
    asked: list[tuple[str, Request]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    hold: asyncio.Event | None = None
    num_cancelled: int = 0

    async def ask(self, session: str, request: Request) -> Reply:
        if isinstance(request, Invalid):
            self.refused.append(request.reason)
            return Done()
        self.asked.append((session, request))
        match request:
            case Call():
                try:
                    if self.hold:
                        await self.hold.wait()
                except asyncio.CancelledError:
                    self.num_cancelled += 1
                    raise
                reply = self.script.popleft() if self.script else answer(number=len(self.calls) - 1)
                if isinstance(reply, Exception):
                    raise reply
                return reply
            case Count():
                return Done(11)
            case Open():
                if self.hold:
                    await self.hold.wait()
                return Opened(f"{session}.0123456789", {"question": request.example})
            case Delivered() | Reward():
                return Done()

    def max_model_len(self, session: str) -> int | None:
        return 4096

    @property
    def calls(self) -> list[Call]:
        return [request for _, request in self.asked if isinstance(request, Call)]

    @property
    def delivered(self) -> list[int]:
        return [request.number for _, request in self.asked if isinstance(request, Delivered)]


@dataclass
class Served:
    """A gateway that listens, and its backend."""

    backend: Scripted
    url: str

    def base(self, session: str = SESSION) -> str:
        return f"{self.url}/s/{session}"

    def openai(self, key: str = session_key(SECRET, SESSION), **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.base()}/v1", api_key=key, timeout=PATIENCE_S, **options)

    def anthropic(self, key: str = session_key(SECRET, SESSION), **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.base(), api_key=key, timeout=PATIENCE_S, **options)


@contextlib.asynccontextmanager
async def gateway(
    *script: Answer | Exception, keep_alive_s: float = PATIENCE_S, told: str = ""
) -> AsyncIterator[Served]:
    """A gateway on the loopback; `told` is the URL that clients are told."""
    backend = Scripted(deque(script))
    async with serving(build_app(backend, SECRET, url=told, keep_alive_s=keep_alive_s)) as url:
        yield Served(backend, url.removesuffix("/v1"))


def headers(key: str | None = None) -> dict[str, str]:
    """Of a request with a key: that of the session, unless another one is given."""
    return {"authorization": f"Bearer {key or session_key(SECRET, SESSION)}", "content-type": "application/json"}


RUN_HEADERS = headers(run_key(SECRET, RUN))
