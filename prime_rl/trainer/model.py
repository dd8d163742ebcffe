"""The base model: loaded once, frozen, with an adapter slot for each run in its linear layers.

With several ranks each holds a shard of the base model and all of the adapters.

Rows are padded at the right and attention is causal, so a token never sees the padding and no mask is needed. Logits
are computed only at the positions that the caller asks for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from prime_rl.configs.shared import LoRAConfig, ModelConfig
from prime_rl.lora.inject import apply_lora_to_model
from prime_rl.lora.linear import AdapterRouting, MultiLoRALinear
from prime_rl.trainer.frozen_norm import fuse_norms
from prime_rl.trainer.sharding import shard_model, shard_trainable
from prime_rl.trainer.world import World

logger = logging.getLogger(__name__)


class ModelError(RuntimeError):
    """The base model cannot be loaded; the message is one line with its name and the reason."""


@dataclass(frozen=True)
class PolicyModel:
    """The frozen base with its adapters.

    Attributes:
        layers: the adapted layers by their name in the base model.
        routing: maps rows to adapters; set it before each call.
    """

    module: nn.Module
    layers: dict[str, MultiLoRALinear]
    routing: AdapterRouting
    vocab_size: int

    def adapters(self) -> list[nn.Parameter]:
        """The parameters of all slots."""
        return [parameter for layer in self.layers.values() for parameter in (*layer.lora_A, *layer.lora_B)]

    def logits(self, token_ids_RT: Tensor, positions_K: Tensor, run_idxs: Sequence[int | None]) -> Tensor:
        """Logits `[R, K, vocab]` at `positions_K` of rows that use the adapters `run_idxs`; None: the base alone."""
        self.routing.set_rows(run_idxs)
        output = self.module(input_ids=token_ids_RT, use_cache=False, logits_to_keep=positions_K)
        logits: Tensor = output.logits
        return logits


def load_model(config: ModelConfig, lora: LoRAConfig | None, n_adapters: int, world: World) -> PolicyModel:
    """Load, freeze, adapt, shard over the ranks; without `lora` all weights are trained. Raises ModelError."""
    if lora is None:
        return _load_trainable(config, world)
    model = adapt_model(_load_base(config.name, getattr(torch, config.dtype)), lora, n_adapters)
    shard_model(model.module, world, replicated=model.adapters())
    return model


def _load_trainable(config: ModelConfig, world: World) -> PolicyModel:
    """The masters are in float32 whatever the model computes in: small updates must not be rounded away."""
    base = _load_base(config.name, torch.float32)
    base.requires_grad_(True)
    base.eval()
    vocab_size = base.get_input_embeddings().num_embeddings  # type: ignore[operator]
    shard_trainable(base, world, getattr(torch, config.dtype))
    return PolicyModel(base, {}, AdapterRouting(1), vocab_size)


def adapt_model(base: nn.Module, lora: LoRAConfig, n_adapters: int) -> PolicyModel:
    """Freeze `base` and give it adapter slots. Raises ModelError when a target module does not exist."""
    base.requires_grad_(False)
    # Dropout off: a run must not depend on random numbers that its neighbours draw too.
    base.eval()
    fuse_norms(base)
    routing = AdapterRouting(n_adapters)
    try:
        layers = apply_lora_to_model(base, lora.rank, n_adapters, lora.target_modules, routing)
    except ValueError as error:
        raise ModelError(f"model.lora.{error}") from error
    embeddings = base.get_input_embeddings()  # type: ignore[operator]
    return PolicyModel(base, layers, routing, embeddings.num_embeddings)


def _load_base(name: str, dtype: torch.dtype) -> nn.Module:
    path = Path(name)
    if not path.is_dir() and (path.is_absolute() or name.count("/") != 1 or _is_offline()):
        raise ModelError(
            f"model.name = {name!r}: folder not found (from {Path.cwd()}); "
            "build one with python -m prime_rl.trainer.make_base --out DIR, or name another"
        )
    transformers_logging.disable_progress_bar()
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.name = {name!r} cannot be loaded: {' '.join(str(error).split())}") from error
    logger.info("loaded %s: %d parameters", name, sum(p.numel() for p in model.parameters()))
    return model


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "yes")
