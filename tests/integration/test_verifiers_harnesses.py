"""The harnesses `null` and `bash` of `verifiers`, as they are published, behind the gateway.

Their program has an environment of its own, which `uv` makes once from the package index. It streams, offers a shell,
and compacts its conversations: each time it does, the policy's history begins anew.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from prime_rl.contract.calls import Answer, Call
from prime_rl.contract.types import TrainingSample, read_batch
from prime_rl.gateway.keys import new_secret
from prime_rl.gateway.serve import serving_here
from prime_rl.orchestrator.envs import load_environments
from prime_rl.orchestrator.envs.base import AnswersCalls, Message, Outcome
from prime_rl.orchestrator.envs.checked import EnvironmentFault, Transient
from prime_rl.orchestrator.orchestrator import run_to_the_end
from prime_rl.orchestrator.policy import ChatTokenizer
from prime_rl.orchestrator.recorder import Branch, PolicySession
from prime_rl.orchestrator.sessions import Sessions
from prime_rl.orchestrator.try_env import sampler_of
from tests.gateway_daemon import gateway_here
from tests.integration.conftest import _once
from tests.integration.test_agents_of_others import TOLERANCE, policy
from tests.integration.test_envs_verifiers import TASKSETS, turns_of
from tests.integration.test_orchestrator_inference import server
from tests.integration.test_orchestrator_inference import serving as serving_of
from tests.orchestrator_support import (
    IM_END,
    FakeInference,
    make_model,
    make_run,
    run_config,
    serving,
    stand_in_trainer,
    until,
)
from tests.patience import PATIENCE_S

__all__ = ["policy"]
pytestmark = pytest.mark.release
SEQ_LEN, MAX_TOKENS = 1024, 8
# Half of SEQ_LEN, where a harness compacts by itself, is far less than this many words.
LONG = "I tell stories about brothers who go to sea, and who come home. " * 12


def bash(**compaction: int) -> dict[str, Any]:
    return {"agent": {"harness": {"id": "bash", "compaction": compaction}}}


NULL = {"agent": {"harness": {"id": "null"}}}


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where verifiers keeps the environment of its program; `uv` is beside the interpreter alone."""
    beside = Path(sys.executable).parent
    elsewhere = [each for each in os.environ["PATH"].split(os.pathsep) if Path(each) != beside]
    monkeypatch.setenv("PATH", os.pathsep.join(elsewhere))
    monkeypatch.setenv("HOME", str(_once(tmp_path_factory, "verifiers-home", Path.mkdir)))
    monkeypatch.setenv("PYTHONPATH", f"{TASKSETS}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")


@pytest.fixture(scope="module")
def inference(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str | None]:
    workspace = tmp_path_factory.mktemp("harnesses") / "workspace"
    with server(workspace, smollm2, max_model_len=SEQ_LEN) as process:
        asyncio.run(until(lambda: serving_of(workspace, process) is not None, "the server"))
        yield serving_of(workspace, process)


class Noted:
    """The policy of a rollout, and what it answered."""

    def __init__(self, policy: PolicySession) -> None:
        self.policy, self.answers = policy, list[Answer]()

    @property
    def answer_lens(self) -> Sequence[int]:
        return self.policy.answer_lens

    async def complete(self, messages: Sequence[Message]) -> str:
        raise AssertionError("verifiers asks through the gateway")

    async def call(self, call: Call) -> Answer:
        self.answers.append(await self.policy.call(call))
        return self.answers[-1]


async def rollouts(
    model: Path, url: str, env: dict[str, Any], taskset: dict[str, Any]
) -> list[tuple[Outcome, list[Branch], list[Answer]]]:
    """Those that verifiers makes of the examples to train on, side by side."""
    args = {"env": env, "taskset": taskset, "num_eval_examples": 1}
    config = run_config(
        model,
        env=[{"id": "verifiers:small-talk", "args": args, "timeout_s": PATIENCE_S}],
        sampling={"max_tokens": MAX_TOKENS},
        seq_len=SEQ_LEN,
    )
    tokenizer = ChatTokenizer.load(str(model))
    async with AsyncExitStack() as cleanup:
        turns = sampler_of(config, url, str(model), SEQ_LEN, cleanup)
        sessions = Sessions("run_a", new_secret(), tokenizer, max_model_len=SEQ_LEN)
        sessions.served_at(await cleanup.enter_async_context(serving_here(sessions, sessions.secret)))
        envs, _ = await load_environments(config, None, cleanup, lambda words: None, sessions=sessions)
        (checked,) = envs.values()

        async def rollout(number: int, example: Any) -> tuple[Outcome, list[Branch], list[Answer]]:
            noted = Noted(PolicySession(turns, tokenizer, seed=number))
            assert isinstance(noted, AnswersCalls)
            outcome = await checked.rollout(example, noted)
            return outcome, noted.policy.finished(outcome).branches, noted.answers

        tasks = [rollout(number, example) for number, example in enumerate(checked.examples("train"))]
        return await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)


def stretches(branch: Branch) -> list[tuple[list[int], list[float]]]:
    """The answers that have a loss in a branch: their tokens and log-probabilities."""
    marked = zip(branch.loss_mask_T, branch.token_ids_T, branch.logprobs_T, strict=True)
    groups = [list(group) for ours, group in itertools.groupby(marked, lambda each: each[0]) if ours]
    return [([ids for _, ids, _ in group], [logprob for _, _, logprob in group]) for group in groups]


async def test_a_prompt_that_is_too_long_is_a_fault_of_its_task(home: None, inference: str, smollm2: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"maximum context length is exceeded") as caught:
        await rollouts(smollm2, inference, bash(), {"earlier": LONG * 10, "num_tasks": 2})
    assert not isinstance(caught.value, Transient), "another try does not make it shorter"


@pytest.mark.parametrize(
    ("env", "taskset", "num_branches"),
    [
        (NULL, {}, 1),
        (NULL, {"earlier": "A poet."}, 1),
        (bash(), {"earlier": "A poet."}, 1),
        (bash(summarize_at_tokens=1), {"earlier": "A poet."}, 3),
        (bash(), {"earlier": LONG}, 3),
    ],
    ids=["null", "null-messages", "bash", "bash-compacts-at-a-count", "bash-compacts-before-the-end"],
)
async def test_what_a_harness_samples_is_recorded_as_it_was_sampled(
    home: None,
    policy: PreTrainedModel,
    inference: str,
    smollm2: Path,
    env: dict[str, Any],
    taskset: dict[str, Any],
    num_branches: int,
) -> None:
    found = await rollouts(smollm2, inference, env, taskset)
    assert len(found) == 4
    # A story that ends after a few words is not cut, so there is nothing to compact.
    assert Counter(len(branches) for _, branches, _ in found).most_common(1)[0][0] == num_branches
    for outcome, branches, answers in found:
        assert outcome.metrics["branches"] == len(branches), "as verifiers has them"
        recorded = [each for branch in branches for each in stretches(branch)]
        assert sorted(recorded) == sorted((each.token_ids, each.logprobs) for each in answers)
        for branch in branches:
            ids = torch.tensor([branch.token_ids_T])
            with torch.no_grad():
                logprobs_TV = torch.log_softmax(policy(ids).logits[0], dim=-1)
            at = [place for place, on in enumerate(branch.loss_mask_T) if on]
            expected = torch.stack([logprobs_TV[place - 1, branch.token_ids_T[place]] for place in at])
            torch.testing.assert_close(
                torch.tensor([branch.logprobs_T[place] for place in at]), expected, atol=TOLERANCE, rtol=0
            )


class RunsCommands(FakeInference):
    """Inference that has a shell count, sums up what it saw whenever it is asked to, and goes on to `LAST`."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.sampled: list[tuple[list[int], float]] = []

    async def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        asked = self._tokenizer.decode(body["prompt"])
        seen = max(map(int, re.findall(r"line (\d+)", asked)), default=0)
        command = {"name": "bash", "arguments": {"command": f"echo so many: line {seen + 1}; seq 1 400"}}
        text = f"<tool_call>\n{json.dumps(command)}\n</tool_call>"
        if "CONTEXT CHECKPOINT" in asked[-1000:]:
            text = f"I have seen line {seen}."
        elif seen == LAST:
            text = "There is nothing else."
        return 200, {"choices": [self._of(text) for _ in range(body["n"])]}

    def _of(self, text: str) -> dict[str, Any]:
        token_ids = [*self._tokenizer.encode(text, add_special_tokens=False).ids, IM_END]
        self.sampled.append((token_ids, -0.001 * (len(self.sampled) + 1)))
        logprobs = [self.sampled[-1][1]] * len(token_ids)
        return {"token_ids": token_ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": "stop", "text": ""}


LAST = 3


def answers_of(sample: TrainingSample) -> list[tuple[list[int], float]]:
    """The answers that have a loss in a sample, each with its log-probability."""
    stretches, logprobs = turns_of(sample), [each for each in sample.logprobs if each]
    assert len(logprobs) == sum(map(len, stretches)) == sum(sample.loss_mask)
    ends = itertools.accumulate(map(len, stretches))
    return [(ids, logprobs[end - 1]) for ids, end in zip(stretches, ends, strict=True)]


async def test_a_run_whose_harness_runs_commands_and_compacts(home: None, tmp_path: Path) -> None:
    """Each answer is in one sample, once; each sample begins with what the one before it summed up."""
    model, run = make_model(tmp_path / "model"), make_run(tmp_path)
    fake = RunsCommands(model)
    args = {"env": bash(summarize_at_tokens=1), "num_eval_examples": 1}
    async with serving(fake) as url, gateway_here(tmp_path):
        config = run_config(
            model,
            env=[{"id": "verifiers:small-talk", "args": args, "timeout_s": PATIENCE_S}],
            client={"base_url": url},
            max_steps=1,
            seq_len=16_384,
            advantage={"type": "batch"},
            sampling={"max_tokens": 200},
        )
        trainer = asyncio.create_task(stand_in_trainer(run))
        assert await asyncio.wait_for(run_to_the_end(config, run, lambda: False), PATIENCE_S) == 0
        trainer.cancel()

    samples = read_batch(run.rollout_file(1)).samples
    rollouts: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        rollouts.setdefault(sample.rollout_id, []).append(sample)
    assert len(rollouts) == 4 and all(len(each) == LAST + 1 for each in rollouts.values())
    used = [answer for sample in samples for answer in answers_of(sample)]
    assert len({logprob for _, logprob in used}) == len(used), "no answer is in two samples"
    assert all(answer in [(ids, pytest.approx(logprob)) for ids, logprob in fake.sampled] for answer in used)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for branches in rollouts.values():
        texts = [[tokenizer.decode(ids) for ids, _ in answers_of(sample)] for sample in branches]
        assert [len(each) for each in texts] == [2] * LAST + [1], "a call and its summary, and at last an answer"
        for earlier, later in itertools.pairwise(zip(branches, texts, strict=True)):
            before = tokenizer.decode(later[0].token_ids[: later[0].loss_mask.index(True)])
            assert earlier[1][-1] in before and "so many: line" not in before
