"""The room on a GPU: the largest micro-batch, the most runs, and what is left for inference. Pure but for passes.

The numbers that "auto" stands for in a trainer's config are such: slots first, then the micro-batch takes the rest.
`prl fit` asks for those of some hardware (`answer`), the trainer for those of what is free on its ranks
(`with_a_budget`).
"""

from __future__ import annotations

import logging
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from prime_rl.configs.inference import WHOLE_GPU
from prime_rl.configs.system import SystemConfig
from prime_rl.configs.trainer import MOST_SLOTS, TrainerConfig
from prime_rl.contract.served import NUM_CHAT_ADAPTERS
from prime_rl.lora.linear import CONTEXT_BYTES, take_share
from prime_rl.trainer.memory import PassMemory, Setting, UnknownModel, predict, setting_of
from prime_rl.trainer.model import ModelError
from prime_rl.trainer.world import World

logger = logging.getLogger(__name__)

GIB = 2**30
# What an allocator loses to odd sizes.
FRAGMENTS = 0.05
# Besides weights, adapters and cache: a pass of inference and its CUDA graphs.
INFERENCE_WORK_BYTES = 3.0 * GIB
# Sizes of a micro-batch are rounded down to this.
TOKENS_STEP = 256
# How often, and how far beyond the pass that was asked for, the line is looked at. A pass of many tokens takes seconds,
# though it holds nothing.
NUM_PROBES, LONGEST_PROBE = 2, 8
# More runs would wait for each other's passes; a larger number can be set.
MOST_AUTO_SLOTS = 64
# Larger passes are no quicker, and a run that comes late waits for the pass to end.
MOST_TOKENS = 131_072
# Of the memory of a machine without a GPU, where inference and the runs' own processes need some too.
CPU_SHARE = 0.5
VERSION = 1
# With gpu_memory_utilization = "auto", what slots or tokens that are "auto" too leave to inference of one GPU for both.
AUTO_SHARE = 0.5
# The values of `activation_checkpointing`, in words.
AGAIN: dict[bool | str, str] = {False: "nothing", "mlp": "gated MLPs", True: "whole layers"}
# An H100, when no GPU is named and this machine has none.
ASSUMED_GPU_GIB = 80.0


@dataclass(frozen=True)
class Capacity:
    """The most that a GPU of `usable` bytes holds with the trainer alone; 0 where not even the least fits."""

    usable: float
    max_tokens: int
    max_runs: int


@dataclass(frozen=True)
class Split:
    """One GPU for trainer and inference: the part of each server, and the tokens that its KV cache has room for."""

    gpu_memory_utilization: float
    kv_cache_tokens: int


def usable_bytes(gpu_gib: float) -> float:
    """Bytes for tensors on a GPU of `gpu_gib` GiB: without the CUDA context, and without what the allocator loses."""
    return max(0.0, gpu_gib * GIB * (1.0 - FRAGMENTS) - CONTEXT_BYTES)


def capacity(setting: Setting, memory: PassMemory, gpu_gib: float) -> Capacity:
    """`memory` is that of a pass of `setting`."""
    usable = usable_bytes(gpu_gib)
    return Capacity(usable, most_tokens(setting, memory, usable), most_runs(setting, memory, usable))


def most_runs(setting: Setting, memory: PassMemory, usable: float) -> int:
    """Slots that fit beside passes of `setting.tokens`: each holds weights, gradients and moments of one adapter.

    At most MOST_SLOTS, the most that a config may ask for; without adapters 1.
    """
    if setting.lora is None:
        return int(memory.peak <= usable)
    of_runs = memory.adapters + memory.optimizer
    each = of_runs / setting.num_runs
    return max(0, min(MOST_SLOTS, math.floor((usable - (memory.peak - of_runs)) / each)))


def most_tokens(setting: Setting, memory: PassMemory, usable: float) -> int:
    """The largest micro-batch, at least one row of `seq_len`; 0 when that does not fit.

    What a pass takes grows along a straight line once its backward is the largest part of it, so the line is drawn
    through the two passes that are nearest to the answer, and again from there.
    """

    def peak(tokens: int) -> float:
        return predict(replace(setting, tokens=tokens)).peak

    before, here = (setting.tokens, memory.peak), (2 * setting.tokens, peak(2 * setting.tokens))
    found = _crossing(before, here, usable)
    for _ in range(NUM_PROBES):
        probe = min(found, LONGEST_PROBE * setting.tokens)
        if probe < setting.seq_len or probe == here[0]:
            break
        before, here = here, (probe, peak(probe))
        if probe == found and here[1] <= usable:
            return found
        found = min(_crossing(before, here, usable), probe - TOKENS_STEP if probe == found else found)
    if found < setting.seq_len and peak(setting.seq_len) <= usable:
        return setting.seq_len  # less than TOKENS_STEP
    return found if found >= setting.seq_len else 0


def _crossing(one: tuple[int, float], other: tuple[int, float], usable: float) -> int:
    """The tokens at which the line through two passes (tokens, peak) reaches `usable`."""
    (tokens, peak), each = other, (other[1] - one[1]) / max(1, other[0] - one[0])
    return math.floor((tokens + (usable - peak) / max(each, 1.0)) / TOKENS_STEP) * TOKENS_STEP


def split(
    setting: Setting, memory: PassMemory, gpu_gib: float, num_adapters: int, num_servers: int = 1
) -> Split | None:
    """The parts of one GPU for the trainer, with passes of `setting`, and for inference; None when both do not fit.

    Args:
        num_adapters: policy versions that a server holds at one time: of all runs, and that of a chat.
    """
    trainer = memory.peak / (1.0 - FRAGMENTS) + CONTEXT_BYTES
    utilization = math.floor(100 * (1.0 - trainer / (gpu_gib * GIB)) / num_servers) / 100
    room = utilization * gpu_gib * GIB - served_bytes(setting, memory) - INFERENCE_WORK_BYTES
    cache = room - num_adapters * served_adapter_bytes(setting, memory)
    tokens = int(cache / kv_bytes(setting.model, setting.dtype.itemsize))
    return Split(utilization, tokens) if tokens >= setting.seq_len else None


def copies_of(system: SystemConfig, setting: Setting) -> int:
    """How often inference holds an adapter, in the type in which the model is.

    The embedded engine on a GPU has it in float32, and once more while it is used.
    """
    return 1 if system.inference.engine == "vllm" or setting.dtype == torch.float32 else 3


def most_served(setting: Setting, memory: PassMemory, inference_bytes: float, versions: int) -> int:
    """Runs of which inference can hold `versions` adapters each in half of what it has beside the model; at least 1.

    One more adapter is that of a chat. The other half is for its KV cache.
    """
    adapters = (inference_bytes - served_bytes(setting, memory)) / 2 / served_adapter_bytes(setting, memory)
    return max(1, math.floor((adapters - NUM_CHAT_ADAPTERS) / versions))


def served_bytes(setting: Setting, memory: PassMemory) -> float:
    """The model as inference holds it: whole, and in the type that it computes in."""
    if setting.lora is not None and setting.num_ranks == 1:
        return memory.weights
    alone = predict(replace(setting, num_ranks=1, host_copies=0, num_runs=1, seq_len=16, tokens=16))
    return alone.weights if setting.lora else alone.weights * setting.dtype.itemsize / 4


def served_adapter_bytes(setting: Setting, memory: PassMemory) -> float:
    """One adapter as inference holds it. `memory.adapters` has float32 weights and gradients of all slots."""
    return memory.adapters / 2 / setting.num_runs * setting.dtype.itemsize / 4 if setting.lora else 0.0


def kv_bytes(model: PretrainedConfig, itemsize: int) -> int:
    """Bytes of keys and values of one token in all layers."""
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    head = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    return int(2 * model.num_hidden_layers * heads * head * itemsize)


class DoesNotFit(ValueError):
    """Not even the least fits; the message is one line that names what to lower."""


def with_numbers(
    config: TrainerConfig, device_type: str, num_ranks: int, usable: float, most_slots: int = MOST_AUTO_SLOTS
) -> TrainerConfig:
    """`config` with numbers in the place of "auto". Raises UnknownModel or DoesNotFit.

    Args:
        device_type: "cuda" or "cpu".
        usable: bytes of a rank's device that the trainer may fill.
        most_slots: what inference has room for, if that is less than MOST_AUTO_SLOTS.
    """
    beside = 0
    if config.num_slots == 0:
        slots, beside = _slots(config, device_type, num_ranks, usable)
        config = config.model_copy(update={"max_concurrent_runs": min(slots, most_slots)})
    if config.max_tokens_per_micro_batch == "auto":
        tokens = _tokens(config, device_type, num_ranks, usable, beside)
        config = config.model_copy(update={"max_tokens_per_micro_batch": tokens})
    return config.model_copy(update={"max_concurrent_runs": config.num_slots})


def _slots(config: TrainerConfig, device_type: str, num_ranks: int, usable: float) -> tuple[int, int]:
    """(slots, tokens of the pass beside them): of the configured size; if that is auto, the default, or else a row."""
    one = config.model_copy(update={"max_concurrent_runs": 1})
    setting = setting_of(one, device_type, num_ranks)
    sizes = {setting.tokens, config.seq_len} if config.max_tokens_per_micro_batch == "auto" else {setting.tokens}
    for tokens in sorted(sizes, reverse=True):
        setting = replace(setting, tokens=tokens)
        if slots := min(MOST_AUTO_SLOTS, most_runs(setting, predict(setting), usable)):
            # Rows of many runs take a little more than rows of one.
            mixed = replace(setting, num_runs=slots)
            return max(1, min(slots, most_runs(mixed, predict(mixed), usable))), tokens
    raise DoesNotFit(
        f"max_concurrent_runs = 'auto': one run with a pass of {setting.tokens:,} tokens does not fit into "
        f"{usable / GIB:.1f} GiB: lower max_tokens_per_micro_batch, seq_len or model.lora.rank"
    )


def _tokens(config: TrainerConfig, device_type: str, num_ranks: int, usable: float, at_least: int) -> int:
    """`at_least` tokens fit for certain."""
    setting = setting_of(config, device_type, num_ranks)
    tokens = max(at_least, min(MOST_TOKENS, most_tokens(setting, predict(setting), usable)))
    if not tokens:
        lower = "max_concurrent_runs or model.lora.rank" if config.model.lora else "or train on more GPUs"
        raise DoesNotFit(
            f"max_tokens_per_micro_batch = 'auto': a row of seq_len = {config.seq_len} does not fit into "
            f"{usable / GIB:.1f} GiB: lower seq_len, {lower}"
        )
    return max(tokens, config.seq_len)


def with_checkpointing(config: TrainerConfig, device_type: str, num_ranks: int, usable: float) -> TrainerConfig:
    """`config`, which has its numbers, with what of a layer backward computes again, where that is to be found out.

    It is the least with which the largest pass, with rows of all runs, fits into `usable` bytes. Raises UnknownModel.
    """
    model = config.model
    if not model.may_keep_more_on(device_type):
        return config

    def keeping(again: bool | str) -> TrainerConfig:
        return config.model_copy(update={"model": model.model_copy(update={"activation_checkpointing": again})})

    tried = [keeping(again) for again in (False, "mlp")[: 2 if model.lora else 1]]
    fit = (each for each in tried if predict(of_all_runs(setting_of(each, device_type, num_ranks))).peak <= usable)
    return next(fit, keeping(True))


def of_all_runs(setting: Setting) -> Setting:
    """Passes as large, in rows so short that each run has one."""
    return replace(setting, seq_len=max(1, min(setting.seq_len, setting.tokens // setting.num_runs)))


def with_a_budget(config: TrainerConfig, world: World) -> TrainerConfig:
    """`config` with what "auto" stands for, before the model is loaded; takes the trainer's share of its GPU.

    A collective. Raises ModelError.
    """
    device_type, numbers = world.device.type, (config.max_concurrent_runs, config.max_tokens_per_micro_batch)
    has_a_share = device_type == "cuda" and config.gpu_share < 1.0
    if "auto" not in numbers and not has_a_share and not config.model.may_keep_more_on(device_type):
        return config
    # On the rank that has the least: all ranks must come to the same numbers.
    free = torch.tensor(_free_bytes(world.device, config.gpu_share), dtype=torch.float64)
    if world.size > 1:
        free = free.to(world.device)
        dist.all_reduce(free, dist.ReduceOp.MIN)
    usable = float(free) * (1.0 - FRAGMENTS)
    try:
        config = with_numbers(config, device_type, world.size, usable)
        config = with_checkpointing(config, device_type, world.size, usable)
    except UnknownModel as error:
        raise ModelError(f"model.name: {error}") from error
    except DoesNotFit as error:
        raise ModelError(str(error)) from error
    logger.info(
        "slots: %d, tokens of a pass: %d, computed again in backward: %s, for the %.1f GiB that are free",
        config.num_slots,
        config.micro_batch_tokens,
        AGAIN[_again(config, device_type)],
        usable / GIB,
    )
    return config


def _again(config: TrainerConfig, device_type: str) -> bool | str:
    """`activation_checkpointing` as it is on such a device."""
    return "mlp" if config.model.lean_mlps else config.model.checkpoints_on(device_type)


def _free_bytes(device: torch.device, share: float) -> float:
    if device.type == "cuda":
        return take_share(share)
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"), re.M)
    assert found, "Linux has it since 3.14"
    return CPU_SHARE * 1024 * int(found.group(1)) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Answer:
    """Everything that is shown. `hardware`: on what, in words.

    `again` is `activation_checkpointing`; where that is auto, what it comes to where the trainer has the device to
    itself. All sizes are those of a pass with the least that auto may keep.
    """

    model: str
    dtype: str
    hardware: str
    on_gpu: bool
    setting: Setting
    memory: PassMemory
    capacity: Capacity
    split: Split | None
    share_key: str
    again: bool | str

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
            "activation_checkpointing": self.again,
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
    adapters *= copies_of(system, setting)
    on_gpu, servers = device_type == "cuda", system.deployment.inference.servers_on_a_gpu
    shared = split(setting, memory, gib, adapters, servers) if on_gpu else None
    again = _again(with_checkpointing(trainer, device_type, num_gpus, room.usable), device_type)
    dtype, share = trainer.model.dtype_on(device_type), system.inference.share_key
    return Answer(trainer.model.name, dtype, hardware, on_gpu, setting, memory, room, shared, share, again)


def _with_numbers(system: SystemConfig, device_type: str, gib: float, num_gpus: int) -> TrainerConfig:
    """The trainer's config with numbers, for a workspace whose trainer and inference share this hardware."""
    trainer, inference = system.trainer, system.inference
    # The part of a device's memory that is the trainer's, and words for the rest.
    share, taken = CPU_SHARE if device_type == "cpu" else 1.0, ""
    if device_type != "cpu" and _has_one_gpu(system):
        served = _share_of_inference(system)
        share = min(1.0 - served, trainer.gpu_share)
        taken = f", or {system.inference.share_key}: inference has {served:g} of the only GPU"
    most_slots = MOST_AUTO_SLOTS
    if trainer.num_slots == 0:
        setting = setting_of(trainer.model_copy(update={"max_concurrent_runs": 1}), device_type, num_gpus)
        if device_type == "cuda":
            servers = system.deployment.inference.servers_on_a_gpu
            of_inference = _share_of_inference(system) / servers * gib * GIB - INFERENCE_WORK_BYTES
        else:
            of_inference = (1.0 - CPU_SHARE) * gib * GIB
        versions = inference.max_versions_per_run * copies_of(system, setting)
        most_slots = most_served(setting, predict(setting), of_inference, versions)
    try:
        return with_numbers(trainer, device_type, num_gpus, usable_bytes(share * gib), most_slots)
    except DoesNotFit as error:
        raise DoesNotFit(f"{error}{taken}") from error


def _share_of_inference(system: SystemConfig) -> float:
    """The part of a GPU that all servers on it have."""
    inference = system.inference
    if inference.share == "auto":
        return AUTO_SHARE if _has_one_gpu(system) else WHOLE_GPU
    return inference.share * system.deployment.inference.servers_on_a_gpu


def _has_one_gpu(system: SystemConfig) -> bool:
    """True when trainer and inference have one GPU between them."""
    return system.inference.device != "cpu" and torch.cuda.device_count() == 1


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
