"""Where a run starts, and what ends it before `max_steps`: `[init]`, `[budget]` and `[stop]` of `orch.toml`."""

from __future__ import annotations

from typing import Literal, Self, TypeVar

from pydantic import ConfigDict, Field, model_validator

from prime_rl.configs.base import BaseConfig

# Keys of `orch.toml` that are read while the run is in its slot; it keeps all others as it was admitted.
LIVE_KEYS = ("weight", "priority", "preempt", "budget", "tags")

RunT = TypeVar("RunT", bound="RunLifetime")


class InitConfig(BaseConfig):
    """Where the run's adapter starts, in place of random weights."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    from_: str | None = Field(None, alias="from", min_length=1, max_length=1024)
    """`run_a` (its newest version), `run_a@v20`, a folder with a PEFT adapter, or the name of one on the Hugging Face
    hub. Its rank may be at most the run's own: it is padded with zeros. Read once, when the run is added."""


class BudgetConfig(BaseConfig):
    """Limits of what the run may use. At the first that is reached it is finished, after a checkpoint."""

    max_tokens: int | None = Field(None, ge=1)
    """Tokens sampled, evaluations included; null: no limit."""

    max_hours: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Hours of the run's orchestrator at work, over all its starts; pauses do not count. null: no limit."""


class StopConfig(BaseConfig):
    """Ends the run when a metric has stopped getting better."""

    metric: str = Field(min_length=1, max_length=200)
    """A metric of `metrics/orchestrator.jsonl`, such as "reward/mean"; "eval/pass@1" is the mean over environments."""

    mode: Literal["max", "min"] = "max"
    """Whether more is better, or less."""

    patience: int = Field(5, ge=1)
    """How many values in a row may bring nothing better before the run is finished."""

    min_delta: float = Field(0.0, ge=0, allow_inf_nan=False)
    """How much better than the best before a value must be."""

    min_steps: int = Field(0, ge=0)
    """No stop before this step."""


class RunLifetime(BaseConfig):
    """Keys of `orch.toml` about the run's life among others: its tags, its share, its beginning and its end."""

    tags: list[str] = Field(default=[], max_length=32)
    """Words to filter and group runs by, each of 1 to 64 letters, digits and ._:=-"""

    weight: float = Field(1.0, gt=0, le=1000, allow_inf_nan=False)
    """The run's share of the trainer's tokens while others have work too, relative to theirs. Read while it runs."""

    priority: int = Field(0, ge=-1000, le=1000)
    """Runs that wait for a slot are admitted by priority, highest first, then by age. Read while it runs."""

    preempt: bool = False
    """Whether the run may take the slot of a run of lower priority, which is saved, waits, and continues later."""

    init: InitConfig = InitConfig()
    """Where the adapter starts."""

    budget: BudgetConfig = BudgetConfig()
    """What the run may use. Read while it runs."""

    stop: StopConfig | None = None
    """An early stop; null: off."""

    @model_validator(mode="after")
    def _plain_tags(self) -> Self:
        for tag in self.tags:
            if not 1 <= len(tag) <= 64 or not all(c.isalnum() or c in "._:=-" for c in tag):
                raise ValueError(f"tags: invalid tag {tag!r}: must be 1 to 64 letters, digits and . _ : = -")
        return self


def with_live_keys(config: RunT, changed: RunLifetime) -> RunT:
    """`config` with the live keys of `changed`; the same object when they are equal."""
    live = {key: getattr(changed, key) for key in LIVE_KEYS}
    return config if all(getattr(config, key) == value for key, value in live.items()) else config.replace(**live)
