"""The whole orchestrator over real HTTP, with a stand-in trainer and a server that can be broken."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prime_rl.contract.layout import RunDir, list_rollout_steps
from prime_rl.contract.metrics import Sign
from prime_rl.contract.status import RunStatus, read_status
from prime_rl.contract.types import read_batch
from prime_rl.orchestrator.orchestrator import run_to_the_end
from prime_rl.orchestrator.recorder import derive_seed
from tests.orchestrator_support import (
    FIRST_BYTE,
    FakeInference,
    config_data,
    look_often,
    make_model,
    make_run,
    publish,
    run_config,
    serving,
    stand_in_trainer,
    until,
    version_token,
    write_toml,
)
from tests.patience import PATIENCE_S


@dataclass
class Workspace:
    run: RunDir
    model: Path
    fake: FakeInference
    url: str
    stopped: bool = False

    def start(self, **over: Any) -> asyncio.Task[int]:
        over = {"client": {"base_url": self.url, **over.pop("client", {})}, **over}
        config = run_config(self.model, **over)
        self.stopped = False
        return asyncio.create_task(run_to_the_end(config, self.run, lambda: self.stopped))

    async def run_to_the_end(self, **over: Any) -> int:
        async with trainer(self.run):
            return await asyncio.wait_for(self.start(**over), PATIENCE_S)

    @property
    def status(self) -> RunStatus:
        status = read_status(self.run.status, RunStatus)
        assert status is not None
        return status

    async def until_waiting_on(self, text: str) -> None:
        def waits() -> bool:
            status = read_status(self.run.status, RunStatus)
            return status is not None and text in (status.waiting_on or "")

        await until(waits, f"waiting_on {text!r}")


@pytest.fixture
async def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Workspace]:
    look_often(monkeypatch)
    model = make_model(tmp_path / "model")
    fake = FakeInference(model)
    async with serving(fake) as url:
        yield Workspace(make_run(tmp_path), model, fake, url)


@asynccontextmanager
async def trainer(run: RunDir) -> AsyncIterator[None]:
    task = asyncio.create_task(stand_in_trainer(run))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def lines(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.orchestrator_metrics.read_text().splitlines()]


def example_ids(run: RunDir, steps: range) -> list[str]:
    return [sample.example_id for step in steps for sample in read_batch(run.rollout_file(step)).samples]


async def test_a_run_from_its_first_batch_to_its_last_update(workspace: Workspace) -> None:
    code = await workspace.run_to_the_end(max_steps=4, max_async_level=1, ckpt={"interval": 3})
    assert (code, workspace.status.state, workspace.status.step) == (0, "finished", 4)
    assert (workspace.status.waiting_on, workspace.status.reason) == (None, None)
    assert list_rollout_steps(workspace.run) == [1, 2, 3, 4]
    for step in range(1, 5):
        batch = read_batch(workspace.run.rollout_file(step))
        assert len(batch.samples) == 4
        assert all(sample.policy_version >= step - 2 for sample in batch.samples)
        assert all(sample.example_id.startswith("reverse-text/train-") for sample in batch.samples)
    assert [line["step"] for line in lines(workspace.run)] == [1, 2, 3, 4]
    wanted = {"time", "reward/mean", "reward/std", "reward/reverse-text", "env/reverse-text/exact_match"}
    wanted |= {"signal", "tokens_per_s", "async_level/max", "groups_dropped", "time/generate", "time/wait_for_policy"}
    assert wanted <= set(lines(workspace.run)[0])
    states = sorted(workspace.run.checkpoints.glob("step_*/orchestrator/state.json"))
    assert [json.loads(path.read_text())["sampler_state"] for path in states] == [
        read_batch(workspace.run.rollout_file(step)).sampler_state for step in (3, 4)
    ]
    assert workspace.fake.adapters == {}, "all adapters of the run are unloaded"


async def test_two_runs_of_the_same_seed_are_the_same(workspace: Workspace, tmp_path: Path) -> None:
    await workspace.run_to_the_end(max_async_level=0)
    first = [read_batch(workspace.run.rollout_file(step)) for step in (1, 2, 3)]
    shutil.rmtree(workspace.run.path)
    workspace.run.control.mkdir(parents=True)
    await workspace.run_to_the_end(max_async_level=0)
    assert [read_batch(workspace.run.rollout_file(step)) for step in (1, 2, 3)] == first


async def test_a_stopped_run_goes_on_at_the_next_example(workspace: Workspace, tmp_path: Path) -> None:
    task = workspace.start(max_steps=6, max_async_level=1)
    publish(workspace.run, 1)
    await workspace.until_waiting_on("policy version 2 (have 1)")
    await until(lambda: 3 in list_rollout_steps(workspace.run), "batch 3, which may be generated with version 1")
    workspace.stopped = True
    assert await asyncio.wait_for(task, PATIENCE_S) == 0
    assert workspace.status.state == "stopped" and workspace.fake.adapters == {}
    done = list_rollout_steps(workspace.run)
    assert done == [1, 2, 3]
    before = {step: workspace.run.rollout_file(step).stat().st_mtime_ns for step in done}
    assert await workspace.run_to_the_end(max_steps=6) == 0
    assert {step: workspace.run.rollout_file(step).stat().st_mtime_ns for step in done} == before, "none is rewritten"
    twin = Workspace(make_run(tmp_path / "twin"), workspace.model, workspace.fake, workspace.url)
    await twin.run_to_the_end(max_steps=6)
    assert example_ids(workspace.run, range(1, 7)) == example_ids(twin.run, range(1, 7))


async def test_a_finished_run_that_is_started_again_finishes_without_generating(workspace: Workspace) -> None:
    await workspace.run_to_the_end()
    num_requests = len(workspace.fake.requests)
    assert await workspace.run_to_the_end() == 0
    assert {path for path, _ in workspace.fake.requests[num_requests:]} == {"/v1/models"}


async def test_waits_for_the_trainer_by_name_also_after_the_last_batch(workspace: Workspace) -> None:
    task = workspace.start(max_steps=2, max_async_level=0)
    await workspace.until_waiting_on("policy version 1 (have 0), trainer has not started yet")
    assert list_rollout_steps(workspace.run) == [1]
    turns = workspace.status.loop
    assert turns is not None
    await until(lambda: (workspace.status.loop or 0) > turns, "its loop to turn while it waits")
    publish(workspace.run, 1)
    await workspace.until_waiting_on("policy version 2 (have 1), trainer last updated")
    assert list_rollout_steps(workspace.run) == [1, 2]
    loads = workspace.fake.num_loads
    publish(workspace.run, 2)
    assert await asyncio.wait_for(task, PATIENCE_S) == 0
    assert workspace.fake.num_loads == loads == 1, "the last version is not needed for generation"


@pytest.mark.parametrize("when", ["before", "waiting for the trainer", "waiting for inference"])
async def test_eviction_ends_every_wait_with_its_reason(
    workspace: Workspace, when: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if when == "before":
        workspace.run.evicted.write_text("too\nloud")
    if when == "waiting for inference":
        workspace.fake.fault = lambda path, body: 503
    task = workspace.start(max_async_level=0)
    if when == "waiting for the trainer":
        await workspace.until_waiting_on("policy version 1")
    elif when == "waiting for inference":
        await workspace.until_waiting_on("503 injected")
    workspace.run.evicted.write_text("too\nloud")
    assert await asyncio.wait_for(task, PATIENCE_S) == 1
    assert (workspace.status.state, workspace.status.reason) == ("evicted", "too loud")
    assert capsys.readouterr().err.strip().splitlines()[-1] == "run_a evicted: too loud"


async def test_a_deleted_run_ends_quietly_and_is_not_made_again(workspace: Workspace) -> None:
    task = workspace.start(max_async_level=0)
    await workspace.until_waiting_on("policy version 1")
    workspace.run.path.rename(workspace.run.path.with_name("elsewhere"))
    assert await asyncio.wait_for(task, PATIENCE_S) == 0
    assert not workspace.run.path.exists()


async def test_inference_that_comes_back_without_its_adapters_costs_no_step(workspace: Workspace) -> None:
    async with trainer(workspace.run):
        task = workspace.start(max_steps=8)
        await until(lambda: bool(workspace.fake.adapters), "a first adapter")
        workspace.fake.fault = lambda path, body: 500
        await workspace.until_waiting_on("500 injected")
        workspace.fake.adapters.clear()
        workspace.fake.fault = lambda path, body: None
        assert await asyncio.wait_for(task, PATIENCE_S) == 0
    assert list_rollout_steps(workspace.run) == list(range(1, 9))
    assert [line["groups_dropped"] for line in lines(workspace.run)] == [0] * 8
    assert max(line["time/wait_for_inference"] for line in lines(workspace.run)) > 0


async def test_what_gets_too_old_is_cancelled_on_the_server_and_made_again(workspace: Workspace) -> None:
    first = derive_seed(derive_seed(run_config(workspace.model).sampling_seed, "train", 0, 0), 0)

    def is_held(body: dict[str, Any]) -> bool:
        return version_token(body["model"]) == FIRST_BYTE and body["seed"] != first

    async def hold_all_but_the_first_of_version_0(body: dict[str, Any]) -> None:
        if is_held(body):
            await asyncio.Event().wait()
        if version_token(body["model"]) > FIRST_BYTE:
            await until(lambda: workspace.fake.num_cancelled == 2, "the requests of version 0 to be cancelled")

    workspace.fake.gate = hold_all_but_the_first_of_version_0
    over = {"batch_size": 2, "max_async_level": 2, "max_off_policy_steps": 0}
    async with trainer(workspace.run):
        assert await asyncio.wait_for(workspace.start(max_steps=4, **over), PATIENCE_S) == 0
    assert workspace.fake.num_cancelled == 2
    assert lines(workspace.run)[-1]["groups_too_old"] == 2 and lines(workspace.run)[-1]["groups_dropped"] == 0
    held = [body["prompt"] for body in workspace.fake.completions if is_held(body)]
    again = [body["prompt"] for body in workspace.fake.completions if version_token(body["model"]) > FIRST_BYTE]
    assert len(held) == 2 and all(prompt in again for prompt in held), "the same examples"
    versions = [sample.turn_versions for sample in read_batch(workspace.run.rollout_file(2)).samples]
    assert versions == [[1], [1]]


async def test_a_server_that_hangs_is_named_at_the_deadline(workspace: Workspace) -> None:
    async def hang(body: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    workspace.fake.gate = hang
    task = workspace.start(client={"timeout_s": 0.3})
    await workspace.until_waiting_on(f"inference at {workspace.url} (no answer in 0.3 s)")
    workspace.fake.gate = None
    async with trainer(workspace.run):
        assert await asyncio.wait_for(task, PATIENCE_S) == 0


async def test_groups_without_signal_are_replaced_and_a_run_that_has_no_others_goes_on(
    workspace: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    workspace.fake.letter = 65  # all answers are the same, so all rewards of a group are
    env = [{"id": "reverse-text", "args": {"wording": "short", "num_examples": 60}}]  # more than it draws: each once
    over = {"filter_zero_advantage": True, "oversampling_factor": 2.0, "max_async_level": 1, "env": env}
    assert await workspace.run_to_the_end(**over) == 0
    filtered = [line["groups_filtered"] for line in lines(workspace.run)]
    assert filtered[0] >= 4 * 2 and filtered == sorted(filtered)
    assert "too many groups have advantages of zero" in caplog.text
    ids = example_ids(workspace.run, range(1, 4))
    assert len(set(ids)) == 6 and max(int(i.rpartition("-")[2]) for i in ids) < 60


async def test_a_run_without_signal_tells_so_also_when_it_goes_on(workspace: Workspace) -> None:
    workspace.fake.letter = 65  # all answers are the same
    assert await workspace.run_to_the_end(max_steps=6, max_async_level=1) == 0
    assert [line["signal"] for line in lines(workspace.run)] == [0.0] * 6
    assert workspace.status.signs == [Sign("no_signal", 0.0, 0.0, 6)]
    assert await workspace.run_to_the_end(max_steps=7, max_async_level=1) == 0
    assert workspace.status.signs == [Sign("no_signal", 0.0, 0.0, 7)]


async def test_one_that_starts_with_nothing_left_to_do_keeps_the_last_reward(workspace: Workspace) -> None:
    assert await workspace.run_to_the_end(max_steps=2) == 0
    reward = lines(workspace.run)[-1]["reward/mean"]
    assert workspace.status.reward == reward
    assert await workspace.run_to_the_end(max_steps=2) == 0
    assert workspace.status.state == "finished" and workspace.status.reward == reward


async def test_the_trainer_that_starts_again_finds_each_batch_once(workspace: Workspace) -> None:
    task = workspace.start(max_steps=6)
    async with trainer(workspace.run):
        await until(lambda: 4 in list_rollout_steps(workspace.run), "batch 4")
    written = {step: workspace.run.rollout_file(step).stat().st_mtime_ns for step in list_rollout_steps(workspace.run)}
    async with trainer(workspace.run):
        assert await asyncio.wait_for(task, PATIENCE_S) == 0
    assert {step: workspace.run.rollout_file(step).stat().st_mtime_ns for step in written} == written
    ids = example_ids(workspace.run, range(1, 7))
    assert len(set(ids)) == len(ids) / 2


async def test_a_run_whose_groups_mostly_fail_is_failed_with_the_last_error(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.fake.fault = lambda path, body: 400 if path == "/v1/completions" else None
    # One group at a time, so that no other fails before the run ends.
    assert await workspace.run_to_the_end(client={"max_concurrent_requests": 2}) == 1
    assert workspace.status.state == "failed"
    assert "11 of the last 11 groups failed" in str(workspace.status.reason)
    assert "400 injected 400" in str(workspace.status.reason)
    assert capsys.readouterr().err.count("run_a failed: ") == 1


async def test_single_failures_are_dropped_counted_and_survived(workspace: Workspace) -> None:
    bad = iter([True, False, False, False, False] * 100)
    workspace.fake.fault = lambda path, body: 400 if path == "/v1/completions" and next(bad) else None
    assert await workspace.run_to_the_end(client={"max_concurrent_requests": 2}) == 0
    assert lines(workspace.run)[-1]["groups_dropped"] > 0
    assert workspace.status.reason is None


@pytest.mark.parametrize(("route", "num_asked"), [("/v1/completions", {3, 4}), ("/v1/load_lora_adapter", {1})])
async def test_an_adapter_that_inference_refuses_ends_the_run_with_its_reason(
    workspace: Workspace, route: str, num_asked: set[int]
) -> None:
    """At once where its files are at fault; else when it has answered none of three requests."""
    refused: list[str] = []

    def fault(path: str, body: dict[str, Any]) -> int | None:
        if path != route or (path == "/v1/completions" and "@v" not in body["model"]):
            return None
        refused.append(str(body))
        return 422

    workspace.fake.fault = fault
    # The third batch needs an adapter, however quick the first two are.
    over = {"max_steps": 4, "max_async_level": 1, "client": {"max_concurrent_requests": 2}}
    assert await workspace.run_to_the_end(**over) == 1
    assert (workspace.status.state, workspace.status.reason) == ("failed", "injected 422")
    assert len(refused) in num_asked, "one more may be under way"


async def test_an_adapter_whose_logprobs_are_not_finite_ends_the_run_with_its_name(workspace: Workspace) -> None:
    def diverge(path: str, body: dict[str, Any]) -> None:
        workspace.fake.logprob = None if "@v" in str(body.get("model")) else -0.5

    workspace.fake.fault = diverge
    assert await workspace.run_to_the_end(max_steps=4, max_async_level=1) == 1
    assert re.match(r"run_a@v\d: its log-probabilities are not finite", str(workspace.status.reason))


async def test_an_adapter_that_some_prompts_break_costs_those_rollouts_only(workspace: Workspace) -> None:
    bad, refused = iter([False, True, False, False, False] * 100), list[str]()

    def fault(path: str, body: dict[str, Any]) -> int | None:
        if path != "/v1/completions" or not next(bad):
            return None
        refused.append(path)
        return 422

    workspace.fake.fault = fault
    assert await workspace.run_to_the_end(client={"max_concurrent_requests": 2}) == 0
    assert refused and workspace.status.reason is None


@pytest.mark.parametrize(
    ("over", "prepare", "reason"),
    [
        ({}, lambda fake: setattr(fake, "api_key", "secret"), "401 invalid API key"),
        ({}, lambda fake: setattr(fake, "model", "another"), "inference serves ['another'], but this run trains"),
        (
            {"env": [{"id": "reverse-text", "args": {"num_examples": 0}}]},
            lambda fake: None,
            "num_examples",
        ),
    ],
)
async def test_what_no_retry_can_mend_fails_the_run(
    workspace: Workspace, over: dict[str, Any], prepare: Callable[[FakeInference], None], reason: str
) -> None:
    prepare(workspace.fake)
    assert await workspace.run_to_the_end(**over) == 1
    assert workspace.status.state == "failed" and reason in str(workspace.status.reason)


async def test_a_crash_leaves_no_last_word_so_that_it_is_started_again(workspace: Workspace) -> None:
    workspace.run.rollouts.mkdir()
    workspace.run.rollout_dir(1).write_text("in the way")
    assert await workspace.run_to_the_end() == 1
    assert workspace.status.state == "running"
    assert "step_1" in str(workspace.status.reason)


async def test_seq_len_comes_from_the_trainer_when_the_run_sets_none(workspace: Workspace) -> None:
    from prime_rl.contract.layout import OutputDir
    from prime_rl.contract.status import StatusWriter, TrainerStatus

    task = workspace.start(seq_len=None)
    await workspace.until_waiting_on("trainer/status.json (for the trainer's seq_len)")
    path = OutputDir(workspace.run.path.parent).trainer_status
    StatusWriter(path, TrainerStatus(state="waiting", max_seq_len=77)).close()
    async with trainer(workspace.run):
        assert await asyncio.wait_for(task, PATIENCE_S) == 0
    bodies = workspace.fake.completions
    assert all(len(body["prompt"]) + body["max_tokens"] <= 77 for body in bodies)


async def test_a_run_that_is_sent_back_waits_until_the_trainer_has_gone_back(workspace: Workspace) -> None:
    await workspace.run_to_the_end(max_steps=4)
    toml = write_toml(workspace.run, config_data(workspace.model, max_steps=4, ckpt={"resume_step": 1}))
    task = workspace.start(max_steps=4, ckpt={"resume_step": 1})
    await workspace.until_waiting_on("the trainer to go back to ckpt.resume_step = 1")
    kept = read_batch(workspace.run.rollout_file(1))
    for folder in [workspace.run.rollout_dir(step) for step in (2, 3, 4)]:
        shutil.rmtree(folder)
    for folder in [workspace.run.broadcast_dir(step) for step in (2, 3, 4)]:
        shutil.rmtree(folder)
    digest = hashlib.sha256(toml.read_bytes()).hexdigest()
    workspace.run.resumed.write_text(json.dumps({"resume_step": 1, "config_sha256": digest, "version": 1}))
    async with trainer(workspace.run):
        assert await asyncio.wait_for(task, PATIENCE_S) == 0
    assert list_rollout_steps(workspace.run) == [1, 2, 3, 4]
    assert read_batch(workspace.run.rollout_file(1)) == kept


async def test_evaluation_of_the_first_the_due_and_the_last_version(workspace: Workspace) -> None:
    code = await workspace.run_to_the_end(
        max_steps=5, eval={"interval": 2, "num_examples": 3, "rollouts_per_example": 2}
    )
    assert code == 0
    evals = [line for line in lines(workspace.run) if "eval/reverse-text/reward" in line]
    steps = [line["step"] for line in evals]
    assert steps[0] == 0 and steps[-1] == 5 and steps == sorted(set(steps))
    assert all(0 <= line["eval/reverse-text/exact_match"] <= 1 for line in evals)
    assert {line["eval/reverse-text/num_failed"] for line in evals} == {0}
    assert all(line["eval/reverse-text/avg@2"] == line["eval/reverse-text/reward"] for line in evals)
    assert workspace.fake.adapters == {}


async def test_evaluation_has_its_own_environments_and_sampling_and_stops_nothing(workspace: Workspace) -> None:
    async def hold_evaluations(body: dict[str, Any]) -> None:
        if body["temperature"] == 0:
            await until(lambda: 3 in list_rollout_steps(workspace.run), "training to go on meanwhile")

    workspace.fake.gate = hold_evaluations
    env = [{"id": "sort-letters", "name": "hard", "args": {"num_eval_examples": 2}}]
    own = {"interval": 9, "sampling": {"temperature": 0, "max_tokens": 3}, "env": env}
    assert await workspace.run_to_the_end(max_steps=3, eval=own) == 0
    bodies = [body for body in workspace.fake.completions if body["temperature"] == 0]
    assert len(bodies) == 2 * 2 and {body["max_tokens"] for body in bodies} == {3}
    assert {body["max_tokens"] for body in workspace.fake.completions if body["temperature"]} == {16}
    evals = [line for line in lines(workspace.run) if "eval/hard/reward" in line]
    assert [line["step"] for line in evals] == [0, 3] and not any("eval/reverse-text/reward" in line for line in evals)
    assert all("reward/reverse-text" in line for line in lines(workspace.run) if "reward/mean" in line)


async def test_several_environments_share_the_batches(workspace: Workspace) -> None:
    env = [{"id": "reverse-text", "name": "easy", "args": {"max_len": 3}}, {"id": "sort-letters"}]
    assert await workspace.run_to_the_end(env=env) == 0
    for line in lines(workspace.run):
        assert {"reward/easy", "reward/sort-letters", "env/easy/exact_match"} <= set(line)
    ids = example_ids(workspace.run, range(1, 4))
    assert sum(i.startswith("easy/") for i in ids) == sum(i.startswith("sort-letters/") for i in ids) == 6
