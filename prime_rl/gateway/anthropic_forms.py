"""Anthropic's messages, which `count_tokens` takes as well."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from prime_rl.contract.calls import Answer, Call, Refusal, ToolCall, Turn
from prime_rl.contract.files import UNDECODABLE
from prime_rl.gateway import forms
from prime_rl.gateway.forms import ROLES, Form, Function, Limit, Name, Part, Stops, text_of

KINDS = {
    **{401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"},
    **{429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error"},
}


class _Block(msgspec.Struct):
    """Text, what was thought, a call of a tool or what it returned."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Part] | None = None
    is_error: bool | None = None

    def result(self) -> Turn:
        text = text_of(self.content)
        return Turn("tool", f"Error: {text}" if self.is_error else text, call_id=self.tool_use_id or "")


class _Message(msgspec.Struct):
    role: Name
    content: str | list[_Block]

    def turns(self, field: str) -> Iterator[Turn]:
        """The turns of a message, results of tools first. Raises BodyError, which begins with `field`."""
        if isinstance(self.content, str):
            yield Turn(ROLES[self.role], self.content)
            return
        results = [block.result() for block in self.content if block.type == "tool_result"]
        texts = [block.text or "" for block in self.content if block.type == "text"]
        thought = "".join(block.thinking or "" for block in self.content)
        used = ((at, block) for at, block in enumerate(self.content) if block.type == "tool_use")
        given = ((block, forms.plain(block.input or {}, f"{field}.content[{at}].input")) for at, block in used)
        calls = tuple(
            ToolCall(block.id or "", block.name or "", msgspec.json.encode(each).decode()) for block, each in given
        )
        yield from results
        if texts or calls or thought or not results:
            yield Turn(ROLES[self.role], "\n".join(texts), thought, calls)


class _Tool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: Literal["custom"] | None = None


class Messages(Form, kw_only=True):
    """POST /v1/messages. A `thread` is refused in such a way that the client sends the whole history instead."""

    waiting: ClassVar[bytes] = forms.sse({"type": "ping"}, "ping")
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    system: str | list[Part] | None = None
    max_tokens: Limit | None = None
    stop_sequences: Stops | None = None
    tools: list[_Tool] | None = None
    tool_choice: dict[str, Any] | None = None
    thread: Any = None

    def call(self, before: Sequence[Turn] = ()) -> Call:
        """The call. A forced choice of a tool is left to the policy."""
        if self.thread is not None:
            raise Refusal(400, "thread_unsupported_request", "thread: not supported: send the whole history")
        system = text_of(self.system)
        turns = [turn for at, each in enumerate(self.messages) for turn in each.turns(f"messages[{at}]")]
        return Call(
            (*([Turn("system", system)] if system else ()), *turns),
            tools=forms.tools_of(
                [Function(each.name, each.description, each.input_schema) for each in self.tools or ()]
            ),
            may_call=(self.tool_choice or {}).get("type") != "none",
            max_tokens=self.max_tokens,
            stop=forms.stops(self.stop_sequences),
        )

    def answer(self, answer: Answer) -> dict[str, Any]:
        """The turn as blocks."""
        turn, content = answer.turn, list[dict[str, Any]]()
        if turn.reasoning:
            # Clients send back only what is signed.
            signature = hashlib.blake2b(turn.reasoning.encode(), digest_size=16).hexdigest()
            content.append({"type": "thinking", "thinking": turn.reasoning, "signature": signature})
        if turn.content or not turn.calls:
            content.append({"type": "text", "text": turn.content})
        for each in turn.calls:
            content.append({"type": "tool_use", "id": each.id, "name": each.name, "input": _input(each.arguments)})
        stop = answer.stop if answer.stop in (self.stop_sequences or ()) else None
        reason = "tool_use" if turn.calls else "end_turn" if stop is None else "stop_sequence"
        return {
            **{"id": forms.new_id("msg"), "type": "message", "role": "assistant", "model": self.model},
            "content": content,
            "stop_reason": "max_tokens" if answer.finish == "length" else reason,
            "stop_sequence": stop,
            "usage": {"input_tokens": answer.num_prompt_tokens, "output_tokens": len(answer.token_ids)},
            **forms.extras(answer),
        }

    def events(self, whole: Mapping[str, Any]) -> Iterator[bytes]:
        """Each block from its start to its stop, between those of the message."""

        def event(kind: str, **fields: Any) -> bytes:
            return forms.sse({"type": kind, **fields}, kind)

        usage = {**whole["usage"], "output_tokens": 0}
        begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield event("message_start", message=begun)
        for index, block in enumerate(whole["content"]):
            empty: dict[str, Any]
            if block["type"] == "tool_use":
                empty, text = {"input": {}}, msgspec.json.encode(block["input"]).decode()
                kind, name = "input_json_delta", "partial_json"
            else:
                name, text = block["type"], block[block["type"]]
                empty, kind = {name: "", **({"signature": ""} if name == "thinking" else {})}, f"{name}_delta"
            yield event("content_block_start", index=index, content_block={**block, **empty})
            for piece in forms.pieces(text):
                yield event("content_block_delta", index=index, delta={"type": kind, name: piece})
            if name == "thinking":
                signed = {"type": "signature_delta", "signature": block["signature"]}
                yield event("content_block_delta", index=index, delta=signed)
            yield event("content_block_stop", index=index)
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield event("message_delta", delta=delta, usage=whole["usage"])
        yield event("message_stop")

    @classmethod
    def error(cls, refusal: Refusal) -> dict[str, Any]:
        """A refusal, in Anthropic's form."""
        kind = KINDS.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
        details = {"error_code": refusal.code}
        return {"type": "error", "error": {"type": kind, "message": forms.sentence(refusal), "details": details}}


def _input(arguments: str) -> Any:
    """The arguments of a call as an object; what is not one becomes its only field."""
    encoded = arguments.encode() or b"{}"
    try:
        msgspec.json.decode(encoded, type=dict[str, Any])
    except UNDECODABLE:
        return {"arguments": arguments}
    return msgspec.Raw(encoded)
