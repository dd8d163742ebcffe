"""Tokens per second of the embedded engine against vLLM's, both as real servers on this machine's CPU.

The demo's base model, and a pretrained one of 135 M parameters; float32, the same 64 concurrent requests of 32 tokens
over the base model and two adapters, to the one server and to the other in turn. vLLM's own model code and scheduler,
with the settings that the project gives it.

And what sixteen requests with one prompt cost the embedded engine until all have a token, of what they cost when each
has a prompt of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.loop_servers import DEMO, NUM_SEQS, SMOLLM2, base_model, load, random_adapters, server

NUM_TOKENS = 32
# A pair of the pretrained model takes some 45 seconds.
NUM_PAIRS = {DEMO: 9, SMOLLM2: 3}
ADAPTERS = ("run_a@v1", "run_b@v1")
NUM_ROLLOUTS, NUM_PROMPT = 16, 512


def embedded_vs_vllm_figures() -> dict[str, float]:
    """Medians over pairs of (tokens per second of the embedded engine) / (those of vLLM)."""
    return {
        "embedded_vs_vllm_tokens_per_s": ratio(DEMO, NUM_PAIRS[DEMO]),
        "embedded_vs_vllm_real": ratio(SMOLLM2, NUM_PAIRS[SMOLLM2]),
    }


def first_token_figures(kind: str = SMOLLM2, num_pairs: int = NUM_PAIRS[SMOLLM2]) -> dict[str, float]:
    """Median over pairs of (seconds with one prompt) / (seconds with sixteen), which no request before had."""
    with tempfile.TemporaryDirectory() as place:
        model = base_model(kind, Path(place))
        with server("embedded", model, Path(place) / "workspace", max_model_len=2 * NUM_PROMPT) as url:
            return {"engine_first_token_16x512_vs_prefills": asyncio.run(_first_tokens(url, str(model), num_pairs))}


async def _first_tokens(url: str, model: str, num_pairs: int) -> float:
    draw = random.Random(0)

    async def seconds(num_prompts: int) -> float:
        prompts = [[draw.randrange(3, 250) for _ in range(NUM_PROMPT)] for _ in range(num_prompts)]
        bodies = [
            {"model": model, "prompt": prompts[idx % num_prompts], "max_tokens": 1, "seed": idx}
            for idx in range(NUM_ROLLOUTS)
        ]
        start_s = time.perf_counter()
        answers = await asyncio.gather(*(http.post(f"{url}/completions", json=body) for body in bodies))
        assert all(answer.json()["usage"]["completion_tokens"] == 1 for answer in answers)
        return time.perf_counter() - start_s

    async with httpx.AsyncClient(timeout=300.0, limits=httpx.Limits(max_connections=None)) as http:
        await seconds(1)
        return statistics.median([await seconds(1) / await seconds(NUM_ROLLOUTS) for _ in range(num_pairs)])


def ratio(kind: str, num_pairs: int) -> float:
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        model = base_model(kind, folder)
        urls = []
        for engine in ("embedded", "vllm"):
            urls.append(stack.enter_context(server(engine, model, folder / engine, max_adapters=len(ADAPTERS))))
            load(urls[-1], random_adapters(folder / engine, model, ADAPTERS))
        return asyncio.run(_ratio(urls, str(model), num_pairs))


async def _ratio(urls: list[str], model: str, num_pairs: int) -> float:
    async with httpx.AsyncClient(
        timeout=300.0, limits=httpx.Limits(max_connections=None, keepalive_expiry=1.0)
    ) as http:
        times_s = [[await round_s(http, url, model, number) for url in urls] for number in range(num_pairs + 1)]
    # The first pair is the warm-up.
    return statistics.median(vllm_s / embedded_s for embedded_s, vllm_s in times_s[1:])


async def round_s(http: httpx.AsyncClient, url: str, model: str, number: int) -> float:
    """Seconds until all requests of one round are answered."""
    names = (model, *ADAPTERS)
    bodies = [
        {
            "model": names[idx % len(names)],
            "prompt": [3 + (number * 31 + idx * 7 + place) % 200 for place in range(8 + idx % 24)],
            "max_tokens": NUM_TOKENS,
            "temperature": 1.0,
            "seed": idx,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
        }
        for idx in range(NUM_SEQS)
    ]
    start_s = time.perf_counter()
    answers = await asyncio.gather(*(http.post(f"{url}/completions", json=body) for body in bodies))
    took_s = time.perf_counter() - start_s
    assert all(len(answer.json()["choices"][0]["token_ids"]) == NUM_TOKENS for answer in answers)
    return took_s


if __name__ == "__main__":
    print(embedded_vs_vllm_figures() | first_token_figures())
