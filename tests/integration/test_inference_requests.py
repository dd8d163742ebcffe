"""Which requests both engines refuse alike before they work for them: those of pages, and texts that cannot fit."""

from __future__ import annotations

import httpx
import pytest

from tests.inference_support import KEY, RunningServer, error_of
from tests.page_attacks import JSON, answered, ask

POSTS = (
    *("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/v1/load_lora_adapter"),
    *("/v1/unload_lora_adapter", "/update_weights", "/reload_weights"),
)
# `max_model_len` of the server, and its longest token, "<eos>" or "<pad>".
MOST = 256 * 5


@pytest.mark.parametrize("path", [*POSTS, "/v1/models", "/metrics", "/health"])
def test_a_page_reaches_no_route_even_with_the_key(server: RunningServer, path: str) -> None:
    port = httpx.URL(server.root_url).port
    assert port is not None
    assert answered(port, path, KEY) == []


def test_with_a_key_a_server_may_have_any_name(server: RunningServer) -> None:
    """Other machines ask for it by the name or address of its node."""
    port = httpx.URL(server.root_url).port
    assert port is not None
    with_key = {"Host": f"node-7.cluster:{port}", "Authorization": f"Bearer {KEY}", **JSON}
    assert ask(port, "POST", "/v1/completions", with_key, b'{"prompt": [5], "max_tokens": 1}')[0] == 200
    assert ask(port, "POST", "/v1/completions", with_key | {"Authorization": ""}, b'{"prompt": [5]}')[0] == 401


def test_texts_that_cannot_fit_are_refused_by_their_characters(server: RunningServer) -> None:
    few, many = "a" * MOST, "a" * (MOST + 1)
    longer = server.post("/v1/completions", model=server.model, prompt=few)
    assert longer.status_code == 400 and "characters" not in error_of(longer), "it is for the tokenizer to say"
    words = f"found {MOST + 1} characters: must be at most {MOST} to fit into the 256 tokens of max_model_len"
    for prompt in (many, ["a", many]):
        refused = server.post("/v1/completions", model=server.model, prompt=prompt)
        assert refused.status_code == 400 and error_of(refused) == f"prompt: {words}"
    messages = [{"role": "", "content": "a" * MOST}, {"role": "", "content": "a"}]
    refused = server.post("/v1/chat/completions", model=server.model, messages=messages)
    assert refused.status_code == 400 and error_of(refused) == f"messages: {words}"
    many_messages = [{"role": "u", "content": ""}] * 1025
    refused = server.post("/v1/chat/completions", model=server.model, messages=many_messages)
    assert refused.status_code == 400 and error_of(refused) == "messages: found 1025: must be at most 1024"
