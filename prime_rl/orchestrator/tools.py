"""Tools as a model knows them: how its chat template offers them, how it calls them, how it is answered.

A template that takes `tools` is given them, and the calls are read in the form of its family. Any other model is asked
in plain messages, in the form of Hermes and Qwen: `<tools>` in the system message, `<tool_call>` in answers,
`<tool_response>` in a user message. What cannot be read as a call stays content.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prime_rl.contract.calls import ToolCall, Turn
from prime_rl.utils.chat_template import ChatTemplate, TokenizerError

Tools = Sequence[Mapping[str, Any]]
# Name and arguments, as JSON.
Found = tuple[str, str]
# What is no call, and the calls; None for one that cannot be read.
Parsed = tuple[str, list[Found | None]]

OFFER = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_MISTRAL_CALL = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\]\w+)?\[ARGS\]")
_BETWEEN_CALLS = re.compile(r"[;\s]*")
MAX_NAME = 128
# Of one answer: more are no calls, whatever they look like.
MAX_CALLS = 128


def _call(name: object, arguments: object) -> Found | None:
    """A call, if it is one: a name, and an object of JSON or its text."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        return None
    if isinstance(arguments, str):
        return (name, arguments) if isinstance(_json(arguments), dict) else None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        return None
    return (name, text) if isinstance(arguments, dict) else None


def _of_object(call: object, key: str = "arguments") -> Found | None:
    """The call in {"name": ..., "arguments": {...}}; arguments may be JSON in a string."""
    return _call(call.get("name"), call.get(key) or {}) if isinstance(call, dict) else None


def _json(text: str) -> Any:
    """None for what is not JSON, and for what cannot be written as UTF-8."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
        return found
    except (ValueError, RecursionError):
        return None


def _between(text: str, start: str, end: str) -> tuple[str, list[str], bool]:
    """The text outside of `start` ... `end`, that in each, and True when the last is closed; else `text` ends it."""
    outside: list[str] = []
    inside: list[str] = []
    at = 0
    while (begin := text.find(start, at)) >= 0:
        outside.append(text[at:begin])
        stop = text.find(end, begin + len(start))
        if stop < 0:
            return "".join(outside), [*inside, text[begin + len(start) :]], False
        inside.append(text[begin + len(start) : stop])
        at = stop + len(end)
    return "".join([*outside, text[at:]]), inside, True


def _hermes(text: str, tools: Tools) -> Parsed:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as often as needed."""
    outside, bodies, _ = _between(text, "<tool_call>", "</tool_call>")
    return outside, [_of_object(_json(body)) for body in bodies]


def _qwen_xml(text: str, tools: Tools) -> Parsed:
    """<function=NAME><parameter=KEY>VALUE</parameter></function> in <tool_call>; a value has its type in the schema."""
    outside, bodies, is_closed = _between(text, "<function=", "</function>")
    calls = [_of_xml(body, tools) for body in bodies]
    outside = outside.replace("<tool_call>", "").replace("</tool_call>", "")
    return outside, calls if is_closed else [None]


def _of_xml(body: str, tools: Tools) -> Found | None:
    name, _, rest = body.partition(">")
    schema = next((each for each in map(_function, tools) if each.get("name") == name), {})
    types = _dict(_dict(schema.get("parameters")).get("properties"))
    between, parameters, is_closed = _between(rest, "<parameter=", "</parameter>")
    given = {}
    for parameter in parameters:
        key, found, value = parameter.partition(">")
        given[key] = _typed(value.removeprefix("\n").removesuffix("\n"), _dict(types.get(key)))
        is_closed = is_closed and bool(found)
    return _call(name, given) if is_closed and not between.strip() else None


def _typed(value: str, schema: Mapping[str, Any]) -> Any:
    kind = schema.get("type")
    if kind is None or kind == "string" or (isinstance(kind, list) and "string" in kind):
        return value
    found = _json(value)
    return value if found is None and value.strip() != "null" else found


def _llama(text: str, tools: Tools) -> Parsed:
    """{"name": ..., "parameters": {...}}, alone or several with ";" between, maybe behind <|python_tag|>."""
    before, _, body = text.rpartition("<|python_tag|>")
    decoder, at, calls = json.JSONDecoder(), _BETWEEN_CALLS.match(body).end(), []  # type: ignore[union-attr]
    while at < len(body):
        try:
            found, end = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            return text, [None]
        key = "parameters" if isinstance(found, dict) and "parameters" in found else "arguments"
        calls.append(_of_object(found, key))
        at = _BETWEEN_CALLS.match(body, end).end()  # type: ignore[union-attr]
    return before, calls


def _mistral(text: str, tools: Tools) -> Parsed:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}], or since Tekken 13 [TOOL_CALLS]NAME[ARGS]{...}."""
    before, *bodies = text.split("[TOOL_CALLS]")
    calls: list[Found | None] = []
    for body in bodies:
        if head := _MISTRAL_CALL.match(body):
            calls.append(_call(head[1], body[head.end() :].strip()))
        else:
            found = _json(body)
            calls += [_of_object(each) for each in (found if isinstance(found, list) else [found])]
    return before, calls


@dataclass(frozen=True)
class ToolForm:
    """The form of one model.

    Attributes:
        family: its name for people.
        native: the template takes `tools`; else they are offered in the form of Hermes in plain messages.
        parse: of an answer's text, what is no call, and the calls.
        thinks: an answer may begin with what the model thinks, up to </think>.
        single: the template has a place for one call in a turn, no more.
    """

    family: str
    native: bool
    parse: Callable[[str, Tools], Parsed] | None
    thinks: bool = False
    single: bool = False

    @classmethod
    def of(cls, template: ChatTemplate) -> ToolForm:
        """By what stands in the template."""
        thinks = "</think>" in template.source
        if not template.takes("tools"):
            return cls("Hermes and Qwen", False, _hermes, thinks)
        for family, mark, parse in FAMILIES:
            if mark in template.source:
                return cls(family, True, parse, thinks, "single tool-call" in template.source)
        return cls("unknown", True, None, thinks)

    def chat(self, turns: Sequence[Turn], tools: Tools, *, begins: bool = True) -> list[dict[str, Any]]:
        """`turns` as messages for the template; `begins`: they are the first of their conversation.

        Raises TokenizerError when tools are offered in a form that is not known.
        """
        if tools and self.parse is None:
            known = ", ".join(dict.fromkeys(family for family, _, _ in FAMILIES))
            raise TokenizerError(f"the model's chat template offers tools in a form that is not known ({known} are)")
        if self.native:
            return [self._native(turn) for turn in turns]
        chat: list[dict[str, Any]] = []
        for role, group in itertools.groupby(turns, key=lambda turn: turn.role):
            if role == "tool":
                results = (f"<tool_response>\n{turn.content}\n</tool_response>" for turn in group)
                chat.append({"role": "user", "content": "\n".join(results)})
            else:
                chat += [{"role": role, "content": _written(turn)} for turn in group]
        return _offered(chat, tools) if tools and begins else chat

    def read(self, text: str, tools: Tools, *, may_call: bool, prefix: str) -> Turn:
        """The turn that the model wrote. `prefix` begins the ids of its calls.

        All of it is content when one of its calls cannot be read, or the template cannot show them to the model again.
        """
        thought, content = _thought(text) if self.thinks else ("", text)
        outside, found = self.parse(content, tools) if may_call and tools and self.parse else (content, [])
        read = [each for each in found if each]
        if not 0 < len(found) == len(read) <= (1 if self.single else MAX_CALLS):
            return Turn("assistant", content, thought)
        calls = tuple(ToolCall(f"{prefix}{number}", *each) for number, each in enumerate(read))
        return Turn("assistant", outside.strip(), thought, calls)

    @staticmethod
    def _native(turn: Turn) -> dict[str, Any]:
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = [
                {
                    "id": _short(call.id),
                    "type": "function",
                    "function": {"name": call.name, "arguments": _object(call.arguments)},
                }
                for call in turn.calls
            ]
        if turn.role == "tool":
            message["tool_call_id"] = _short(turn.call_id)
        return message


def _thought(text: str) -> tuple[str, str]:
    """The thought of a model, and its words; its template may have begun the thought, and the end may be cut off."""
    thought, ended, said = text.partition("</think>")
    begun = thought.lstrip()
    if not ended and not begun.startswith("<think>"):
        return "", text
    return begun.removeprefix("<think>").strip(), said.lstrip()


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return _dict(tool.get("function"))


def _dict(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _object(arguments: str) -> Any:
    """The arguments as templates expect them; what is not JSON stays text."""
    found = _json(arguments or "{}")
    return arguments if found is None else found


def _short(call_id: str) -> str:
    """An id as Mistral's templates ask for it: nine letters or digits."""
    return hashlib.blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]


def _written(turn: Turn) -> str:
    calls = (
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'
        for call in turn.calls
    )
    return "\n".join(part for part in (turn.content, *calls) if part)


def _offered(chat: list[dict[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    offer = OFFER.format(tools="\n".join(json.dumps(tool) for tool in tools))
    if chat and chat[0]["role"] == "system":
        return [{"role": "system", "content": f"{chat[0]['content']}\n\n{offer}"}, *chat[1:]]
    return [{"role": "system", "content": offer}, *chat]


# By what stands in a template, the most particular first.
FAMILIES = (
    ("Qwen3-Coder", "<function=", _qwen_xml),
    ("Hermes and Qwen", "<tool_call>", _hermes),
    ("Mistral", "[TOOL_CALLS]", _mistral),
    ("Llama 3", "<|python_tag|>", _llama),
    ("Llama 3", '"parameters": dictionary of argument name', _llama),
)
