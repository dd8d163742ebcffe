"""Config tables that more than one process reads."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from prime_rl.configs.base import BaseConfig

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
