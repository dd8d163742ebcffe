"""The engine's thread: jobs, adapters in their slots, clients that go away, and an end that fails all waiters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from prime_rl.configs.inference import InferenceConfig
from prime_rl.contract.files import wait_for
from prime_rl.inference.embedded.batch import Row
from prime_rl.inference.embedded.engine import Engine, EngineDead
from prime_rl.inference.embedded.model import Served, load_model
from prime_rl.inference.embedded.sampling import SamplingParams
from prime_rl.inference.errors import ApiError
from prime_rl.inference.weight_files import model_shapes
from tests.inference_support import greedy, make_adapter, make_model
from tests.patience import PATIENCE_S

PROMPT = [5, 6, 7]
LONG = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture
def served(folder: Path) -> Served:
    config = {"model": {"name": str(folder), "lora": {"rank": 8}}, "max_concurrent_runs": 2, "max_versions_per_run": 1}
    return load_model(InferenceConfig.model_validate(config))


@pytest.fixture
def engine(served: Served) -> Iterator[Engine]:
    """An engine with two slots for adapters and four rows."""
    running = Engine(served, lambda ids: "", max_num_seqs=4)
    running.start()
    yield running
    running.stop(PATIENCE_S)
    assert not running.alive


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def generate(engine: Engine, max_tokens: int = 12, **kwargs: Any) -> list[Row]:
    return engine.submit(PROMPT, params(max_tokens), **kwargs).future.result(PATIENCE_S)


def tokens(engine: Engine, **kwargs: Any) -> list[int]:
    return generate(engine, **kwargs)[0].token_ids


def test_more_choices_than_rows_wait_for_room(engine: Engine) -> None:
    completions = generate(engine, num_choices=11)
    assert [completion.token_ids for completion in completions] == [completions[0].token_ids] * 11
    wait_for(lambda: engine.stats().num_running == 0, "the rows to leave", timeout_s=PATIENCE_S)
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_prompt_tokens, stats.num_tokens) == (0, 3, 11 * 12)


def test_rows_wait_when_the_cache_could_not_hold_them(served: Served) -> None:
    """Room for 100 tokens: three rows of at most 33, or one of 403."""
    small = replace(served, cache_tokens=100)
    engine = Engine(small, lambda ids: "", max_num_seqs=64)
    short = [engine.submit(PROMPT, params(30)) for _ in range(5)]
    engine.submit(PROMPT, params(LONG))
    assert [row.job for row in engine._take_fitting()] == short[:3]
    engine = Engine(small, lambda ids: "", max_num_seqs=64)
    endless = engine.submit(PROMPT, params(LONG))
    engine.submit(PROMPT, params(1))
    assert [row.job for row in engine._take_fitting()] == [endless]
    assert served.cache_tokens > 10**6


def test_unloading_never_changes_what_a_running_request_gets(engine: Engine, folder: Path, tmp_path: Path) -> None:
    first = make_adapter(tmp_path / "first", folder, seed=1)
    other = make_adapter(tmp_path / "other", folder, seed=2)
    engine.load_adapter("run_a@v1", first)
    expected = tokens(engine, adapter="run_a@v1", max_tokens=LONG)
    pending = engine.submit(PROMPT, params(LONG), adapter="run_a@v1")
    engine.unload_adapter("run_a@v1")
    engine.load_adapter("run_b@v1", other)
    assert engine.adapters() == {"run_b@v1": str(other)}
    with pytest.raises(ApiError, match="does not exist"):
        engine.submit(PROMPT, params(1), adapter="run_a@v1")
    b_tokens = tokens(engine, adapter="run_b@v1", max_tokens=LONG)
    assert pending.future.result(PATIENCE_S)[0].token_ids == expected != b_tokens


def test_a_slot_is_free_when_its_last_request_has_ended(engine: Engine, folder: Path, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "adapter", folder, seed=1)
    engine.load_adapter("run_a@v1", path)
    engine.load_adapter("run_b@v1", path)
    engine.load_adapter("chat/run_b@v1", path)
    pending = engine.submit(PROMPT, params(LONG), adapter="run_a@v1", num_choices=8)
    engine.unload_adapter("run_a@v1")
    with pytest.raises(ApiError, match=r"slots are in use, 1 of them unloaded but still in use"):
        engine.load_adapter("run_c@v1", path)
    pending.future.result(PATIENCE_S)
    engine.load_adapter("run_c@v1", path)
    assert sorted(engine.adapters()) == ["chat/run_b@v1", "run_b@v1", "run_c@v1"]


def test_a_refused_adapter_leaves_its_slot_free(engine: Engine, folder: Path, tmp_path: Path) -> None:
    wide = make_adapter(tmp_path / "wide", folder, seed=1, rank=16)
    for _ in range(3):
        with pytest.raises(ApiError, match="rank 16"):
            engine.load_adapter("run_a@v1", wide)
    with pytest.raises(ApiError, match="refused"):
        engine.load_adapter("run_a@v1", tmp_path / "nowhere")
    good = make_adapter(tmp_path / "good", folder, seed=1)
    engine.load_adapter("run_a@v1", good)
    engine.load_adapter("run_b@v1", good)
    assert tokens(engine, adapter="run_a@v1") == tokens(engine, adapter="run_b@v1") != tokens(engine)


def test_an_adapter_of_lower_rank_after_one_of_higher_rank_is_itself(
    engine: Engine, folder: Path, tmp_path: Path
) -> None:
    high, low = (make_adapter(tmp_path / f"rank{rank}", folder, seed=rank, rank=rank) for rank in (8, 2))
    engine.load_adapter("run_low@v1", low)
    expected = tokens(engine, adapter="run_low@v1")
    engine.unload_adapter("run_low@v1")
    for name in ("run_high@v1", "run_high@v2"):  # both slots have held the higher rank
        engine.load_adapter(name, high)
    engine.unload_adapter("run_high@v1")
    engine.unload_adapter("run_high@v2")
    engine.load_adapter("run_low@v2", low)
    assert tokens(engine, adapter="run_low@v2") == expected


def test_a_cancelled_job_frees_rows_and_slot(engine: Engine, folder: Path, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "adapter", folder, seed=1)
    engine.load_adapter("run_a@v1", path)
    endless = engine.submit(PROMPT, params(10**5), adapter="run_a@v1", num_choices=6)
    wait_for(lambda: engine.stats().num_running == 4, "the endless job to run", timeout_s=PATIENCE_S)
    assert engine.stats().num_waiting == 2
    engine.cancel([endless])
    endless.future.result(PATIENCE_S)
    assert len(tokens(engine)) == 12
    wait_for(lambda: engine.stats().num_running == 0, "the rows to be free", timeout_s=PATIENCE_S)
    engine.unload_adapter("run_a@v1")
    for name in ("run_b@v1", "run_c@v1"):
        engine.load_adapter(name, path)


def test_stopping_fails_all_waiters(served: Served) -> None:
    engine = Engine(served, lambda ids: "", max_num_seqs=1)
    engine.start()
    endless = [engine.submit(PROMPT, params(10**9)) for _ in range(3)]
    engine.stop(PATIENCE_S)
    for job in endless:
        with pytest.raises(EngineDead, match="shutdown"):
            job.future.result(PATIENCE_S)
    with pytest.raises(EngineDead):
        engine.submit(PROMPT, params(1))
    with pytest.raises(EngineDead):
        engine.run_between_steps(lambda: None)


def test_a_failure_in_the_engine_is_said_to_everybody_and_shows(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    both_wait = threading.Event()

    def broken(*args: object) -> None:
        assert both_wait.wait(PATIENCE_S)
        raise MemoryError("no room for activations")

    monkeypatch.setattr(served, "forward", broken)
    engine = Engine(served, lambda ids: "", max_num_seqs=1)
    engine.start()
    jobs = [engine.submit(PROMPT, params(5)) for _ in range(2)]
    both_wait.set()
    for job in jobs:
        with pytest.raises(EngineDead, match="no room for activations"):
            job.future.result(PATIENCE_S)
    wait_for(lambda: not engine.alive, "the engine to be dead", timeout_s=PATIENCE_S)
    assert "the engine has failed" in caplog.text
    engine.stop(PATIENCE_S)


def test_a_caller_that_goes_away_takes_nothing_from_the_engine(engine: Engine) -> None:
    """A command whose future was cancelled used to end the thread."""
    done = threading.Event()
    endless = engine.submit(PROMPT, params(10**5))
    assert not engine.run_between_steps(done.set).cancel()
    assert done.wait(PATIENCE_S)
    engine.cancel([endless])
    assert len(tokens(engine)) == 12 and engine.alive


def test_whole_weights_reach_every_layer_below_its_adapters(
    engine: Engine, served: Served, folder: Path, tmp_path: Path
) -> None:
    assert served.weights.shapes == model_shapes(str(folder))
    newer = make_model(tmp_path / "newer", seed=1)
    expected = greedy(AutoModelForCausalLM.from_pretrained(newer), PROMPT, 12)
    before = tokens(engine)
    read = served.weights.read(newer)
    for weights, after in ((read, expected), (None, before)):
        engine.run_between_steps(lambda weights=weights: served.weights.apply(weights)).result(PATIENCE_S)  # type: ignore[misc]
        assert tokens(engine) == after
    assert before != expected


def test_an_action_that_ends_the_engine_is_told_to_its_caller_and_to_those_behind(served: Served) -> None:
    engine = Engine(served, lambda ids: "", max_num_seqs=1)
    actions = [engine.run_between_steps(lambda: [][0]), engine.run_between_steps(lambda: None)]  # type: ignore[func-returns-value]
    engine.start()
    for action in actions:
        with pytest.raises(EngineDead, match="list index out of range"):
            action.result(PATIENCE_S)
    engine.stop(PATIENCE_S)
