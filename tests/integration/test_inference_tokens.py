"""Token ids in and out of both engines: what ends a completion, and the route that others ask through."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.inference_support import LOADED, RunningServer, token_ids

A = LOADED[0]
PROMPTS = [[9, 6, 13, 13, 16]]
NUM_TOKENS = 24
EOS_ID = 1


def test_max_tokens_are_cut_to_the_room_that_is_left(server: RunningServer) -> None:
    body = server.complete([5] * 250, max_tokens=7, temperature=0, ignore_eos=True)
    assert [len(ids) for ids in token_ids(body)] == [6]
    assert body["choices"][0]["finish_reason"] == "length"


def test_an_empty_name_is_that_of_the_base_model(server: RunningServer) -> None:
    own, none = (server.complete(PROMPTS[0], model=name, max_tokens=4, temperature=0) for name in (server.model, ""))
    assert token_ids(none) == token_ids(own)


def test_stop_string_ends_the_text(server: RunningServer) -> None:
    whole = server.complete(PROMPTS[0], max_tokens=NUM_TOKENS, temperature=0)["choices"][0]["text"]
    stop = whole[6:8]
    choice = server.complete(PROMPTS[0], max_tokens=NUM_TOKENS, temperature=0, stop=[stop])["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop


def test_a_stop_token_ends_a_completion_and_none_ends_it_too_early(server: RunningServer) -> None:
    whole = server.complete(PROMPTS[0], max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)["choices"][0]
    stop = whole["token_ids"][5]
    at = whole["token_ids"].index(stop)
    asked = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stop_token_ids": [stop]}
    choice = server.complete(PROMPTS[0], **asked)["choices"][0]
    assert choice["token_ids"] == whole["token_ids"][: at + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    longer = server.complete(PROMPTS[0], **asked, min_tokens=at + 3)["choices"][0]
    assert len(longer["token_ids"]) >= at + 3 and stop not in longer["token_ids"][: at + 3]


class Plain:
    """As much of a renderer as a prompt of token ids needs."""

    supports_tools = True

    def get_stop_token_ids(self) -> list[int]:
        return [EOS_ID]

    def parse_response(self, token_ids: list[int], **_: Any) -> Any:
        return SimpleNamespace(content="", reasoning_content=None, tool_calls=[], reasoning_complete=False)


async def test_the_training_client_of_others_gets_the_same_tokens_and_logprobs(server: RunningServer) -> None:
    """`renderers` is what the training client of verifiers asks through."""
    import openai
    from renderers.client import generate as renderers_generate

    settings = {"max_tokens": NUM_TOKENS, "temperature": 0.9, "seed": 4, "top_p": 0.9}
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key or "none", max_retries=0) as client:
        for model in (server.model, A):
            answer = await renderers_generate(
                client=client,
                renderer=Plain(),
                messages=[],
                model=model,
                prompt_ids=PROMPTS[0],
                sampling_params=settings,
            )
            choice = server.complete(PROMPTS[0], model=model, stop_token_ids=[EOS_ID], **settings)["choices"][0]
            assert answer["completion_ids"] == choice["token_ids"]
            assert answer["completion_logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
            assert answer["finish_reason"] == choice["finish_reason"]
        own = {"token_ids": [1], "sampling_params": {"model": A}}
        streams = {"token_ids": [1], "sampling_params": {"stream": True}}
        for body in (own, streams, {"token_ids": [1], "stream": True}, {"token_ids": "x"}, {"prompt": [1]}):
            assert server.post("/inference/v1/generate", **body).status_code == 400
        with pytest.raises(openai.NotFoundError):
            await renderers_generate(
                client=client, renderer=Plain(), messages=[], model="nobody", prompt_ids=PROMPTS[0], sampling_params={}
            )
