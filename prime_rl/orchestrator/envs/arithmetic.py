"""A small built-in environment: one sum to work out, scored by the digits that are right.

The last whole number of the answer counts, so that a chat model may talk first. A wrong number earns at most half, the
more the nearer its digits are, so that a group of rollouts has something to learn from before any of them is right.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field

from prime_rl.orchestrator.envs.base import BuiltInArgs, Example, Outcome, Policy, Split
from prime_rl.utils.tasks import draw_distinct, similarity

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
QUESTIONS = {
    "full": "Work out {problem}. Answer with the result only, as a whole number in digits.",
    "short": "Compute: {problem}",
}
NUMBER = re.compile(r"-?\d+")
# Of the reward, for a number that is not the right one.
WRONG_SHARE = 0.5


class ArithmeticArgs(BuiltInArgs):
    """`[env.args]` of `arithmetic`."""

    num_examples: int = Field(500, ge=1, le=1_000_000)
    """Examples to train on."""

    num_eval_examples: int = Field(50, ge=1, le=1_000_000)
    """Examples to evaluate on."""

    max_operand: int = Field(50, ge=1, le=1_000_000)
    """Highest of the two numbers, which begin at 0."""

    operations: list[Literal["+", "-", "*"]] = Field(default=["+", "-"], min_length=1)
    """What is done with them."""


class ArithmeticEnvironment:
    """One sum to work out. Raises ValueError when there are not enough different problems."""

    id = "arithmetic"

    def __init__(self, args: ArithmeticArgs, seed: int) -> None:
        counts: dict[Split, int] = {"train": args.num_examples, "eval": args.num_eval_examples}
        self._examples = {split: _make(split, count, args, seed) for split, count in counts.items()}

    def examples(self, split: Split) -> Sequence[Example]:
        """The sums of a split, which were made at the start."""
        return self._examples[split]

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        """One turn: the last whole number is the answer."""
        answer = last_number(await policy.complete(example.messages))
        exact = answer == example.answer
        reward = 1.0 if exact else WRONG_SHARE * similarity(answer or "", example.answer)
        single = {"exact_match": float(exact), "is_number": float(answer is not None)}
        return Outcome(reward, single, rewards=single)


def last_number(text: str) -> str | None:
    """The last whole number of `text` in plain form ("007" is "7"), or None."""
    found = NUMBER.findall(text)
    # Longer ones are never right here, and Python refuses to parse very long ones.
    return str(int(found[-1])) if found and len(found[-1]) <= 20 else None


def _make(split: Split, count: int, args: ArithmeticArgs, seed: int) -> list[Example]:
    rng = random.Random(f"{seed}/arithmetic/{split}")

    def draw() -> str:
        left, right = rng.randint(0, args.max_operand), rng.randint(0, args.max_operand)
        return f"{left} {rng.choice(args.operations)} {right}"

    problems = draw_distinct(draw, count, split)
    if len(problems) < count:
        raise ValueError(
            f"found only {len(problems)} different problems for the {split} split, wanted {count}: ask for fewer "
            "examples or for a higher max_operand"
        )
    return [_example(f"{split}-{i}", problem, args) for i, problem in enumerate(problems)]


def _example(example_id: str, problem: str, args: ArithmeticArgs) -> Example:
    left, operation, right = problem.split()
    answer = OPERATIONS[operation](int(left), int(right))
    question = QUESTIONS[args.wording].format(problem=problem)
    return Example(example_id, [{"role": "user", "content": question}], str(answer))
