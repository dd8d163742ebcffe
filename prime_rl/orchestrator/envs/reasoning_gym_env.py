"""Any family of `reasoning-gym` as an `Environment`. Imported only in the process of such an environment (`child`).

Examples and scores are the library's own, and the same for the same seed. Training and evaluation have different
examples of one dataset.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import reasoning_gym

from prime_rl.configs.reasoning_gym import PROVIDER, read_args
from prime_rl.orchestrator.envs.base import Example, Message, Outcome, Policy, Split

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymEnvironment:
    """One family. Raises what the library raises for its settings."""

    def __init__(self, family: str, args: dict[str, Any], seed: int) -> None:
        config = read_args(args)
        self.id = f"{PROVIDER}:{family}"
        self._instruction = config.instruction
        size = config.num_eval_examples + config.num_examples
        self._dataset = reasoning_gym.create_dataset(family, **{"seed": seed, "size": size, **config.settings})
        self._entries: dict[str, dict[str, Any]] = {}
        self._splits: dict[Split, list[Example]] = {"eval": [], "train": []}
        held: set[str] = set()
        for number in range(size):
            entry = self._dataset[number]
            split: Split = "eval" if number < config.num_eval_examples else "train"
            if split == "eval":
                held.add(entry["question"])
            if split == "eval" or entry["question"] not in held:
                self._splits[split].append(self._example(f"{split}-{number}", entry))
        if not self._splits["train"]:
            raise ValueError(f"{family} has no examples beyond the {len(held)} of the evaluation: widen its settings")

    def examples(self, split: Split) -> Sequence[Example]:
        return self._splits[split]

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        """One turn, scored by the family."""
        text = await policy.complete(example.messages)
        tagged = ANSWER.findall(text)
        answer = tagged[-1].strip() if tagged else text.strip()
        reward = float(self._dataset.score_answer(answer, self._entries[example.id]))
        return Outcome(reward, {"solved": float(reward >= 1.0), "tagged": float(bool(tagged))})

    def _example(self, example_id: str, entry: dict[str, Any]) -> Example:
        self._entries[example_id] = entry
        system: list[Message] = [{"role": "system", "content": self._instruction}] if self._instruction else []
        return Example(example_id, [*system, {"role": "user", "content": entry["question"]}], str(entry["answer"]))
