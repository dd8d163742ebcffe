"""The common part of the forms of all endpoints: bodies that are checked as they are read, streams, errors.

A form is the type of a body. It makes a `Call` of the body, and of the `Answer` what its client expects, as JSON or as
the events of a stream. Fields that it does not have are ignored, such as `temperature`, `top_p` and `seed`: the run
decides how it samples. What would change the meaning of an answer and cannot be done is refused by the field's name.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from prime_rl.contract.calls import Answer, Call, Refusal, Role, Turn
from prime_rl.contract.files import UNDECODABLE
from prime_rl.contract.served import MAX_STOP_CHARS, MAX_STOPS
from prime_rl.utils.text import one_line

# Of a body: each takes time in which no other request is read. Those of texts count too.
MAX_BRACKETS, MAX_COMMAS = 2**16, 2**20
MAX_LEVELS = 64
CHUNK_CHARS = 256
MAX_MESSAGE_CHARS = 1000
# What mini-swe-agent looks for: it repeats any other refusal.
TOO_LONG = "maximum context length"
Name = Literal["system", "developer", "user", "assistant", "tool", "function"]
ROLES: Mapping[Name, Role] = {
    **{"system": "system", "developer": "system", "user": "user", "assistant": "assistant"},
    **{"tool": "tool", "function": "tool"},
}
# Of tokens. A large one is not refused: the run has its own.
Limit = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Choice = str | dict[str, Any]
Stop = Annotated[str, msgspec.Meta(max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], msgspec.Meta(max_length=MAX_STOPS)]
T = TypeVar("T")


class BodyError(Refusal):
    """A body with a `field` that is refused."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(400, "invalid_request", f"{field}: {problem}")
        self.field = one_line(field)


class Form(msgspec.Struct, kw_only=True):
    """The body of a request that asks for an answer. `waiting` keeps its stream alive until there is one."""

    waiting: ClassVar[bytes] = b": waiting\n\n"
    model: str | None = None
    stream: bool | None = None

    def call(self, before: Sequence[Turn] = ()) -> Call:
        """The call that the body asks for; `before` comes before its messages. Raises Refusal."""
        raise NotImplementedError

    def answer(self, answer: Answer) -> dict[str, Any]:
        """The answer for the client, as JSON."""
        raise NotImplementedError

    def events(self, whole: Mapping[str, Any]) -> Iterator[bytes]:
        """The result of `answer` as the events of a stream."""
        raise NotImplementedError

    @classmethod
    def error(cls, refusal: Refusal) -> dict[str, Any]:
        """A refusal, in OpenAI's form."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(refusal.status, "server_error" if refusal.status >= 500 else "invalid_request_error")
        field = refusal.field if isinstance(refusal, BodyError) else None
        return {"error": {"message": sentence(refusal), "type": kind, "param": field, "code": refusal.code}}


class TextFormat(msgspec.Struct):
    """The form of an answer."""

    type: Literal["text"]


class Part(msgspec.Struct):
    """A part of a message; other kinds than text are refused."""

    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"]
    text: str


class Function(msgspec.Struct, omit_defaults=True):
    """A tool of the client."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def decoded(body: bytes, kind: type[T]) -> T:
    """The body as `kind`. Raises BodyError."""
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS or body.count(b",") > MAX_COMMAS:
        raise BodyError("body", f"must have at most {MAX_BRACKETS} brackets and {MAX_COMMAS} commas")
    try:
        return msgspec.json.decode(body, type=kind)
    except UNDECODABLE as error:
        problem, _, place = str(error).partition(" - at `$")
        raise BodyError(place.strip(".`") or "body", problem) from None


def plain(value: dict[str, Any], field: str) -> dict[str, Any]:
    """`value`, whose form is the client's own affair. Raises BodyError when it could not be passed on."""
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError):
        raise BodyError(field, "must have integers of at most 64 bits") from None
    level: list[Any] = [value]
    for _ in range(MAX_LEVELS):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for values in inner for each in values if isinstance(each, (dict, list))]
        if not level:
            return value
    raise BodyError(field, f"must have at most {MAX_LEVELS} objects and lists in one another")


def text_of(content: str | Sequence[Part] | None) -> str:
    """The text of a message, its parts on lines of their own, as vLLM joins them."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


def tools_of(functions: Sequence[Function]) -> tuple[dict[str, Any], ...]:
    """The tools of a call. Raises BodyError."""
    for at, each in enumerate(functions):
        properties = plain(each.parameters or {}, f"tools[{at}]").get("properties") or {}
        if not isinstance(properties, dict):
            raise BodyError(f"tools[{at}]", "must have its parameters as a JSON schema of an object")
    return tuple({"type": "function", "function": msgspec.to_builtins(each)} for each in functions)


def stops(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Texts that end the answer."""
    return tuple(filter(None, [given] if isinstance(given, str) else given or ()))


def sentence(refusal: Refusal) -> str:
    """A refusal in one line."""
    is_unsaid = refusal.code == "context_length_exceeded" and TOO_LONG not in refusal.message
    return one_line(f"the {TOO_LONG} is exceeded: " * is_unsaid + refusal.message, MAX_MESSAGE_CHARS)


def sse(data: Any, event: str = "") -> bytes:
    """An event of a stream."""
    return (f"event: {event}\n" if event else "").encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"


def pieces(text: str | None) -> list[str]:
    """`text` as a stream brings it."""
    return [text[at : at + CHUNK_CHARS] for at in range(0, len(text), CHUNK_CHARS)] if text else []


def new_id(prefix: str) -> str:
    """An id for an answer, or a part of one."""
    return f"{prefix}_{secrets.token_hex(12)}"


def extras(answer: Answer) -> dict[str, Any]:
    """Fields of ours, which clients pass through: what is trained on, and the number by which a reward names it."""
    return {"token_ids": answer.token_ids, "policy_version": answer.version, "answer": answer.number}
