"""The lines of `[[data]]` as conversations, in the form of OpenAI's chat completions, or as plain texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.configs.data import MAX_LINE_BYTES, DataConfig
from prime_rl.configs.jsonl import of_lines
from prime_rl.contract.calls import Refusal, Turn
from prime_rl.gateway.openai_forms import Chat


class Text(msgspec.Struct, frozen=True):
    """One text: a conversation with its tools, or plain `text`. `id` is its line."""

    id: str
    turns: tuple[Turn, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    text: str = ""


def read_texts(path: Path, config: DataConfig) -> list[Text]:
    """All texts of a file. Raises ValueError that names the file, the line and what is wrong there; OSError."""
    return of_lines(path, lambda number, fields: text_of(number, fields, config), MAX_LINE_BYTES)


def messages_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """A conversation as `read_texts` takes it."""
    found: list[dict[str, Any]] = []
    for turn in turns:
        called = [{"id": each.id, "function": {"name": each.name, "arguments": each.arguments}} for each in turn.calls]
        more = {
            "reasoning_content": turn.reasoning,
            "tool_calls": [{"type": "function", **each} for each in called],
            "tool_call_id": turn.call_id,
        }
        found.append({"role": turn.role, "content": turn.content} | {key: each for key, each in more.items() if each})
    return found


def text_of(number: int, fields: Mapping[str, Any], config: DataConfig) -> Text:
    """The text of a line. Raises ValueError."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair, which cannot be encoded") from None
    given = {
        key: fields[key] for key in (config.messages, config.prompt, config.completion, config.text) if key in fields
    }
    if config.messages in given:
        key, messages = config.messages, given[config.messages]
    elif config.prompt in given and config.completion in given:
        key, prompt = config.completion, given[config.prompt]
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = [*_listed(config.prompt, asked), {"role": "assistant", "content": given[config.completion]}]
    elif config.text in given:
        if not isinstance(text := given[config.text], str) or not text.strip():
            raise ValueError(
                f"{config.text!r} is {'empty' if isinstance(text, str) else type(text).__name__}: must be text"
            )
        return Text(str(number), text=text)
    else:
        found = ", ".join(map(str, fields)) or "none"
        wanted = f"{config.messages!r}, {config.prompt!r} with {config.completion!r}, or {config.text!r}"
        raise ValueError(f"must have {wanted}; its keys: {found[:200]}")
    body = {"messages": _listed(key, messages), "tools": fields.get(config.tools)}
    try:
        call = msgspec.convert(body, Chat).call()
    except (Refusal, msgspec.ValidationError) as error:
        raise ValueError(f"{key!r}: {error}") from None
    answers = [turn for turn in call.messages if turn.role == "assistant"]
    if not answers:
        raise ValueError(f"{key!r} has no message of the assistant: there is nothing to learn")
    if any(not (turn.content.strip() or turn.calls) for turn in answers):
        raise ValueError(f"{key!r} has an empty message of the assistant")
    return Text(str(number), call.messages, call.tools)


def _listed(key: str, messages: Any) -> list[Any]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{key!r} is {type(messages).__name__}: must be a list of messages")
    return messages
