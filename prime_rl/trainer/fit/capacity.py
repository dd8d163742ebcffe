"""What fits into a GPU: the largest micro-batch, the most runs, and what is left for inference. Pure but for passes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from prime_rl.trainer.fit.predict import PassMemory, Setting, predict

GIB = 2**30
# What the CUDA context and the libraries of a process take, and what an allocator loses to odd sizes.
CONTEXT_BYTES = 1.0 * GIB
FRAGMENTS = 0.05
# Besides weights, adapters and cache: a pass of vLLM and its CUDA graphs.
INFERENCE_WORK_BYTES = 3.0 * GIB
# Sizes of a micro-batch are rounded down to this.
TOKENS_STEP = 256
# How often, and how far beyond the pass that was asked for, the line is looked at. A pass of many tokens takes seconds,
# though it holds nothing.
NUM_PROBES, LONGEST_PROBE = 2, 8
# Slots that a config may ask for at most.
MOST_RUNS = 1024


@dataclass(frozen=True)
class Capacity:
    """What a GPU of `usable` bytes holds when the trainer has it to itself; 0 where not even the least fits."""

    usable: float
    max_tokens: int
    max_runs: int


@dataclass(frozen=True)
class Split:
    """One GPU for trainer and vLLM: the part that is vLLM's, and the tokens that its KV cache has room for."""

    gpu_memory_utilization: float
    kv_cache_tokens: int


def usable_bytes(gpu_gib: float) -> float:
    return max(0.0, gpu_gib * GIB * (1.0 - FRAGMENTS) - CONTEXT_BYTES)


def capacity(setting: Setting, memory: PassMemory, gpu_gib: float) -> Capacity:
    """`memory` is that of a pass of `setting`."""
    usable = usable_bytes(gpu_gib)
    return Capacity(usable, most_tokens(setting, memory, usable), most_runs(setting, memory, usable))


def most_runs(setting: Setting, memory: PassMemory, usable: float) -> int:
    """Slots that fit beside passes of `setting.tokens`: each holds weights, gradients and moments of one adapter."""
    of_runs = memory.adapters + memory.optimizer
    each = of_runs / setting.num_runs
    return max(0, min(MOST_RUNS, math.floor((usable - (memory.peak - of_runs)) / each)))


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
        if probe < setting.seq_len:
            return 0
        before, here = here, (probe, peak(probe))
        if probe == found and here[1] <= usable:
            return found
        found = min(_crossing(before, here, usable), probe - TOKENS_STEP if probe == found else found)
    return found if found >= setting.seq_len else 0


def _crossing(one: tuple[int, float], other: tuple[int, float], usable: float) -> int:
    """Where the line through two passes (tokens, peak) reaches `usable`."""
    (tokens, peak), each = other, (other[1] - one[1]) / max(1, other[0] - one[0])
    return math.floor((tokens + (usable - peak) / max(each, 1.0)) / TOKENS_STEP) * TOKENS_STEP


def split(setting: Setting, memory: PassMemory, gpu_gib: float, num_adapters: int) -> Split | None:
    """How one GPU is divided between the trainer, for passes of `setting`, and vLLM; None when both do not fit.

    Args:
        num_adapters: policy versions of all runs that vLLM holds at one time.
    """
    trainer = memory.peak / (1.0 - FRAGMENTS) + CONTEXT_BYTES
    utilization = math.floor(100 * (1.0 - trainer / (gpu_gib * GIB))) / 100
    adapter = memory.adapters / 2 / setting.num_runs * setting.dtype.itemsize / 4
    cache = utilization * gpu_gib * GIB - memory.weights - INFERENCE_WORK_BYTES - num_adapters * adapter
    tokens = int(cache / kv_bytes(setting.model, setting.dtype.itemsize))
    return Split(utilization, tokens) if tokens >= setting.seq_len else None


def kv_bytes(model: PretrainedConfig, itemsize: int) -> int:
    """Bytes of keys and values of one token in all layers."""
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    head = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    return int(2 * model.num_hidden_layers * heads * head * itemsize)
