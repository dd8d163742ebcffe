"""Config of the environments of a run."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from prime_rl.configs.base import BaseConfig
from prime_rl.configs.reasoning_gym import PROVIDER, CurriculumConfig, check_family, read_args

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
# Environments that need nothing but this project, and the form of all others: provider and name.
BUILT_IN_ENVS = ("reverse-text", "sort-letters", "upper-case", "arithmetic", "guess-number")
PLUGGED_ENV = re.compile(r"(?:verifiers|reasoning-gym|plugin):[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# In a template: where the environment's own question goes.
QUESTION = "{prompt}"


class ShotConfig(BaseConfig):
    """A question with its answer, shown before every question."""

    prompt: str
    """The question, as the environment would ask it."""

    answer: str
    """The answer of the assistant."""


class PromptConfig(BaseConfig):
    """The prompt for the policy: the environment's own question, with a system prompt, a template and examples."""

    system: str | None = None
    """System prompt, in place of the environment's own; null leaves that."""

    template: str = QUESTION
    """First message of a conversation; `{prompt}` stands for what the environment asks."""

    examples: list[ShotConfig] = Field([], max_length=64)
    """Questions and answers before it, each `{ prompt = "...", answer = "..." }`. The template applies to them too."""

    @field_validator("template")
    @classmethod
    def _has_the_question(cls, template: str) -> str:
        if QUESTION not in template:
            raise ValueError(f"found {template!r}: must contain {QUESTION}, which stands for the question")
        return template

    def shown(self, messages: Sequence[Any]) -> list[Any]:
        """A conversation of chat messages as the policy sees it. Of a longer one the beginning is the same."""
        has_system = bool(messages) and messages[0]["role"] == "system"
        system, rest = list(messages[:has_system]), list(messages[has_system:])
        if self.system is not None:
            system = [{"role": "system", "content": self.system}]
        if rest and rest[0]["role"] == "user":
            rest[0] = self._asked(rest[0]["content"])
        shots = ([self._asked(each.prompt), {"role": "assistant", "content": each.answer}] for each in self.examples)
        return [*system, *itertools.chain.from_iterable(shots), *rest]

    def _asked(self, question: str) -> dict[str, str]:
        return {"role": "user", "content": self.template.replace(QUESTION, question)}


class EnvConfig(BaseConfig):
    """One environment of the run; several are sampled by their weights."""

    id: str
    """The environment: a built-in one, "verifiers:TASKSET", "reasoning-gym:FAMILY", or "plugin:NAME"
    (docs/environments.md)."""

    name: Name | None = None
    """Name in metrics; null takes the last part of the id."""

    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Share of the examples that come from this environment, beside the weights of the others. Has no effect in
    evaluations."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""

    prompt: PromptConfig = PromptConfig()
    """How the policy is asked."""

    env_vars: list[str] = Field(default_factory=list)
    """Environment variables that the process of the environment gets, by name, in addition to what every process needs
    (PATH, HOME and the like, docs/environments.md). The API key of inference is never among them."""

    timeout_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    """Deadline, in seconds, of each step of the environment between two answers of the policy. Waiting for the policy
    does not count. A rollout that misses it is dropped."""

    reward_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest reward of the environment. A rollout with a reward outside of it is dropped."""

    @property
    def curriculum(self) -> CurriculumConfig | None:
        """The levels of a family of reasoning-gym, where the run asks for them."""
        provider, _, family = self.id.partition(":")
        return read_args(family, self.args).curriculum if provider == PROVIDER else None

    @property
    def label(self) -> str:
        """The environment's name in metrics."""
        return self.name or self.id.rpartition(":")[2]

    @field_validator("id")
    @classmethod
    def _is_known(cls, env_id: str) -> str:
        if env_id in BUILT_IN_ENVS or PLUGGED_ENV.fullmatch(env_id):
            if env_id.startswith(f"{PROVIDER}:"):
                check_family(env_id.partition(":")[2])
            return env_id
        near = difflib.get_close_matches(env_id, BUILT_IN_ENVS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"found {env_id!r}; {hint}expected one of {', '.join(BUILT_IN_ENVS)}, verifiers:TASKSET, "
            "reasoning-gym:FAMILY, plugin:NAME"
        )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _ = self.curriculum  # checks the args
        low, high = self.reward_range
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"reward_range: found [{low}, {high}]: must be two numbers, the lower one first")
        return self
