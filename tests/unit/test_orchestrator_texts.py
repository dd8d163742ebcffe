"""A run that learns texts, alone without inference or beside its rollouts, with a stand-in trainer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.base import build, merge
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.files import append_line
from prime_rl.contract.layout import RunDir, list_rollout_steps
from prime_rl.contract.status import RunStatus, read_status
from prime_rl.contract.types import TrainingBatch, TrainingSample, read_batch
from prime_rl.orchestrator.orchestrator import run_to_the_end
from tests.orchestrator_support import (
    FakeInference,
    config_data,
    look_often,
    make_model,
    make_run,
    publish,
    serving,
    stand_in_trainer,
    until,
)
from tests.patience import PATIENCE_S

NUM_TEXTS = 12


@dataclass
class World:
    run: RunDir
    model: Path

    def write(self, rows: Sequence[Any]) -> None:
        path = self.run.data_file("texts.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(map(json.dumps, rows)))

    def config(self, **over: Any) -> OrchestratorConfig:
        data = {
            key: value for key, value in config_data(self.model).items() if key not in ("rollouts_per_example", "env")
        }
        of_texts = {"kind": "sft", "data": [{"path": "texts.jsonl", "num_held_out": 2}]}
        return build(OrchestratorConfig, merge({**data, **of_texts}, over), "test")

    def start(self, config: OrchestratorConfig) -> asyncio.Task[int]:
        return asyncio.create_task(run_to_the_end(config, self.run, lambda: False))

    async def live(self, config: OrchestratorConfig) -> int:
        async with trainer(self.run):
            return await asyncio.wait_for(self.start(config), PATIENCE_S)

    @property
    def status(self) -> RunStatus:
        status = read_status(self.run.status, RunStatus)
        assert status is not None
        return status

    def batch(self, step: int) -> TrainingBatch:
        return read_batch(self.run.rollout_file(step))

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run.orchestrator_metrics.read_text().splitlines()]


@asynccontextmanager
async def trainer(run: RunDir, lines: Mapping[int, Mapping[str, float]] | None = None) -> AsyncIterator[None]:
    """`lines`: what it reports of each step."""

    def published(run: RunDir, step: int) -> None:
        if lines is not None and step in lines:
            append_line(run.trainer_metrics, json.dumps({"step": step, **lines[step]}))
        publish(run, step)

    task = asyncio.create_task(stand_in_trainer(run, published))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    look_often(monkeypatch)
    world = World(make_run(tmp_path), make_model(tmp_path / "model"))
    world.write([{"prompt": f"say {number}", "completion": str(number)} for number in range(NUM_TEXTS)])
    return world


def ids(samples: Sequence[TrainingSample], use: str) -> list[str]:
    return [each.example_id for each in samples if each.use == use]


async def test_a_run_of_texts_needs_no_inference(world: World) -> None:
    sampling = {"temperature": 0.5}  # of evaluations, if there were any
    over = {"sampling": sampling, "max_async_level": 1, "sft": {"held_out_interval": 3}}
    assert await world.live(world.config(max_steps=5, **over)) == 0
    batches = [world.batch(step) for step in range(1, 6)]
    learned = [each for batch in batches for each in ids(batch.samples, "supervised")]
    assert len(learned) == 20 and set(learned) == {f"texts/{line}" for line in range(3, 13)}
    assert all(len(set(learned[at : at + 10])) == 10 for at in (0, 10)), "each once an epoch"
    assert [len(ids(batch.samples, "held_out")) for batch in batches] == [2, 0, 0, 2, 0]
    samples = [each for batch in batches for each in batch.samples]
    assert {(each.temperature, each.advantage, sum(map(abs, each.logprobs))) for each in samples} == {(1.0, 1.0, 0.0)}
    assert all(each.policy_version >= batch.step - 2 for batch in batches for each in batch.samples)
    lines = world.lines()
    assert [line["epoch"] for line in lines] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert not any(name.startswith("reward") or name == "signal" for name in lines[0])
    assert world.status.reward is None and {line["bottleneck"] for line in lines} <= {"none", "trainer"}


async def test_batches_are_made_ahead_no_further_than_the_trainer_may_lag(world: World) -> None:
    running = world.start(world.config(max_steps=10))

    def waits() -> bool:
        status = read_status(world.run.status, RunStatus)
        waiting_on = (status and status.waiting_on) or ""
        return "policy version 1" in waiting_on and list_rollout_steps(world.run) == [1, 2, 3]

    await until(waits, "three batches, and the first update to be waited for")  # max_async_level = 2
    async with trainer(world.run):
        assert await asyncio.wait_for(running, PATIENCE_S) == 0
    assert list_rollout_steps(world.run) == list(range(1, 11))


async def test_a_run_that_goes_on_draws_the_texts_that_it_would_have_drawn(world: World, tmp_path: Path) -> None:
    assert await world.live(world.config(max_steps=6)) == 0
    other = World(make_run(tmp_path, "run_b"), world.model)
    other.write([json.loads(line) for line in world.run.data_file("texts.jsonl").read_text().splitlines()])
    for max_steps in (1, 4, 6):
        assert await other.live(other.config(max_steps=max_steps)) == 0
    for step in range(1, 7):
        assert ids(other.batch(step).samples, "supervised") == ids(world.batch(step).samples, "supervised")


async def test_a_run_all_of_whose_texts_are_unusable_fails_with_one_line(world: World) -> None:
    world.write([{"prompt": "p" * 300, "completion": "x"}] * 6)
    assert await world.live(world.config(max_env_failure_share=1.0)) == 1
    assert world.status.state == "failed" and world.status.examples_unusable == 6
    reason = world.status.reason or ""
    assert reason.startswith("4 of 4 texts cannot be learned; the last: texts.jsonl line ") and "\n" not in reason
    assert list_rollout_steps(world.run) == []


async def test_a_single_bad_line_fails_the_run_by_name(world: World) -> None:
    world.write([{"prompt": "a", "completion": "b"}, {"prompt": "a"}])
    assert await world.live(world.config()) == 1
    assert world.status.state == "failed" and "texts.jsonl line 2: must have" in (world.status.reason or "")


async def test_texts_are_counted_in_the_budget(world: World) -> None:
    assert await world.live(world.config(max_steps=50, budget={"max_tokens": 300})) == 0
    assert world.status.state == "finished" and "300" in (world.status.reason or "")
    assert 0 < list_rollout_steps(world.run)[-1] < 50


async def test_a_run_ends_when_what_is_held_out_gets_no_better(world: World) -> None:
    losses = {step: {"held_out/loss": 3.0 - step if step < 3 else 5.0} for step in range(1, 51)}
    stop = {"metric": "held_out/loss", "mode": "min", "patience": 2}
    async with trainer(world.run, losses):
        assert await asyncio.wait_for(world.start(world.config(max_steps=50, stop=stop)), PATIENCE_S) == 0
    assert (world.status.reason or "").startswith("stopped early: held_out/loss did not improve")
    assert "best 1 at step 2" in (world.status.reason or "") and list_rollout_steps(world.run)[-1] < 50


async def test_a_run_of_rollouts_has_texts_beside_them(world: World, tmp_path: Path) -> None:
    data = {"data": [{"path": "texts.jsonl", "num_held_out": 2}], "sft": {"share": 0.5, "weight": 0.3}}
    async with serving(FakeInference(world.model)) as url:
        over = {"client": {"base_url": url}, "max_steps": 5, "samples": {"per_step": 4}, **data}
        assert await world.live(build(OrchestratorConfig, config_data(world.model, **over), "test")) == 0
    batches = [world.batch(step) for step in range(1, 6)]
    assert [[each.use for each in batch.samples] for batch in batches] == [
        [""] * 4 + ["supervised"] * 2 + ["held_out"] * (2 if step == 1 else 0) for step in range(1, 6)
    ]
    learned = [each for batch in batches for each in ids(batch.samples, "supervised")]
    assert len(learned) == len(set(learned)) == 10, "an epoch"
    assert {each.advantage for batch in batches for each in batch.samples if each.use} == {0.3}
    kept = [json.loads(line) for line in world.run.samples.read_text().splitlines()]
    assert {each["env"] for each in kept if "env" in each} == {"reverse-text"}
    assert all("reward/mean" in line for line in world.lines()) and all("epoch" not in line for line in world.lines())


async def test_what_people_read_of_a_text_has_no_log_probabilities(world: World) -> None:
    """It was not sampled: a number would be made up."""
    assert await world.live(world.config(max_steps=1, samples={"per_step": 2})) == 0
    rows = [json.loads(line) for line in world.run.samples.read_text().splitlines()]
    kept = [each for each in rows if "env" in each]
    assert len(kept) == 2 and all(each["completion"].strip().isdigit() for each in kept)
    assert all(set(each["tokens"]["logprobs"]) == {None} for each in kept)


async def test_a_run_of_texts_is_evaluated_with_the_versions_that_it_makes(world: World) -> None:
    fake = FakeInference(world.model)
    env = {"id": "reverse-text", "args": {"wording": "short", "num_examples": 8, "num_eval_examples": 4}}
    async with serving(fake) as url:
        over = {"client": {"base_url": url}, "max_steps": 4, "eval": {"interval": 2, "env": [env]}}
        assert await world.live(world.config(**over)) == 0
    evaluated = [line["step"] for line in world.lines() if any(name.startswith("eval/") for name in line)]
    assert evaluated[-1] == 4 and fake.completions
    assert all(each.use for step in range(1, 5) for each in world.batch(step).samples)
    assert fake.adapters == {}, "all versions are unloaded"


async def test_a_run_that_begins_with_an_adapter_learns_from_its_first_version_on(world: World) -> None:
    assert await world.live(world.config(init={"from": "run_before@v3"}, max_steps=3)) == 0
    assert {each.policy_version for each in world.batch(1).samples} == {0}
    assert list_rollout_steps(world.run) == [1, 2, 3]


async def test_a_run_that_is_paused_goes_on_at_the_next_text(world: World) -> None:
    running = world.start(world.config(max_steps=6))
    await until(lambda: list_rollout_steps(world.run) == [1, 2, 3], "three batches")
    world.run.paused.write_text("")
    await asyncio.wait_for(running, PATIENCE_S)
    assert world.status.state == "paused"
    world.run.paused.unlink()
    assert await world.live(world.config(max_steps=6)) == 0
    learned = [each for step in range(1, 7) for each in ids(world.batch(step).samples, "supervised")]
    assert len(set(learned[:10])) == len(set(learned[10:20])) == 10, "each once an epoch"


async def test_a_run_that_is_evicted_ends(world: World) -> None:
    running = world.start(world.config(max_steps=6))
    await until(lambda: list_rollout_steps(world.run) == [1, 2, 3], "three batches")
    world.run.evicted.write_text("out of memory")
    assert await asyncio.wait_for(running, PATIENCE_S) == 1
    assert (world.status.state, world.status.reason) == ("evicted", "out of memory")
