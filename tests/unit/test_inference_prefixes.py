"""Sequences that begin alike share what is computed: the same answers as without, and nothing of another's."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.configs.inference import EmbeddedConfig, InferenceConfig
from prime_rl.inference.embedded.batch import Batch, Job, SamplingParams
from prime_rl.inference.embedded.engine import Engine
from prime_rl.inference.embedded.model import BLOCK, PrefixCache, Served, load_model
from prime_rl.lora.adapter_state import load_adapter
from prime_rl.utils.runtime import StartError
from tests.budgets import examples
from tests.inference_support import adapter_tensors, linear_shapes, make_adapter, make_model
from tests.numeric import num_terms, rounding
from tests.unit.test_inference_batching import ARCHITECTURES, new_batch, run_out, save, serve
from tests.unit.test_inference_engine import NO_MEMORY, running, until, within

pytestmark = pytest.mark.numeric

LONG = [5 + number % 50 for number in range(3 * BLOCK + 1)]  # three blocks, and the token that a step takes
Forward = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("prefixes") / "model")


@pytest.fixture
def served(folder: Path) -> Served:
    served = load_model(
        InferenceConfig.model_validate(
            {"model": {"name": str(folder), "lora": {"rank": 4}}, "max_concurrent_runs": 2, "max_versions_per_run": 1}
        )
    )
    fill(served, folder)
    return served


@pytest.fixture
async def engine(served: Served) -> AsyncIterator[Engine]:
    async with running(Engine(served, lambda ids: "", max_num_seqs=4, max_model_len=10**6)) as engine:
        yield engine


def fill(served: Served, folder: Path) -> None:
    for slot in range(len(served.routing.scaling)):
        load_adapter(served.layers, slot, adapter_tensors(linear_shapes(folder), seed=slot, rank=3), 3)
        served.routing.scaling[slot] = 1.0 + slot


def without(served: Served) -> Served:
    return dataclasses.replace(served, prefix_blocks=0)


def job(prompt: Sequence[int], max_tokens: int = 4, slot: int | None = None, run_id: str = "", **params: Any) -> Job:
    sampling = SamplingParams(**{"seed": 0, "temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params})
    model = "the base model" if slot is None else f"run_{slot}@v1"
    return Job([prompt], sampling, slot=slot, max_length=10**6, run_id=run_id, model=model)


def computed(batch: Batch) -> int:
    return batch.num_prefix_queries - batch.num_prefix_hits


def answer(batch: Batch, *jobs: Job) -> list[list[int]]:
    batch.add([row for each in jobs for row in each.rows])
    run_out(batch)
    return [row.token_ids for each in jobs for row in each.rows]


def tree(draw: random.Random, slots: Sequence[int | None]) -> list[list[Job]]:
    """Groups of requests that come one after the other; each prompt is a part of an earlier one, and more."""
    beginnings: list[list[int]] = [[]]
    groups = []
    for number in range(6):
        group = []
        for _ in range(draw.randint(1, 5)):
            before = draw.choice(beginnings)
            prompt = before[: draw.choice([len(before), draw.randint(0, len(before))])]
            prompt = prompt + [draw.randint(1, 63) for _ in range(draw.choice([1, 3, BLOCK, BLOCK + 1, 2 * BLOCK + 5]))]
            beginnings.append(prompt)
            sampled = {"temperature": draw.choice([0.0, 1.0]), "n": draw.choice([1, 1, 3]), "seed": number}
            group.append(job(prompt, draw.randint(1, 20), draw.choice(slots), **sampled))
        groups.append(group)
    return groups


def staggered(batch: Batch, groups: Sequence[Sequence[Job]]) -> list[Any]:
    """The rows of all `groups`, of which a new one joins at every third step; then each answer again, as a prompt."""
    for group in groups:
        batch.add([row for each in group for row in each.rows])
        for _ in range(3):
            batch.step()
    run_out(batch)
    rows = [row for group in groups for each in group for row in each.rows]
    later = [job([*row.all_ids, 3, 4], 3, row.job.slot) for row in rows]
    answer(batch, *later)
    return rows + [row for each in later for row in each.rows]


def assert_the_same(served: Served, groups: Callable[[], list[list[Job]]]) -> Batch:
    """With and without the cache: the same tokens, and the same log-probabilities but for rounding."""
    batch = new_batch(served)
    found, expected = staggered(batch, groups()), staggered(new_batch(without(served)), groups())
    assert [row.token_ids for row in found] == [row.token_ids for row in expected]
    ours, theirs = (torch.tensor([each for row in rows for each in row.logprobs]) for rows in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=rounding(num_terms(served.model)))
    return batch


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_answers_are_those_without_the_cache(name: str, tmp_path: Path) -> None:
    served = serve(save(ARCHITECTURES[name], tmp_path), with_lora=False)
    batch = assert_the_same(served, lambda: tree(random.Random(name), [None]))
    assert batch.num_prefix_hits > batch.num_prefix_queries / 4


@given(seed=st.integers(0, 2**32), num_blocks=st.sampled_from([1, 2, 7, 10**6]))
@settings(max_examples=examples(6), deadline=None)
def test_answers_of_adapters_are_those_without_the_cache(shared: Served, seed: int, num_blocks: int) -> None:
    small = dataclasses.replace(shared, prefix_blocks=num_blocks)
    batch = assert_the_same(small, lambda: tree(random.Random(seed), [None, 0, 1, 2]))
    assert len(batch.prefixes) <= num_blocks


@pytest.fixture(scope="module")
def shared(folder: Path) -> Served:
    served = serve(folder)
    fill(served, folder)
    return served


def test_requests_that_wait_together_compute_their_beginning_once(shared: Served) -> None:
    """Sixteen alike and four that go on in another way, in an order in which the shortest comes first."""
    batch = new_batch(shared)
    prompts = [*[LONG] * 16, *([*LONG[:-1], 60, number, number] for number in range(1, 5)), LONG[: BLOCK + 1]]
    answer(batch, *(job(prompt, slot=1) for prompt in reversed(prompts)))
    rest = 3  # of the longest, beyond the blocks that it shares with all
    assert batch.num_prefix_queries == sum(len(prompt) - 1 for prompt in prompts)
    assert 3 * BLOCK + 4 * (rest - 1) <= computed(batch) <= 3 * BLOCK + 21 * rest


def test_a_conversation_computes_only_what_is_new(shared: Served) -> None:
    batch = new_batch(shared)
    [sampled] = answer(batch, job(LONG, 2 * BLOCK))
    before = computed(batch)
    history = [*LONG, *sampled]
    answer(batch, job([*history, 7, 8, 9]))
    # All blocks of the history, the sampled tokens too; what begins the next block is computed again.
    assert computed(batch) - before == (len(history) + 2) - (len(history) - 1) // BLOCK * BLOCK


def test_the_whole_prompt_may_be_known(shared: Served) -> None:
    batch, calls = new_batch(shared), list[int]()
    forward: Forward = shared.forward
    first = answer(batch, job(LONG))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "forward", lambda ids, *args: calls.append(ids.shape[1]) or forward(ids, *args))
        assert answer(batch, job(LONG), job(LONG)) == first * 2
    assert calls == [1] * 4, "steps alone"


def test_nothing_is_shared_between_adapters(shared: Served) -> None:
    batch = new_batch(shared)
    for number, slot in enumerate((None, 0, 1, 2)):
        answer(batch, job(LONG, slot=slot))
        assert computed(batch) == (number + 1) * 3 * BLOCK
    assert batch.num_prefix_hits == 0


def test_tokens_that_were_drawn_are_those_of_a_seed(shared: Served) -> None:
    """The beginning was computed with the request, before it, or for it alone."""
    sampled = {"temperature": 1.0, "seed": 9}
    warm, cold = new_batch(shared), new_batch(without(shared))
    expected = answer(cold, job(LONG, 30, **sampled))
    answer(warm, job(LONG[:40], 5))
    assert answer(warm, job(LONG, 30, **sampled), job(LONG, 3))[:1] == expected
    assert answer(warm, job(LONG, 30, **sampled)) == expected


def test_what_is_cancelled_or_fails_leaves_right_answers(shared: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer(new_batch(without(shared)), job(LONG, 9))
    batch, gone, bad = new_batch(shared), job(LONG, 99), job([*LONG, 1], 9)
    batch.add([*gone.rows, *bad.rows])
    batch.step()
    forward: Forward = shared.forward

    def not_finite(*args: Any) -> torch.Tensor:
        return forward(*args) * torch.tensor([[1.0] if row.job is gone else [float("nan")] for row in batch._rows])

    monkeypatch.setattr(shared, "forward", not_finite)
    batch.step()
    monkeypatch.undo()
    gone.is_cancelled = True
    run_out(batch)
    assert [row.finish_reason for row in (*gone.rows, *bad.rows)] == ["abort", "error"]
    assert answer(batch, job(LONG, 9)) == expected


def blocks(number: int) -> Callable[[int, int], torch.Tensor]:
    return lambda start, stop: torch.full((1, stop - start, 1), float(number))


def keys(name: str, num: int) -> list[bytes]:
    return [f"{name}{number}".encode() for number in range(num)]


def test_the_run_with_the_most_loses_what_it_used_the_longest_ago() -> None:
    cache = PrefixCache(8)
    for name in ("a", "b", "c"):
        cache.keep(keys(name, 2), blocks(0), slot=0, run_id="run_large")
    cache.find(keys("a", 2))
    cache.keep(keys("x", 2), blocks(0), slot=1, run_id="run_small")
    cache.keep(keys("y", 1), blocks(0), slot=1, run_id="run_small")
    known = {name: cache.num_known(keys(name, 2)) for name in "abcxy"}
    assert known == {"a": 2, "b": 1, "c": 2, "x": 2, "y": 1}, "the end of a sequence goes before its beginning"
    cache.keep(keys("d", 5), blocks(0), slot=0, run_id="run_large")
    assert cache.num_known(keys("x", 2)) == 2 and cache.num_known(keys("y", 1)) == 1 and len(cache) == 8
    cache.drop(1)
    assert len(cache) == 5 and cache.find(keys("x", 2)) == []


def test_a_sequence_that_is_too_long_keeps_its_beginning() -> None:
    cache = PrefixCache(4)
    cache.keep(keys("a", 9), blocks(1), slot=0, run_id="run_a")
    assert cache.num_known(keys("a", 9)) == 4
    cache.keep(keys("b", 9), blocks(2), slot=0, run_id="run_a")
    assert (cache.num_known(keys("a", 9)), cache.num_known(keys("b", 9))) == (0, 4)
    assert all(bool((block == 2).all()) for block in cache.find(keys("b", 9)))


@given(
    room=st.integers(0, 12),
    asked=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 9)), max_size=40),
)
@settings(max_examples=examples(60), deadline=None)
def test_the_bound_holds_and_nobody_is_pushed_below_an_equal_part(room: int, asked: list[tuple[str, int, int]]) -> None:
    cache, held = PrefixCache(room), Counter[str]()
    for run, number, length in asked:
        cache.keep(keys(f"{run}{number}.", length), blocks(number), slot=ord(run), run_id=run)
        now = Counter({each: len(used) for each, used in cache._by_use.items()})
        assert len(cache) == now.total() <= room
        for other, before in held.items():
            assert other == run or now[other] >= min(before, room // (len(held | Counter([run])) or 1))
        held = now
        assert all(bool((block == number).all()) for block in cache.find(keys(f"{run}{number}.", length)))


async def test_a_version_is_forgotten_when_it_is_unloaded(engine: Engine, folder: Path, tmp_path: Path) -> None:
    """Also what a request computes that goes on after that; another adapter gets the name and the slot."""
    one, other = (make_adapter(tmp_path / f"adapter{seed}", folder, seed=seed) for seed in (1, 2))
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    kept = engine._batch.prefixes

    async def tokens(name: str | None) -> list[int]:
        return (await within(engine.submit([LONG], sampling, adapter=name).result()))[0].token_ids

    await engine.load_adapter("run_a@v1", other)
    await engine.load_adapter("run_b@v1", other)
    await engine.load_adapter("run_c@v1", other)  # there are no more slots
    expected = await tokens("run_a@v1")
    engine.unload_adapter("run_a@v1")
    await engine.load_adapter("run_a@v1", one)
    before = await tokens("run_a@v1")
    num_kept = len(kept)
    last = engine.submit(
        [LONG], SamplingParams(n=4, temperature=0, max_tokens=200, ignore_eos=True), adapter="run_a@v1"
    )
    await until(lambda: engine.stats().num_running == 4)
    engine.unload_adapter("run_a@v1")
    await until(lambda: len(kept) < num_kept)
    await within(last.result())
    assert len(kept) == 0 and last.rows[0].token_ids[:20] == before
    await engine.load_adapter("run_a@v1", other)
    assert await tokens("run_a@v1") == expected != before


async def test_nothing_of_other_whole_weights_is_used(
    engine: Engine, served: Served, folder: Path, tmp_path: Path
) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)

    async def tokens() -> list[int]:
        return (await within(engine.submit([LONG], sampling).result()))[0].token_ids

    before = await tokens()
    newer = make_model(tmp_path / "newer", seed=1)
    weights = served.weights.read(newer)
    await within(engine.change(lambda: served.weights.apply(weights)))
    expected = answer(new_batch(without(serve(newer, with_lora=False))), job(LONG, 9))[0]
    assert await tokens() == expected != before
    await within(engine.change(lambda: served.weights.apply(None)))
    assert await tokens() == before


async def test_out_of_memory_gives_back_what_was_kept(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, and half of the room for good; the answers are those of an engine that had enough."""
    sampling = SamplingParams(n=4, seed=1, max_tokens=20, ignore_eos=True)
    forward: Forward = served.forward
    expected = answer(new_batch(without(served)), job(LONG, n=4, seed=1, temperature=1.0, max_tokens=20))
    async with running(Engine(served, lambda ids: "", max_num_seqs=4, max_model_len=10**6)) as engine:
        kept = engine._batch.prefixes
        await within(engine.submit([LONG], sampling).result())
        assert len(kept) > 0
        lacking, seen = threading.Event(), list[int]()
        lacking.set()

        def limited(ids: torch.Tensor, *args: Any) -> torch.Tensor:
            if len(ids) == 4 and lacking.is_set():
                lacking.clear()
                raise NO_MEMORY[0]
            seen.append(len(kept))
            return forward(ids, *args)

        monkeypatch.setattr(served, "forward", limited)
        rows = await within(engine.submit([LONG], sampling).result())
        assert (
            [row.token_ids for row in rows] == expected and 0 in seen and kept._max_blocks == served.prefix_blocks // 2
        )


async def test_a_run_is_charged_for_what_is_computed(engine: Engine) -> None:
    """One that asks for what is known is not a prefill ahead of others."""
    sampling = SamplingParams(max_tokens=1)

    async def cost(prompt: list[int]) -> int:
        job = engine.submit([prompt], sampling, run_id="run_a")
        found = engine._waiting.cost(job.rows[0])
        await within(job.result())
        return found

    assert [await cost(prompt) for prompt in (LONG, [*LONG, 1], LONG[::-1])] == [1 + len(LONG), 3, 1 + len(LONG)]


def test_the_room_is_a_part_of_what_is_free(folder: Path) -> None:
    auto, none, much = (EmbeddedConfig.model_validate({"prefix_cache_gb": each}) for each in ("auto", 0, 10**6))
    assert (
        auto.prefix_bytes(800.0, 10**6) == 100 and auto.prefix_bytes(10.0**6, 7.0) == 7 and none.prefix_bytes(8, 8) == 0
    )
    config = {"model": {"name": str(folder)}, "max_num_seqs": 4}
    served = load_model(InferenceConfig.model_validate(config))
    assert served.prefix_blocks == 4 * 2048 / BLOCK
    config |= {"embedded": {"prefix_cache_gb": much.prefix_cache_gb}}
    with pytest.raises(StartError, match=r"embedded.prefix_cache_gb: found 1000000.0 GiB, .* GiB are free .* lower it"):
        load_model(InferenceConfig.model_validate(config))
