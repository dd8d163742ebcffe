"""Any family of `reasoning-gym` as an `Environment`. Imported only in the process of such an environment (`child`).

Examples and scores are the library's own, and the same for the same seed. Training and evaluation have different
examples of one dataset.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

import reasoning_gym
from pydantic import Field
from reasoning_gym.factory import DATASETS

from prime_rl.configs.base import BaseConfig, build
from prime_rl.orchestrator.envs.base import Example, Message, Outcome, Policy, Split

# Families of reasoning-gym 0.1.25 that give their own right answer no reward: nothing true can be learned from them.
BROKEN = frozenset({"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"})
INSTRUCTION = "Think first if you like. Write the final answer between <answer> and </answer>."
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymArgs(BaseConfig):
    """`[env.args]` of `reasoning-gym:FAMILY`."""

    settings: dict[str, Any] = Field(default_factory=dict)
    """The family's own settings, for example `{ min_terms = 2, max_terms = 3 }`."""

    num_examples: int = Field(1000, ge=1, le=100_000)
    """Examples to train on."""

    num_eval_examples: int = Field(100, ge=0, le=100_000)
    """Examples to evaluate on."""

    instruction: str = INSTRUCTION
    """System prompt: which form of answer counts. If the policy writes `<answer>`, the last one is scored, else all
    that it wrote."""


class ReasoningGymEnvironment:
    """One family. Raises ValueError for an unknown or broken one, and what the library raises for its settings."""

    def __init__(self, family: str, args: dict[str, Any], seed: int) -> None:
        config = build(ReasoningGymArgs, args, f"env 'reasoning-gym:{family}', args")
        _check_family(family)
        self.id = f"reasoning-gym:{family}"
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


def _check_family(family: str) -> None:
    if family in BROKEN:
        raise ValueError(f"{family} gives its own right answer no reward: choose another family")
    if family not in DATASETS:
        near = difflib.get_close_matches(family, DATASETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"reasoning-gym has no family {family!r}{hint}")
