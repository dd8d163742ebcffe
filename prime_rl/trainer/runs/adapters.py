"""The adapters behind the slots: the layers that registered themselves, and one run's part of them.

Everything here is by slot; the caller passes which run sits in it, and with which rank. `SlotWeights` is what the
manager needs of them; a trainer without adapters has the whole model in their place.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from prime_rl.configs.orchestrator import OrchestratorConfig, RunLoRAConfig
from prime_rl.configs.shared import LoRAConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.validate import TrainerLimits
from prime_rl.lora.adapter_state import export_adapter, load_adapter, reset_adapter
from prime_rl.lora.linear import MultiLoRALinear


class SlotWeights(Protocol):
    """What the runs train, by slot."""

    def named_parameters(self, run_idx: int) -> list[tuple[str, nn.Parameter]]:
        """The leaves that gradients collect in."""

    def export(self, run_idx: int, lora: RunLoRAConfig) -> dict[str, Tensor]:
        """What the run publishes, as copies on the CPU."""

    def load(self, run_idx: int, tensors: dict[str, Tensor], lora: RunLoRAConfig) -> None:
        """The reverse of `export`; ValueError, and nothing changed, when a name or a shape does not fit."""

    def reset(self, run_idx: int, generator: torch.Generator, lora: RunLoRAConfig) -> None:
        """Start values; gradients are dropped."""

    def scale_of(self, lora: RunLoRAConfig) -> float:
        """What the run's weights are multiplied by in the model."""


class SlotAdapters:
    """The adapted layers of one model.

    Attributes:
        layers: by their name in the base model.
        scaling: by slot. The layers read this very list, so what is set here is what they use.
    """

    def __init__(self, max_runs: int) -> None:
        self.layers: dict[str, MultiLoRALinear] = {}
        self.scaling = [1.0] * max_runs

    def limits_for(self, config: OrchestratorConfig) -> TrainerLimits:
        """What the layers can serve, where there is no trainer's config: any model, and ranks that they hold."""
        rank = self.max_rank or config.model.lora.rank or LoRAConfig().rank
        seq_len = config.seq_len or TrainerConfig(max_concurrent_runs=1).seq_len
        return TrainerLimits(config.model.name, seq_len, rank, LoRAConfig().alpha)

    @property
    def max_rank(self) -> int | None:
        """What every layer has room for; None before the first registered."""
        return min((layer.rank for layer in self.layers.values()), default=None)

    def register(self, name: str, layer: MultiLoRALinear) -> None:
        """Take up `layer`, which reads the slots' scaling from then on.

        Raises ValueError when it does not have one adapter for each slot.
        """
        if len(layer.lora_A) != len(self.scaling):
            raise ValueError(
                f"layer {name} has n_adapters = {len(layer.lora_A)}, the manager {len(self.scaling)} slots"
            )
        self.layers[name] = layer
        layer.routing.scaling = self.scaling

    def alpha_of(self, run_idx: int, lora: RunLoRAConfig) -> float:
        """alpha / rank is the scale in use; exactly the config's alpha unless that was changed."""
        assert lora.alpha is not None, "the config in a slot is resolved"
        return lora.alpha if self.scaling[run_idx] == scale_of(lora) else self.scaling[run_idx] * rank_of(lora)

    def named_parameters(self, run_idx: int) -> list[tuple[str, nn.Parameter]]:
        """A and B of each layer, at the trainer's rank, as NAME.lora_A and NAME.lora_B."""
        named = []
        for name, layer in self.layers.items():
            lora_A, lora_B = layer.parameters_of(run_idx)
            named += [(f"{name}.lora_A", lora_A), (f"{name}.lora_B", lora_B)]
        return named

    def export(self, run_idx: int, lora: RunLoRAConfig) -> dict[str, Tensor]:
        """PEFT names, the run's own rank and type; copies on the CPU."""
        tensors, dtype = export_adapter(self.layers, run_idx, rank_of(lora)), dtype_of(lora)
        return {name: tensor.to(dtype) for name, tensor in tensors.items()}

    def load(self, run_idx: int, tensors: dict[str, Tensor], lora: RunLoRAConfig) -> None:
        """The reverse of `export`; ValueError, and nothing changed, when a name or a shape does not fit."""
        rounded = {name: tensor.to(dtype_of(lora)) for name, tensor in tensors.items()}
        load_adapter(self.layers, run_idx, rounded, rank_of(lora))

    def reset(self, run_idx: int, generator: torch.Generator, lora: RunLoRAConfig) -> None:
        """Start values; gradients are dropped."""
        reset_adapter(self.layers, run_idx, generator, rank_of(lora), dtype_of(lora))

    def scale_of(self, lora: RunLoRAConfig) -> float:
        """alpha / rank of the run's config."""
        return scale_of(lora)


def rank_of(lora: RunLoRAConfig) -> int:
    """The rank of a run in a slot, whose config is resolved."""
    assert lora.rank is not None, "the config in a slot is resolved"
    return lora.rank


def scale_of(lora: RunLoRAConfig) -> float:
    """alpha / rank of a run in a slot, whose config is resolved."""
    assert lora.alpha is not None, "the config in a slot is resolved"
    return lora.alpha / rank_of(lora)


def dtype_of(lora: RunLoRAConfig) -> torch.dtype:
    """What the run's weights are rounded to, and published in; in memory all are float32."""
    return torch.bfloat16 if lora.dtype == "bfloat16" else torch.float32
