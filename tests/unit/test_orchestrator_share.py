"""What the nodes of a group draw: by what earlier iterations made known, the same however the tasks are divided."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from prime_rl.configs.multinode import RUN_ID
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.types import JoinRequest, JoinResult, MakeRequest, TrainingBatch, read_batch
from prime_rl.multinode.place import Proofs
from prime_rl.multinode.records import RlPhase
from prime_rl.multinode.work import make_plan
from prime_rl.orchestrator import share
from prime_rl.orchestrator.envs import load_environment
from prime_rl.orchestrator.envs.base import Example, Outcome, Policy
from prime_rl.orchestrator.envs.built_in import ArithmeticEnvironment
from prime_rl.orchestrator.envs.checked import EnvironmentBroken
from prime_rl.orchestrator.sampler import ExampleSampler
from tests.orchestrator_support import IM_END, FakeInference, make_model, make_run, publish, run_config, serving

ITERATIONS, UPDATES, GROUPS = 3, 2, 8
SUMS = {"id": "arithmetic", "args": {"wording": "short", "num_examples": 6, "num_eval_examples": 2, "max_operand": 9}}
LEVELS = {
    "id": "reasoning-gym:chain_sum",
    "args": {"num_examples": 8, "num_eval_examples": 2, "curriculum": {"max_level": 2, "window": 4, "raise_at": 0.5}},
}


class SolvesSomeSums(FakeInference):
    """A model that answers each sum always right, always without a number, or right for every second seed."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def _choice(self, model: str, body: dict[str, Any], number: int) -> dict[str, Any]:
        problem = re.findall(r"\d+(?: [-+] \d+)+", self._tokenizer.decode(body["prompt"]))[-1]
        kind = sum(map(int, re.findall(r"\d", problem))) % 4
        is_right = kind < 2 or (kind == 2 and (body["seed"] + number) % 2 == 0)
        token_ids = [*self._tokenizer.encode(str(eval(problem)) if is_right else "no").ids, IM_END]
        logprobs = {"token_logprobs": [-0.5] * len(token_ids)}
        return {"token_ids": token_ids, "logprobs": logprobs, "finish_reason": "stop", "stop_reason": None, "text": ""}


class Group:
    """What the nodes of a group make of each iteration, one process after another; a stand-in publishes the updates."""

    def __init__(self, folder: Path, config: OrchestratorConfig, url: str, num_nodes: int) -> None:
        self.output = OutputDir(folder)
        self.run: RunDir = make_run(folder, RUN_ID)
        for made in (self.run.metrics, self.run.checkpoints):
            made.mkdir()
        self._url, self._num_nodes = url, num_nodes
        # One group at a time: what it makes known is there before the next one is drawn.
        self._config = config.replace(client={"base_url": url, "max_concurrent_requests": 2})

    async def iterate(self, iteration: int, *, lost_after: int | None = None) -> None:
        """With `lost_after`, the last node is lost after so many tasks, and the first makes the rest of its part."""
        # As after a restart: nothing of what is known comes from anywhere but the files.
        proofs = Proofs(self.output, RlPhase.BOTH, frozenset({"train"}), None, UPDATES, "key")
        version = proofs.version(iteration)
        state = proofs.sampler_state(version)
        folder = self.output.iteration(iteration)
        folder.path.mkdir(parents=True)
        tasks = [str(task) for task in range((iteration - 1) * GROUPS, iteration * GROUPS)]
        plan = make_plan(tasks, {}, dict.fromkeys(range(self._num_nodes), 1.0), iteration, version, state)
        sources: dict[str, str] = {}
        for rank, part in plan.parts.items():
            kept = len(part) if lost_after is None or rank != self._num_nodes - 1 else lost_after
            for maker, mine in ((rank, part[:kept]), (0, part[kept:])):
                path = folder.rank_file("train", maker, version, "key", "a")
                request = MakeRequest(
                    run=str(self.run.path),
                    base_url=self._url,
                    policy_version=version,
                    seq_len=512,
                    split="train",
                    tasks=list(mine),
                    rank_file=str(path),
                    sampler_state=dict(plan.sampler_state),
                )
                await share.make(request, self.run, self._config)
                sources |= dict.fromkeys(mine, str(path))
        result = await self.join(iteration, sources, state)
        folder.proof("update").write_bytes(msgspec.json.encode(result))
        for step in result.steps:
            publish(self.run, step)

    async def join(self, iteration: int, sources: dict[str, str], state: dict[str, Any]) -> JoinResult:
        steps = [(iteration - 1) * UPDATES + number + 1 for number in range(UPDATES)]
        request = JoinRequest(
            run=str(self.run.path), split="train", sources=sources, steps=steps, result="", sampler_state=state
        )
        result = await share.join(request, self.run, self._config)
        if iteration == 2:  # of a node that was killed after its batches and before its proof
            assert await share.join(request, self.run, self._config) == result
        return result

    def batches(self) -> list[TrainingBatch]:
        return [read_batch(self.run.rollout_file(step + 1)) for step in range(ITERATIONS * UPDATES)]

    def figures(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.run.orchestrator_metrics.read_text().splitlines()]
        return [{name: value for name, value in line.items() if name != "time"} for line in lines]


async def made_by(folder: Path, config: OrchestratorConfig, url: str, num_nodes: int, lost: int | None = None) -> Group:
    group = Group(folder, config, url, num_nodes)
    for iteration in range(1, ITERATIONS + 1):
        await group.iterate(iteration, lost_after=lost if iteration == 3 else None)
    return group


def drawn(group: Group) -> list[str]:
    """The examples of all batches, in order."""
    return [sample.example_id for batch in group.batches() for sample in batch.samples[::2]]


async def both(tmp_path: Path, env: dict[str, Any], settled_share: float) -> tuple[Group, Group]:
    """The same run made by one node, and by two of which one is lost."""
    model = make_model(tmp_path / "model")
    over = {"seq_len": 512, "batch_size": GROUPS // UPDATES * 2, "max_steps": ITERATIONS * UPDATES, "env": [env]}
    config = run_config(model, **over, max_async_level=UPDATES - 1, settled_share=settled_share)
    async with serving(SolvesSomeSums(model)) as url:
        one = await made_by(tmp_path / "one", config, url, 1)
        two = await made_by(tmp_path / "two", config, url, 2, lost=1)
    return one, two


async def test_settled_examples_are_the_same_on_one_node_and_on_two(tmp_path: Path) -> None:
    one, two = await both(tmp_path, SUMS, settled_share=0.1)
    assert two.batches() == one.batches() and two.figures() == one.figures()
    env = load_environment(run_config(tmp_path, env=[SUMS]).env[0], run_config(tmp_path).seed)
    sampler = ExampleSampler({"arithmetic": env}, run_config(tmp_path).seed)
    plain = [f"arithmetic/{sampler.pick(index).example.id}" for index in range(ITERATIONS * GROUPS)]
    assert drawn(one)[:GROUPS] == plain[:GROUPS], "nothing is known of the examples yet"
    assert drawn(one) != plain
    figures = one.figures()[-1]
    assert figures["env/arithmetic/settled_right"] > 0 and figures["env/arithmetic/settled_wrong"] > 0


def spoil(monkeypatch: pytest.MonkeyPatch, *example_ids: str) -> None:
    """Rollouts of these examples fail, each time."""
    real = ArithmeticEnvironment.rollout

    async def rollout(self: ArithmeticEnvironment, example: Example, policy: Policy) -> Outcome:
        if example.id in example_ids:
            raise KeyError("answer")
        return await real(self, example, policy)

    monkeypatch.setattr(ArithmeticEnvironment, "rollout", rollout)


async def test_an_unusable_example_is_left_out_on_one_node_and_on_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, "train-1", "train-4")
    one, two = await both(tmp_path, SUMS, settled_share=1.0)
    assert two.batches() == one.batches() and two.figures() == one.figures()
    whole, unusable = GROUPS // UPDATES * 2, [line["examples_unusable"] for line in one.figures()]
    assert sum(unusable) >= 2
    assert [len(batch.samples) for batch in one.batches()] == [whole - 2 * number for number in unusable]
    assert not {"arithmetic/train-1", "arithmetic/train-4"} & set(drawn(one))


async def test_a_run_whose_examples_are_all_unusable_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, *(f"train-{number}" for number in range(6)))
    with pytest.raises(EnvironmentBroken, match=r"all 6 examples are unusable; last: KeyError: 'answer' in example "):
        await both(tmp_path, SUMS, settled_share=1.0)


async def test_an_update_needs_no_environment_where_no_draw_depends_on_rewards(tmp_path: Path) -> None:
    one, two = await both(tmp_path, SUMS, settled_share=1.0)
    assert two.batches() == one.batches()
    assert one.batches()[-1].sampler_state == {"next_index": ITERATIONS * GROUPS}
    rewards = {"reward/mean", "reward/exact_match/mean", "reward/is_number/mean", "examples_unusable"}
    assert all(line.keys() == {"step", *rewards} for line in one.figures()), "nothing of the examples"


@pytest.mark.release
@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs reasoning-gym")
async def test_levels_are_the_same_on_one_node_and_on_two(tmp_path: Path) -> None:
    one, two = await both(tmp_path, LEVELS, settled_share=0.5)
    assert two.batches() == one.batches() and two.figures() == one.figures()
    levels = [line["env/chain_sum/level"] for line in one.figures()]
    assert levels[0] == 0 and max(levels) > 0
    names = [re.findall(r"train-(\d)-", name)[0] for name in drawn(one)]
    assert set(names[:GROUPS]) == {"0"} and set(names) > {"0"}
