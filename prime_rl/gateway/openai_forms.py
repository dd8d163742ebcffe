"""OpenAI's chat completions, completions and responses, and the histories that `previous_response_id` goes on from."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from prime_rl.contract.calls import Answer, Call, Refusal, ToolCall, Turn
from prime_rl.gateway import forms
from prime_rl.gateway.forms import Form, Function, Limit, Name, Part, Stop, Stops, text_of

MAX_RESPONSES = 64  # of a session
MAX_KEPT_BYTES = 2**25  # of all sessions


_Text = Annotated[str, msgspec.Meta(min_length=1)]


class _Sampled(Form, kw_only=True):
    """The common part of chats and completions. `required` and a tool's name leave the choice to the policy."""

    n: Literal[1] | None = None
    max_tokens: Limit | None = None
    stop: Stop | Stops | None = None
    stream_options: dict[str, Any] | None = None

    def _whole(self, kind: str, choice: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
        num_prompt, num_sampled = answer.num_prompt_tokens, len(answer.token_ids)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_sampled}
        return {
            **{"id": forms.new_id("chatcmpl"), "object": kind, "created": int(time.time()), "model": self.model},
            "choices": [{"index": 0, **choice, **forms.extras(answer)}],
            "usage": {**usage, "total_tokens": num_prompt + num_sampled},
        }

    def _events(self, whole: Mapping[str, Any], kind: str, parts: Sequence[dict[str, Any]]) -> Iterator[bytes]:
        """`parts`: of the choice."""
        head = {**whole, "object": kind}
        usage = head.pop("usage")
        for part in parts:
            yield forms.sse({**head, "choices": [{"index": 0, "logprobs": None, "finish_reason": None, **part}]})
        if self.stream_options and self.stream_options.get("include_usage"):
            yield forms.sse({**head, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


class _Called(msgspec.Struct):
    name: str
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Called
    id: str | None = None


class _Message(msgspec.Struct):
    role: Name
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None

    def turn(self) -> Turn:
        given = ((each.id or "", each.function) for each in self.tool_calls or ())
        calls = tuple(ToolCall(call_id, each.name, each.arguments or "") for call_id, each in given)
        thought = self.reasoning_content or self.reasoning or ""
        return Turn(forms.ROLES[self.role], text_of(self.content), thought, calls, self.tool_call_id or "")


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: Function


class Chat(_Sampled, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    tools: list[_Tool] | None = None
    tool_choice: forms.Choice | None = None
    max_completion_tokens: Limit | None = None
    response_format: forms.TextFormat | None = None
    logprobs: bool | None = None

    def call(self, before: Sequence[Turn] = ()) -> Call:
        """The call."""
        return Call(
            tuple(message.turn() for message in self.messages),
            tools=forms.tools_of([tool.function for tool in self.tools or ()]),
            may_call=self.tool_choice != "none",
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=forms.stops(self.stop),
            pieces=bool(self.logprobs),
        )

    def answer(self, answer: Answer) -> dict[str, Any]:
        """One choice. What was cut ends by "length", whatever it calls."""
        turn = answer.turn
        message: dict[str, Any] = {"role": "assistant", "content": turn.content or (None if turn.calls else "")}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls:
            called = [(each.id, {"name": each.name, "arguments": each.arguments}) for each in turn.calls]
            message["tool_calls"] = [{"id": id_, "type": "function", "function": each} for id_, each in called]
        tokens = [
            {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
            for piece, logprob in zip(answer.pieces, answer.logprobs, strict=False)
        ]
        logprobs = {"content": tokens, "refusal": None} if self.logprobs else None
        finish = "tool_calls" if turn.calls and answer.finish == "stop" else answer.finish
        choice = {"message": message, "logprobs": logprobs, "finish_reason": finish}
        return self._whole("chat.completion", choice, answer)

    def events(self, whole: Mapping[str, Any]) -> Iterator[bytes]:
        """The role, what was thought, the text, each call; the log-probabilities come at the end."""
        choice = dict(whole["choices"][0])
        message = choice.pop("message")
        deltas = [
            {"role": "assistant", "content": None if message["content"] is None else ""},
            *({"reasoning_content": piece} for piece in forms.pieces(message.get("reasoning_content"))),
            *({"content": piece} for piece in forms.pieces(message["content"])),
            *({"tool_calls": [{"index": at, **each}]} for at, each in enumerate(message.get("tool_calls", ()))),
        ]
        parts = [*({"delta": delta} for delta in deltas), {**choice, "delta": {}}]
        return self._events(whole, "chat.completion.chunk", parts)


class Completion(_Sampled, kw_only=True):
    """POST /v1/completions, of one text."""

    prompt: _Text | Annotated[list[_Text], msgspec.Meta(min_length=1, max_length=1)]
    echo: bool | None = None
    logprobs: int | None = None

    def call(self, before: Sequence[Turn] = ()) -> Call:
        """The call."""
        if self.echo:
            raise forms.BodyError("echo", "must be false")
        prompt = self.prompt if isinstance(self.prompt, str) else self.prompt[0]
        stop, pieces = forms.stops(self.stop), self.logprobs is not None
        return Call(prompt=prompt, max_tokens=self.max_tokens, stop=stop, pieces=pieces)

    def answer(self, answer: Answer) -> dict[str, Any]:
        """One choice."""
        logprobs = None
        if self.logprobs is not None:
            starts = [0, *itertools.accumulate(map(len, answer.pieces))][: len(answer.pieces)]
            tokens = {"tokens": answer.pieces, "token_logprobs": answer.logprobs}
            logprobs = {**tokens, "top_logprobs": None, "text_offset": starts}
        choice = {"text": answer.turn.content, "logprobs": logprobs, "finish_reason": answer.finish}
        return self._whole("text_completion", choice, answer)

    def events(self, whole: Mapping[str, Any]) -> Iterator[bytes]:
        """The text, then what there is beside it."""
        choice = whole["choices"][0]
        parts = [*({"text": piece} for piece in forms.pieces(choice["text"])), {**choice, "text": ""}]
        return self._events(whole, "text_completion", parts)


class Histories:
    """The turns up to each response, as long as there is room: the session that takes most of it loses its own."""

    def __init__(self) -> None:
        self._sessions: dict[str, dict[str, tuple[Turn, ...]]] = {}
        self._num_bytes: Counter[str] = Counter()

    def keep(self, session: str, response_id: str, turns: tuple[Turn, ...]) -> None:
        """Note that the response of that id ended `turns`."""
        kept = self._sessions.setdefault(session, {})
        kept[response_id] = turns
        self._num_bytes[session] += _size(turns)
        if len(kept) > MAX_RESPONSES:
            self._num_bytes[session] -= _size(kept.pop(next(iter(kept))))
        while self._num_bytes.total() > MAX_KEPT_BYTES:
            self.drop(self._num_bytes.most_common(1)[0][0])

    def find(self, session: str, response_id: str) -> tuple[Turn, ...]:
        """The turns up to the response of that id. Raises Refusal, with OpenAI's code."""
        found = self._sessions.get(session, {}).get(response_id)
        if found is None:
            message = f"previous_response_id: {response_id!r} not found: send the whole input instead"
            raise Refusal(400, "previous_response_not_found", message)
        return found

    def drop(self, session: str) -> None:
        """Forget a session."""
        self._sessions.pop(session, None)
        self._num_bytes.pop(session, None)


def _size(turns: tuple[Turn, ...]) -> int:
    return len(msgspec.msgpack.encode(turns))


class _Item(msgspec.Struct):
    """A message, a thought, a call of a function or what it returned."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"] | None = None
    role: Name | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class _Draft(msgspec.Struct):
    """An assistant's turn, which stands in several items: what it thought, what it said, each of its calls."""

    reasoning: str = ""
    content: str | None = None
    calls: list[ToolCall] = []

    def turn(self) -> Turn:
        return Turn("assistant", self.content or "", self.reasoning, tuple(self.calls))


def _turns(items: Sequence[_Item]) -> list[Turn]:
    found: list[Turn | _Draft] = []
    for item in items:
        last = found[-1] if found and isinstance(found[-1], _Draft) else None
        if item.type == "reasoning":
            found.append(_Draft(text_of(item.content) or text_of(item.summary)))
        elif item.type == "function_call_output":
            found.append(Turn("tool", text_of(item.output), call_id=item.call_id or ""))
        elif item.type == "function_call":
            if last is None:
                found.append(last := _Draft())
            last.calls.append(ToolCall(item.call_id or "", item.name or "", item.arguments or ""))
        elif item.role != "assistant":
            found.append(Turn(forms.ROLES[item.role or "user"], text_of(item.content)))
        elif last and last.content is None and not last.calls:
            last.content = text_of(item.content)
        else:
            found.append(_Draft(content=text_of(item.content)))
    return [each.turn() if isinstance(each, _Draft) else each for each in found]


class _FlatTool(Function, kw_only=True):
    type: Literal["function"]


class _TextOptions(msgspec.Struct):
    format: forms.TextFormat | None = None


class Responses(Form, kw_only=True):
    """POST /v1/responses."""

    input: str | list[_Item] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[_FlatTool] | None = None
    tool_choice: forms.Choice | None = None
    max_output_tokens: Limit | None = None
    text: _TextOptions | None = None

    def call(self, before: Sequence[Turn] = ()) -> Call:
        """The call. `instructions` come first, and are those of this call alone."""
        new = [Turn("user", self.input)] if isinstance(self.input, str) else _turns(self.input)
        if not self.input and not before:
            raise forms.BodyError("input", "must not be empty")
        functions = [Function(each.name, each.description, each.parameters, each.strict) for each in self.tools or ()]
        return Call(
            (*([Turn("system", self.instructions)] if self.instructions else ()), *before, *new),
            tools=forms.tools_of(functions),
            may_call=self.tool_choice != "none",
            max_tokens=self.max_output_tokens,
        )

    def history(self, call: Call, answer: Answer) -> tuple[Turn, ...]:
        """The turns that a later request goes on from."""
        return (*call.messages[1 if self.instructions else 0 :], answer.turn)

    def answer(self, answer: Answer) -> dict[str, Any]:
        """The turn as items."""
        turn, done = answer.turn, {"status": "completed" if answer.finish == "stop" else "incomplete"}
        output: list[dict[str, Any]] = []
        if turn.reasoning:
            thought = [{"type": "reasoning_text", "text": turn.reasoning}]
            output.append({"id": forms.new_id("rs"), "type": "reasoning", "summary": [], "content": thought, **done})
        if turn.content or not turn.calls:
            said = [{"type": "output_text", "text": turn.content, "annotations": [], "logprobs": []}]
            head = {"id": forms.new_id("msg"), "type": "message", "role": "assistant"}
            output.append({**head, "content": said, **done})
        for each in turn.calls:
            called = {"call_id": each.id, "name": each.name, "arguments": each.arguments}
            output.append({"id": forms.new_id("fc"), "type": "function_call", **called, **done})
        num_prompt, num_sampled = answer.num_prompt_tokens, len(answer.token_ids)
        return {
            **{"id": forms.new_id("resp"), "object": "response", "created_at": int(time.time()), **done},
            "incomplete_details": None if answer.finish == "stop" else {"reason": "max_output_tokens"},
            **{"model": self.model, "error": None, "metadata": {}, "instructions": self.instructions},
            **{"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
            "previous_response_id": self.previous_response_id,
            "output": output,
            "usage": {
                **{"input_tokens": num_prompt, "output_tokens": num_sampled, "total_tokens": num_prompt + num_sampled},
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            },
            **forms.extras(answer),
        }

    def events(self, whole: Mapping[str, Any]) -> Iterator[bytes]:
        """Each item from its beginning to its end, between those of the response."""
        numbers = itertools.count()

        def event(kind: str, **fields: Any) -> bytes:
            return forms.sse({"type": kind, "sequence_number": next(numbers), **fields}, kind)

        empty: dict[str, Any] = {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield event("response.created", response={**whole, **empty})
        yield event("response.in_progress", response={**whole, **empty})
        for index, item in enumerate(whole["output"]):
            is_call = item["type"] == "function_call"
            begun = {**item, "status": "in_progress", **({"arguments": ""} if is_call else {"content": []})}
            place = {"item_id": item["id"], "output_index": index}
            yield event("response.output_item.added", output_index=index, item=begun)
            if is_call:
                for piece in forms.pieces(item["arguments"]):
                    yield event("response.function_call_arguments.delta", **place, delta=piece)
                ended = {"name": item["name"], "arguments": item["arguments"]}
                yield event("response.function_call_arguments.done", **place, **ended)
            else:
                part, place["content_index"] = item["content"][0], 0
                yield event("response.content_part.added", **place, part={**part, "text": ""})
                for piece in forms.pieces(part["text"]):
                    yield event(f"response.{part['type']}.delta", **place, delta=piece, logprobs=[])
                yield event(f"response.{part['type']}.done", **place, text=part["text"], logprobs=[])
                yield event("response.content_part.done", **place, part=part)
            yield event("response.output_item.done", output_index=index, item=item)
        yield event(f"response.{whole['status']}", response=whole)
