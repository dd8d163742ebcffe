"""What the choice between two servers is worth: the share of prompt tokens that a prefix cache already has.

Two vLLM servers on the CPU with the demo's base model. Conversations as a run has them: the rollouts of a group share
their prompt and their first request, and each turn sends the whole conversation so far. The same work goes through the
orchestrator's own client, to a server drawn at random for each request, and to one server alone. Each way has its own
prompts, so none finds what another left.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.loop_servers import DEMO, base_model, server
from prime_rl.configs.base import SamplingConfig
from prime_rl.orchestrator.client import CompletionRequest, Endpoint, ServerClient
from prime_rl.orchestrator.pool import InferenceClient

NUM_GROUPS, NUM_ROLLOUTS, NUM_TURNS = 48, 4, 4
NUM_PROMPT, NUM_SAMPLED, NUM_REPLY = 96, 32, 16
NUM_IN_FLIGHT = 64
# vLLM's cache holds whole blocks of tokens only; its default on a CPU, 128, is longer than these turns.
VLLM = {"extra_args": {"block_size": 32}, "kv_cache_gb": 0.5}
SAMPLING = SamplingConfig(min_tokens=NUM_SAMPLED, max_tokens=NUM_SAMPLED)
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"


def prefix_figures(num_groups: int = NUM_GROUPS) -> dict[str, float]:
    """Tokens found in a prefix cache over prompt tokens, of both servers together, for each way of choosing one."""
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        model = base_model(DEMO, folder)
        urls = [
            stack.enter_context(server("vllm", model, folder / name, num_threads=1, vllm=VLLM)) for name in ("a", "b")
        ]
        return asyncio.run(_shares(urls, str(model), num_groups))


async def _shares(urls: Sequence[str], model: str, num_groups: int) -> dict[str, float]:
    both, *single = [_client(urls), *(_client([url]) for url in urls)]
    draw = random.Random(0)
    ways: dict[str, Callable[[], InferenceClient]] = {
        "prefix_hit_share_two_servers": lambda: both,
        "prefix_hit_share_random": lambda: draw.choice(single),
        "prefix_hit_share_one_server": lambda: single[0],
    }
    try:
        return {name: await _share(urls, model, name, choose, num_groups) for name, choose in ways.items()}
    finally:
        for client in (both, *single):
            await client.close()


def _client(urls: Sequence[str]) -> InferenceClient:
    endpoints = [Endpoint(Path(), url) for url in urls]
    return InferenceClient(endpoints, _as_it_is, max_concurrent_requests=NUM_IN_FLIGHT)


async def _as_it_is(server: ServerClient) -> None:
    """The base model needs no adapter."""


async def _share(
    urls: Sequence[str], model: str, seed: str, choose: Callable[[], InferenceClient], num_groups: int
) -> float:
    hits, queries = _counts(urls)
    places = asyncio.Semaphore(NUM_IN_FLIGHT // NUM_ROLLOUTS)
    await asyncio.gather(*(_group(model, f"{seed}/{number}", choose, places) for number in range(num_groups)))
    hits_after, queries_after = _counts(urls)
    return (hits_after - hits) / (queries_after - queries)


async def _group(model: str, seed: str, choose: Callable[[], InferenceClient], places: asyncio.Semaphore) -> None:
    """All conversations of one group: one request for their first turns, then each goes on alone."""
    draw = random.Random(seed)
    prompt = _tokens(draw, NUM_PROMPT)

    async def turn(conversation: list[int], num_choices: int, number: int) -> list[list[int]]:
        request = CompletionRequest(model, conversation, SAMPLING, NUM_SAMPLED, number, num_choices, NUM_PROMPT)
        completions = await choose().complete(request)
        return [conversation + completion.token_ids for completion in completions]

    async def rollout(conversation: list[int], replies: random.Random) -> None:
        for number in range(1, NUM_TURNS):
            [conversation] = await turn(conversation + _tokens(replies, NUM_REPLY), 1, number)

    async with places:
        first = await turn(prompt, NUM_ROLLOUTS, 0)
        await asyncio.gather(*(rollout(each, random.Random(f"{seed}/{idx}")) for idx, each in enumerate(first)))


def _tokens(draw: random.Random, number: int) -> list[int]:
    return [draw.randrange(3, 250) for _ in range(number)]


def _counts(urls: Sequence[str]) -> tuple[float, float]:
    """Hits and queries of all servers since their start, in tokens."""
    totals = {HITS: 0.0, QUERIES: 0.0}
    for url in urls:
        text = httpx.get(f"{url.removesuffix('/v1')}/metrics").raise_for_status().text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in totals:
                    totals[sample.name] += sample.value
    return totals[HITS], totals[QUERIES]


if __name__ == "__main__":
    print(prefix_figures())
