"""Runs that train the whole model: the weights of each server, and no answer of other weights than expected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.base import SamplingConfig
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import RunStatus, StatusWriter, TrainerStatus, read_status
from prime_rl.contract.types import read_batch
from prime_rl.orchestrator.client import RequestRefused
from prime_rl.orchestrator.orchestrator import run_to_the_end
from prime_rl.orchestrator.policy import PolicyVersions, TurnSampler
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.orchestrator.publication import lease
from prime_rl.orchestrator.rollout import GroupFailed
from tests.orchestrator_support import (
    FIRST_BYTE,
    FakeInference,
    TalkEnv,
    connected,
    look_often,
    make_model,
    make_run,
    make_worker,
    publish,
    run_config,
    serving,
    stand_in_trainer,
    until,
)
from tests.patience import PATIENCE_S
from tests.ports import free_port

UPDATE, RELOAD = "/update_weights", "/reload_weights"


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    look_often(monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path)
    for version in (1, 2, 3):
        publish(run, version)
    return run


def changes(fake: FakeInference) -> list[str]:
    """What the server was told to take, in order: the last part of the folder, or base."""
    return [Path(body.get("weight_dir", "base")).name for path, body in fake.requests if path in (UPDATE, RELOAD)]


@asynccontextmanager
async def at_version(
    fake: FakeInference, run: RunDir, version: int
) -> AsyncIterator[tuple[InferenceClient, PolicyVersions]]:
    """The run's client and its policy, whose `version` the server has."""
    async with serving(fake) as url:
        client, policy = connected(url, run, Path(fake.model), whole=True)
        await policy.begin()
        await policy.switch_to(version)
        yield client, policy
        await client.close()


@pytest.mark.parametrize("other", ["base", "run_b/broadcast/step_2", "run_a/broadcast/step_1", "run_a/x/step_9", "%00"])
async def test_an_answer_of_other_weights_is_not_taken_and_the_version_is_given_back(
    model: Path, run: RunDir, other: str
) -> None:
    fake = FakeInference(model)
    async with at_version(fake, run, 2) as (client, policy):
        fake.weights = other
        worker = make_worker(client, policy, model, {"talk": TalkEnv()})
        groups = await asyncio.gather(*(worker.group(index) for index in range(8)))
        num_changes = len(changes(fake))
        await policy.close()
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    assert {tuple(rollout.turn_versions) for rollout in rollouts} == {(2,)}
    assert {rollout.branches[0].token_ids_T[rollout.num_prompt_tokens] for rollout in rollouts} == {FIRST_BYTE + 2}
    assert changes(fake) == ["base", "step_2", "step_2", "base"] and num_changes == 3, "one change brings it back"


async def test_an_answer_of_a_newer_version_counts_as_that(model: Path, run: RunDir) -> None:
    """The request waits at the server while the weights change."""
    fake = FakeInference(model)
    async with at_version(fake, run, 1) as (client, policy):
        worker = make_worker(client, policy, model, {"talk": TalkEnv(num_turns=2)}, rollouts_per_example=1)
        asked: list[int] = []

        def note(version: int) -> None:
            asked.append(version)
            fake.weights = f"run_a/broadcast/step_{version + 1}"  # before the request gets there

        (rollout,) = (await worker.group(0, note)).rollouts_G
    assert asked == [1, 1] and rollout.turn_versions == [2, 2]


@pytest.mark.parametrize("version", [1, 2])
async def test_a_server_that_comes_back_has_the_weights_before_it_is_asked(
    model: Path, run: RunDir, version: int
) -> None:
    """Also where it had the same when it left: it has lost them."""
    fakes = [FakeInference(model) for _ in range(3)]
    async with serving(fakes[0]) as first:
        async with serving(fakes[1], free_port()) as second:
            client, policy = connected([first, second], run, model, whole=True)
            await policy.begin()
            await policy.switch_to(1)
        worker = make_worker(client, policy, model, {"talk": TalkEnv()})
        await asyncio.gather(*(worker.group(index) for index in range(4)))
        await policy.switch_to(version)
        port = int(second.rpartition(":")[2].removesuffix("/v1"))
        async with serving(fakes[2], port):
            await until(lambda: bool(client.metrics()["inference/1/living"]), "the server to be asked again")
            groups = await asyncio.gather(*(worker.group(index) for index in range(4)))
            await policy.close()
        await client.close()
    assert next(path for path, _ in fakes[2].requests) == UPDATE and changes(fakes[2]) == [f"step_{version}", "base"]
    assert {group.oldest_version for group in groups} == {version}
    assert fakes[2].completions


async def test_a_pinned_version_stays_until_it_is_let_go(model: Path, run: RunDir) -> None:
    fake = FakeInference(model)
    async with at_version(fake, run, 1) as (client, policy):
        async with policy.pin(1) as version:
            switching = asyncio.create_task(policy.switch_to(2))
            worker = make_worker(client, policy, model, {"talk": TalkEnv()})
            for index in range(5):  # far longer than the switch would take
                await worker.group(index)
            assert (version, policy.version, fake.weights) == (1, 1, "run_a/broadcast/step_1")
            assert not switching.done()
        await switching
    assert fake.weights == "run_a/broadcast/step_2"


async def test_a_version_that_cannot_be_had_any_more_fails_requests_for_exactly_that(model: Path, run: RunDir) -> None:
    """The current version is waited for: a newer one may come. A pinned one is not, or nothing newer could come."""
    fake = FakeInference(model)
    async with at_version(fake, run, 1) as (client, policy):
        fake.weights = "base"
        fake.fault = lambda path, body: 400 if path == UPDATE and body["weight_dir"].endswith("step_1") else None
        pinned = TurnSampler(client, policy, SamplingConfig(max_tokens=4), seq_len=64)
        with pytest.raises(RequestRefused, match="injected 400"):
            await pinned.sample([5], seed=1, version=1)
        worker = make_worker(client, policy, model, {"talk": TalkEnv()})
        group = asyncio.create_task(worker.group(0))
        await until(lambda: changes(fake).count("step_1") > 2, "it to be asked for again")
        await policy.switch_to(2)
        assert {rollout.turn_versions[0] for rollout in (await group).rollouts_G} == {2}
        fake.weights = "run_b/broadcast/step_7"
        fake.fault = lambda path, body: 200 if path == UPDATE else None  # another answer than the contract's
        with pytest.raises(GroupFailed, match="invalid answer"):
            await worker.group(1)


async def test_a_request_for_exactly_one_version_is_answered_by_no_newer_one(model: Path, run: RunDir) -> None:
    fake = FakeInference(model)
    async with at_version(fake, run, 1) as (client, policy):
        fake.weights = "run_a/broadcast/step_2"
        pinned = TurnSampler(client, policy, SamplingConfig(max_tokens=4), seq_len=64)
        version, (completion,) = await pinned.sample([5], seed=1, version=1)
    assert version == 1 and completion.weights == "run_a/broadcast/step_1"


async def test_a_version_that_was_refused_is_not_given_to_a_server_that_has_lost_the_one_before(
    model: Path, run: RunDir
) -> None:
    fake = FakeInference(model)
    async with at_version(fake, run, 1) as (client, policy):
        fake.fault = lambda path, body: 400 if path == UPDATE and body["weight_dir"].endswith("step_2") else None
        with pytest.raises(RequestRefused, match="injected 400"):
            await policy.switch_to(2)
        fake.weights = "base"
        pinned = TurnSampler(client, policy, SamplingConfig(max_tokens=4), seq_len=64)
        assert (await pinned.sample([5], seed=1, version=1))[0] == 1
    assert changes(fake) == ["base", "step_1", "step_2", "step_1"]


async def test_one_run_at_a_time_has_the_weights(tmp_path: Path) -> None:
    said: list[str | None] = []
    path = OutputDir(tmp_path).weights_lock
    async with AsyncExitStack() as first:
        await first.enter_async_context(lease(path, said.append))
        second = AsyncExitStack()
        entering = asyncio.create_task(second.enter_async_context(lease(path, said.append)))
        await until(lambda: len(said) > 1, "the second to say what it waits for")
        assert not entering.done() and "another run" in str(said[-1])
    await asyncio.wait_for(entering, PATIENCE_S)
    assert said[-1] is None
    await second.aclose()


async def test_a_run_from_its_first_batch_to_the_base_model_again(model: Path, tmp_path: Path) -> None:
    """Only the trainer's status shows it; a killed orchestrator has left its weights behind."""
    fake, run = FakeInference(model), make_run(tmp_path)
    fake.weights = "run_a/broadcast/step_9"
    over: dict[str, Any] = {"max_steps": 5, "max_async_level": 1, "eval": {"interval": 2, "num_examples": 2}}
    async with serving(fake) as url:
        config = run_config(model, client={"base_url": url}, **over)
        config = config.model_copy(update={"model": config.model.model_copy(update={"full_finetune": None})})
        training = asyncio.create_task(stand_in_trainer(run))
        running = asyncio.create_task(run_to_the_end(config, run, lambda: False))

        def waits_for_the_trainer() -> bool:
            status = read_status(run.status, RunStatus)
            return status is not None and "whether it trains adapters" in (status.waiting_on or "")

        await until(waits_for_the_trainer, "the trainer to be named")
        trainer = TrainerStatus(state="waiting", model=str(model), max_seq_len=256)
        writer = StatusWriter(OutputDir(tmp_path).trainer_status, trainer)
        assert await asyncio.wait_for(running, PATIENCE_S) == 0
        writer.close(state="stopped")
        training.cancel()
    assert changes(fake)[0] == changes(fake)[-1] == "base" == fake.weights and fake.adapters == {}
    assert [name for name in changes(fake) if name != "base"] == sorted({*changes(fake)} - {"base"}), (
        "one each, upwards"
    )
    for step in range(1, 6):
        for sample in read_batch(run.rollout_file(step)).samples:
            first = sample.loss_mask.index(True)
            assert sample.token_ids[first] == FIRST_BYTE + sample.policy_version
            assert max(0, step - 2) <= sample.policy_version == sample.turn_versions[0] <= step - 1
