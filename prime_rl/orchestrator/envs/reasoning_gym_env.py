"""Any family of `reasoning-gym` as an `Environment`. Imported only in the process of such an environment (`child`).

Examples and scores are the library's own, and the same for the same seed. Training and evaluation have different
examples: of one dataset, or with a curriculum the training examples of a dataset for each level.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS, create_curriculum

from prime_rl.configs.envs import PROVIDER, ReasoningGymArgs, read_args
from prime_rl.orchestrator.envs.base import Example, Message, Outcome, Policy, Split

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# The library makes an example from the sum of a dataset's seed and the example's number: more than there are numbers.
LEVEL_SEEDS = 1_000_000


class ReasoningGymEnvironment:
    """One family. Raises ValueError when it lacks examples or a level, and what the library raises for its settings."""

    def __init__(self, family: str, args: dict[str, Any], seed: int) -> None:
        config = read_args(family, args)
        self.id = f"{PROVIDER}:{family}"
        self._instruction = config.instruction
        # By example id: the dataset, and its entry.
        self._entries: dict[str, tuple[Any, dict[str, Any]]] = {}
        num_eval, num_train = config.num_eval_examples, config.num_examples
        plain = reasoning_gym.create_dataset(family, **{"seed": seed, "size": num_eval + num_train, **config.settings})
        held = [self._example(f"eval-{number}", plain, number) for number in range(num_eval)]
        numbers = range(num_eval, num_eval + num_train)
        if config.curriculum is None:
            train = self._unlike(held, [self._example(f"train-{number}", plain, number) for number in numbers])
        else:
            train = [
                example
                for level, dataset in enumerate(_levels(family, config, seed))
                for example in self._unlike(
                    held, [self._example(f"train-{level}-{n}", dataset, n, level) for n in range(num_train)]
                )
            ]
        self._splits: dict[Split, list[Example]] = {"eval": held, "train": train}

    def examples(self, split: Split) -> Sequence[Example]:
        """The examples of a split, which were made at the start; with a curriculum level by level."""
        return self._splits[split]

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        """One turn, scored by the family."""
        text = await policy.complete(example.messages)
        tagged = ANSWER.findall(text)
        answer = tagged[-1].strip() if tagged else text.strip()
        dataset, entry = self._entries[example.id]
        reward = float(dataset.score_answer(answer, entry))
        is_tagged = float(bool(tagged))
        return Outcome(
            reward, {"solved": float(reward >= 1.0), "tagged": is_tagged}, {"score": reward, "tagged": is_tagged}
        )

    def _example(self, example_id: str, dataset: Any, number: int, level: int = 0) -> Example:
        entry = dataset[number]
        self._entries[example_id] = (dataset, entry)
        system: list[Message] = [{"role": "system", "content": self._instruction}] if self._instruction else []
        messages: list[Message] = [*system, {"role": "user", "content": entry["question"]}]
        return Example(example_id, messages, str(entry["answer"]), level=level)

    def _unlike(self, held: Sequence[Example], train: Sequence[Example]) -> list[Example]:
        """Those of `train` whose question is not among `held`. Raises ValueError when none is left."""
        asked = {example.messages[-1]["content"] for example in held}
        left = [example for example in train if example.messages[-1]["content"] not in asked]
        if not left:
            where = f" of level {train[0].level}" if train[0].level else ""
            raise ValueError(
                f"{self.id} has no examples{where} beyond the {len(asked)} of the evaluation: widen its settings"
            )
        return left


def _levels(family: str, config: ReasoningGymArgs, seed: int) -> Iterator[Any]:
    """The datasets of the levels, the easiest first. Raises ValueError for a level that the library cannot make."""
    assert config.curriculum is not None
    curriculum = create_curriculum(family)
    num_levels = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=1)
    for level in range(min(num_levels, config.curriculum.max_level + 1)):
        own = {"seed": seed + (level + 1) * LEVEL_SEEDS, "size": config.num_examples}
        curriculum.set_global_level(level)
        try:
            settings = dataclasses.replace(curriculum.generate_configuration(own), **config.settings)
            yield DATASETS[family][0](config=settings)
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"{family} has no level {level} with these settings ({error}): "
                f"set curriculum.max_level below {level}, or other settings"
            ) from error
