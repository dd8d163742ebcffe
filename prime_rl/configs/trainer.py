"""Config of the trainer process. The settings of a run are in `orchestrator.py`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from prime_rl.configs.base import BaseConfig, BroadcastConfig, LogConfig, LoRAConfig, ModelConfig, WatchConfig

DEFAULT_MICRO_BATCH_TOKENS = 8192
MOST_SLOTS = 1024


def _whole_number(least: int, most: float, allowed: str) -> BeforeValidator:
    """Accepts "auto" and whole numbers from `least` to `most`."""

    def check(value: object) -> object:
        if value == "auto" or (type(value) is int and least <= value <= most):
            return value
        raise ValueError(f"found {value!r}: must be {allowed}, or 'auto'")

    return BeforeValidator(check)


SlotsSetting = Annotated[int | Literal["auto"], _whole_number(1, MOST_SLOTS, f"1 to {MOST_SLOTS}")]
TokensSetting = Annotated[int | Literal["auto"], _whole_number(8, math.inf, "8 or more")]


class TrainerModelConfig(ModelConfig):
    """The base model as the trainer holds it."""

    lora: LoRAConfig | None = None
    """Adapters, one slot per run; an empty `[model.lora]` table takes the defaults. Without the table the whole model
    is fine-tuned, for one run at a time."""

    activation_checkpointing: bool | Literal["auto", "mlp"] = "auto"
    """Keep only the input of each layer for backward, which computes the layer again: a small part of the memory for a
    third more compute. mlp: only the gated MLPs do so, for a tenth more; with adapters. auto: on a GPU the first of
    false, mlp and true with which the largest pass fits when the trainer starts; false on a CPU."""

    activation_offload: bool = False
    """Keep the layer inputs of activation checkpointing in pinned memory of the host: a part of a GPU's memory for the
    time of two copies. Turns activation checkpointing on where that is auto. Without effect on a CPU."""

    packed_rows: bool | Literal["auto"] = "auto"
    """Lay the rows of a pass end to end, with attention that stays inside each, and compute once what rows of a run
    have in common at their beginning; false: pad rows of similar length to the longest. auto: where the model's
    attention is causal and nothing else."""

    tf32: bool = False
    """Multiply float32 matrices in TF32 on a GPU: several times quicker, but with ten bits of mantissa, so that a run's
    weights depend on its neighbours to 1e-3, not to 1e-4."""

    def numbers_on(self, device_type: str) -> str:
        """The kind of numbers that are multiplied there, in words: "float32 on cpu"."""
        dtype = self.dtype_on(device_type)
        is_cut = self.tf32 and dtype == "float32" and device_type == "cuda"
        return f"{dtype} on {device_type}{', multiplied in TF32' if is_cut else ''}"

    @property
    def packs(self) -> bool:
        """True when rows are packed, where attention allows it."""
        return self.packed_rows is not False

    def checkpoints_on(self, device_type: str) -> bool:
        """True when layers are computed again in backward on such a device; auto is what takes the least memory."""
        if self.activation_checkpointing == "auto":
            return device_type == "cuda" or self.activation_offload
        return self.activation_checkpointing is True

    def may_keep_more_on(self, device_type: str) -> bool:
        """True when a trainer is to find out on such a device how much of a layer it can keep for backward."""
        return self.activation_checkpointing == "auto" and not self.activation_offload and device_type == "cuda"

    @property
    def lean_mlps(self) -> bool:
        """True when nothing from inside a gated MLP is kept for backward."""
        return self.activation_checkpointing == "mlp"

    @model_validator(mode="after")
    def _checkpointing_fits(self) -> Self:
        if self.lean_mlps and self.lora is None:
            raise ValueError("activation_checkpointing = 'mlp' requires [model.lora]: set it to true, false or 'auto'")
        if self.activation_offload and self.activation_checkpointing in (False, "mlp"):
            raise ValueError(
                "activation_offload = true requires activation_checkpointing: set that to true or 'auto', or remove one"
            )
        return self


class TrainerConfig(BaseConfig):
    """`prl trainer @ trainer.toml`."""

    output_dir: Path = Path("outputs")
    """The workspace: the folder of all runs."""

    model: TrainerModelConfig = TrainerModelConfig()
    """Base model and adapters."""

    max_concurrent_runs: SlotsSetting = 4
    """Slots, 1 to 1024: how many runs train at once. Further runs wait, first come, first served. auto: as many as fit
    beside a pass, at most 64; 1 without `[model.lora]` (`prl fit` shows it). If `max_tokens_per_micro_batch` is auto
    too, slots come first, beside a pass of 8192 tokens or of `seq_len`; the pass then takes the rest."""

    seq_len: int = Field(2048, ge=8)
    """Longest sample in tokens."""

    max_async_level: int | None = Field(None, ge=0, le=16)
    """Largest `max_async_level` that a run may ask for; null: any. In a workspace: the workspace's, as inference
    has room for the policy versions of so many, and a run that used more would never get its turn."""

    max_tokens_per_micro_batch: TokensSetting = DEFAULT_MICRO_BATCH_TOKENS
    """Token positions of one forward/backward pass (rows x padded length, or of packed rows the tokens); bounds memory,
    does not change results. 8 or more. auto: as many as fit into the memory that is free when the trainer starts."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on."""

    gpu_share: float = Field(1.0, gt=0, le=1)
    """Share of GPU memory that the trainer may take. Below 1 it starts once the inference servers of its workspace have
    what is theirs. `prl up` sets it where both use one GPU and the share of inference is auto."""

    servers_on_gpu: int = Field(1, ge=1)
    """Inference servers that use the trainer's GPU: with a `gpu_share` below 1 it starts once so many have what is
    theirs. `prl up` sets it beside `gpu_share`."""

    num_threads: int | None = Field(None, ge=1)
    """Number of CPU threads of torch; null leaves it to torch."""

    dist_timeout_s: float = Field(600.0, gt=0)
    """How long ranks wait for each other before a missing one is reported, in seconds."""

    stop_after_step: int | None = Field(None, ge=1)
    """End when every run in a slot has made this many updates; null: never."""

    broadcast: BroadcastConfig = BroadcastConfig()
    """How the whole model's new weights are sent to inference."""

    watch: WatchConfig = WatchConfig()
    """How new runs and batches are detected."""

    log: LogConfig = LogConfig()
    """Logging."""

    @property
    def num_slots(self) -> int:
        """`max_concurrent_runs` as a number; 0 while it is auto and has not been worked out."""
        if self.max_concurrent_runs != "auto":
            return self.max_concurrent_runs
        is_whole_model = self.model.lora is None
        return 1 if is_whole_model else 0

    @property
    def micro_batch_tokens(self) -> int:
        """`max_tokens_per_micro_batch` as a number: the default as long as the trainer has not worked it out."""
        value = self.max_tokens_per_micro_batch
        return DEFAULT_MICRO_BATCH_TOKENS if value == "auto" else value

    @model_validator(mode="after")
    def _whole_model_or_adapters(self) -> Self:
        if self.model.lora is None and self.num_slots != 1:
            raise ValueError(
                f"max_concurrent_runs = {self.max_concurrent_runs}: must be 1 without [model.lora] (full fine-tuning); "
                "set it to 1, or add [model.lora]"
            )
        if self.broadcast.type == "nccl" and self.model.lora is not None:
            raise ValueError("broadcast.type = 'nccl' is only for full fine-tuning: remove it, or remove [model.lora]")
        return self
