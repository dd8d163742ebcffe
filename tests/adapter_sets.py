"""Adapters on every set of target modules, as the trainer publishes them, and the trainer's own forward of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from prime_rl.configs.base import DEFAULT_TARGET_MODULES, LoRAConfig
from prime_rl.lora.adapter_state import export_adapter, save_peft
from prime_rl.trainer.model import PolicyModel, adapt_model

ATTENTION, MLP = DEFAULT_TARGET_MODULES[:4], DEFAULT_TARGET_MODULES[4:]
# The sets that people choose, and each module alone.
TARGET_SETS: dict[str, tuple[str, ...]] = {
    "all": DEFAULT_TARGET_MODULES,
    "attention": ATTENTION,
    "mlp": MLP,
    "q and v": ("q_proj", "v_proj"),
    **{name: (name,) for name in DEFAULT_TARGET_MODULES},
}
MAX_RANK, SLOT = 8, 1


@dataclass(frozen=True)
class TrainedAdapter:
    """An adapter in slot 1 of a trainer's model, of a rank below the slot's."""

    policy: PolicyModel
    targets: tuple[str, ...]
    rank: int
    alpha: float

    @classmethod
    def on(cls, base: nn.Module, targets: Sequence[str], *, seed: int, rank: int = 4) -> TrainedAdapter:
        """Random weights, none of them zero, in a copy of `base`."""
        lora = LoRAConfig(rank=MAX_RANK, alpha=1.0, target_modules=tuple(targets))
        policy = adapt_model(copy.deepcopy(base), lora, n_adapters=2)
        adapter = cls(policy, tuple(targets), rank, alpha=3.0 * rank)
        policy.routing.scaling[SLOT] = adapter.alpha / rank
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer in policy.layers.values():
                lora_A, lora_B = layer.parameters_of(SLOT)
                lora_A[:rank] = torch.randn(rank, lora_A.shape[1], generator=generator) * 0.1
                lora_B[:, :rank] = torch.randn(lora_B.shape[0], rank, generator=generator) * 0.1
        return adapter

    def publish(self, folder: Path, base_model: str = "models/base") -> Path:
        folder.mkdir(parents=True)
        tensors = export_adapter(self.policy.layers, SLOT, self.rank)
        save_peft(folder, tensors, rank=self.rank, alpha=self.alpha, target_modules=self.targets, base_model=base_model)
        return folder

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], *, adapted: bool = True) -> Tensor:
        """The trainer's forward, `[T, V]`; without `adapted` that of the base model."""
        ids_RT = torch.tensor([token_ids])
        return self.policy.logits(ids_RT, torch.arange(ids_RT.shape[1]), [SLOT if adapted else None])[0]

    def logprobs(self, prompt: Sequence[int], generated: Sequence[int], *, adapted: bool = True) -> list[float]:
        """Of each generated token."""
        logits_TV = self.logits([*prompt, *generated], adapted=adapted)[len(prompt) - 1 : -1]
        return logits_TV.log_softmax(-1).gather(1, torch.tensor(generated)[:, None])[:, 0].tolist()
