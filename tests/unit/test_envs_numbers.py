"""The built-in environments over numbers: `arithmetic`, and `guess-number` with its several turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from prime_rl.configs.envs import EnvConfig
from prime_rl.orchestrator.envs import Environment, Message, load_environment
from prime_rl.orchestrator.envs.built_in import last_number


def make(env_id: str, seed: int = 0, **args: Any) -> Environment:
    return load_environment(EnvConfig.model_validate({"id": env_id, "args": args}), seed)


class Says:
    """A policy that answers by a function of the conversation."""

    def __init__(self, answer: Callable[[Sequence[Message]], str]) -> None:
        self._answer = answer

    answer_lens: Sequence[int] = ()

    async def complete(self, messages: Sequence[Message]) -> str:
        return self._answer(messages)


@pytest.mark.parametrize("env_id", ["arithmetic", "guess-number"])
def test_examples_come_from_the_seed_and_the_splits_share_none(env_id: str) -> None:
    first, again, other = (make(env_id, seed, num_examples=200, num_eval_examples=20) for seed in (1, 1, 2))
    assert list(first.examples("train")) == list(again.examples("train")) != list(other.examples("train"))
    keys = [
        {(example.messages[0]["content"], example.answer) for example in env.examples(split)}
        for env in (first, other)
        for split in ("train", "eval")  # of another seed too: what was ever trained on is never evaluated on
    ]
    assert [len(of) for of in keys] == [200, 20, 200, 20]
    assert not (keys[0] | keys[2]) & (keys[1] | keys[3])


async def test_sums_are_right() -> None:
    env = make("arithmetic", num_examples=300, max_operand=20, operations=["+", "-", "*"])
    for example in env.examples("train"):
        (problem,) = re.fullmatch(r"Work out (.*)\. Answer with .*", example.messages[0]["content"]).groups()  # type: ignore[union-attr]
        right = str(eval(problem))
        for answer in (right, f"It is {right}.", f"2 + 2 = 4, and so: {right}\n"):
            outcome = await env.rollout(example, Says(lambda _, answer=answer: answer))
            single = {"exact_match": 1.0, "is_number": 1.0}
            assert (outcome.reward, outcome.metrics, outcome.rewards) == (1.0, single, single)


@pytest.mark.parametrize(
    ("env_id", "short", "full"),
    [
        ("arithmetic", "Compute: {}", "Work out {}. Answer with the result only, as a whole number in digits."),
        ("guess-number", "Guess a number from {}. Answer with the number only.", "Guess a number from {}. After each"),
    ],
)
def test_the_wordings_ask_the_same(env_id: str, short: str, full: str) -> None:
    for asked, taught in zip(
        *(make(env_id, wording=each).examples("train") for each in ("full", "short")), strict=True
    ):
        before, after = short.split("{}")
        problem = taught.messages[0]["content"].removeprefix(before).removesuffix(after)
        assert problem and taught.messages[0]["content"] == short.format(problem)
        assert asked.messages[0]["content"].startswith(full.format(problem)) and asked.answer == taught.answer


@pytest.mark.parametrize(("answer", "is_number"), [("", 0), ("no idea", 0), ("9" * 5000, 0), ("31", 1), ("-7", 1)])
async def test_wrong_sums_earn_at_most_half(answer: str, is_number: float) -> None:
    env = make("arithmetic", max_operand=10, num_examples=50, num_eval_examples=5)
    for example in env.examples("train"):
        if example.answer != answer:
            outcome = await env.rollout(example, Says(lambda _: answer))
            assert 0 <= outcome.reward <= 0.5
            assert outcome.metrics == {"exact_match": 0.0, "is_number": is_number}


def test_the_last_number_of_an_answer() -> None:
    assert [last_number(text) for text in ("3, then 007", "-0", "1.5", "x")] == ["7", "0", "5", None]


def halves(messages: Sequence[Message]) -> str:
    """The best strategy: the middle of what is still possible."""
    words = messages[0]["content"].split()
    low, high = int(words[4]), int(words[6].rstrip("."))
    for guess, reply in zip(messages[1::2], messages[2::2], strict=True):
        if reply["content"] == "higher":
            low = int(guess["content"]) + 1
        else:
            high = int(guess["content"]) - 1
    return str((low + high) // 2)


async def test_halving_finds_every_number_and_fewer_turns_earn_more() -> None:
    env = make("guess-number", num_numbers=16, max_turns=5)
    outcomes = [await env.rollout(example, Says(halves)) for example in env.examples("train")]
    assert all(outcome.metrics["found"] == 1.0 for outcome in outcomes)
    assert {(outcome.metrics["turns"], round(outcome.reward, 6)) for outcome in outcomes} == {
        (1.0, 1.0),
        (2.0, 0.8),
        (3.0, 0.6),
        (4.0, 0.4),
        (5.0, 0.2),
    }


async def test_a_rollout_that_never_finds_the_number_earns_less_and_more_for_coming_near() -> None:
    env = make("guess-number", num_numbers=16, max_turns=4)
    example = env.examples("train")[0]
    secret = int(example.answer)
    rewards = [
        (await env.rollout(example, Says(lambda _, off=off: f"I say {secret + off}"))).reward for off in (1, 5, 99)
    ]
    assert 0.25 > rewards[0] > rewards[1] > rewards[2] == 0.0
    silent = await env.rollout(example, Says(lambda _: "?"))
    assert (silent.reward, silent.metrics) == (0.0, {"found": 0.0, "turns": 4.0, "valid_share": 0.0})


async def test_the_game_is_told_in_turns() -> None:
    env = make("guess-number", num_numbers=8, max_turns=3)
    example = env.examples("train")[0]
    said = iter(["nothing", str(int(example.answer) - 1), example.answer])
    seen: list[list[Message]] = []

    def answer(messages: Sequence[Message]) -> str:
        seen.append(list(messages))
        return next(said)

    outcome = await env.rollout(example, Says(answer))
    assert outcome.reward == pytest.approx(1 / 3)
    assert [message["content"] for message in seen[-1][1:]] == [
        "nothing",
        "That is not a number.",
        str(int(example.answer) - 1),
        "higher",
    ]


@pytest.mark.parametrize(
    ("env_id", "args", "message"),
    [
        ("arithmetic", {"max_operand": 3, "num_examples": 500}, "found only .* different problems"),
        ("guess-number", {"num_numbers": 2, "num_examples": 5000}, "found only .* different games"),
        ("arithmetic", {"operations": ["/"]}, r"operations\.0"),
    ],
)
def test_wrong_arguments_are_named(env_id: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(env_id, **args)
