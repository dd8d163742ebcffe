"""The engine: jobs, adapters in their slots, clients that go away, and an end that fails all waiters."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import shutil
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.batch import MAX_PREFILL_TOKENS, Job, Row, SamplingParams
from prime_rl.inference.embedded.engine import Engine, EngineDead, Waiting
from prime_rl.inference.embedded.model import PrefixCache, Served, load_model
from prime_rl.inference.guard import ApiError, model_shapes
from prime_rl.lora.adapter_state import ADAPTER_FILE, CONFIG_FILE, ServedPart, read_shapes, served_parts
from tests.inference_support import greedy, make_adapter, make_model
from tests.patience import PATIENCE_S

PROMPT = [5, 6, 7]
LONG = 160
ENDLESS = 10**9
T = TypeVar("T")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture
def served(folder: Path) -> Served:
    config = {"model": {"name": str(folder), "lora": {"rank": 8}}, "max_concurrent_runs": 2, "max_versions_per_run": 1}
    return load_model(InferenceConfig.model_validate(config))


def new_engine(served: Served, max_num_seqs: int) -> Engine:
    return Engine(served, lambda ids: "", max_num_seqs=max_num_seqs, max_model_len=ENDLESS)


@contextlib.asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Engine]:
    task = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        engine.stop()
        await within(task)
    assert not engine.alive


@pytest.fixture
async def engine(served: Served) -> AsyncIterator[Engine]:
    """An engine with two slots for adapters and four rows."""
    async with running(new_engine(served, 4)) as engine:
        yield engine


async def within(waiting: Awaitable[T]) -> T:
    return await asyncio.wait_for(waiting, PATIENCE_S)


async def until(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await within(poll())


def params(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(n=n, temperature=0, max_tokens=max_tokens, ignore_eos=True)


async def generate(engine: Engine, max_tokens: int = 12, n: int = 1, **kwargs: Any) -> list[Row]:
    return await within(engine.submit([PROMPT], params(max_tokens, n), **kwargs).result())


async def tokens(engine: Engine, **kwargs: Any) -> list[int]:
    return (await generate(engine, **kwargs))[0].token_ids


async def test_more_choices_than_rows_wait_for_room(engine: Engine) -> None:
    completions = await generate(engine, n=11)
    assert [completion.token_ids for completion in completions] == [completions[0].token_ids] * 11
    await until(lambda: engine.stats().num_running == 0)
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_prompt_tokens, stats.num_tokens) == (0, 3, 11 * 12)


async def test_rows_wait_when_the_cache_could_not_hold_them(served: Served) -> None:
    """Room for 100 tokens: three rows of at most 33, or one of 403."""
    small = dataclasses.replace(served, cache_tokens=100)
    engine = new_engine(small, 64)
    short = [engine.submit([PROMPT], params(30)) for _ in range(5)]
    engine.submit([PROMPT], params(LONG))
    assert [row.job for row in engine._take_fitting()] == short[:3]
    engine = new_engine(small, 64)
    endless = engine.submit([PROMPT], params(LONG))
    engine.submit([PROMPT], params(1))
    assert [row.job for row in engine._take_fitting()] == [endless]
    assert served.cache_tokens > 10**6


async def test_rows_of_a_run_do_not_wait_behind_all_rows_of_another(served: Served) -> None:
    """The next row is of the run with the fewest tokens, of each in the order they came."""
    engine = new_engine(served, 4)
    many = engine.submit([PROMPT], params(30, n=9), run_id="run_many")
    few = engine.submit([PROMPT[::-1]], params(30, n=2), run_id="run_few")
    assert (engine.num_waiting_of("run_many"), engine.num_waiting_of("run_few")) == (9, 2)
    assert [row.job for row in engine._take_fitting()] == [many, few, many, few]
    assert [row.job for row in engine._take_fitting()] == [many] * 4 and engine.stats().num_waiting == 3
    engine.cancel(many)
    assert engine.stats().num_waiting == 0 and engine._take_fitting() == []


def job(run_id: str, *prompts: Sequence[int], n: int = 1) -> Job:
    return Job(prompts, params(30, n=n), slot=None, max_length=10**6, run_id=run_id)


def test_the_run_that_had_the_fewest_tokens_is_next() -> None:
    waiting = Waiting(PrefixCache(0))
    long, short = job("run_long", *([number] * 99 for number in range(9))), job("run_short", [1], n=120)
    waiting.put(long)
    waiting.put(short)
    taken = [waiting.take().job.run_id for _ in range(104)]
    assert taken[:3] == ["run_long", "run_short", "run_short"] and taken.count("run_long") == 2
    waiting.charge({"run_long": 0, "run_short": 1000})
    assert [waiting.take().job for _ in range(6)] == [long] * 6, "what was generated counts as what was read"
    assert waiting.counts == {"run_long": 1, "run_short": 18} and len(waiting) == 19

    # One that comes has no more than the fewest; one that comes back has not been forgotten.
    rest = waiting.drop(short)
    assert len(rest) == 18 and waiting.drop(short) == []
    waiting.put(job("run_new", [1], [2]))
    waiting.put(job("run_short", [1]))
    waiting.put_back(long.rows[0])
    assert [waiting.take().job.run_id for _ in range(2)] == ["run_new", "run_new"]
    assert [waiting.take() for _ in range(2)] == [long.rows[0], long.rows[-1]]
    assert waiting.take().job.run_id == "run_short" and len(waiting) == 0


async def test_clients_that_hang_up_cost_their_own_rows_only(served: Served) -> None:
    """A request that is given up is not looked for among thousands of others."""
    engine = new_engine(served, 4)
    jobs = [engine.submit([PROMPT], params(30, n=16)) for _ in range(1000)]
    rows = engine._waiting
    calls = Counter[str]()

    def count(frame: FrameType, event: str, argument: object) -> None:
        calls[event] += 1

    for each in jobs[10:20]:
        sys.setprofile(count)
        engine.cancel(each)
        sys.setprofile(None)
        assert each.ended.is_set()
    assert sum(calls.values()) < 10 * 200 and len(rows) == 990 * 16


async def test_prompts_are_read_in_parts_between_which_others_go_on(served: Served) -> None:
    engine = new_engine(served, 64)
    engine.submit([[number] * 200 for number in range(60)], params(30))
    joining = engine._take_fitting()
    assert [len(joining), engine._is_crowded] == [MAX_PREFILL_TOKENS // 201, True]
    engine._waiting.charge({"": 0})
    assert len(engine._take_fitting()) == 60 - len(joining) and not engine._is_crowded
    engine.submit([[number] * 200 for number in range(60)], params(30))
    engine._waiting.charge({"": 0, "run_behind": 1})
    assert len(engine._take_fitting()) == 512 // 201, "a run that had much already gives way more often"


async def test_unloading_never_changes_what_a_running_request_gets(
    engine: Engine, folder: Path, tmp_path: Path
) -> None:
    first = make_adapter(tmp_path / "first", folder, seed=1)
    other = make_adapter(tmp_path / "other", folder, seed=2)
    await engine.load_adapter("run_a@v1", first)
    expected = await tokens(engine, adapter="run_a@v1", max_tokens=LONG)
    pending = engine.submit([PROMPT], params(LONG), adapter="run_a@v1")
    engine.unload_adapter("run_a@v1")
    await engine.load_adapter("run_b@v1", other)
    assert engine.adapters() == {"run_b@v1": str(other)}
    with pytest.raises(ApiError, match="does not exist"):
        engine.submit([PROMPT], params(1), adapter="run_a@v1")
    b_tokens = await tokens(engine, adapter="run_b@v1", max_tokens=LONG)
    assert (await within(pending.result()))[0].token_ids == expected != b_tokens


async def test_a_slot_is_free_when_its_last_request_has_ended(engine: Engine, folder: Path, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "adapter", folder, seed=1)
    await engine.load_adapter("run_a@v1", path)
    await engine.load_adapter("run_b@v1", path)
    await engine.load_adapter("chat/run_b@v1", path)
    pending = engine.submit([PROMPT], params(LONG, 8), adapter="run_a@v1")
    engine.unload_adapter("run_a@v1")
    with pytest.raises(ApiError, match=r"slots are in use, 1 of them unloaded but still in use"):
        await engine.load_adapter("run_c@v1", path)
    engine.cancel(pending)
    await within(engine.load_adapter("run_c@v1", path))
    assert pending.ended.is_set() and sorted(engine.adapters()) == ["chat/run_b@v1", "run_b@v1", "run_c@v1"]


async def test_a_refused_adapter_leaves_its_slot_free(engine: Engine, folder: Path, tmp_path: Path) -> None:
    wide = make_adapter(tmp_path / "wide", folder, seed=1, rank=16)
    for _ in range(3):
        with pytest.raises(ApiError, match="rank 16"):
            await engine.load_adapter("run_a@v1", wide)
    with pytest.raises(ApiError, match="refused"):
        await engine.load_adapter("run_a@v1", tmp_path / "nowhere")
    good = make_adapter(tmp_path / "good", folder, seed=1)
    await engine.load_adapter("run_a@v1", good)
    await engine.load_adapter("run_b@v1", good)
    assert await tokens(engine, adapter="run_a@v1") == await tokens(engine, adapter="run_b@v1") != await tokens(engine)


async def test_an_adapter_of_lower_rank_after_one_of_higher_rank_is_itself(
    engine: Engine, folder: Path, tmp_path: Path
) -> None:
    high, low = (make_adapter(tmp_path / f"rank{rank}", folder, seed=rank, rank=rank) for rank in (8, 2))
    await engine.load_adapter("run_low@v1", low)
    expected = await tokens(engine, adapter="run_low@v1")
    engine.unload_adapter("run_low@v1")
    for name in ("run_high@v1", "run_high@v2"):  # both slots have held the higher rank
        await engine.load_adapter(name, high)
    engine.unload_adapter("run_high@v1")
    engine.unload_adapter("run_high@v2")
    await engine.load_adapter("run_low@v2", low)
    assert await tokens(engine, adapter="run_low@v2") == expected


async def test_every_part_of_a_load_lets_a_token_through(
    engine: Engine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter(tmp_path / "adapter", folder, seed=1)
    await engine.load_adapter("run_whole@v1", adapter)
    in_one = await tokens(engine, adapter="run_whole@v1")
    numbers = sum(map(math.prod, read_shapes(adapter / ADAPTER_FILE).values()))
    monkeypatch.setattr("prime_rl.lora.adapter_state.PART_SIZE", numbers // 4)
    after: list[int] = []
    change = engine.change

    async def counted(action: Callable[[], None], **kwargs: Any) -> None:
        def noted() -> None:
            action()
            after.append(engine.stats().num_tokens)  # in the engine's thread, before its next step

        await change(noted, **kwargs)

    monkeypatch.setattr(engine, "change", counted)
    endless = engine.submit([PROMPT], params(ENDLESS))
    await until(lambda: engine.stats().num_running == 1)
    await within(engine.load_adapter("run_parts@v1", adapter))
    engine.cancel(endless)
    assert len(after) >= 4 and len(set(after)) == len(after)
    assert await tokens(engine, adapter="run_parts@v1") == in_one != await tokens(engine)


async def test_a_load_that_is_cancelled_while_it_reads_is_not_a_refused_adapter(
    engine: Engine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, may_go_on = threading.Event(), threading.Event()

    def slow_parts(*args: Any, **kwargs: Any) -> Iterator[ServedPart]:
        reading.set()
        assert may_go_on.wait(PATIENCE_S)
        yield from served_parts(*args, **kwargs)

    monkeypatch.setattr("prime_rl.inference.embedded.engine.served_parts", slow_parts)
    load = asyncio.create_task(engine.load_adapter("run_a@v1", make_adapter(tmp_path / "adapter", folder, seed=1)))
    await until(reading.is_set)
    load.cancel()
    await asyncio.wait({load}, timeout=PATIENCE_S)
    may_go_on.set()
    assert load.cancelled() and not engine.adapters() and len(await tokens(engine)) == 12


async def test_a_cancelled_job_frees_rows_and_slot(engine: Engine, folder: Path, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "adapter", folder, seed=1)
    await engine.load_adapter("run_a@v1", path)
    endless = engine.submit([PROMPT], params(10**5, 6), adapter="run_a@v1")
    await until(lambda: engine.stats().num_running == 4)
    assert engine.stats().num_waiting == 2
    engine.cancel(endless)
    await within(endless.result())
    assert len(await tokens(engine)) == 12
    await until(lambda: engine.stats().num_running == 0)
    engine.unload_adapter("run_a@v1")
    for name in ("run_b@v1", "run_c@v1"):
        await engine.load_adapter(name, path)


async def test_stopping_fails_all_waiters(served: Served) -> None:
    async with running(new_engine(served, 1)) as engine:
        endless = [engine.submit([PROMPT], params(ENDLESS)) for _ in range(3)]
        await until(lambda: engine.stats().num_running == 1)
        engine.stop()
        for job in endless:
            with pytest.raises(EngineDead, match="shutdown"):
                await within(job.result())
        with pytest.raises(EngineDead):
            engine.submit([PROMPT], params(1))
        with pytest.raises(EngineDead):
            await engine.change(lambda: None)


async def test_a_failure_in_the_engine_is_said_to_everybody_and_shows(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    both_wait = threading.Event()

    def broken(*args: object) -> None:
        assert both_wait.wait(PATIENCE_S)
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr(served, "forward", broken)
    async with running(new_engine(served, 1)) as engine:
        jobs = [engine.submit([PROMPT], params(5)) for _ in range(2)]
        both_wait.set()
        for job in jobs:
            with pytest.raises(EngineDead, match="no kernel for this device"):
                await within(job.result())
        assert not engine.alive and "the engine has failed" in caplog.text


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: ..."),
    MemoryError("Unable to allocate 8.00 GiB"),
]


def out_of_memory(served: Served, has_room: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device that has room for so many rows; returns the numbers that were asked of it."""
    forward, asked, errors = served.forward, list[int](), itertools.cycle(NO_MEMORY)

    def limited(ids: torch.Tensor, *args: Any) -> torch.Tensor:
        asked.append(len(ids))
        if not has_room(len(ids)):
            raise next(errors)
        return forward(ids, *args)

    monkeypatch.setattr(served, "forward", limited)
    return asked


async def test_out_of_memory_computes_rows_again_and_loses_no_token(
    served: Served, monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    prompts, sampling = (
        [[5 + number, 6, 7] for number in range(8)],
        SamplingParams(max_tokens=40, seed=3, ignore_eos=True),
    )
    adapter = make_adapter(tmp_path / "adapter", folder, seed=1)

    async def answered(engine: Engine) -> list[list[int]]:
        await engine.load_adapter("run_a@v1", adapter)
        jobs = [engine.submit(prompts, sampling, adapter=name) for name in (None, "run_a@v1")]
        return [row.token_ids for job in jobs for row in await within(job.result())]

    async with running(new_engine(served, 8)) as engine:
        expected = await answered(engine)
    asked = out_of_memory(served, lambda num_rows: num_rows <= 3, monkeypatch)
    async with running(new_engine(served, 8)) as engine:
        assert await answered(engine) == expected
        assert engine.alive and not engine.lacks_memory, "nothing waits any more"
        assert engine.stats().num_tokens == 16 * 40, "no token was made twice"
    assert max(asked) == 8 and sum(num_rows > 3 for num_rows in asked) < 16, "fewer at a time from then on"


@pytest.mark.slow
async def test_out_of_memory_takes_as_many_rows_as_before_when_there_is_room_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = threading.Event()
    scarce.set()
    asked = out_of_memory(served, lambda num_rows: num_rows <= 1 or not scarce.is_set(), monkeypatch)
    async with running(new_engine(served, 4)) as engine:
        jobs = [engine.submit([PROMPT], params(LONG)) for _ in range(4)]
        await until(lambda: engine.lacks_memory)
        scarce.clear()
        for job in jobs:
            await within(job.result())
        assert not engine.lacks_memory
        asked.clear()
        for _ in range(6):
            await generate(engine, n=4)
        await until(lambda: 4 in asked)


async def test_a_row_that_does_not_fit_alone_ends_and_the_next_is_taken(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_memory(served, lambda num_rows: False, monkeypatch)
    async with running(new_engine(served, 4)) as engine:
        job = engine.submit([PROMPT, PROMPT[:2]], params(5, 2))
        with pytest.raises(ApiError, match=r"the base model: \d tokens do not fit into the memory") as caught:
            await within(job.result())
        assert caught.value.status == 400
        monkeypatch.undo()
        assert len(await tokens(engine)) == 12


async def test_a_load_without_memory_is_refused_for_now_and_leaves_its_slot_free(
    engine: Engine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter(tmp_path / "adapter", folder, seed=1)
    numbers = sum(map(math.prod, read_shapes(adapter / ADAPTER_FILE).values()))
    monkeypatch.setattr("prime_rl.lora.adapter_state.PART_SIZE", numbers // 4)
    put, lacking, done = ServedPart.put, iter(NO_MEMORY), list[ServedPart]()

    def lacks(part: ServedPart, idx: int) -> None:
        put(part, idx)
        done.append(part)
        if len(done) == 2:
            done.clear()
            raise next(lacking)

    endless = engine.submit([PROMPT], params(ENDLESS))
    monkeypatch.setattr(ServedPart, "put", lacks)
    for _ in NO_MEMORY:
        with pytest.raises(ApiError, match="'run_a@v1' is not loaded: inference is out of memory") as caught:
            await within(engine.load_adapter("run_a@v1", adapter))
        assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    monkeypatch.setattr(ServedPart, "put", put)
    assert engine.alive and not engine.adapters() and not endless.ended.is_set()
    engine.cancel(endless)
    for name in ("run_a@v1", "run_b@v1"):
        await within(engine.load_adapter(name, adapter))
    assert await tokens(engine, adapter="run_a@v1") == await tokens(engine, adapter="run_b@v1") != await tokens(engine)


async def test_an_adapter_with_numbers_that_are_not_finite_is_refused(
    engine: Engine, folder: Path, tmp_path: Path
) -> None:
    for number, value in enumerate((math.nan, math.inf, -math.inf)):
        bad = make_adapter(tmp_path / f"bad{number}", folder, seed=1)
        tensors = load_file(bad / ADAPTER_FILE)
        name = sorted(tensors)[number]
        tensors[name][-1, -1] = value
        save_file(tensors, bad / ADAPTER_FILE)
        with pytest.raises(ApiError, match=f"'run_a@v1' is refused: {name} is not finite") as caught:
            await engine.load_adapter("run_a@v1", bad)
        assert caught.value.status == 422 and not engine.adapters()
    good = make_adapter(tmp_path / "good", folder, seed=1)
    for name in ("run_b@v1", "run_b@v2"):  # both slots have been tried
        await engine.load_adapter(name, good)
    assert await tokens(engine, adapter="run_b@v1") == await tokens(engine, adapter="run_b@v2")


async def test_an_adapter_of_another_base_model_is_refused(engine: Engine, folder: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", attention_bias=True)
    copy = shutil.copytree(folder, tmp_path / "copy")
    adapter = make_adapter(tmp_path / "adapter", folder, seed=1)
    config = json.loads((adapter / CONFIG_FILE).read_text())
    for base, is_refused in (
        (str(other), True),
        (str(copy), False),
        ("owner/model", False),  # may be where the folder came from
        (str(tmp_path / "elsewhere"), False),  # a path of another machine
        ("a\0b", False),
    ):
        (adapter / CONFIG_FILE).write_text(json.dumps(config | {"base_model_name_or_path": base}))
        if is_refused:
            with pytest.raises(ApiError, match=f"its base model is {base}, not {folder}") as caught:
                await engine.load_adapter("run_a@v1", adapter)
            assert caught.value.status == 422
        else:
            await engine.load_adapter("run_a@v1", adapter)
            engine.unload_adapter("run_a@v1")
    (adapter / CONFIG_FILE).write_text(json.dumps(config | {"lora_alpha": math.inf}))
    with pytest.raises(ApiError, match="lora_alpha is inf"):
        await engine.load_adapter("run_a@v1", adapter)


async def test_a_request_that_fails_ends_with_all_its_waiting_choices(
    engine: Engine, folder: Path, tmp_path: Path
) -> None:
    broken = make_adapter(tmp_path / "broken", folder, seed=1)
    tensors = {name: tensor * 1e25 for name, tensor in load_file(broken / ADAPTER_FILE).items()}
    save_file(tensors, broken / ADAPTER_FILE)
    await engine.load_adapter("run_a@v1", broken)
    long = engine.submit([PROMPT], params(LONG))
    job = engine.submit([PROMPT] * 3, params(5, 7), adapter="run_a@v1")
    with pytest.raises(ApiError, match="run_a@v1: logits are not finite") as caught:
        await within(job.result())
    assert caught.value.status == 422
    assert [len(row.token_ids) for row in await within(long.result())] == [LONG]
    await until(lambda: (engine.stats().num_running, engine.stats().num_waiting) == (0, 0))


async def test_a_caller_that_goes_away_takes_nothing_from_the_engine(engine: Engine) -> None:
    done = threading.Event()
    endless = engine.submit([PROMPT], params(10**5))
    caller = asyncio.create_task(engine.change(done.set))
    await until(done.is_set)
    caller.cancel()
    gone = asyncio.create_task(engine.change(lambda: None))
    await asyncio.sleep(0)
    gone.cancel()
    engine.cancel(endless)
    assert len(await tokens(engine)) == 12 and engine.alive


async def test_requests_of_which_no_row_is_wanted_are_not_computed(served: Served) -> None:
    """An engine that stops while prompts wait for their first token does not compute them first."""
    engine = new_engine(served, 4)
    job = engine.submit([PROMPT, PROMPT[:2]], params(5, 2))
    rows = engine._take_fitting()
    engine.stop()
    assert engine._batch.add(rows) == job.rows
    assert engine.stats().num_running == 0 and not any(row.token_ids for row in rows)


async def test_prompts_of_one_request_have_their_own_room_and_without_a_seed_their_own_streams(served: Served) -> None:
    engine = Engine(served, lambda ids: "", max_num_seqs=8, max_model_len=10)
    sampled = SamplingParams(n=2, max_tokens=9, ignore_eos=True)
    async with running(engine):
        rows = await within(engine.submit([PROMPT, PROMPT, [5] * 8], sampled).result())
        assert [len(row.token_ids) for row in rows] == [7, 7, 7, 7, 2, 2]
        assert len({tuple(row.token_ids) for row in rows[:4]}) == 4
        rows = await within(engine.submit([PROMPT, PROMPT], replace(sampled, seed=1)).result())
        assert [row.token_ids for row in rows[:2]] == [row.token_ids for row in rows[2:]]


async def test_whole_weights_reach_every_layer_below_its_adapters(
    engine: Engine, served: Served, folder: Path, tmp_path: Path
) -> None:
    assert served.weights.shapes == model_shapes(str(folder))
    newer = make_model(tmp_path / "newer", seed=1)
    expected = greedy(AutoModelForCausalLM.from_pretrained(newer), PROMPT, 12)
    before = await tokens(engine)
    read = served.weights.read(newer)
    for weights, after in ((read, expected), (None, before)):
        await within(engine.change(lambda weights=weights: served.weights.apply(weights)))  # type: ignore[misc]
        assert await tokens(engine) == after
    assert before != expected


async def test_whole_weights_that_may_be_half_changed_serve_nothing(served: Served) -> None:
    def lacks() -> None:
        raise NO_MEMORY[0]

    async with running(new_engine(served, 1)) as engine:
        with pytest.raises(EngineDead, match="out of memory"):
            await within(engine.change(lacks))


async def test_an_action_that_ends_the_engine_is_told_to_its_caller_and_to_those_behind(served: Served) -> None:
    async with running(new_engine(served, 1)) as engine:
        actions = [asyncio.create_task(engine.change(each)) for each in (lambda: {}["key"], lambda: None)]
        for action in actions:
            with pytest.raises(EngineDead, match="key"):
                await within(action)
