"""Config tables that more than one process reads, and the sampling of completions: what vLLM takes, under its names."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from prime_rl.configs.base import BaseConfig
from prime_rl.contract.served import MAX_STOP_CHARS, MAX_STOPS, RANGES, TEMPERATURE

DEFAULT_TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoRAConfig(BaseConfig):
    """The adapters that the trainer can hold: their largest rank, and which linear layers have one."""

    rank: int = Field(16, ge=1, le=512)
    """Largest rank of a run, and the default rank."""

    alpha: float = Field(32.0, gt=0)
    """Default LoRA alpha of a run; the scale of an adapter is alpha / rank."""

    target_modules: tuple[str, ...] = DEFAULT_TARGET_MODULES
    """Names of the linear layers (last part of the module path) that get an adapter."""


class ModelConfig(BaseConfig):
    """The base model, shared by trainer and inference."""

    name: str = "models/base"
    """Path of a Hugging Face model folder, or a model id on the Hugging Face Hub."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the weights in memory; auto: bfloat16 on a GPU, float32 on a CPU. The same in trainer and inference,
    so that their logprobs agree."""

    def dtype_on(self, device_type: str) -> str:
        """The name of the data type on a device of type "cuda" or "cpu"."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if device_type == "cuda" else "float32"


class WatchConfig(BaseConfig):
    """The detection of changes on disk."""

    kind: Literal["auto", "native", "polling"] = "auto"
    """File events of the operating system, polling, or a choice by file system."""

    rescan_s: float = Field(5.0, gt=0)
    """Longest time between two scans of the disk without an event, in seconds."""


class BroadcastConfig(BaseConfig):
    """The way of the whole model's new weights from trainer to inference. Adapters always go through the disk."""

    type: Literal["filesystem", "nccl"] = "filesystem"
    """`filesystem`: a model folder. `nccl`: from memory to memory, over gloo between CPUs. The same on both sides."""

    host: str = "127.0.0.1"
    """`nccl`: address on which the trainer listens. Anyone who reaches it can read the weights."""

    port: int = Field(29650, ge=1, le=65535)
    """`nccl`: port that the trainer listens on."""

    timeout_s: float = Field(60.0, gt=0)
    """`nccl`: how long one side waits for the other, in seconds."""


class LogConfig(BaseConfig):
    """Logging of one process."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""


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

    stop: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]] = Field([], max_length=MAX_STOPS)
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
