"""Families of the real reasoning-gym as environments: its examples, its scores, in a process of their own."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

from prime_rl.configs.base import ConfigError
from prime_rl.configs.envs import BROKEN, FAMILIES, INSTRUCTION, VERSION, WITHOUT_CURRICULUM, EnvConfig
from prime_rl.configs.validate import load_run_config
from prime_rl.contract.types import read_batch
from prime_rl.orchestrator.envs import Example, Message, ProcessEnvironment
from prime_rl.orchestrator.orchestrator import run_to_the_end
from tests.budgets import in_full
from tests.orchestrator_support import (
    IM_END,
    FakeInference,
    make_model,
    make_run,
    run_config,
    serving,
    stand_in_trainer,
)
from tests.patience import PATIENCE_S
from tests.system_support import ROOT

if TYPE_CHECKING:
    from prime_rl.orchestrator.envs.reasoning_gym_env import ReasoningGymEnvironment

if find_spec("reasoning_gym") is None:
    pytest.skip("reasoning_gym is not installed: a part of it needs a C compiler", allow_module_level=True)
# It takes a second to import, and no other tests do: one worker has them all.
pytestmark = pytest.mark.xdist_group("reasoning_gym")

SEED = 3
NUM_EVAL, NUM_TRAIN = 4, 12
EASY = ("chain_sum", "spell_backward", "letter_counting", "leg_counting", "gcd", "number_sorting")


class Says:
    """A policy that always answers the same."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.heard: Sequence[Message] = ()
        self.answer_lens: list[int] = []

    async def complete(self, messages: Sequence[Message]) -> str:
        self.heard = messages
        self.answer_lens.append(1)
        return self.text


class Knows:
    """A policy that looks up what is asked: answer by question."""

    def __init__(self, answers: dict[str, str]) -> None:
        self._answers = answers
        self.answer_lens: list[int] = []

    async def complete(self, messages: Sequence[Message]) -> str:
        self.answer_lens.append(1)
        return f"<answer>{self._answers[messages[-1]['content']]}</answer>"


def environment(family: str, **args: object) -> ReasoningGymEnvironment:
    from prime_rl.orchestrator.envs.reasoning_gym_env import ReasoningGymEnvironment

    return ReasoningGymEnvironment(family, {"num_examples": NUM_TRAIN, "num_eval_examples": NUM_EVAL, **args}, SEED)


def asked(examples: Sequence[Example]) -> list[str]:
    return [example.messages[-1]["content"] for example in examples]


@pytest.mark.parametrize("family", EASY)
async def test_examples_and_scores_are_the_librarys_own(family: str) -> None:
    env = environment(family)
    import reasoning_gym

    theirs = reasoning_gym.create_dataset(family, seed=SEED, size=NUM_EVAL + NUM_TRAIN)
    entries = [theirs[number] for number in range(NUM_EVAL + NUM_TRAIN)]
    assert [each.messages[-1]["content"] for each in env.examples("eval")] == [
        e["question"] for e in entries[:NUM_EVAL]
    ]
    held = {entry["question"] for entry in entries[:NUM_EVAL]}
    questions = [entry["question"] for entry in entries[NUM_EVAL:] if entry["question"] not in held]
    assert [each.messages[-1]["content"] for each in env.examples("train")] == questions
    entry, example = entries[0], env.examples("eval")[0]
    for answer in (str(entry["answer"]), "7", "", "no idea"):
        for text in (f"I think <answer>wrong</answer>, or rather <answer> {answer} </answer>", answer):
            outcome = await env.rollout(example, Says(text))
            assert outcome.reward == theirs.score_answer(answer, entry)
            assert outcome.metrics["tagged"] == float("<answer>" in text)
            assert outcome.rewards == {"score": outcome.reward, "tagged": outcome.metrics["tagged"]}
    assert (await env.rollout(example, Says(str(entry["answer"])))).metrics["solved"] == 1.0


async def test_the_policy_is_told_which_form_counts() -> None:
    policy = Says("")
    env = environment("gcd")
    await env.rollout(env.examples("train")[0], policy)
    assert [message["role"] for message in policy.heard] == ["system", "user"]
    assert policy.heard[0]["content"] == INSTRUCTION
    assert environment("gcd", instruction="").examples("train")[0].messages[0]["role"] == "user"


def test_settings_are_the_familys_own_and_small_ones_repeat_no_example_of_the_evaluation() -> None:
    env = environment("chain_sum", settings={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    assert not set(asked(env.examples("eval"))) & set(asked(env.examples("train")))
    with pytest.raises(TypeError, match="max_words"):
        environment("chain_sum", settings={"max_words": 2})


FAMILIES_OF_RECIPES = [
    env.id.partition(":")[2]
    for recipe in ("qwen3-0.6b-gsm8k/gsm8k.toml", "qwen3-4b-math/math.toml")
    for env in load_run_config(ROOT / "configs" / "recipes" / recipe).env
]


@pytest.mark.parametrize("family", FAMILIES_OF_RECIPES)
async def test_the_families_of_the_recipes_are_mathematics_and_take_their_own_answers(family: str) -> None:
    from reasoning_gym.factory import DATASETS

    assert DATASETS[family][0].__module__.split(".")[1] in ("algebra", "arithmetic", "geometry")
    env = environment(family)
    for example in env.examples("eval"):
        outcome = await env.rollout(example, Says(f"<answer>{example.answer}</answer>"))
        assert outcome.reward == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(BROKEN))
def test_families_that_are_refused_score_their_own_answer_low(family: str) -> None:
    """When a new version of the library has mended one, this fails, and the family is welcome."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(family, seed=SEED, size=5)
    scores = [dataset.score_answer(dataset[number]["answer"], dataset[number]) for number in range(5)]
    assert min(scores) < 1.0


def test_the_families_of_the_configs_are_those_of_the_library() -> None:
    """A config is checked without the library: what is allowed is a list, which must be the library's own."""
    assert version("reasoning-gym") == VERSION, "write the lists of prime_rl/configs/envs.py again"
    from reasoning_gym.factory import DATASETS

    assert set(DATASETS) == FAMILIES and BROKEN < FAMILIES


async def test_settings_that_the_family_does_not_have_are_told_when_it_is_loaded() -> None:
    env = ProcessEnvironment(EnvConfig(id="reasoning-gym:gcd", args={"settings": {"max_words": 2}}), seed=0)
    with pytest.raises(ConfigError, match="max_words"):
        await env.start()
    await env.close()


async def test_it_runs_in_a_process_of_its_own() -> None:
    env = ProcessEnvironment(EnvConfig(id="reasoning-gym:spell_backward", args={"num_examples": 5}), seed=SEED)
    try:
        await env.start()
        outcome = await env.rollout(env.examples("train")[0], Says("<answer>nothing</answer>"))
        assert outcome.metrics == {"solved": 0.0, "tagged": 1.0}
    finally:
        await env.close()


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of the library's own data
@pytest.mark.parametrize("family", ["arc_agi", *in_full("rearc")])
async def test_grids_are_right_across_the_process(family: str) -> None:
    """These two score their own answer wrong after their entries were JSON. Entries stay in the process here."""
    args = {"num_examples": 4, "num_eval_examples": 2}
    import reasoning_gym

    theirs = reasoning_gym.create_dataset(family, seed=SEED, size=6)
    answers = {theirs[number]["question"]: theirs[number]["answer"] for number in range(6)}
    env = ProcessEnvironment(EnvConfig(id=f"reasoning-gym:{family}", args=args), seed=SEED)
    try:
        await env.start()
        for example in [*env.examples("train"), *env.examples("eval")]:
            assert (await env.rollout(example, Knows(answers))).metrics == {"solved": 1.0, "tagged": 1.0}
            assert (await env.rollout(example, Says("<answer>0</answer>"))).metrics == {"solved": 0.0, "tagged": 1.0}
    finally:
        await env.close()


async def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        ConfigError,
        match=r'env .reasoning-gym:gcd.: not installed: reasoning_gym; pip install "prl-multirun\[environments\]"',
    ):
        await ProcessEnvironment(EnvConfig(id="reasoning-gym:gcd"), seed=0).start()


def test_each_level_has_its_own_examples_and_settings_hold_at_all_of_them() -> None:
    plain, env = environment("chain_sum"), environment("chain_sum", curriculum={"max_level": 2})
    assert asked(env.examples("eval")) == asked(plain.examples("eval")), "evaluations can be compared over the levels"
    train = env.examples("train")
    assert [sum(each.level == level for each in train) for level in range(4)] == [NUM_TRAIN] * 3 + [0]
    assert len({each.id for each in train}) == len(train) and list(train) == list(
        environment("chain_sum", curriculum={"max_level": 2}).examples("train")
    )
    sizes = [max(len(each.answer.lstrip("-")) for each in train if each.level == level) for level in range(3)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[2], "more terms and more digits"
    held = environment("chain_sum", curriculum={"max_level": 2}, settings={"max_digits": 1})
    assert all(abs(int(each.answer)) < 40 for each in held.examples("train")), "at most four terms of one digit"


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("caesar_cipher", {}, "caesar_cipher has no level 2 with these settings .* set curriculum.max_level below 2"),
        ("chain_sum", {"max_terms": 1}, "max_terms"),
    ],
)
def test_a_level_that_the_library_cannot_make_is_told(family: str, settings: dict[str, int], message: str) -> None:
    with pytest.raises((ValueError, AssertionError), match=message):
        environment(family, curriculum={}, settings=settings)


def test_the_families_without_levels_are_those_of_the_library() -> None:
    from reasoning_gym.factory import CURRICULA, DATASETS

    assert set(DATASETS) - set(CURRICULA) == WITHOUT_CURRICULUM


class SolvesSums(FakeInference):
    """A model that answers every sum right."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def _choice(self, model: str, body: dict[str, Any], number: int) -> dict[str, Any]:
        text = self._tokenizer.decode(body["prompt"])
        (problem,) = re.findall(r"problem: ([-+\d ]+) =", text)
        token_ids = [*self._tokenizer.encode(str(eval(problem))).ids, IM_END]
        logprobs = {"token_logprobs": [-0.5] * len(token_ids)}
        return {"token_ids": token_ids, "logprobs": logprobs, "finish_reason": "stop", "stop_reason": None, "text": ""}


@pytest.mark.slow
async def test_a_run_climbs_and_goes_on_at_its_level_after_a_restart(tmp_path: Path) -> None:
    model, run = make_model(tmp_path / "model"), make_run(tmp_path / "workspace")
    args = {"num_examples": 8, "num_eval_examples": 2, "curriculum": {"max_level": 2, "window": 2}}
    over = {"seq_len": 512, "max_async_level": 0, "env": [{"id": "reasoning-gym:chain_sum", "args": args}]}
    async with serving(SolvesSums(model)) as url:
        trainer = asyncio.create_task(stand_in_trainer(run))
        for max_steps in (2, 4):
            config = run_config(model, **over, max_steps=max_steps, client={"base_url": url})
            assert await asyncio.wait_for(run_to_the_end(config, run, lambda: False), PATIENCE_S) == 0
        trainer.cancel()
    batches = [read_batch(run.rollout_file(step)) for step in range(1, 5)]
    levels = [{sample.example_id.split("-")[1] for sample in batch.samples} for batch in batches]
    assert levels == [{"0"}, {"1"}, {"2"}, {"2"}]
    lines = [json.loads(line) for line in run.orchestrator_metrics.read_text().splitlines()]
    assert [line["env/chain_sum/level"] for line in lines if "env/chain_sum/level" in line] == [1, 2, 2, 2]
