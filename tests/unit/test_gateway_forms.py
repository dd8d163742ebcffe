"""The forms of the gateway, as the clients of OpenAI and Anthropic send and read them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import httpx
import openai
import pytest

from prime_rl.contract.calls import Call, Count, Refusal, ToolCall, Turn
from prime_rl.contract.served import MAX_STOP_CHARS, MAX_STOPS
from prime_rl.gateway.keys import session_key
from tests.gateway_support import CALLED, SECRET, SESSION, THOUGHT, WEATHER, answer, gateway, headers

USER: Any = {"role": "user", "content": "weather in Bern?"}
ASKED = Turn("user", "weather in Bern?")
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}}
FLAT: Any = {"type": "function", **TOOL["function"]}
CUSTOM: Any = {"name": "weather", "description": "of a city", "input_schema": WEATHER}
RESULT = Turn("tool", "-3 C", call_id="call_1")
LONG = "word " * 500


async def test_a_chat_is_answered_whole() -> None:
    async with gateway(answer(THOUGHT, number=4)) as served, served.openai() as client:
        whole = await client.chat.completions.create(model="run_a@v3", messages=[USER])
    assert served.backend.asked[0] == (SESSION, Call((ASKED,)))
    choice: Any = whole.choices[0]
    assert (whole.model, choice.finish_reason, choice.message.content) == ("run_a@v3", "stop", "It is cold.")
    assert choice.message.reasoning_content == "Winter, so cold."
    assert (choice.token_ids, choice.policy_version, choice.answer) == ([7, 8], 3, 4)
    usage: Any = whole.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 2, 7)
    assert served.backend.delivered == [4]


async def test_a_synchronous_client_gets_the_same() -> None:
    async with gateway() as served:

        def ask() -> str | None:
            with openai.OpenAI(base_url=f"{served.base()}/v1", api_key=session_key(SECRET, SESSION)) as client:
                return client.chat.completions.create(model="m", messages=[USER]).choices[0].message.content

        assert await asyncio.to_thread(ask) == "hello"


async def test_what_a_chat_asks_for_becomes_a_call() -> None:
    parts: Any = [{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}]
    async with gateway() as served, served.openai() as client:
        await client.chat.completions.create(
            model="m",
            messages=[{"role": "developer", "content": parts}, USER],
            tools=[TOOL],
            tool_choice="none",
            max_completion_tokens=128_000,
            stop=["a", "b"],
            logprobs=True,
            temperature=0.1,
            top_p=0.5,
            seed=3,
            user="u",
            metadata={"a": "b"},
            store=True,
            parallel_tool_calls=False,
            reasoning_effort="low",
            response_format={"type": "text"},
            n=1,
            extra_body={"a_key_of_tomorrow": {"x": [1, None]}},
        )
    (call,) = served.backend.calls
    assert call.messages == (Turn("system", "be\nkind"), ASKED)
    assert call.tools == (TOOL,) and not call.may_call and call.pieces
    assert (call.max_tokens, call.stop) == (128_000, ("a", "b"))


async def test_logprobs_are_those_of_the_pieces() -> None:
    pieced = answer("né", pieces=["n", "é"])
    async with gateway(pieced, pieced, pieced) as served, served.openai() as client:
        whole = await client.chat.completions.create(model="m", messages=[USER], logprobs=True, top_logprobs=2)
        found = whole.choices[0].logprobs
        assert found and found.content
        assert [(each.token, each.logprob, each.bytes) for each in found.content] == [
            ("n", -0.5, [110]),
            ("é", -1.5, [195, 169]),
        ]
        stream = await client.chat.completions.create(model="m", messages=[USER], logprobs=True, stream=True)
        parts = [part.choices[0].logprobs async for part in stream]
        assert [part.to_dict() for part in parts if part] == [found.to_dict()]
        old = await client.completions.create(model="m", prompt="p", logprobs=1)
        logprobs = old.choices[0].logprobs
        assert logprobs and (logprobs.tokens, logprobs.text_offset) == (["n", "é"], [0, 1])


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_tool_goes_round_in_a_chat(is_streamed: bool) -> None:
    """The history comes back as the client has put it together."""
    strict: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    async with gateway(answer(CALLED), answer(THOUGHT)) as served, served.openai() as client:
        asked: Any = {"model": "m", "messages": (messages := [USER]), "tools": [strict]}
        for _ in range(2):
            if is_streamed:
                async with client.chat.completions.stream(**asked) as stream:
                    whole: Any = await stream.get_final_completion()
            else:
                whole = await client.chat.completions.create(**asked)
            message = whole.choices[0].message
            messages.append(message.to_dict())
            if message.tool_calls:
                assert whole.choices[0].finish_reason == "tool_calls" and message.content is None
                messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "-3 C"})
    assert message.content == "It is cold."
    first, second = served.backend.calls
    assert first.messages == (ASKED,) and first.tools == (strict,)
    assert second.messages == (ASKED, CALLED, RESULT)


async def test_a_stream_brings_the_usage_when_it_is_asked_for() -> None:
    async with gateway(answer(LONG, finish="length"), answer(number=1)) as served, served.openai() as client:
        stream = await client.chat.completions.create(
            model="m", messages=[USER], stream=True, stream_options={"include_usage": True}
        )
        parts = [part async for part in stream]
        assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == LONG
        assert len(parts) > 5 and parts[0].choices[0].delta.role == "assistant"
        last: Any = parts[-2].choices[0]
        assert (last.finish_reason, last.token_ids) == ("length", [7, 8])
        assert parts[-1].choices == [] and parts[-1].usage and parts[-1].usage.total_tokens == 7
        stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)
        assert [part async for part in stream][-1].usage is None
    assert served.backend.delivered == [0, 1]


async def test_completions_are_texts() -> None:
    async with gateway(answer(LONG), answer(LONG)) as served, served.openai() as client:
        whole = await client.completions.create(model="m", prompt=["once"], max_tokens=3, stop="x", echo=False)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (LONG, "stop")
        stream = await client.completions.create(model="m", prompt="once", stream=True)
        assert "".join([part.choices[0].text async for part in stream]) == LONG
    assert served.backend.calls == [Call(prompt="once", max_tokens=3, stop=("x",)), Call(prompt="once")]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_tool_goes_round_in_responses(is_streamed: bool) -> None:
    """All items are sent back, as openai-agents does."""
    called = Turn("assistant", "Let me look.", "Which city?", CALLED.calls)
    async with gateway(answer(called), answer(THOUGHT)) as served, served.openai() as client:
        items: list[Any] = [USER]
        for _ in range(2):
            asked: Any = {"model": "m", "input": items, "instructions": "be kind", "tools": [FLAT]}
            if is_streamed:
                async with client.responses.stream(**asked) as stream:
                    whole: Any = await stream.get_final_response()
            else:
                whole = await client.responses.create(**asked)
            items += [item.to_dict(exclude_unset=False) for item in whole.output]
            items += [
                {"type": "function_call_output", "call_id": item.call_id, "output": "-3 C"}
                for item in whole.output
                if item.type == "function_call"
            ]
    assert (whole.output_text, whole.status, whole.usage.total_tokens) == ("It is cold.", "completed", 7)
    first, second = served.backend.calls
    assert first == Call((Turn("system", "be kind"), ASKED), tools=(TOOL,))
    assert second.messages == (Turn("system", "be kind"), ASKED, called, RESULT)


async def test_a_response_goes_on_from_a_previous_one() -> None:
    async with gateway(answer(CALLED), answer(THOUGHT)) as served, served.openai() as client:
        first = await client.responses.create(model="m", input="weather in Bern?", instructions="be kind")
        output: Any = {"type": "function_call_output", "call_id": "call_1", "output": "-3 C"}
        second = await client.responses.create(model="m", input=[output], previous_response_id=first.id)
        await client.responses.create(model="m", input="and now?", previous_response_id=second.id, store=False)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="m", input="and now?", previous_response_id="resp_x")
        assert caught.value.code == "previous_response_not_found"
    _, second_call, third_call = served.backend.calls
    assert second_call.messages == (ASKED, CALLED, RESULT)
    assert third_call.messages == (ASKED, CALLED, RESULT, THOUGHT, Turn("user", "and now?"))


async def test_the_events_of_a_response_have_their_order() -> None:
    async with gateway(answer(THOUGHT), answer("cu", finish="length")) as served, served.openai() as client:
        events = [event async for event in await client.responses.create(model="m", input="hi", stream=True)]
        item = ["response.output_item.added", "response.content_part.added"]
        done = ["response.content_part.done", "response.output_item.done"]
        assert [event.type for event in events] == [
            *("response.created", "response.in_progress"),
            *(*item, "response.reasoning_text.delta", "response.reasoning_text.done", *done),
            *(*item, "response.output_text.delta", "response.output_text.done", *done),
            "response.completed",
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        events = [event async for event in await client.responses.create(model="m", input="hi", stream=True)]
        last: Any = events[-1]
        assert last.type == "response.incomplete"
        assert last.response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_tool_goes_round_in_messages(is_streamed: bool) -> None:
    called = Turn("assistant", "Let me look.", "Which city?", CALLED.calls)
    async with gateway(answer(called), answer("cold!", stop="END")) as served, served.anthropic() as client:
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": USER["content"]}]}]
        for _ in range(2):
            asked: Any = {
                **{"model": "m", "max_tokens": 128_000, "messages": messages, "tools": [CUSTOM]},
                "system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
                "stop_sequences": ["END"],
            }
            if is_streamed:
                async with client.messages.stream(**asked) as stream:
                    whole: Any = await stream.get_final_message()
            else:
                whole = await client.messages.create(**{**asked, "max_tokens": 1000})
            messages.append({"role": "assistant", "content": whole.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "-3 C"}]}
                for block in whole.content
                if block.type == "tool_use"
            ]
            if results:
                assert whole.stop_reason == "tool_use" and whole.content[-1].input == {"city": "Bern"}
                messages.append({"role": "user", "content": [*results, {"type": "text", "text": "go on"}]})
    assert (whole.stop_reason, whole.stop_sequence, whole.usage.output_tokens) == ("stop_sequence", "END", 2)
    assert (whole.token_ids, whole.policy_version) == ([7, 8], 3)
    first, second = served.backend.calls
    assert first.messages == (Turn("system", "be kind"), ASKED) and first.tools == (TOOL,)
    assert (first.max_tokens, first.stop) == (128_000 if is_streamed else 1000, ("END",))
    compact = Turn("assistant", "Let me look.", "Which city?", (ToolCall("call_1", "weather", '{"city":"Bern"}'),))
    assert second.messages == (*first.messages, compact, RESULT, Turn("user", "go on"))


async def test_blocks_of_messages_become_turns() -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "no such file", "is_error": True},
        {"type": "tool_result", "tool_use_id": "t2"},
    ]
    said = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {
        "messages": [{"role": "assistant", "content": said}, {"role": "user", "content": blocks}],
        "tool_choice": {"type": "none"},
    }
    async with gateway() as served, httpx.AsyncClient() as client:
        done = await client.post(f"{served.base()}/v1/messages", json=body, headers=headers())
    assert done.json()["content"] == [{"type": "text", "text": "hello"}]
    (call,) = served.backend.calls
    assert call.messages == (
        Turn("assistant", "a\nb"),
        Turn("tool", "Error: no such file", call_id="t1"),
        Turn("tool", "", call_id="t2"),
    )
    assert not call.may_call


async def test_tokens_are_counted() -> None:
    async with gateway() as served, served.anthropic() as client:
        counted = await client.messages.count_tokens(model="m", messages=[USER], system="be kind")
    assert counted.input_tokens == 11
    assert served.backend.asked == [(SESSION, Count(Call((Turn("system", "be kind"), ASKED))))]


async def test_a_tool_runner_with_threads_goes_on_without() -> None:
    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """Of a city."""
        return f"-3 C in {city}"

    async with gateway(answer(CALLED), answer("cold")) as served, served.anthropic() as client:
        runner = client.beta.messages.tool_runner(model="m", max_tokens=100, messages=[USER], tools=[weather])
        final: Any = await runner.until_done()
    assert final.content[0].text == "cold"
    assert [turn.role for turn in served.backend.calls[-1].messages] == ["user", "assistant", "tool"]
    assert served.backend.calls[-1].messages[-1].content == "-3 C in Bern"


async def test_arguments_that_are_no_object_reach_an_anthropic_client() -> None:
    for arguments in ("", '{"a": NaN}', "[1]", '{"a": "\\ud800"}'):
        turn = Turn("assistant", calls=(ToolCall("c", "f", arguments),))
        async with gateway(answer(turn), answer(turn)) as served, served.anthropic() as client:
            whole: Any = await client.messages.create(model="m", max_tokens=9, messages=[USER])
            assert whole.content[0].input == ({"arguments": arguments} if arguments else {})
            async with client.messages.stream(model="m", max_tokens=9, messages=[USER]) as stream:
                assert (await stream.get_final_message()).content == whole.content


async def test_the_card_of_the_model_has_its_length() -> None:
    async with gateway() as served, served.openai() as client, served.anthropic() as other:
        cards: list[Any] = [card async for card in client.models.list()]
        (card,) = cards
        assert (card.id, card.max_model_len) == ("run_a.b", 4096)
        named: Any = await client.models.retrieve("some/name@v3")
        assert (named.id, named.max_model_len) == ("some/name@v3", 4096)
        assert [card.id async for card in other.models.list()] == ["run_a.b"]
        assert (await other.models.retrieve("m")).id == "m"


CHAT, MESSAGES, RESPONSES = "chat/completions", "messages", "responses"
TEXT = {"messages": [USER]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
DEEP = {"a": json.loads("[" * 80 + "]" * 80)}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {**TEXT, "n": 2}, "n"),
    (CHAT, {**TEXT, "stream": "yes"}, "stream"),
    (CHAT, {**TEXT, "max_tokens": 0}, "max_tokens"),
    (CHAT, {**TEXT, "max_tokens": 2**70}, "max_tokens"),
    (CHAT, {**TEXT, "stop": ["x"] * (MAX_STOPS + 1)}, "stop"),
    (CHAT, {**TEXT, "stop": "x" * (MAX_STOP_CHARS + 1)}, "stop"),
    (CHAT, {**TEXT, "response_format": {"type": "json_schema"}}, "response_format.type"),
    (CHAT, {**TEXT, "tools": [{"type": "web_search"}]}, "tools[0].type"),
    (CHAT, {**TEXT, "tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
    (CHAT, {**TEXT, "tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}, "tools[0]"),
    (
        CHAT,
        {**TEXT, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 2**70}}}]},
        "tools[0]",
    ),
    (
        CHAT,
        {**TEXT, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": [1]}}}]},
        "tools[0]",
    ),
    ("completions", {"prompt": [1, 2]}, "prompt[0]"),
    ("completions", {"prompt": ["a", "b"]}, "prompt"),
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": "a", "echo": True}, "echo"),
    (RESPONSES, {}, "input"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    (RESPONSES, {"input": "a", "text": {"format": {"type": "json_object"}}}, "text.format.type"),
    (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    (MESSAGES, {**TEXT, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    (MESSAGES, {**TEXT, "thread": {"type": "create"}}, "thread"),
    (MESSAGES, {**TEXT, "system": [{"type": "image"}]}, "system[0].type"),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0]",
    ),
    (
        MESSAGES,
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": DEEP}]}]},
        "messages[0].content[0].input",
    ),
]


@pytest.mark.parametrize(("path", "body", "field"), REFUSED, ids=lambda value: str(value)[:60])
async def test_what_cannot_be_done_is_refused_by_its_name(path: str, body: dict[str, Any], field: str) -> None:
    async with gateway() as served, httpx.AsyncClient() as client:
        done = await client.post(f"{served.base()}/v1/{path}", json=body, headers=headers())
    error = done.json()["error"]
    assert done.status_code == 400 and done.headers["x-should-retry"] == "false"
    assert (error["message"].startswith(field) or f"`{field}`" in error["message"]) and "\n" not in error["message"]
    assert served.backend.asked == []


@pytest.mark.parametrize("after_s", [0.01, 1])
async def test_clients_repeat_what_may_be_repeated(after_s: float) -> None:
    busy = Refusal(429, "busy", "all places are taken", after_s)
    async with (
        gateway(busy, answer(), busy, answer()) as served,
        served.openai() as client,
        served.anthropic() as other,
    ):
        assert (await client.responses.create(model="m", input="hi")).output_text == "hello"
        async with other.messages.stream(model="m", max_tokens=9, messages=[USER]) as stream:
            assert await stream.get_final_text() == "hello"
    assert [call.again for call in served.backend.calls] == [False, True, False, True]


async def test_clients_do_not_repeat_what_may_not() -> None:
    closed = Refusal(503, "closed", "the session has ended")
    async with gateway(closed, closed) as served, served.openai() as client, served.anthropic() as other:
        with pytest.raises(openai.InternalServerError, match="the session has ended") as caught:
            await client.chat.completions.create(model="m", messages=[USER])
        assert (caught.value.status_code, caught.value.code) == (503, "closed")
        with pytest.raises(anthropic.APIStatusError, match="the session has ended") as failed:
            await other.messages.create(model="m", max_tokens=9, messages=[USER])
        body: Any = failed.value.body
        assert body["error"]["type"] == "overloaded_error"
    assert len(served.backend.calls) == 2 and served.backend.delivered == []


async def test_a_context_that_is_too_long_is_named_so() -> None:
    long = Refusal(400, "context_length_exceeded", "5000 tokens: at most 4096")
    async with gateway(long, long) as served, served.openai() as client, served.anthropic() as other:
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            await client.chat.completions.create(model="m", messages=[USER])
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
            await other.messages.create(model="m", max_tokens=9, messages=[USER])


async def test_a_refusal_after_the_headers_ends_the_stream() -> None:
    refusal = Refusal(503, "unavailable", "the engine has failed", 1)
    script = [refusal] * 4
    async with gateway(*script, keep_alive_s=0.01) as served, served.openai() as client, served.anthropic() as other:
        served.backend.hold = hold = asyncio.Event()

        async def read(stream: Any) -> None:
            hold.set()
            async for _ in stream:
                pass

        with pytest.raises(openai.APIError, match="the engine has failed"):
            await read(await client.chat.completions.create(model="m", messages=[USER], stream=True))
        hold.clear()
        with pytest.raises(openai.APIError, match="the engine has failed"):
            await read(await client.responses.create(model="m", input="hi", stream=True))
        hold.clear()
        with pytest.raises(anthropic.APIStatusError, match="the engine has failed"):
            await read(await other.messages.create(model="m", max_tokens=9, messages=[USER], stream=True))
    assert len(served.backend.calls) == 3 and served.backend.delivered == []
