"""Whole runs over real HTTP: one of several turns, and one whose environment fails too often."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from prime_rl.contract.calls import Turn
from prime_rl.contract.status import RunStatus, read_status
from prime_rl.contract.types import read_batch
from prime_rl.orchestrator.orchestrator import run_to_the_end
from prime_rl.orchestrator.policy import ChatTokenizer
from prime_rl.utils.tasks import UPPER
from tests.orchestrator_support import (
    IM_END,
    FakeInference,
    make_model,
    make_run,
    run_config,
    serving,
    stand_in_trainer,
    version_token,
)
from tests.patience import PATIENCE_S


class Remembers(FakeInference):
    """Keeps what each version answered to which prompt."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.answers: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}

    async def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        status, answer = await super()._complete(body)
        for choice in answer.get("choices", []):
            made = (version_token(body["model"]) - version_token(self.model), choice["token_ids"])
            self.answers.setdefault(tuple(body["prompt"]), []).append(made)
        return status, answer


async def test_every_turn_of_a_conversation_is_as_it_was_sampled(tmp_path: Path) -> None:
    model, run = make_model(tmp_path / "model"), make_run(tmp_path)
    fake = Remembers(model)
    args = {"num_examples": 20, "num_eval_examples": 2, "max_turns": 4}
    async with serving(fake) as url:
        config = run_config(
            model, env=[{"id": "guess-number", "args": args}], client={"base_url": url}, seq_len=400, max_steps=4
        )
        trainer = asyncio.create_task(stand_in_trainer(run))
        assert await asyncio.wait_for(run_to_the_end(config, run, lambda: False), PATIENCE_S) == 0
        trainer.cancel()
    samples = [sample for step in range(1, 5) for sample in read_batch(run.rollout_file(step)).samples]
    assert len(samples) == 16
    for sample in samples:
        starts = [0, *itertools.accumulate(len(list(same)) for _, same in itertools.groupby(sample.loss_mask))]
        assert len(starts) == 2 * 4 + 1, "four turns, each behind what the environment said"
        turns = list(zip(starts[1::2], starts[2::2], strict=True))
        assert len(sample.turn_versions) == len(turns)
        assert sample.policy_version == min(sample.turn_versions)
        for version, (start, end) in zip(sample.turn_versions, turns, strict=True):
            # The prompt of each turn is, token for token, all that came before it.
            assert (version, sample.token_ids[start:end]) in fake.answers[tuple(sample.token_ids[:start])]
            assert sample.token_ids[end - 1] == IM_END and set(sample.logprobs[start:end]) == {-0.5}
        assert sum(sample.loss_mask) == sum(end - start for start, end in turns)
        assert sample.reward < 1 / 4
    assert {version for sample in samples for version in sample.turn_versions} > {0}
    line = json.loads(run.orchestrator_metrics.read_text().splitlines()[-1])
    assert (line["env/guess-number/turns"], line["env/guess-number/found"], line["env/guess-number/dropped"]) == (
        4,
        0,
        0,
    )


async def test_a_run_whose_environment_fails_too_often_fails_with_the_last_error(tmp_path: Path) -> None:
    model, run = make_model(tmp_path / "model"), make_run(tmp_path)
    env = {"id": "reverse-text", "name": "strict", "reward_range": [2, 3], "args": {"num_examples": 20}}
    async with serving(FakeInference(model)) as url:
        config = run_config(model, env=[env], client={"base_url": url}, max_env_failure_share=0.25)
        assert await asyncio.wait_for(run_to_the_end(config, run, lambda: False), PATIENCE_S) == 1
    status = read_status(run.status, RunStatus)
    assert status is not None and status.state == "failed"
    wanted = (
        r"env strict: (\d+) of the \d+ examples tried are unusable, more than max_env_failure_share = 0.25 of them; "
        r"last: the reward is \S+, not within reward_range = \[2, 3\] in example train-\d+"
    )
    assert (found := re.fullmatch(wanted, str(status.reason))), status.reason
    assert status.examples_unusable == len(status.unusable) >= int(found[1])
    assert all(each.startswith("strict/train-") for each in status.unusable) and status.problem is None


async def test_a_run_learns_from_the_rewards_that_it_weighs_or_names_the_one_that_is_missing(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    reasons = {}
    async with serving(FakeInference(model)) as url:
        for name, weights in (("run_a", {"exact_match": 1.0, "is_number": 0.2}), ("run_b", {"format": 1.0})):
            run = make_run(tmp_path, name)
            config = run_config(
                model, env=[{"id": "arithmetic"}], client={"base_url": url}, advantage={"reward_weights": weights}
            )
            trainer = asyncio.create_task(stand_in_trainer(run))
            await asyncio.wait_for(run_to_the_end(config, run, lambda: False), PATIENCE_S)
            trainer.cancel()
            status = read_status(run.status, RunStatus)
            assert status is not None
            reasons[name] = status.state, str(status.reason)
    assert reasons["run_a"] == ("finished", "None")
    assert reasons["run_b"][0] == "failed"
    missing = "no reward 'format', which advantage.reward_weights names; found: exact_match, is_number in example "
    assert missing in reasons["run_b"][1]


async def test_a_run_goes_on_without_the_examples_that_are_too_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only words of three and four letters leave room, of up to ten: far more than half of the groups are left out."""
    model, run, fake = make_model(tmp_path / "model"), make_run(tmp_path), FakeInference(tmp_path / "model")
    prompt = ChatTokenizer.load(str(model)).prompt((Turn("user", UPPER.prompt("abcd")),))
    args = {"wording": "short", "num_examples": 40, "num_eval_examples": 2, "min_len": 3, "max_len": 10}
    async with serving(fake) as url:
        config = run_config(
            model,
            env=[{"id": "upper-case", "args": args}],
            client={"base_url": url},
            seq_len=len(prompt) + 1,
            max_env_failure_share=1.0,
            max_steps=4,
        )
        trainer = asyncio.create_task(stand_in_trainer(run))
        assert await asyncio.wait_for(run_to_the_end(config, run, lambda: False), PATIENCE_S) == 0
        trainer.cancel()
    status = read_status(run.status, RunStatus)
    assert status is not None and (status.state, status.problem) == ("finished", None)
    assert status.examples_unusable > 8 and status.examples_unusable >= len(status.unusable) > 8
    wanted = r"\d\d prompt tokens leave no room in seq_len = \d\d \(.*: prl down; prl up --seq_len 64; prl runs .*\)"
    assert all(re.fullmatch(wanted, reason) for reason in status.unusable.values())
    line = json.loads(run.orchestrator_metrics.read_text().splitlines()[-1])
    assert (line["step"], line["groups_dropped"]) == (4, 0)
    assert 0 < line["examples_unusable"] == line["env/upper-case/dropped"] <= status.examples_unusable
    assert not [record for record in caplog.records if "never retrieved" in record.getMessage()]
