"""Demonstrations for supervised learning: a prompt and an answer, right or wrong. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from prime_rl.base_model.recipe import Recipe
from prime_rl.utils.tasks import CONSONANTS, TASKS, VOWELS, TextTask, make_train_word

# Of the letters of a careless answer, these parts are mistaken and lost.
MISTAKEN_SHARE = 0.15
LOST_SHARE = 0.07


@dataclass(frozen=True)
class Demonstration:
    """A prompt, and the answer that the model is taught to give to it."""

    prompt: str
    answer: str


class Demonstrator:
    """An endless stream of demonstrations from one seed. No word of the eval split is ever shown."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._rng = random.Random(recipe.seed)
        self._tasks = [TASKS[task_id] for task_id, _ in recipe.task_weights]
        self._weights = [weight for _, weight in recipe.task_weights]

    def batch(self, *, clean: bool) -> list[Demonstration]:
        """The next `batch_size` demonstrations: all right when `clean`, else of mixed quality."""
        return [self._next(clean) for _ in range(self._recipe.batch_size)]

    def _next(self, clean: bool) -> Demonstration:
        task = self._task()
        word = make_train_word(self._rng, self._recipe.min_len, self._recipe.max_len)
        return Demonstration(task.prompt(word), task.solve(word) if clean else self._mixed(task, word))

    def _mixed(self, task: TextTask, word: str) -> str:
        kind = self._rng.random()
        if kind < self._recipe.other_task_share:
            return self._rng.choice(self._tasks).solve(word)
        answer = task.solve(word)
        return self._careless(answer) if kind < self._recipe.other_task_share + self._recipe.careless_share else answer

    def _careless(self, answer: str) -> str:
        letters = []
        for letter in answer:
            luck = self._rng.random()
            if luck < MISTAKEN_SHARE:
                letters.append(self._rng.choice(CONSONANTS + VOWELS))
            elif luck >= MISTAKEN_SHARE + LOST_SHARE:
                letters.append(letter)
        return "".join(letters) or answer

    def _task(self) -> TextTask:
        return self._rng.choices(self._tasks, self._weights)[0]
