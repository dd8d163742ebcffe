"""The built-in environments: examples and rewards."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from prime_rl.configs.envs import EnvConfig
from prime_rl.orchestrator.envs import Environment, Message, load_environment
from prime_rl.utils.tasks import TASKS

IDS = ["reverse-text", "sort-letters", "upper-case"]


def make(env_id: str, seed: int = 0, **args: Any) -> Environment:
    return load_environment(EnvConfig.model_validate({"id": env_id, "args": args}), seed)


class Says:
    """A policy that always answers the same."""

    def __init__(self, answer: str) -> None:
        self._answer = answer

    answer_lens: Sequence[int] = ()

    async def complete(self, messages: Sequence[Message]) -> str:
        return self._answer


RIGHT: dict[str, Callable[[str], str]] = {
    "reverse-text": lambda word: word[::-1],
    "sort-letters": lambda word: "".join(sorted(word)),
    "upper-case": str.upper,
}


async def rewards(env: Environment, answer: Callable[[str], str]) -> list[tuple[float, float]]:
    """Reward and `exact_match` of the answers to 50 words, each a function of the word."""
    examples = env.examples("train")[:50]
    outcomes = [await env.rollout(example, Says(answer(example.info["text"]))) for example in examples]
    assert all(set(outcome.metrics) == {"exact_match"} for outcome in outcomes)
    return [(outcome.reward, outcome.metrics["exact_match"]) for outcome in outcomes]


@pytest.mark.parametrize("env_id", IDS)
async def test_right_answers_have_reward_one(env_id: str) -> None:
    assert await rewards(make(env_id), lambda word: f" {RIGHT[env_id](word)}\n") == [(1.0, 1.0)] * 50


@pytest.mark.parametrize("env_id", IDS)
async def test_nearly_right_answers_lie_between(env_id: str) -> None:
    nearly = await rewards(make(env_id), lambda word: RIGHT[env_id](word)[:-1] + "?")
    nearer = await rewards(make(env_id), lambda word: RIGHT[env_id](word) + "?")
    assert all(0.5 < reward < 1.0 and exact == 0.0 for reward, exact in nearly)
    assert all(a < b < 1.0 for (a, _), (b, _) in zip(nearly, nearer, strict=True))


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize("answer", ["", "1234567", "?" * 500, "\x1b]0;7\x07"])
async def test_garbage_has_no_reward(env_id: str, answer: str) -> None:
    assert all(outcome == (0.0, 0.0) for outcome in await rewards(make(env_id), lambda _: answer))


@pytest.mark.parametrize("env_id", IDS)
async def test_rewards_stay_in_range(env_id: str) -> None:
    for answer in (
        lambda word: word,
        lambda word: word * 3,
        lambda word: word[:1],
        lambda word: RIGHT[env_id](word) * 2,
    ):
        assert all(0.0 <= reward <= 1.0 for reward, _ in await rewards(make(env_id), answer))


async def test_case_is_part_of_the_answer() -> None:
    env = make("upper-case")
    assert all(reward == 0.0 for reward, _ in await rewards(env, str.lower))


@pytest.mark.parametrize("env_id", IDS)
def test_examples(env_id: str) -> None:
    env = make(env_id, num_examples=300, num_eval_examples=40, min_len=4, max_len=5)
    train, held = env.examples("train"), env.examples("eval")
    assert (env.id, len(train), len(held)) == (env_id, 300, 40)
    for example in [*train, *held]:
        word = example.info["text"]
        assert 4 <= len(word) <= 5 and example.answer == RIGHT[env_id](word)
        (message,) = example.messages
        assert message["role"] == "user" and f"word {word} " in message["content"], "the full wording is the default"
    words = [example.info["text"] for example in train], [example.info["text"] for example in held]
    assert not set(words[0]) & set(words[1])
    assert len({example.id for example in train}) == 300 and len(set(words[0])) == 300


@pytest.mark.parametrize("env_id", IDS)
def test_the_short_wording_is_what_the_base_model_was_taught_and_changes_nothing_else(env_id: str) -> None:
    full, short = make(env_id), make(env_id, wording="short")
    for asked, taught in zip(full.examples("train"), short.examples("train"), strict=True):
        assert replace(asked, messages=taught.messages) == taught
        assert taught.messages == [{"role": "user", "content": TASKS[env_id].prompt(taught.info["text"])}]
        assert "Answer with" in asked.messages[0]["content"]
    with pytest.raises(ValueError, match=r"wording.*'long'"):
        make(env_id, wording="long")


def test_no_seed_trains_on_what_another_evaluates_on() -> None:
    train = {e.info["text"] for seed in range(3) for e in make("sort-letters", seed).examples("train")}
    held = {e.info["text"] for seed in range(3) for e in make("upper-case", seed).examples("eval")}
    assert train and held and not train & held


def test_examples_follow_from_the_seed() -> None:
    first, again, other = make("sort-letters", 5), make("sort-letters", 5), make("sort-letters", 6)
    for split in ("train", "eval"):
        assert list(first.examples(split)) == list(again.examples(split))  # type: ignore[arg-type]
        assert list(first.examples(split)) != list(other.examples(split))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"num_exmples": 3}, ["num_exmples", "unknown key; did you mean 'num_examples'?"]),
        ({"zzz": 3}, ["zzz", "unknown key; valid keys: ", "min_len", "max_len", "num_eval_examples"]),
        ({"num_examples": 0}, ["num_examples", "found 0"]),
        ({"num_examples": "many"}, ["num_examples", "found 'many'"]),
        ({"min_len": 6, "max_len": 5}, ["min_len", "found 6", "max_len = 5"]),
        ({"max_len": 1000}, ["max_len", "found 1000"]),
        ({"min_len": 1, "max_len": 1}, ["wanted 1000", "fewer examples"]),
    ],
)
def test_wrong_args_are_named_with_the_environment(args: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape("env 'sort-letters'")) as caught:
        make("sort-letters", **args)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)
