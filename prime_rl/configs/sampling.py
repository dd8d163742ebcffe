"""Sampling of completions: what vLLM takes, under its names."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from prime_rl.configs.base import BaseConfig
from prime_rl.contract.sampling_ranges import RANGES, TEMPERATURE

MIN_TOP_P, MIN_REPETITION_PENALTY = RANGES["top_p"].lowest, RANGES["repetition_penalty"].lowest
Penalty = Annotated[float, Field(ge=-2, le=2)]


class _Ranged(BaseConfig):
    @field_validator("*")
    @classmethod
    def _is_in_range(cls, value: Any, info: ValidationInfo) -> Any:
        limits = RANGES.get(info.field_name or "")
        return value if limits is None or value is None else limits.check(value)


class SamplingConfig(_Ranged):
    """The sampling of completions."""

    temperature: float = Field(1.0, ge=TEMPERATURE.lowest, le=2)
    """Logits are divided by this. It cannot be zero: greedy rollouts carry no gradient."""

    max_tokens: int = Field(64, ge=1)
    """Longest completion of one turn, in tokens."""

    min_tokens: int = Field(0, ge=0)
    """Shortest completion of one turn, in tokens: nothing ends it before."""

    top_p: float = Field(1.0, ge=MIN_TOP_P, le=1)
    """Only the smallest set of tokens with at least this probability is sampled from; 1: off."""

    top_k: int = Field(0, ge=0, lt=2**31)
    """Only this many of the most likely tokens are sampled from; 0: off."""

    min_p: float = Field(0.0, ge=0, le=1)
    """Only tokens with at least this part of the probability of the most likely one are sampled from; 0: off, else
    at least 1e-6."""

    repetition_penalty: float = Field(1.0, ge=MIN_REPETITION_PENALTY, le=2)
    """Logits of tokens of the prompt or the completion so far are divided by this if positive, else multiplied; 1:
    off."""

    presence_penalty: Penalty = 0.0
    """Taken off the logits of tokens that the completion has so far; 0: off."""

    frequency_penalty: Penalty = 0.0
    """Taken off the logit of a token for each time that the completion has it so far; 0: off."""

    stop: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field([], max_length=16)
    """Texts that end a completion. The environment does not see them; the policy is trained on them."""

    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field([], max_length=64)
    """Tokens that end a completion, beside the model's own end of sequence."""

    seed: int | None = Field(None, ge=0)
    """Seed of the sampling; each turn has its own, derived from it. null: that of the run."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the model's chat template, such as `enable_thinking = false`."""

    @property
    def request_fields(self) -> dict[str, Any]:
        """The fields of every request, under vLLM's names: the temperature, and all that is not off."""
        own = {"max_tokens", "min_tokens", "seed", "chat_template_kwargs"}
        return {"temperature": self.temperature, **self.model_dump(exclude=own, exclude_defaults=True)}

    @property
    def narrows(self) -> list[str]:
        """The settings because of which the sampled distribution is not the policy's own at this temperature."""
        names = ("min_tokens", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    @model_validator(mode="after")
    def _shortest_below_longest(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: found {self.min_tokens}: must be at most max_tokens = {self.max_tokens}")
        return self


class EvalSamplingConfig(_Ranged):
    """The sampling of completions in evaluations; everything else is that of `[sampling]`."""

    temperature: float | None = Field(None, ge=0, le=2)
    """Logits are divided by this, at least 0.01; 0 always takes the most likely token; null: that of `[sampling]`."""

    max_tokens: int | None = Field(None, ge=1)
    """Longest completion of one turn, in tokens; null: that of `[sampling]`."""

    top_p: float | None = Field(None, ge=MIN_TOP_P, le=1)
    """As in `[sampling]`; null: its value."""

    top_k: int | None = Field(None, ge=0, lt=2**31)
    """As in `[sampling]`; null: its value."""

    min_p: float | None = Field(None, ge=0, le=1)
    """As in `[sampling]`; null: its value."""
