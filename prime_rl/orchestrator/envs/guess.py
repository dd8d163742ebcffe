"""The built-in environment of several turns: guess a number, get "higher" or "lower", guess again.

Fewer turns earn more. A rollout that never finds the number earns a little for coming near, always less than one that
finds it in the last turn, so a group in which none finds it still has something to learn from.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from prime_rl.orchestrator.envs.arithmetic import last_number
from prime_rl.orchestrator.envs.base import BuiltInArgs, Example, Message, Outcome, Policy, Split
from prime_rl.utils.tasks import draw_distinct

# The intervals begin anywhere below this, so that there are more examples than numbers in one interval.
MAX_LOW = 1000
QUESTIONS = {
    "full": (
        "Guess a number from {low} to {high}. After each guess you are told whether the number is higher or lower "
        "than your guess. Number of guesses: {turns}. Answer each time with one number only, in digits."
    ),
    "short": "Guess a number from {low} to {high}. Answer with the number only.",
}


class GuessNumberArgs(BuiltInArgs):
    """`[env.args]` of `guess-number`."""

    num_examples: int = Field(500, ge=1, le=1_000_000)
    """Examples to train on."""

    num_eval_examples: int = Field(50, ge=1, le=1_000_000)
    """Examples to evaluate on."""

    num_numbers: int = Field(32, ge=2, le=1_000_000)
    """How many numbers it can be."""

    max_turns: int = Field(8, ge=1, le=100)
    """Guesses until the game is lost."""


class GuessNumberEnvironment:
    """The game. Raises ValueError when there are not enough different examples."""

    id = "guess-number"

    def __init__(self, args: GuessNumberArgs, seed: int) -> None:
        self._args = args
        counts: dict[Split, int] = {"train": args.num_examples, "eval": args.num_eval_examples}
        self._examples = {split: self._make(split, count, seed) for split, count in counts.items()}

    def examples(self, split: Split) -> Sequence[Example]:
        """The games of a split, which were drawn at the start."""
        return self._examples[split]

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

    def _make(self, split: Split, count: int, seed: int) -> list[Example]:
        rng = random.Random(f"{seed}/guess-number/{split}")

        def draw() -> str:
            low = rng.randrange(MAX_LOW)
            return f"{low} {low + rng.randrange(self._args.num_numbers)}"

        drawn = draw_distinct(draw, count, split)
        if len(drawn) < count:
            raise ValueError(
                f"found only {len(drawn)} different games for the {split} split, wanted {count}: ask for fewer "
                "examples or for more numbers"
            )
        return [self._example(f"{split}-{i}", *map(int, pair.split())) for i, pair in enumerate(drawn)]

    def _example(self, example_id: str, low: int, secret: int) -> Example:
        high = low + self._args.num_numbers - 1
        prompt = QUESTIONS[self._args.wording].format(low=low, high=high, turns=self._args.max_turns)
        return Example(example_id, [{"role": "user", "content": prompt}], str(secret), {"low": low, "high": high})


def _reply(number: str | None, secret: int) -> Message:
    if number is None:
        return {"role": "user", "content": "That is not a number."}
    return {"role": "user", "content": "higher" if int(number) < secret else "lower"}
