"""The model that verifiers talks to: an OpenAI-like endpoint on the loopback, each turn of which our `Policy` answers.

verifiers requires its own HTTP client. The name of the model identifies the conversation. A conversation only grows:
earlier messages never change, so the sampled tokens stay what they are; a request with a different history is refused,
and its rollout is lost (`ConversationError`).

Tools are offered and called in the form that Qwen and Hermes models are taught, in plain messages, so that any chat
template will do: `<tools>` in the system message, `<tool_call>` in answers, `<tool_response>` in a user message.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

from aiohttp import web

from prime_rl.orchestrator.envs.base import Message, Policy
from prime_rl.utils.runtime import http_refusal

# A request is a whole conversation with its tool results; the context of the model is the real limit.
MAX_BODY_BYTES = 64 * 2**20
TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
TOOLS_PROMPT = """\
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
# Role, text and tool calls: what makes two messages of a request the same.
Said = tuple[str, str, tuple[tuple[str, str], ...]]


class ConversationError(RuntimeError):
    """A request that the policy cannot answer as a part of one conversation."""


class Conversation:
    """One rollout's talk with the policy. `error` is what went wrong in it."""

    def __init__(self, policy: Policy) -> None:
        self.error: Exception | None = None
        self._policy = policy
        self._said: list[Said] = []
        self._messages: list[Message] = []
        self._tools: list[dict[str, Any]] = []
        self._call_ids = itertools.count()

    @property
    def num_tokens(self) -> int:
        """Of the last answer."""
        return self._policy.answer_lens[-1]

    async def reply(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        """The assistant's message that follows `messages`, which must begin with all earlier ones."""
        said = [_said(message) for message in messages]
        num_seen = len(self._said)
        if said[:num_seen] != self._said or len(said) == num_seen:
            raise ConversationError("a role started a second conversation with the policy; only one can be trained")
        if num_seen and tools != self._tools:
            raise ConversationError("the tools changed within a conversation")
        new = _as_chat(messages[num_seen:])
        conversation = [*self._messages, *(new if num_seen else _with_tools(new, tools))]
        text = await self._policy.complete(conversation)
        answer = self._answer(text)
        self._tools = tools
        self._said = [*said, _said(answer)]
        self._messages = [*conversation, {"role": "assistant", "content": text}]
        return answer

    def _answer(self, text: str) -> dict[str, Any]:
        """An OpenAI message: what can be read as calls of tools becomes that, the rest is the content."""
        calls = (
            [call for body in TOOL_CALL.findall(text) if (call := _parse_call(body))] if "<tool_call>" in text else []
        )
        if not calls:
            return {"role": "assistant", "content": text}
        tool_calls = [
            {
                "id": f"call_{next(self._call_ids)}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for name, arguments in calls
        ]
        return {"role": "assistant", "content": TOOL_CALL.sub("", text).strip(), "tool_calls": tool_calls}


class PolicyProxy:
    """The endpoint. Requests need `key`; `base_url` ends in /v1."""

    def __init__(self, key: str) -> None:
        self.base_url = ""
        self._key = key
        self._conversations: dict[str, Conversation] = {}
        self._names = (f"policy-{number}" for number in itertools.count())

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @contextlib.contextmanager
    def conversation(self, policy: Policy) -> Iterator[tuple[str, Conversation]]:
        """A new conversation and the model name that identifies it."""
        name, conversation = next(self._names), Conversation(policy)
        self._conversations[name] = conversation
        try:
            yield name, conversation
        finally:
            del self._conversations[name]

    async def _complete(self, request: web.Request) -> web.Response:
        if refused := http_refusal(request.method, request.headers.items()):
            return _refusal(*refused)
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._key.encode()):
            return _refusal(401, "wrong key")
        try:
            body = await request.json()
        except (ValueError, RecursionError) as error:
            return _refusal(400, f"The body is not JSON: {error}")
        conversation = self._conversations.get(str(body.get("model"))) if isinstance(body, dict) else None
        if conversation is None:
            return _refusal(404, "no rollout has the model of this request")
        try:
            message = await conversation.reply(body["messages"], body.get("tools") or [])
        except Exception as error:  # the rollout's affair; raised again when verifiers has ended the episode
            conversation.error = conversation.error or error
            return _refusal(400, f"{type(error).__name__}: {error}")
        return web.json_response(_completion(body["model"], message, conversation.num_tokens))


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _completion(model: str, message: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """The answer of the endpoint; `num_tokens` are those of this turn. What is in the prompt is not counted."""
    finish_reason = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": f"chatcmpl-{time.monotonic_ns()}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 0, "completion_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _parse_call(body: str) -> tuple[str, str] | None:
    """(name, arguments as JSON) of a <tool_call>, or None."""
    try:
        call = json.loads(body)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return call["name"], json.dumps(call.get("arguments") or {})


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    if not all(part.get("type") == "text" for part in content):
        raise ConversationError("only text messages are supported")
    return "\n".join(part["text"] for part in content)


def _said(message: dict[str, Any]) -> Said:
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = tuple((function["name"], function["arguments"]) for function in functions)
    return message["role"], _text(message.get("content")), calls


def _as_chat(messages: Sequence[dict[str, Any]]) -> list[Message]:
    """Messages as any chat template takes them: results of tools, one after the other, are one user message."""
    chat: list[Message] = []
    for is_tool, group in itertools.groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_tool:
            results = [f"<tool_response>\n{_text(message['content'])}\n</tool_response>" for message in group]
            chat.append({"role": "user", "content": "\n".join(results)})
        else:
            chat += [{"role": _role(message["role"]), "content": _with_calls(message)} for message in group]
    return chat


def _role(role: str) -> Literal["system", "user", "assistant"]:
    if role in ("system", "developer"):
        return "system"
    return "assistant" if role == "assistant" else "user"


def _with_calls(message: dict[str, Any]) -> str:
    """The text of a message that stood in the prompt, its calls of tools written out."""
    _, text, calls = _said(message)
    written = [f'<tool_call>\n{{"name": {json.dumps(n)}, "arguments": {a}}}\n</tool_call>' for n, a in calls]
    return "\n".join(part for part in (text, *written) if part)


def _with_tools(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    if not tools:
        return messages
    offer = TOOLS_PROMPT.format(tools="\n".join(json.dumps(tool) for tool in tools))
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{offer}"}, *messages[1:]]
    return [{"role": "system", "content": offer}, *messages]
