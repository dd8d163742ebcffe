"""A call of the policy and its answer, whatever the form of the endpoint that it came through.

The gateway makes one of what an agent sends, the orchestrator of the run answers it and records what was sampled. What
an agent asks for is a `Request` in a session; it is answered, or refused with `Refusal`, which becomes an answer of
HTTP. A session's id is its run's, a dot, and letters and digits.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a tool. `arguments` is JSON as the policy wrote it, `id` of one call alone in its session."""

    id: str
    name: str
    arguments: str


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message.

    Attributes:
        reasoning: what the assistant thought before `content`.
        calls: of tools, by the assistant.
        call_id: whose result this is, of role "tool".
    """

    role: Role
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""


class Call(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """A request for the turn that follows `messages`, or for the text that follows `prompt`.

    Attributes:
        tools: OpenAI's form, each {"type": "function", "function": {...}}.
        may_call: calls of tools are read out of the answer; else all of it is content.
        max_tokens, stop: beside the run's own limits and stops.
        pieces: the answer is to have the texts of its tokens.
        again: the client says that it repeats itself, so an answer that it has had is given again.
    """

    messages: tuple[Turn, ...] = ()
    prompt: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    may_call: bool = True
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    pieces: bool = False
    again: bool = False


class Answer(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """The policy's turn.

    Attributes:
        finish: "length" when it was cut.
        stop: the text that ended it, which is not in `turn`.
        num_prompt_tokens: of all that the policy read.
        token_ids, logprobs, pieces: of the answer, as they are trained on; `pieces` are the texts of the tokens.
        version: of the policy.
        number: of the answer in its session, by which `Delivered` names it.
    """

    turn: Turn
    finish: Literal["stop", "length"]
    num_prompt_tokens: int
    token_ids: list[int]
    logprobs: list[float]
    version: int
    stop: str | None = None
    pieces: list[str] = []
    number: int = 0


class Delivered(msgspec.Struct, frozen=True, tag=True):
    """The client has all of an answer: the same request, sent again, asks for another one. None: it has `Opened`."""

    number: int | None = None


class Invalid(msgspec.Struct, frozen=True, tag=True):
    """A call of the session that was not understood, so it was refused without being asked for."""

    reason: str


class Count(msgspec.Struct, frozen=True, tag=True):
    """Ask for the number of tokens that a call has the policy read: `Done.num_tokens`."""

    call: Call


class Reward(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """The reward of a session. `rewards` are its parts or named figures; `closes`: the session ends with it.

    `value` None closes without a reward; with `number` it is that of one answer.
    """

    value: float | None = None
    rewards: dict[str, float] = {}
    number: int | None = None
    closes: bool = True
    error: str = ""


class Open(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """A session for somebody outside; `group`: the same for sessions that are compared with each other."""

    example: str = ""
    group: str = ""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The id of a new session, and what it is about: messages and the rest of an example, as JSON."""

    session: str
    example: dict[str, Any]


class Done(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """The request is done."""

    num_tokens: int = 0


Request = Call | Delivered | Invalid | Count | Reward | Open
Reply = Answer | Done | Opened


class Refusal(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP.
        code: in one word, as OpenAI has it; "context_length_exceeded", "limit", "busy", "closed", "unavailable", ...
        retry_after_s: trying again then helps; None: it does not help.
    """

    def __init__(self, status: int, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_after_s = status, code, message, retry_after_s


class Backend(Protocol):
    """Whoever answers the requests of sessions: the orchestrator of a run in this process, or at the end of a link."""

    async def ask(self, session: str, request: Request) -> Reply:
        """The reply to a request in `session`, or for `Open` of the run of that id. Cancelled, its place is free.

        Raises Refusal.
        """

    def max_model_len(self, session: str) -> int | None:
        """The longest sequence of its run; None where that is not known."""
