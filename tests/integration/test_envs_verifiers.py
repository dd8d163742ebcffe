"""A run whose environment is a taskset of `verifiers` with a tool: real verifiers, real tool server, real HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer

from prime_rl.configs.base import ConfigError
from prime_rl.configs.envs import EnvConfig
from prime_rl.contract.status import RunStatus, read_status
from prime_rl.contract.types import TrainingSample, read_batch
from prime_rl.orchestrator.envs import ProcessEnvironment
from prime_rl.orchestrator.orchestrator import run_to_the_end
from tests.gateway_daemon import gateway_here
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

TASKSETS = Path(__file__).parents[1] / "tasksets"


class LooksIntoTheBox(FakeInference):
    """Inference that calls the tool and then answers with the word, now and then with too many words around it."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.sampled: list[list[int]] = []

    async def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        prompt = self._tokenizer.decode(body["prompt"])
        return 200, {"choices": [self._choice(prompt, body["seed"] + number) for number in range(body["n"])]}

    def _choice(self, prompt: str, seed: int) -> dict[str, Any]:
        found = re.search(r"holds the word (\w+)", prompt)
        if found:
            text = f"{found[1]}, as the box says to me" if seed % 2 else found[1]
        else:
            number = re.findall(r"in box (\d)", prompt)[-1]
            text = f'<tool_call>\n{{"name": "box_look", "arguments": {{"number": {number}}}}}\n</tool_call>'
        token_ids = [*self._tokenizer.encode(text, add_special_tokens=False).ids, IM_END]
        self.sampled.append(token_ids)
        logprobs = [-0.01 * len(self.sampled)] * len(token_ids)
        return {"token_ids": token_ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": "stop", "text": ""}


def turns_of(sample: TrainingSample) -> list[list[int]]:
    """The stretches of tokens that are trained on."""
    marked = zip(sample.loss_mask, sample.token_ids, strict=True)
    return [[token for _, token in group] for is_ours, group in itertools.groupby(marked, lambda m: m[0]) if is_ours]


def check_sample(sample: TrainingSample, fake: LooksIntoTheBox, prompts: list[Any]) -> None:
    """Both turns of the policy have a loss and the advantages of the taskset; the rest is the prompt and the tool's."""
    turns = turns_of(sample)
    assert len(turns) == 2 and all(turn in fake.sampled for turn in turns)
    assert sum(sample.loss_mask) == sum(map(len, turns))
    # The second prompt is the first, the first answer as it was sampled, and the tool's result.
    assert sample.token_ids[: len(sample.token_ids) - len(turns[1])] in prompts
    assert all((logprob != 0.0) == ours for logprob, ours in zip(sample.logprobs, sample.loss_mask, strict=True))
    assert sample.reward == (1.0 if len(turns[1]) < 20 else 0.75)
    assert sample.example_id in {"word-box/task-1", "word-box/task-3", "word-box/task-4"}
    own = [value for value, ours in zip(sample.token_advantages, sample.loss_mask, strict=False) if ours]
    first, second = ([0.5] * len(turns[0]), [float(at) for at in range(len(turns[1]))])
    assert (
        own
        == {
            "word-box/task-1": first + second,
            "word-box/task-3": [],
            "word-box/task-4": first + [0.0] * len(second),
        }[sample.example_id]
    )


@pytest.mark.release
async def test_a_run_on_a_taskset_with_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{TASKSETS}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")
    monkeypatch.setenv("HOME", str(tmp_path))  # verifiers keeps the folders of its rollouts below it
    before = set(psutil.Process().children(recursive=True))
    model, run = make_model(tmp_path / "model"), make_run(tmp_path)
    fake = LooksIntoTheBox(model)
    # The rewards of tasks 2 and 5 raise.
    args = {"taskset": {"num_tasks": 6, "faults": ["raise", "lose"], "credits": True}, "num_eval_examples": 1}
    async with serving(fake) as url, gateway_here(tmp_path):
        config = run_config(
            model,
            env=[{"id": "verifiers:word-box", "args": args}],
            client={"base_url": url},
            max_steps=2,
            seq_len=2000,
            max_env_failure_share=1.0,
            sampling={"max_tokens": 200},
            eval={"interval": 2, "num_examples": 4},
        )
        trainer = asyncio.create_task(stand_in_trainer(run))
        orchestrator = asyncio.create_task(run_to_the_end(config, run, lambda: False))

        def says_that_it_loads() -> bool:
            status = read_status(run.status, RunStatus)
            return status is not None and "loading verifiers:word-box" in (status.waiting_on or "")

        await until(says_that_it_loads, "the status to say what takes so long")
        assert await asyncio.wait_for(orchestrator, PATIENCE_S) == 0
        trainer.cancel()

    prompts = [body["prompt"] for path, body in fake.requests if path == "/v1/completions"]
    samples = [sample for step in (1, 2) for sample in read_batch(run.rollout_file(step)).samples]
    assert len(samples) == 8
    for sample in samples:
        check_sample(sample, fake, prompts)
    lines = [json.loads(line) for line in run.orchestrator_metrics.read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    for line in steps:
        assert (line["env/word-box/looks"], line["env/word-box/says_the_word"], line["env/word-box/turns"]) == (1, 1, 2)
        assert line["reward/word-box"] == pytest.approx(0.75 + 0.25 * line["env/word-box/is_short"])
        for name in ("says_the_word", "is_short"):
            assert line[f"reward/{name}/mean"] == line[f"env/word-box/{name}"]
    assert (steps[-1]["examples_unusable"], steps[-1]["groups_dropped"]) == (1, 1)
    status = read_status(run.status, RunStatus)
    assert status is not None and status.unusable.keys() == {"word-box/task-2"}, "a lost connection is no task's fault"
    assert lines[-1]["eval/word-box/reward"] >= 0.75
    assert "verifiers.v1" not in sys.modules, "the orchestrator itself does not load it"
    await until(
        lambda: not any(p.is_running() for p in set(psutil.Process().children(recursive=True)) - before),
        "the processes to end",
    )


async def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    env = ProcessEnvironment(EnvConfig(id="verifiers:word-box"), seed=0)
    with pytest.raises(ConfigError) as error:
        await env.start()
    assert str(error.value) == (
        "env 'verifiers:word-box': not installed: verifiers; pip install \"prl-multirun[environments]\""
    )


HANGS = """
import asyncio
from prime_rl.orchestrator.envs import verifiers_env as ours

async def hangs(self, runtime):
    await asyncio.Event().wait()

async def main():
    ours.SETUP_TIMEOUT_S, ours.ChatHarness.setup = 0.1, hangs
    async with ours.VerifiersEnvironment("word-box", {"num_eval_examples": 1}, 0).serving():
        raise AssertionError

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_harness_whose_setup_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{TASKSETS}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")
    monkeypatch.setenv("HOME", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert last == "TimeoutError: the setup of harness 'prime_rl_chat' (uv, network) took longer than 0.1 s"
