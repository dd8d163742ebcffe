"""The built-in environments: one instruction over one generated word, scored by how near the answer comes.

`reverse-text`, `sort-letters` and `upper-case` differ only in their `TextTask`. The reward is dense (each letter in
place counts), so that a group of rollouts nearly always has something to learn from; `exact_match` is what a person
would call right. Examples come from the seed alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from prime_rl.orchestrator.envs.base import BuiltInArgs, Example, Outcome, Policy, Split
from prime_rl.utils.tasks import (
    MAX_WORD_LEN,
    MIN_WORD_LEN,
    REVERSE,
    SORT,
    UPPER,
    TextTask,
    make_words,
    normalise,
    similarity,
)

TEXT_TASKS = {task.id: task for task in (REVERSE, SORT, UPPER)}
# The full wording of each task; the short one is its `TextTask.prompt`.
QUESTIONS = {
    REVERSE.id: "Spell the word {word} backwards. Answer with the result only, in lower case.",
    SORT.id: (
        "Sort the letters of the word {word} from a to z; a letter that occurs twice is written twice. "
        "Answer with the sorted letters only, in lower case, without blanks or commas between them."
    ),
    UPPER.id: "Write the word {word} in capital letters. Answer with the result only.",
}


class TextArgs(BuiltInArgs):
    """`[env.args]` of the three environments."""

    num_examples: int = Field(1000, ge=1, le=1_000_000)
    """Examples to train on."""

    num_eval_examples: int = Field(100, ge=1, le=1_000_000)
    """Examples to evaluate on."""

    min_len: int = Field(3, ge=MIN_WORD_LEN, le=MAX_WORD_LEN)
    """Letters of the shortest word."""

    max_len: int = Field(6, ge=MIN_WORD_LEN, le=MAX_WORD_LEN)
    """Letters of the longest word."""

    @model_validator(mode="after")
    def _lengths_are_a_range(self) -> Self:
        if self.min_len > self.max_len:
            raise ValueError(f"min_len: found {self.min_len}: must be at most max_len = {self.max_len}")
        return self


class TextEnvironment:
    """One `TextTask` as an `Environment`. Raises ValueError when there are not enough words of the asked lengths."""

    def __init__(self, task: TextTask, args: TextArgs, seed: int) -> None:
        self._task = task
        self._wording = args.wording
        counts: dict[Split, int] = {"train": args.num_examples, "eval": args.num_eval_examples}
        self._examples = {split: self._make(split, count, args, seed) for split, count in counts.items()}

    @property
    def id(self) -> str:
        """The id of its task, such as `reverse-text`."""
        return self._task.id

    def examples(self, split: Split) -> Sequence[Example]:
        """The words of a split, which were drawn at the start."""
        return self._examples[split]

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        """One turn: the answer is compared letter by letter."""
        answer = normalise(await policy.complete(example.messages))
        wanted = normalise(example.answer)
        return Outcome(similarity(answer, wanted), {"exact_match": float(answer == wanted)})

    def _make(self, split: Split, count: int, args: TextArgs, seed: int) -> list[Example]:
        # No environment's id in the seed: the tasks of one seed are set over the same words.
        rng = random.Random(f"{seed}/{split}")
        words = make_words(rng, count, args.min_len, args.max_len, split)
        return [self._example(f"{split}-{i}", word) for i, word in enumerate(words)]

    def _example(self, example_id: str, word: str) -> Example:
        full = self._wording == "full"
        prompt = QUESTIONS[self._task.id].format(word=word) if full else self._task.prompt(word)
        return Example(example_id, [{"role": "user", "content": prompt}], self._task.solve(word), {"text": word})
