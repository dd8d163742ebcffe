"""`kind = "distill"`: the teacher whose probabilities a run learns from, and how. Nothing here needs a model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from prime_rl.configs.base import ApiUrl, BaseConfig

BASE = "base"
# What vLLM gives for a place unless its server allows more.
MAX_TOP_K = 20
_LATEST = re.compile(r"(run_[A-Za-z0-9._-]{1,64})@latest")


class TeacherConfig(BaseConfig):
    """A teacher. `teacher = "..."` is short for `teacher = { model = "..." }`."""

    model: str = Field(min_length=1, max_length=1024)
    """"base" (the run's base model), an adapter as `init.from` names one (`run_a`, `run_a@v20`, a folder, a name on the
    hub), copied when the run is added, or `run_a@latest`: another run while it trains. With `base_url`: the name
    there."""

    base_url: ApiUrl | None = None
    """An OpenAI-compatible server with vLLM's `prompt_logprobs` and the run's tokenizer, such as
    "http://gpu7:8000/v1"; null: the run's own inference."""

    api_key_var: str | None = None
    """Environment variable with the key of that server, or, with `_FILE`, the name of a file that only its owner can
    read; null sends none."""

    @property
    def follows(self) -> str | None:
        """The run whose newest version it is."""
        found = None if self.base_url else _LATEST.fullmatch(self.model)
        return found[1] if found else None

    @property
    def is_adapter(self) -> bool:
        """True when the run's inference serves it beside the base model."""
        return not self.base_url and self.model != BASE

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.api_key_var and not self.base_url:
            raise ValueError("api_key_var: only used with base_url: remove it")
        return self


def _in_full(given: Any) -> Any:
    return {"model": given} if isinstance(given, str) else given


Teacher = Annotated[TeacherConfig, BeforeValidator(_in_full, json_schema_input_type=str | TeacherConfig)]


class DistillConfig(BaseConfig):
    """Learning from a teacher (docs/distill.md)."""

    objective: Literal["reverse_kl", "forward_kl"] = "reverse_kl"
    """"reverse_kl": each sampled token has the advantage `coef` x (log p of the teacher - log p of the student).
    "forward_kl": the student learns the teacher's `top_k` likeliest tokens at each place of its own rollouts."""

    coef: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Weight of what the teacher says."""

    reward_weight: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of the advantages that follow from the rewards; 0: these are only reported. Not with "forward_kl"."""

    top_k: int = Field(MAX_TOP_K, ge=1, le=MAX_TOP_K)
    """For "forward_kl": tokens of the teacher at each place."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.objective == "forward_kl" and self.reward_weight:
            raise ValueError('reward_weight: not used with "forward_kl", which has no advantages: remove it')
        if self.objective == "reverse_kl" and self.top_k != MAX_TOP_K:
            raise ValueError('top_k: only used with objective = "forward_kl": remove it')
        return self


def adapters_of(teachers: Iterable[TeacherConfig | None]) -> list[str]:
    """The adapters among `teachers`, each once; its place here is the number of the run's copy."""
    return list(dict.fromkeys(each.model for each in teachers if each and each.is_adapter))
