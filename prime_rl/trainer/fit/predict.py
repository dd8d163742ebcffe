"""The memory of a pass, from the trainer's own model, head and losses on tensors without memory.

The layers of a model are alike, so every figure is a straight line over their number: a pass of two layers and one of
three give it for all of them, in seconds for a model of any size. A model whose layers differ is measured as a whole.
"""

from __future__ import annotations

import copy
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from prime_rl.configs.losses import AipoLossConfig
from prime_rl.configs.shared import LoRAConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.contract.types import TOKEN_BYTES, MicroBatch
from prime_rl.trainer.fair_queue import LOSS_TOKEN
from prime_rl.trainer.fit.meter import Meter, metered
from prime_rl.trainer.fit.shapes import model_config
from prime_rl.trainer.model import PolicyModel, adapt_model
from prime_rl.trainer.passes import forward_backward

# Float32 numbers that Adam keeps for each weight of an adapter.
MOMENTS = 2
FEW_LAYERS, MORE_LAYERS = 2, 3


@dataclass(frozen=True)
class Setting:
    """What is asked: a model, its adapters, and the passes.

    Attributes:
        tokens: token positions of a pass: as many rows of `seq_len` as fit, at least one.
        checkpoints: whether layers are computed again in backward.
        packs: whether rows lie end to end.
        num_ranks: GPUs that the base model is sharded over.
    """

    model: PretrainedConfig
    dtype: torch.dtype
    lora: LoRAConfig
    num_runs: int
    seq_len: int
    tokens: int
    checkpoints: bool
    packs: bool = False
    num_ranks: int = 1

    @property
    def num_rows(self) -> int:
        return max(1, self.tokens // self.seq_len)

    @property
    def row_tokens(self) -> int:
        return self.tokens // self.num_rows


def setting_of(trainer: TrainerConfig, device_type: str, num_ranks: int) -> Setting:
    """Of the trainer's largest pass on devices of type "cuda" or "cpu". Raises UnknownModel."""
    model = trainer.model
    assert model.lora is not None, "only adapters can be predicted"
    return Setting(
        model=model_config(model.name),
        dtype=getattr(torch, model.dtype_on(device_type)),
        lora=model.lora,
        num_runs=trainer.max_concurrent_runs,
        seq_len=trainer.seq_len,
        tokens=max(trainer.seq_len, trainer.micro_batch_tokens),
        checkpoints=model.checkpoints_on(device_type),
        packs=model.packs_on(device_type),
        num_ranks=num_ranks,
    )


@dataclass(frozen=True)
class PassMemory:
    """Bytes on one rank.

    Attributes:
        weights: the frozen base model; of several ranks, this one's part and what it puts together in a pass.
        adapters: weights and gradients of all slots, in float32.
        optimizer: their moments.
        activations: what backward needs, when the layers' forward ends.
        head: the most that log-probabilities and entropies take then.
        work: what backward takes beyond all that.
    """

    weights: float
    adapters: float
    optimizer: float
    activations: float
    head: float
    work: float

    @property
    def peak(self) -> float:
        """The most that is held at one time."""
        return float(sum(astuple(self)))

    def plus(self, other: PassMemory, times: float) -> PassMemory:
        """`times` the other added to this one."""
        return PassMemory(*(mine + times * its for mine, its in zip(astuple(self), astuple(other), strict=True)))


def predict(setting: Setting) -> PassMemory:
    """The memory of a pass half of whose positions are loss tokens of the default loss."""
    num_layers = setting.model.num_hidden_layers
    are_alike = len(set(getattr(setting.model, "layer_types", None) or ())) <= 1
    low, high = (FEW_LAYERS, MORE_LAYERS) if are_alike and num_layers > MORE_LAYERS else (1, num_layers)
    small, large = measure(setting, low), measure(setting, high)
    num_more = max(1, high - low)
    more = large.plus(small, -1.0)
    whole = small.plus(more, (num_layers - low) / num_more)
    weights = _on_each_rank(whole.weights, more.weights / num_more, num_layers, setting.num_ranks)
    return replace(whole, weights=weights)


def _on_each_rank(weights: float, layer: float, num_layers: int, num_ranks: int) -> float:
    """A part of every weight, two whole layers (the one that works and the next), and what is around the layers."""
    if num_ranks == 1:
        return weights
    return weights / num_ranks + 2 * layer + (weights - num_layers * layer)


def measure(setting: Setting, num_layers: int) -> PassMemory:
    config = copy.deepcopy(setting.model)
    config.num_hidden_layers = num_layers
    with metered() as meter:
        base = AutoModelForCausalLM.from_config(config, dtype=setting.dtype)
        weights = meter.alive
        runs, checkpoints = setting.num_runs, setting.checkpoints
        model = adapt_model(base, setting.lora, runs, checkpoints=checkpoints, packs=setting.packs)
        adapters = meter.alive - weights
        for leaf in model.adapters():
            leaf.grad = torch.zeros_like(leaf)
        stages = _Stages(meter, model)
        batch = micro_batch(setting)
        forward_backward(model, batch, [AipoLossConfig()] * len(batch.run_idxs), torch.device("cpu"))
        return stages.memory(weights, adapters)


class _Stages:
    """What is alive when the head begins, and the most that was until it ended."""

    def __init__(self, meter: Meter, model: PolicyModel) -> None:
        self._meter = meter
        self._start = meter.alive
        self._at_head = self._in_head = self._before_head = 0
        meter.reset_peak()
        model.head.register_forward_pre_hook(self._head_begins)
        model.head.register_forward_hook(self._head_ends)

    def _head_begins(self, *_: Any) -> None:
        self._at_head, self._before_head = self._meter.alive, self._meter.peak
        self._meter.reset_peak()

    def _head_ends(self, *_: Any) -> None:
        self._in_head = self._meter.peak

    def memory(self, weights: int, adapters: int) -> PassMemory:
        peak = max(self._before_head, self._meter.peak)
        activations, head = self._at_head - self._start, self._in_head - self._at_head
        work = peak - self._start - activations - head
        return PassMemory(weights, 2 * adapters, MOMENTS * adapters, activations, head, work)


def micro_batch(setting: Setting) -> MicroBatch:
    """Rows of the runs in turn; the second half of each is a completion."""
    num_rows, num_tokens = setting.num_rows, setting.row_tokens
    prompt = num_tokens // 2
    return MicroBatch(
        run_idxs=[row * setting.num_runs // num_rows for row in range(num_rows)],
        token_ids=[bytes(num_tokens * TOKEN_BYTES)] * num_rows,
        loss_mask=[bytes(prompt) + LOSS_TOKEN * (num_tokens - prompt)] * num_rows,
        logprobs=[bytes(num_tokens * TOKEN_BYTES)] * num_rows,
        advantages=[1.0] * num_rows,
        temperatures=[1.0] * num_rows,
        loss_scales=[1.0] * num_rows,
        num_tokens=num_tokens,
    )
