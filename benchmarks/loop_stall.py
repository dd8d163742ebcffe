"""How long tokens wait while adapters are loaded: sixteen of 171 MB without a pause, 64 requests are being answered.

A pretrained model of 135 M parameters in float32, adapters of rank 140 on every linear layer (a third of the model
each), real servers of both engines. The requests are for the base model: its steps are the shortest, so a load has the
least to hide behind, and vLLM on a CPU takes minutes to read the prompts with adapters of that rank. A server loads one
adapter at a time, and NUM_SLOTS requests to load wait for that. Each adapter is unloaded as soon as it is there, to
make room for the next. A delay is a gap between two tokens beyond the usual gap, in usual gaps, which are decode steps.
vLLM streams, so each request's own tokens are timed; the embedded engine decodes all requests in one step and its count
of tokens is polled. As many seconds without a load show what this machine delays on its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.loop_servers import NUM_SEQS, SMOLLM2, base_model, random_adapters, server

NUM_ADAPTERS, RANK = 16, 140
# For them. Each takes up to 0.7 GB of vLLM: two copies on its host, and one in its layers that is padded to rank 256.
NUM_SLOTS = 4
NUM_ROUNDS = 3
MAX_TOKENS = 400  # far more than a round takes, with a cache for all of them:
KV_CACHE_GB = 2.0
NUM_USUAL = 12  # tokens of every request before a round begins to count
POLL_S = 0.01
_TOKENS = re.compile(r"^prl_generated_tokens_total ([\d.e+]+)$", re.MULTILINE)

Times = list[float]  # of one request's tokens, in seconds
Watch = Callable[[httpx.AsyncClient, str, str], contextlib.AbstractAsyncContextManager[Sequence[Times]]]


def stall_figures(
    kind: str = SMOLLM2, *, num_rounds: int = NUM_ROUNDS, num_adapters: int = NUM_ADAPTERS, rank: int = RANK
) -> dict[str, float]:
    """The longest delay of a token while adapters are loaded and while none is, in decode steps; and a step in ms."""
    figures = {}
    watches: dict[str, Watch] = {"embedded": _polled, "vllm": _streamed}
    for engine, watch in watches.items():
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            model = base_model(kind, folder)
            names = [f"run_{number}@v1" for number in range(num_adapters)]
            vllm = {"kv_cache_gb": KV_CACHE_GB}
            with server(engine, model, folder / engine, max_adapters=NUM_SLOTS, rank=rank, vllm=vllm) as url:
                adapters = random_adapters(folder / engine, model, names, rank=rank)
                rounds = [asyncio.run(_round(watch, url, str(model), adapters)) for _ in range(num_rounds)]
        delays, undisturbed, steps_s = zip(*rounds, strict=True)
        figures[f"adapter_load_stall_{engine}"] = max(delays)
        figures[f"no_load_stall_{engine}"] = max(undisturbed)
        figures[f"decode_step_ms_{engine}"] = 1000 * statistics.median(steps_s)
    return figures


async def _round(watch: Watch, url: str, model: str, adapters: dict[str, Path]) -> tuple[float, float, float]:
    """Longest delay in steps while `adapters` are loaded and unloaded, and while nothing is; seconds of a step."""
    http = httpx.AsyncClient(timeout=300.0, limits=httpx.Limits(max_connections=None))
    async with http, watch(http, url, model) as series:
        while min(map(len, series)) < NUM_USUAL:
            await asyncio.sleep(POLL_S)
        start_s = time.perf_counter()
        paths = list(adapters.items())
        await asyncio.gather(*(_load_in_turn(http, url, paths[slot::NUM_SLOTS]) for slot in range(NUM_SLOTS)))
        loaded_s = time.perf_counter()
        while min(times[-1] for times in series) < loaded_s:
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(loaded_s - start_s)
    pairs = [pair for times in series for pair in itertools.pairwise(times)]
    loading = [after - before for before, after in pairs if before < loaded_s and after > start_s]
    calm = [after - before for before, after in pairs if loaded_s <= before]
    usual_s = statistics.median(calm)
    return max(loading) / usual_s - 1, max(calm) / usual_s - 1, usual_s


async def _load_in_turn(http: httpx.AsyncClient, url: str, adapters: Sequence[tuple[str, Path]]) -> None:
    """One slot: each adapter is loaded, and unloaded for the next."""
    for name, path in adapters:
        await _post(http, f"{url}/load_lora_adapter", name, lora_path=str(path))
        await _post(http, f"{url}/unload_lora_adapter", name)


async def _post(http: httpx.AsyncClient, url: str, name: str, **fields: str) -> None:
    (await http.post(url, json={"lora_name": name, **fields})).raise_for_status()


def _bodies(model: str) -> list[dict[str, Any]]:
    common = {"model": model, "max_tokens": MAX_TOKENS, "temperature": 1.0, "ignore_eos": True}
    return [{"prompt": [3 + (idx * 7 + place) % 200 for place in range(16)], **common} for idx in range(NUM_SEQS)]


@contextlib.asynccontextmanager
async def _streamed(http: httpx.AsyncClient, url: str, model: str) -> AsyncIterator[Sequence[Times]]:
    """When each token of each request came, as long as the block runs."""
    series: list[Times] = [[] for _ in range(NUM_SEQS)]

    async def follow(body: dict[str, Any], times: Times) -> None:
        async with http.stream("POST", f"{url}/completions", json={**body, "stream": True}) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
        raise RuntimeError("a request ended before all adapters were loaded")

    async with _running([follow(body, times) for body, times in zip(_bodies(model), series, strict=True)]):
        yield series


@contextlib.asynccontextmanager
async def _polled(http: httpx.AsyncClient, url: str, model: str) -> AsyncIterator[Sequence[Times]]:
    """When the count of all tokens grew: one series, for all requests get their token in the same step."""
    times: Times = []

    async def ask(body: dict[str, Any]) -> None:
        (await http.post(f"{url}/completions", json=body)).raise_for_status()
        raise RuntimeError("a request ended before all adapters were loaded")

    async def poll() -> None:
        count = -1.0
        while True:
            found = _TOKENS.search((await http.get(f"{url.removesuffix('/v1')}/metrics")).raise_for_status().text)
            assert found is not None
            if float(found[1]) > count:
                count = float(found[1])
                times.append(time.perf_counter())
            await asyncio.sleep(POLL_S)

    async with _running([poll(), *map(ask, _bodies(model))]):
        yield [times]


@contextlib.asynccontextmanager
async def _running(coroutines: Sequence[Any]) -> AsyncIterator[None]:
    """They run as long as the block does, and it ends with the first error of one."""
    tasks = asyncio.gather(*coroutines)
    owner = asyncio.current_task()
    assert owner is not None
    tasks.add_done_callback(lambda done: None if done.cancelled() else owner.cancel(str(done.exception())))
    try:
        yield
    finally:
        tasks.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await tasks


if __name__ == "__main__":
    print(stall_figures())
