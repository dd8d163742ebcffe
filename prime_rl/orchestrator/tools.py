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
THINKING = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_MISTRAL_CALL = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\]\w+)?\[ARGS\]")


def _of_object(call: object, key: str = "arguments") -> Found | None:
    """The call in {"name": ..., "arguments": {...}}; arguments may be JSON in a string."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get(key) or {}
    if isinstance(arguments, str):
        return (call["name"], arguments) if isinstance(_json(arguments), dict) else None
    return (call["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _hermes(text: str, tools: Tools) -> tuple[str, list[Found]]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as often as needed."""
    calls = [_of_object(_json(body)) for body in _TOOL_CALL.findall(text)]
    return _TOOL_CALL.sub("", text), [call for call in calls if call] if all(calls) else []


def _qwen_xml(text: str, tools: Tools) -> tuple[str, list[Found]]:
    """<function=NAME><parameter=KEY>VALUE</parameter></function> in <tool_call>; a value has its type in the schema."""
    calls = []
    for name, body in _FUNCTION.findall(text):
        schema = next((_function(tool) for tool in tools if _function(tool).get("name") == name), {})
        types = (schema.get("parameters") or {}).get("properties") or {}
        given = {key: _typed(value, types.get(key)) for key, value in _PARAMETER.findall(body)}
        calls.append((name, json.dumps(given)))
    return _TOOL_CALL.sub("", text), calls


def _typed(value: str, schema: Any) -> Any:
    if isinstance(schema, dict) and schema.get("type") not in (None, "string"):
        found = _json(value)
        return value if found is None and value.strip() != "null" else found
    return value


def _llama(text: str, tools: Tools) -> tuple[str, list[Found]]:
    """{"name": ..., "parameters": {...}}, alone or several with ";" between, maybe behind <|python_tag|>."""
    before, _, body = text.rpartition("<|python_tag|>")
    decoder, at, calls = json.JSONDecoder(), 0, []
    body = body.strip()
    while at < len(body):
        try:
            found, end = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            return text, []
        call = _of_object(found, "parameters") if isinstance(found, dict) and "parameters" in found else None
        call = call or _of_object(found)
        if call is None:
            return text, []
        calls.append(call)
        at = end + len(body[end:]) - len(body[end:].lstrip("; \n"))
    return before, calls


def _mistral(text: str, tools: Tools) -> tuple[str, list[Found]]:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}], or since Tekken 13 [TOOL_CALLS]NAME[ARGS]{...}."""
    before, *bodies = text.split("[TOOL_CALLS]")
    calls: list[Found | None] = []
    for body in bodies:
        if head := _MISTRAL_CALL.match(body):
            calls.append(_of_object({"name": head[1], "arguments": body[head.end() :].strip()}))
        else:
            found = _json(body)
            calls += [_of_object(each) for each in (found if isinstance(found, list) else [found])]
    return before, [call for call in calls if call] if all(calls) else []


@dataclass(frozen=True)
class ToolForm:
    """The form of one model.

    Attributes:
        family: its name for people.
        native: the template takes `tools`; else they are offered in the form of Hermes in plain messages.
        parse: of an answer's text, what is no call, and the calls; none when one of them cannot be read.
        thinks: an answer may begin with what the model thinks, up to </think>.
    """

    family: str
    native: bool
    parse: Callable[[str, Tools], tuple[str, list[Found]]] | None
    thinks: bool = False

    @classmethod
    def of(cls, template: ChatTemplate) -> ToolForm:
        """By what stands in the template."""
        thinks = "</think>" in template.source
        if not template.takes("tools"):
            return cls("Hermes and Qwen", False, _hermes, thinks)
        for family, mark, parse in FAMILIES:
            if mark in template.source:
                return cls(family, True, parse, thinks)
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
        """The turn that the model wrote. `prefix` begins the ids of its calls."""
        thought = THINKING.match(text) if self.thinks else None
        rest = text[thought.end() :] if thought else text
        content, found = self.parse(rest, tools) if may_call and tools and self.parse else (rest, [])
        calls = tuple(ToolCall(f"{prefix}{number}", *each) for number, each in enumerate(found))
        content = content.strip() if calls else rest
        return Turn("assistant", content, thought[1].strip() if thought else "", calls)

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


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    found = tool.get("function")
    return found if isinstance(found, dict) else {}


def _object(arguments: str) -> Any:
    """What templates expect; arguments that are not JSON stay text."""
    found = _json(arguments or "{}")
    return arguments if found is None else found


def _short(call_id: str) -> str:
    """An id as Mistral's templates ask for it: nine letters or digits."""
    return hashlib.blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]


def _written(turn: Turn) -> str:
    calls = (
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
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
