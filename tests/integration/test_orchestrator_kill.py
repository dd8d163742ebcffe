"""kill -9 of the real orchestrator at each of its points: no example is lost, none is in two batches."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.contract.layout import RunDir, list_rollout_steps
from prime_rl.contract.status import RunStatus, read_status
from prime_rl.contract.types import read_batch
from prime_rl.orchestrator.envs import load_environment
from prime_rl.orchestrator.sampler import ExampleSampler
from tests.budgets import in_full
from tests.orchestrator_lives import POINTS, Lives, lives
from tests.orchestrator_support import (
    FakeInference,
    config_data,
    make_model,
    make_run,
    run_config,
    serving,
    stand_in_trainer,
    until,
    write_toml,
)

MAX_STEPS = 5
OVER = {"max_steps": MAX_STEPS, "max_async_level": 1, "ckpt": {"interval": 2}}
DURABILITY = Path(__file__).parents[2] / "docs" / "durability.md"


@pytest.fixture(scope="module")
def parent() -> Iterator[Lives]:
    with lives() as started:
        yield started


def expected_ids(model: Path) -> list[str]:
    """The example of each sample, had the run never been killed."""
    config = run_config(model, **OVER)
    sampler = ExampleSampler({env.label: load_environment(env, config.seed) for env in config.env}, config.seed)
    picks = [sampler.pick(index) for index in range(2 * MAX_STEPS)]
    return [f"{pick.env_name}/{pick.example.id}" for pick in picks for _ in range(2)]


def lines(run: RunDir) -> list[dict[str, float]]:
    """The whole lines of metrics."""
    texts = run.orchestrator_metrics.read_text().splitlines()
    return [json.loads(text) for text in texts if text.endswith("}")]


def written(run: RunDir) -> dict[int, int]:
    return {step: run.rollout_file(step).stat().st_mtime_ns for step in list_rollout_steps(run)}


@pytest.mark.parametrize("point", [*list(POINTS)[::2], *in_full(*list(POINTS)[1::2])])
async def test_a_killed_orchestrator_goes_on_at_the_next_example(tmp_path: Path, parent: Lives, point: str) -> None:
    model = make_model(tmp_path / "model")
    run, fake = make_run(tmp_path / "workspace"), FakeInference(model)
    async with serving(fake) as url:
        toml = write_toml(run, config_data(model, client={"base_url": url}, **OVER))
        trainer = asyncio.create_task(stand_in_trainer(run))
        assert await asyncio.to_thread(parent.live, toml, point) == -signal.SIGKILL
        before = written(run)
        assert await asyncio.to_thread(parent.live, toml) == 0
        trainer.cancel()
    status = read_status(run.status, RunStatus)
    assert status is not None and (status.state, status.step) == ("finished", MAX_STEPS)
    assert list_rollout_steps(run) == list(range(1, MAX_STEPS + 1))
    assert before.items() <= written(run).items(), "no batch is written twice"
    batches = [read_batch(run.rollout_file(step)) for step in range(1, MAX_STEPS + 1)]
    assert [sample.example_id for batch in batches for sample in batch.samples] == expected_ids(model)
    assert all(version >= batch.step - 2 for batch in batches for s in batch.samples for version in s.turn_versions)
    steps = [line["step"] for line in lines(run)]
    assert steps == sorted(set(steps)) and len(steps) >= MAX_STEPS - 1
    assert fake.adapters == {}, "what the killed one left loaded is gone too"


async def test_one_that_is_killed_again_and_again_never_outruns_the_trainer(tmp_path: Path, parent: Lives) -> None:
    model = make_model(tmp_path / "model")
    run, fake = make_run(tmp_path / "workspace"), FakeInference(model)
    async with serving(fake) as url:
        toml = write_toml(run, config_data(model, client={"base_url": url}, oversampling_factor=2.0, **OVER))
        for _ in range(3):
            life = asyncio.create_task(asyncio.to_thread(parent.live, toml))
            await until(lambda: written(run).keys() == {1, 2} and waits_for_version_1(run), "the trainer to be needed")
            status = read_status(run.status, RunStatus)
            assert status is not None
            os.kill(status.pid, signal.SIGKILL)
            assert await life == -signal.SIGKILL
            run.status.unlink()  # not before: a heartbeat would write it again


OF_TEXTS = [
    "before the first group is finished",
    "while groups are generated",
    "between a state and its batch",
    "before a batch file gets its name",
    "between a batch and its line of metrics",
    "while the last version is waited for",
]


@pytest.mark.parametrize("point", [*OF_TEXTS[:2], *in_full(*OF_TEXTS[2:])])
async def test_a_killed_run_of_texts_goes_on_at_the_next_text(tmp_path: Path, parent: Lives, point: str) -> None:
    model = make_model(tmp_path / "model")
    found = {}
    for life, points in {"killed": (point, None), "whole": (None,)}.items():
        run = make_run(tmp_path / life)
        data = config_data(model, **OVER) | {"kind": "sft", "data": [{"path": "texts.jsonl"}]}
        data = {key: value for key, value in data.items() if key not in ("rollouts_per_example", "env")}
        toml = write_toml(run, data)
        run.data_file("texts.jsonl").parent.mkdir(parents=True, exist_ok=True)
        run.data_file("texts.jsonl").write_text("\n".join(json.dumps({"text": f"text {n}"}) for n in range(30)))
        trainer = asyncio.create_task(stand_in_trainer(run))
        codes = [await asyncio.to_thread(parent.live, toml, each) for each in points]
        trainer.cancel()
        assert codes == [*[-signal.SIGKILL] * (len(points) - 1), 0]
        assert list_rollout_steps(run) == list(range(1, MAX_STEPS + 1))
        batches = [read_batch(run.rollout_file(step)) for step in range(1, MAX_STEPS + 1)]
        found[life] = [[(each.example_id, each.use) for each in batch.samples] for batch in batches]
        states = [batch.sampler_state for batch in batches]
        assert states == [{"next_index": 4 * step} for step in range(1, MAX_STEPS + 1)]
    assert found["killed"] == found["whole"]
    learned = [name for batch in found["whole"] for name, use in batch if use == "supervised"]
    assert len(learned) == len(set(learned)) == 4 * MAX_STEPS, "an epoch is longer"
    assert [use for _, use in found["whole"][0]] == ["supervised"] * 4 + ["held_out"] * 3


OF_TEACHERS = ["while groups are generated", "between a state and its batch", "between a batch and its line of metrics"]


@pytest.mark.parametrize("point", [*OF_TEACHERS[:1], *in_full(*OF_TEACHERS[1:])])
async def test_a_killed_run_with_a_teacher_has_the_same_batches(tmp_path: Path, parent: Lives, point: str) -> None:
    model, found = make_model(tmp_path / "model"), {}
    for life, points in {"killed": (point, None), "whole": (None,)}.items():
        run, fake = make_run(tmp_path / life), FakeInference(model)
        over = {**OVER, "max_async_level": 0, "kind": "distill", "teacher": "base"}
        async with serving(fake) as url:
            toml = write_toml(run, config_data(model, client={"base_url": url}, **over))
            trainer = asyncio.create_task(stand_in_trainer(run))
            codes = [await asyncio.to_thread(parent.live, toml, each) for each in points]
            trainer.cancel()
        assert codes == [*[-signal.SIGKILL] * (len(points) - 1), 0]
        found[life] = [read_batch(run.rollout_file(step)).samples for step in range(1, MAX_STEPS + 1)]
    assert found["killed"] == found["whole"]
    assert all(any(each.token_advantages) for samples in found["whole"] for each in samples)


def waits_for_version_1(run: RunDir) -> bool:
    status = read_status(run.status, RunStatus)
    return status is not None and (status.waiting_on or "").startswith("policy version 1 (have 0), trainer")


def test_the_points_are_those_of_the_documents() -> None:
    section = DURABILITY.read_text().partition("## A kill of an orchestrator\n")[2].partition("\n## ")[0]
    told = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    assert [name for name in told if name not in ("point", "---")] == list(POINTS)
