"""The built-in environments: their examples come from the seed alone, and no answer needs more than a few tokens.

Rewards are dense, so that a group of rollouts nearly always has something to learn from, also before any of them is
right; `exact_match` and `found` are what a person would call right.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Sequence
from typing import Generic, Literal, Self, TypeVar

from pydantic import Field, model_validator

from prime_rl.configs.base import BaseConfig
from prime_rl.orchestrator.envs.base import Example, Message, Outcome, Policy, Split
from prime_rl.utils.tasks import (
    MAX_WORD_LEN,
    MIN_WORD_LEN,
    REVERSE,
    SORT,
    UPPER,
    draw_distinct,
    make_words,
    normalise,
    similarity,
)

TEXT_TASKS = {task.id: task for task in (REVERSE, SORT, UPPER)}
# The full wording of each task; the short one is its `TextTask.prompt`.
TEXT_QUESTIONS = {
    REVERSE.id: "Spell the word {word} backwards. Answer with the result only, in lower case.",
    SORT.id: (
        "Sort the letters of the word {word} from a to z; a letter that occurs twice is written twice. "
        "Answer with the sorted letters only, in lower case, without blanks or commas between them."
    ),
    UPPER.id: "Write the word {word} in capital letters. Answer with the result only.",
}
OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
SUM_QUESTIONS = {
    "full": "Work out {problem}. Answer with the result only, as a whole number in digits.",
    "short": "Compute: {problem}",
}
NUMBER = re.compile(r"-?\d+")
# Of the reward, for a number that is not the right one.
WRONG_SHARE = 0.5
# The intervals begin anywhere below this, so that there are more examples than numbers in one interval.
MAX_LOW = 1000
GUESS_QUESTIONS = {
    "full": (
        "Guess a number from {low} to {high}. After each guess you are told whether the number is higher or lower "
        "than your guess. Number of guesses: {turns}. Answer each time with one number only, in digits."
    ),
    "short": "Guess a number from {low} to {high}. Answer with the number only.",
}


class BuiltInArgs(BaseConfig):
    """The fields of `[env.args]` of every built-in environment."""

    wording: Literal["full", "short"] = "full"
    """How the policy is asked: "full" describes the task and which form of answer counts, as a chat model expects it;
    "short" is a few words, which is all that the base model of `prl make-base` was taught."""

    num_examples: int = Field(500, ge=1, le=1_000_000)
    """Examples to train on."""

    num_eval_examples: int = Field(50, ge=1, le=1_000_000)
    """Examples to evaluate on."""


ArgsT = TypeVar("ArgsT", bound=BuiltInArgs)


class BuiltIn(Generic[ArgsT]):
    """The examples of one environment, drawn at the start. Raises ValueError when there are not enough different ones.

    Those who inherit have two functions. `_draw(split, count, seed)` returns so many different texts, of which
    `_example` makes examples.
    """

    def __init__(self, env_id: str, args: ArgsT, seed: int) -> None:
        self.id, self._args = env_id, args
        counts: dict[Split, int] = {"train": args.num_examples, "eval": args.num_eval_examples}
        self._examples = {
            split: [self._example(f"{split}-{i}", text) for i, text in enumerate(self._draw(split, count, seed))]
            for split, count in counts.items()
        }

    def examples(self, split: Split) -> Sequence[Example]:
        """The examples of a split."""
        return self._examples[split]

    def _draw(self, split: Split, count: int, seed: int) -> list[str]:
        raise NotImplementedError

    def _example(self, example_id: str, text: str) -> Example:
        raise NotImplementedError


class TextArgs(BuiltInArgs):
    """`[env.args]` of `reverse-text`, `sort-letters` and `upper-case`."""

    num_examples: int = Field(1000, ge=1, le=1_000_000)

    num_eval_examples: int = Field(100, ge=1, le=1_000_000)

    min_len: int = Field(3, ge=MIN_WORD_LEN, le=MAX_WORD_LEN)
    """Letters of the shortest word."""

    max_len: int = Field(6, ge=MIN_WORD_LEN, le=MAX_WORD_LEN)
    """Letters of the longest word."""

    @model_validator(mode="after")
    def _lengths_are_a_range(self) -> Self:
        if self.min_len > self.max_len:
            raise ValueError(f"min_len: found {self.min_len}: must be at most max_len = {self.max_len}")
        return self


class TextEnvironment(BuiltIn[TextArgs]):
    """One `TextTask` over one generated word, scored by how many letters are in place."""

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        """One turn: the answer is compared letter by letter."""
        answer = normalise(await policy.complete(example.messages))
        wanted = normalise(example.answer)
        return Outcome(similarity(answer, wanted), {"exact_match": float(answer == wanted)})

    def _draw(self, split: Split, count: int, seed: int) -> list[str]:
        # No environment's id in the seed: the tasks of one seed are set over the same words.
        return make_words(random.Random(f"{seed}/{split}"), count, self._args.min_len, self._args.max_len, split)

    def _example(self, example_id: str, text: str) -> Example:
        task, full = TEXT_TASKS[self.id], self._args.wording == "full"
        prompt = TEXT_QUESTIONS[self.id].format(word=text) if full else task.prompt(text)
        return Example(example_id, [{"role": "user", "content": prompt}], task.solve(text), {"text": text})


class ArithmeticArgs(BuiltInArgs):
    """`[env.args]` of `arithmetic`."""

    max_operand: int = Field(50, ge=1, le=1_000_000)
    """Highest of the two numbers, which begin at 0."""

    operations: list[Literal["+", "-", "*"]] = Field(default=["+", "-"], min_length=1)
    """What is done with them."""


class ArithmeticEnvironment(BuiltIn[ArithmeticArgs]):
    """One sum to work out, scored by the digits that are right.

    The last whole number of the answer counts, so that a chat model may talk first. A wrong number earns at most half,
    the more the nearer its digits are.
    """

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        """One turn: the last whole number is the answer."""
        answer = last_number(await policy.complete(example.messages))
        exact = answer == example.answer
        reward = 1.0 if exact else WRONG_SHARE * similarity(answer or "", example.answer)
        single = {"exact_match": float(exact), "is_number": float(answer is not None)}
        return Outcome(reward, single, rewards=single)

    def _draw(self, split: Split, count: int, seed: int) -> list[str]:
        rng, most = random.Random(f"{seed}/{self.id}/{split}"), self._args.max_operand

        def draw() -> str:
            left, right = rng.randint(0, most), rng.randint(0, most)
            return f"{left} {rng.choice(self._args.operations)} {right}"

        return draw_distinct(draw, count, split, "problems", "a higher max_operand")

    def _example(self, example_id: str, text: str) -> Example:
        left, operation, right = text.split()
        answer = OPERATIONS[operation](int(left), int(right))
        question = SUM_QUESTIONS[self._args.wording].format(problem=text)
        return Example(example_id, [{"role": "user", "content": question}], str(answer))


class GuessNumberArgs(BuiltInArgs):
    """`[env.args]` of `guess-number`."""

    num_numbers: int = Field(32, ge=2, le=1_000_000)
    """How many numbers it can be."""

    max_turns: int = Field(8, ge=1, le=100)
    """Guesses until the game is lost."""


class GuessNumberEnvironment(BuiltIn[GuessNumberArgs]):
    """Several turns: guess a number, get "higher" or "lower", guess again.

    Fewer turns earn more. A rollout that never finds the number earns a little for coming near, always less than one
    that finds it in the last turn.
    """

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        """Up to `max_turns` turns. The last whole number of an answer is the guess; an answer without one is a turn."""
        secret, messages = int(example.answer), list(example.messages)
        nearest, num_valid = self._args.num_numbers, 0
        for turn in range(1, self._args.max_turns + 1):
            answer = await policy.complete(messages)
            number = last_number(answer)
            if number is not None:
                num_valid += 1
                nearest = min(nearest, abs(int(number) - secret))
                if nearest == 0:
                    return self._outcome(1 - (turn - 1) / self._args.max_turns, turn, num_valid, found=True)
            messages += [{"role": "assistant", "content": answer}, _reply(number, secret)]
        closeness = 1 - nearest / self._args.num_numbers
        return self._outcome(closeness / (2 * self._args.max_turns), turn, num_valid, found=False)

    def _outcome(self, reward: float, turns: int, num_valid: int, *, found: bool) -> Outcome:
        return Outcome(reward, {"found": float(found), "turns": float(turns), "valid_share": num_valid / turns})

    def _draw(self, split: Split, count: int, seed: int) -> list[str]:
        rng = random.Random(f"{seed}/{self.id}/{split}")

        def draw() -> str:
            low = rng.randrange(MAX_LOW)
            return f"{low} {low + rng.randrange(self._args.num_numbers)}"

        return draw_distinct(draw, count, split, "games", "more numbers")

    def _example(self, example_id: str, text: str) -> Example:
        low, secret = map(int, text.split())
        high = low + self._args.num_numbers - 1
        prompt = GUESS_QUESTIONS[self._args.wording].format(low=low, high=high, turns=self._args.max_turns)
        return Example(example_id, [{"role": "user", "content": prompt}], str(secret), {"low": low, "high": high})


def last_number(text: str) -> str | None:
    """The last whole number of `text` in plain form ("007" is "7"), or None."""
    found = NUMBER.findall(text)
    # Longer ones are never right here, and Python refuses to parse very long ones.
    return str(int(found[-1])) if found and len(found[-1]) <= 20 else None


def _reply(number: str | None, secret: int) -> Message:
    if number is None:
        return {"role": "user", "content": "That is not a number."}
    return {"role": "user", "content": "higher" if int(number) < secret else "lower"}
