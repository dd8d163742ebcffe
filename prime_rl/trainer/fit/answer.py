"""What `prl fit` answers, from a system config and the hardware."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from prime_rl.configs.system import SystemConfig
from prime_rl.trainer.fit.capacity import GIB, Capacity, Split, capacity, split
from prime_rl.trainer.fit.predict import PassMemory, Setting, predict, setting_of

VERSION = 1
# An H100, when no GPU is named and this machine has none.
ASSUMED_GPU_GIB = 80.0


@dataclass(frozen=True)
class Answer:
    """Everything that is shown. `hardware` says in words on what."""

    model: str
    dtype: str
    hardware: str
    on_gpu: bool
    setting: Setting
    memory: PassMemory
    capacity: Capacity
    split: Split | None

    def as_json(self) -> dict[str, Any]:
        memory = self.memory
        sizes = {
            "peak": memory.peak,
            "weights": memory.weights,
            "adapters": memory.adapters,
            "optimizer": memory.optimizer,
            "activations": memory.activations,
            "head": memory.head,
            "backward": memory.work,
            "usable": self.capacity.usable,
        }
        return {
            "version": VERSION,
            "model": self.model,
            "dtype": self.dtype,
            "tokens": self.setting.tokens,
            "seq_len": self.setting.seq_len,
            "runs": self.setting.num_runs,
            "rank": self.setting.lora.rank,
            **{f"{name}_gib": round(size / GIB, 3) for name, size in sizes.items()},
            "max_tokens_per_micro_batch": self.capacity.max_tokens,
            "max_concurrent_runs": self.capacity.max_runs,
            "gpu_memory_utilization": self.split and self.split.gpu_memory_utilization,
            "kv_cache_tokens": self.split and self.split.kv_cache_tokens,
        }


def answer(system: SystemConfig, gpu_gib: float | None = None, num_gpus: int = 1) -> Answer:
    """Predict a pass of the system's trainer. Raises UnknownModel.

    Args:
        gpu_gib: memory of one GPU; None: of this machine's, or of an H100. On a CPU, this machine's memory.
    """
    trainer = system.trainer
    device_type = "cpu" if trainer.device == "cpu" else "cuda"
    setting = setting_of(trainer, device_type, num_gpus)
    memory = predict(setting)
    gib, hardware = _hardware(device_type, gpu_gib, num_gpus)
    room = capacity(setting, memory, gib)
    shared = split(setting, memory, gib, system.inference.max_loras) if device_type == "cuda" else None
    dtype = trainer.model.dtype_on(device_type)
    return Answer(trainer.model.name, dtype, hardware, device_type == "cuda", setting, memory, room, shared)


def _hardware(device_type: str, gib: float | None, num_gpus: int) -> tuple[float, str]:
    if device_type == "cpu":
        gib = gib or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        return gib, f"a CPU with {gib:.0f} GB"
    source = ""
    if gib is None and torch.cuda.is_available():
        gib = torch.cuda.get_device_properties(0).total_memory / GIB
    elif gib is None:
        gib, source = ASSUMED_GPU_GIB, " (assumed; --gpu-memory names another)"
    return gib, f"{num_gpus} GPU{'s' if num_gpus > 1 else ''} of {gib:.0f} GB{source}"
