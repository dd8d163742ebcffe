"""What `prl fit` answers, from a system config and the hardware."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from prime_rl.configs.system import SystemConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.contract.served import NUM_CHAT_ADAPTERS
from prime_rl.trainer.fit.capacity import (
    CPU_SHARE,
    GIB,
    INFERENCE_WORK_BYTES,
    MOST_AUTO_SLOTS,
    Capacity,
    DoesNotFit,
    Split,
    capacity,
    most_served,
    split,
    usable_bytes,
    with_numbers,
)
from prime_rl.trainer.fit.predict import PassMemory, Setting, predict, setting_of

VERSION = 1
# With gpu_memory_utilization = "auto", what slots or tokens that are "auto" too leave to inference of one GPU for both.
AUTO_SHARE = 0.5
# An H100, when no GPU is named and this machine has none.
ASSUMED_GPU_GIB = 80.0


@dataclass(frozen=True)
class Answer:
    """Everything that is shown. `hardware`: on what, in words."""

    model: str
    dtype: str
    hardware: str
    on_gpu: bool
    setting: Setting
    memory: PassMemory
    capacity: Capacity
    split: Split | None

    def as_json(self) -> dict[str, Any]:
        """The one object that `prl fit --json` prints; sizes in GiB, null for what does not apply."""
        memory = self.memory
        sizes = {
            "peak": memory.peak,
            "weights": memory.weights,
            "adapters": memory.adapters,
            "optimizer": memory.optimizer,
            "activations": memory.activations,
            "head": memory.head,
            "backward": memory.work,
            "offloaded": memory.offloaded,
            "usable": self.capacity.usable,
        }
        return {
            "version": VERSION,
            "model": self.model,
            "dtype": self.dtype,
            "tokens": self.setting.tokens,
            "seq_len": self.setting.seq_len,
            "runs": self.setting.num_runs,
            "rank": self.setting.lora.rank if self.setting.lora else None,
            **{f"{name}_gib": round(size / GIB, 3) for name, size in sizes.items()},
            "max_tokens_per_micro_batch": self.capacity.max_tokens,
            "max_concurrent_runs": self.capacity.max_runs,
            "gpu_memory_utilization": self.split and self.split.gpu_memory_utilization,
            "kv_cache_tokens": self.split and self.split.kv_cache_tokens,
        }


def answer(system: SystemConfig, gpu_gib: float | None = None, num_gpus: int | None = 1) -> Answer:
    """Predict a pass of the system's trainer. Raises UnknownModel, ModelError or DoesNotFit.

    Args:
        gpu_gib: memory of one GPU; None: of this machine's, or of an H100. On a CPU, this machine's memory.
        num_gpus: ranks of the trainer; None: all GPUs of this machine.
    """
    device_type = "cpu" if system.trainer.device == "cpu" else "cuda"
    num_gpus = num_gpus or max(1, torch.cuda.device_count())
    gib, hardware = _hardware(device_type, gpu_gib, num_gpus)
    trainer = _with_numbers(system, device_type, gib, num_gpus)
    setting = setting_of(trainer, device_type, num_gpus)
    memory = predict(setting)
    room = capacity(setting, memory, gib)
    adapters = setting.num_runs * system.inference.max_versions_per_run + NUM_CHAT_ADAPTERS
    shared = split(setting, memory, gib, adapters) if device_type == "cuda" else None
    dtype = trainer.model.dtype_on(device_type)
    return Answer(trainer.model.name, dtype, hardware, device_type == "cuda", setting, memory, room, shared)


def _with_numbers(system: SystemConfig, device_type: str, gib: float, num_gpus: int) -> TrainerConfig:
    """The trainer's config with numbers, for a workspace whose trainer and inference share this hardware."""
    trainer, inference = system.trainer, system.inference
    share, taken = _share_of_trainer(system, device_type)
    most_slots = MOST_AUTO_SLOTS
    if trainer.num_slots == 0:
        setting = setting_of(trainer.model_copy(update={"max_concurrent_runs": 1}), device_type, num_gpus)
        if device_type == "cuda":
            of_inference = _share_of_inference(system) * gib * GIB - INFERENCE_WORK_BYTES
        else:
            of_inference = (1.0 - CPU_SHARE) * gib * GIB
        most_slots = most_served(setting, predict(setting), of_inference, inference.max_versions_per_run)
    try:
        return with_numbers(trainer, device_type, num_gpus, usable_bytes(share * gib), most_slots)
    except DoesNotFit as error:
        raise DoesNotFit(f"{error}{taken}") from error


def _share_of_trainer(system: SystemConfig, device_type: str) -> tuple[float, str]:
    """The part of a device's memory that is the trainer's, and words for the rest."""
    if device_type == "cpu":
        return CPU_SHARE, ""
    if _has_one_gpu(system):
        of_inference = _share_of_inference(system)
        return 1.0 - of_inference, f", or inference.vllm.gpu_memory_utilization = {of_inference:g} of the only GPU"
    return 1.0, ""


def _share_of_inference(system: SystemConfig) -> float:
    vllm = system.inference.vllm
    return AUTO_SHARE if vllm.gpu_memory_utilization == "auto" and _has_one_gpu(system) else vllm.gpu_share


def _has_one_gpu(system: SystemConfig) -> bool:
    """Whether trainer and vLLM have one GPU between them."""
    return system.inference.engine == "vllm" and torch.cuda.device_count() == 1


def _hardware(device_type: str, gib: float | None, num_gpus: int) -> tuple[float, str]:
    if device_type == "cpu":
        gib = gib or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        return gib, f"a CPU with {gib:.0f} GiB"
    source = ""
    if gib is None and torch.cuda.is_available():
        gib = torch.cuda.get_device_properties(0).total_memory / GIB
    elif gib is None:
        gib, source = ASSUMED_GPU_GIB, " (assumed; --gpu-memory names another)"
    return gib, f"{num_gpus} GPU{'s' if num_gpus > 1 else ''} of {gib:.0f} GiB{source}"
