"""The model that verifiers talks to: conversations that only grow, tools as plain text, and allowed requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from prime_rl.orchestrator.envs import Message
from prime_rl.orchestrator.envs.verifiers_proxy import Conversation, ConversationError, PolicyProxy
from tests.page_attacks import JSON, ask, attacks

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'


class Says:
    """A policy with a list of answers."""

    def __init__(self, *texts: str) -> None:
        self._texts = iter(texts)
        self.seen: list[list[Message]] = []
        self.answer_lens: list[int] = []

    async def complete(self, messages: Sequence[Message]) -> str:
        self.seen.append(list(messages))
        text = next(self._texts)
        self.answer_lens.append(len(text.split()))
        return text


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_a_call_of_a_tool_and_its_result_are_turns_of_one_conversation() -> None:
    policy = Says(f"Let me see. {CALL}{CALL}", "done")
    conversation = Conversation(policy)
    asked = await conversation.reply([{"role": "developer", "content": "Be brief."}, user("q")], [TOOL])
    assert asked["content"] == "Let me see."
    assert [call["function"] for call in asked["tool_calls"]] == [{"name": "look", "arguments": '{"at": 1}'}] * 2
    ids = [call["id"] for call in asked["tool_calls"]]
    assert len(set(ids)) == 2
    results = [{"role": "tool", "tool_call_id": i, "content": f"saw {n}"} for n, i in enumerate(ids)]
    opening = [{"role": "developer", "content": "Be brief."}, user([{"type": "text", "text": "q"}])]
    assert (await conversation.reply([*opening, asked, *results], [TOOL]))["content"] == "done"
    first, second = policy.seen
    assert first[0]["role"] == "system" and first[0]["content"].startswith("Be brief.\n\n# Tools")
    assert '"name": "look"' in first[0]["content"]
    assert second[:2] == first
    assert second[2] == {"role": "assistant", "content": f"Let me see. {CALL}{CALL}"}, "as it was sampled"
    answers = "<tool_response>\nsaw 0\n</tool_response>\n<tool_response>\nsaw 1\n</tool_response>"
    assert second[3:] == [{"role": "user", "content": answers}]


@pytest.mark.parametrize("body", ["{}", "not json", '{"name": 3}', "[1]"])
async def test_what_is_no_call_is_what_the_model_said(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert await Conversation(Says(text)).reply([user("q")], [TOOL]) == {"role": "assistant", "content": text}


async def test_a_prompt_may_have_examples_in_it() -> None:
    policy = Says("b")
    call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    shown = [user("a?"), {"role": "assistant", "content": None, "tool_calls": [call]}, user("b?")]
    await Conversation(policy).reply(shown, [])
    assert [message["content"] for message in policy.seen[0]] == ["a?", CALL, "b?"]


@pytest.mark.parametrize(
    ("messages", "tools", "message"),
    [
        ([user("q")], [], "second conversation"),
        ([user("other"), {"role": "assistant", "content": "a"}, user("more")], [], "second conversation"),
        ([user("q"), {"role": "assistant", "content": "b"}, user("more")], [], "second conversation"),
        ([user("q"), {"role": "assistant", "content": "a"}], [], "second conversation"),
        ([user("q"), {"role": "assistant", "content": "a"}, user("more")], [TOOL], "tools changed"),
        ([user("q"), {"role": "assistant", "content": "a"}, user([{"type": "image_url"}])], [], "only text"),
    ],
)
async def test_another_story_is_refused(messages: list[dict[str, Any]], tools: list[Any], message: str) -> None:
    conversation = Conversation(Says("a", "never"))
    await conversation.reply([user("q")], [])
    with pytest.raises(ConversationError, match=message):
        await conversation.reply(messages, tools)


async def test_pages_of_a_browser_are_refused_and_bodies_that_are_not_requests() -> None:
    async with PolicyProxy("key") as proxy:
        port = urlsplit(proxy.base_url).port
        assert port is not None
        posts = [each for each in attacks(port) if each.method == "POST"]
        for attack in posts:
            status, _ = await asyncio.to_thread(ask, port, "POST", "/v1/chat/completions", attack.headers)
            assert status == attack.status, attack.what
        headers = {"Host": "localhost", "Authorization": "Bearer key", **JSON}
        for body, status in ((b"", 400), (b"\xff", 400), (b"[" * 10**5, 400), (b"[]", 404), (b"{}", 404)):
            found = await asyncio.to_thread(ask, port, "POST", "/v1/chat/completions", headers, body)
            assert found[0] == status and json.loads(found[1])["error"]["message"], body[:9]


async def test_who_may_ask_and_what_becomes_of_errors() -> None:
    async with PolicyProxy("key") as proxy, httpx.AsyncClient(base_url=proxy.base_url, verify=False) as http:
        with proxy.conversation(Says("hi")) as (model, conversation):
            body = {"model": model, "messages": [user("q")]}
            url, key = "/chat/completions", {"Authorization": "Bearer key"}
            assert (await http.post(url, json=body)).status_code == 401
            assert (await http.post(url, json={**body, "model": "other"}, headers=key)).status_code == 404
            answer = await http.post(url, json=body, headers=key)
            assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
            refused = await http.post(url, json=body, headers=key)
            assert refused.status_code == 400 and "second conversation" in refused.json()["error"]["message"]
            assert isinstance(conversation.error, ConversationError)
        assert (await http.post(url, json=body, headers=key)).status_code == 404
