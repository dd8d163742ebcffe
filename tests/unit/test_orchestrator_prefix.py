"""Requests that begin alike go to one server, as long as the load allows it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from prime_rl.configs.base import SamplingConfig
from prime_rl.orchestrator.client import CompletionRequest, ServerClient
from prime_rl.orchestrator.pool import LOAD_BOUND, Server, choose

MAX_TOKENS = 100


def servers(*outstanding: int) -> list[Server]:
    client = ServerClient.__new__(ServerClient)  # never asked here
    return [Server(number, client, outstanding_tokens=tokens) for number, tokens in enumerate(outstanding)]


def request(*prefix: int, more: int = 0, model: str = "run_a@v1") -> CompletionRequest:
    prompt = [*prefix, *range(1000, 1000 + more)]
    return CompletionRequest(model, prompt, SamplingConfig(), MAX_TOKENS, seed=1, num_prefix=len(prefix))


def test_a_conversation_stays_where_it_began_and_groups_are_spread() -> None:
    ready = servers(0, 0, 0)
    begun = [choose(ready, request(group, 7)).number for group in range(600)]
    assert [choose(ready, request(group, 7, more=group % 50)).number for group in range(600)] == begun
    assert all(150 < count < 250 for count in Counter(begun).values())


def test_without_a_prefix_the_least_loaded_is_asked() -> None:
    ready = servers(30, 10, 20)
    assert choose(ready, None).number == 1
    assert choose(ready, CompletionRequest("m", [5, 6], SamplingConfig(), MAX_TOKENS, seed=1)).number == 1


def test_a_server_that_goes_moves_only_its_own_conversations() -> None:
    ready = servers(0, 0, 0, 0)
    before = [choose(ready, request(group)).number for group in range(400)]
    after = [choose(ready[:2] + ready[3:], request(group)).number for group in range(400)]
    assert all(was == now for was, now in zip(before, after, strict=True) if was != 2)
    assert {now for was, now in zip(before, after, strict=True) if was == 2} == {0, 1, 3}


@given(st.lists(st.integers(0, 12), min_size=1, max_size=80), st.integers(2, 5))
def test_no_server_gets_far_more_than_its_share(groups: list[int], num_servers: int) -> None:
    ready = servers(*[0] * num_servers)
    for group in groups:
        asked = request(group)
        least = min(server.outstanding_tokens for server in ready)
        chosen = choose(ready, asked)
        was_least = chosen.outstanding_tokens == least
        chosen.outstanding_tokens += asked.num_tokens
        share = sum(server.outstanding_tokens for server in ready) / num_servers
        assert was_least or chosen.outstanding_tokens <= LOAD_BOUND * share
