"""A run that ends before `max_steps`: by its budget, by its stop rule, by the word of others; and what it has used."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from daemons.actions import ends_again
from prime_rl.configs.base import merge
from prime_rl.configs.validate import load_run_config
from prime_rl.contract.files import remove
from prime_rl.contract.layout import OutputDir, RunDir, list_rollout_steps
from prime_rl.contract.status import RunStatus, read_status
from prime_rl.contract.usage import read_usage
from prime_rl.orchestrator.guard import Ending, RunMeter
from prime_rl.orchestrator.orchestrator import run_to_the_end
from tests.orchestrator_support import (
    FakeInference,
    config_data,
    make_model,
    make_run,
    publish,
    serving,
    stand_in_trainer,
    until,
    write_toml,
)
from tests.patience import PATIENCE_S


@dataclass
class Workspace:
    run: RunDir
    fake: FakeInference
    url: str
    stopped: bool = False

    def start(self, **over: Any) -> asyncio.Task[int]:
        data = config_data(Path(self.fake.model), **merge({"client": {"base_url": self.url}}, over))
        write_toml(self.run, data)
        self.stopped = False
        return asyncio.create_task(run_to_the_end(load_run_config(self.run.orch_toml), self.run, lambda: self.stopped))

    async def run_to_the_end(self, **over: Any) -> int:
        trainer = asyncio.create_task(stand_in_trainer(self.run))
        try:
            return await asyncio.wait_for(self.start(**over), PATIENCE_S)
        finally:
            trainer.cancel()

    @property
    def end(self) -> tuple[str, str | None]:
        status = read_status(self.run.status, RunStatus)
        assert status is not None
        return status.state, status.reason

    @property
    def used(self) -> int:
        """Tokens on record."""
        output = OutputDir(self.run.path.parent)
        return sum(line.tokens for line in read_usage(output.run_usage(self.run.run_id)).values())

    @property
    def again(self) -> str | None:
        return ends_again(OutputDir(self.run.path.parent), self.run)

    def rewards(self) -> list[tuple[int, float]]:
        lines = [json.loads(line) for line in self.run.orchestrator_metrics.read_text().splitlines()]
        return [(line["step"], line["reward/mean"]) for line in lines if "reward/mean" in line]


@pytest.fixture
async def workspace(tmp_path: Path) -> AsyncIterator[Workspace]:
    fake = FakeInference(make_model(tmp_path / "model"))
    async with serving(fake) as url:
        yield Workspace(make_run(tmp_path), fake, url)


# Every answer of the fake has three tokens: a batch of four samples has twelve.
BATCH_TOKENS = 12


async def test_a_used_up_budget_ends_the_run_and_a_raised_one_lets_it_go_on(workspace: Workspace) -> None:
    budget = 5 * BATCH_TOKENS
    code = await workspace.run_to_the_end(max_steps=50, max_async_level=0, budget={"max_tokens": budget})
    assert code == 0
    reason = workspace.run.finished.read_text()
    assert reason == "budget used up: 60 of 60 tokens"
    (line,) = map(json.loads, OutputDir(workspace.run.path.parent).audit.read_text().splitlines())
    assert [line[key] for key in ("who", "action", "run_id", "reason")] == [
        *("orchestrator", "finish", workspace.run.run_id, reason)
    ]
    assert workspace.end == ("finished", reason)
    assert list_rollout_steps(workspace.run) == [1, 2, 3, 4, 5] and workspace.used == budget
    assert workspace.run.broadcast_dir(5).is_dir(), "the trainer trained on all that it was handed"

    # Started again it ends without a request; without its mark it ends again, and a raised budget lets it go on.
    num_requests = len(workspace.fake.requests)
    assert await workspace.run_to_the_end(max_steps=50, max_async_level=0, budget={"max_tokens": budget}) == 0
    assert workspace.end == ("finished", reason) and len(workspace.fake.requests) == num_requests
    assert workspace.again == f"{reason}: raise [budget] in its orch.toml first"
    remove(workspace.run.finished)
    assert await workspace.run_to_the_end(max_steps=50, max_async_level=0, budget={"max_tokens": budget}) == 0
    assert workspace.run.finished.read_text() == reason and workspace.used == budget
    remove(workspace.run.finished)
    write_toml(workspace.run, config_data(Path(workspace.fake.model), budget={"max_tokens": 84}))
    assert workspace.again is None
    assert await workspace.run_to_the_end(max_steps=50, max_async_level=0, budget={"max_tokens": 84}) == 0
    assert workspace.end == ("finished", "budget used up: 84 of 84 tokens")
    assert list_rollout_steps(workspace.run)[-1] == 7 and workspace.used == 84


def test_a_budget_that_is_set_while_the_orchestrator_loads_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_toml(run, config_data(tmp_path))
    config = load_run_config(run.orch_toml)
    meter = cast(RunMeter, SimpleNamespace(used=lambda: (5, 0.0)))
    ending = Ending(run, config, meter, step=0)
    assert ending.reason() is None
    with run.orch_toml.open("a") as file:
        file.write("\n[budget]\nmax_tokens = 1\n")
    assert ending.reason() == Ending(run, config, meter, step=0).reason() == "budget used up: 5 of 1 tokens"


async def test_a_budget_is_read_while_the_run_lives_and_counts_evaluations(workspace: Workspace) -> None:
    over = {"max_async_level": 0, "max_steps": 50, "eval": {"interval": 100, "num_examples": 4}}
    task = workspace.start(budget={"max_tokens": 10**6}, **over)
    await until(lambda: list_rollout_steps(workspace.run) == [1] and workspace.used > 0, "the first batch")
    data = config_data(Path(workspace.fake.model), client={"base_url": workspace.url}, **over)
    write_toml(workspace.run, data | {"budget": {"max_tokens": 2 * BATCH_TOKENS}})
    trainer = asyncio.create_task(stand_in_trainer(workspace.run))
    try:
        assert await asyncio.wait_for(task, PATIENCE_S) == 0
    finally:
        trainer.cancel()
    assert workspace.end[0] == "finished" and (workspace.end[1] or "").startswith("budget used up: ")
    asked = sum(body["n"] for body in workspace.fake.completions)
    assert workspace.used <= 3 * asked, "nothing is counted that was not sampled"
    # Four evaluations of three tokens: the budget of two batches does not last for two.
    assert workspace.used >= 2 * BATCH_TOKENS and len(list_rollout_steps(workspace.run)) <= 2


async def test_the_run_ends_when_its_last_batch_was_trained_on_and_generates_nothing_meanwhile(
    workspace: Workspace,
) -> None:
    never = asyncio.Event()

    async def only_the_first_batch(body: dict[str, Any]) -> None:
        if len(workspace.fake.completions) > 1:
            await never.wait()

    workspace.fake.gate = only_the_first_batch
    # One group a batch and one under way: the first request is that of the first batch.
    one = {"rollouts_per_example": 4, "client": {"max_concurrent_requests": 4}}
    task = workspace.start(max_steps=50, max_async_level=2, budget={"max_tokens": BATCH_TOKENS}, **one)

    def waits() -> bool:
        status = read_status(workspace.run.status, RunStatus)
        return status is not None and "policy version 1 (have 0)" in (status.waiting_on or "")

    await until(waits, "the run to wait for its last update, with nothing in flight")
    assert not workspace.run.finished.exists() and list_rollout_steps(workspace.run) == [1]
    publish(workspace.run, 1)
    assert await asyncio.wait_for(task, PATIENCE_S) == 0
    assert workspace.end == ("finished", "budget used up: 12 of 12 tokens")


async def test_hours_are_those_at_work(workspace: Workspace) -> None:
    assert await workspace.run_to_the_end(max_steps=50, max_async_level=0, budget={"max_hours": 1e-9}) == 0
    state, reason = workspace.end
    assert state == "finished" and re.fullmatch(r"budget used up: \d+\.\d\d of 1e-09 hours", reason or "")


async def test_a_kill_counts_nothing_twice_and_a_stop_nothing_less(workspace: Workspace) -> None:
    """The trainer publishes nothing, so the orchestrator is stopped while it waits; what it made stays counted."""
    task = workspace.start(max_steps=6, max_async_level=1)
    await until(lambda: list_rollout_steps(workspace.run) == [1, 2], "two batches")
    workspace.stopped = True
    assert await asyncio.wait_for(task, PATIENCE_S) == 0
    assert workspace.used == 2 * BATCH_TOKENS
    path = OutputDir(workspace.run.path.parent).run_usage(workspace.run.run_id)
    path.write_bytes(path.read_bytes()[:-5])  # as a kill in the last write leaves it
    assert workspace.used in (BATCH_TOKENS, 2 * BATCH_TOKENS)
    before = workspace.used
    assert await workspace.run_to_the_end(max_steps=6, max_async_level=1) == 0
    assert workspace.used == before + 4 * BATCH_TOKENS


async def test_a_stop_rule_ends_the_run_and_a_restart_decides_the_same(workspace: Workspace) -> None:
    workspace.fake.letter = 65  # the same answers at every step: the reward never gets better than at its best
    stop = {"metric": "reward/mean", "patience": 3}
    assert await workspace.run_to_the_end(max_steps=50, max_async_level=0, stop=stop) == 0
    state, reason = workspace.end
    assert state == "finished" and (reason or "").startswith("stopped early: reward/mean did not improve in 3 values")
    steps = [step for step, _ in workspace.rewards()]
    assert steps[-1] == list_rollout_steps(workspace.run)[-1] < 50
    assert (workspace.again or "").endswith("change or remove [stop] in its orch.toml, then prl runs apply run_a")

    remove(workspace.run.finished)
    assert await workspace.run_to_the_end(max_steps=50, max_async_level=0, stop=stop) == 0
    assert workspace.end == (state, reason) and [step for step, _ in workspace.rewards()] == steps
    remove(workspace.run.finished)
    assert await workspace.run_to_the_end(max_steps=steps[-1] + 1, max_async_level=0) == 0
    assert workspace.end == ("finished", None), "without the rule it goes on to its last step"


async def test_the_mark_of_others_ends_a_run_that_works(workspace: Workspace) -> None:
    task = workspace.start(max_steps=50, max_async_level=1)
    await until(lambda: list_rollout_steps(workspace.run) == [1, 2], "two batches")
    workspace.run.finished.write_text("halving: rung 1\nof 3")
    assert await asyncio.wait_for(task, PATIENCE_S) == 0
    assert workspace.end == ("finished", "halving: rung 1 of 3")
    assert workspace.fake.adapters == {}
