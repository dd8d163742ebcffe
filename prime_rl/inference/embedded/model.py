"""The model of the embedded engine: loading it, and one forward over many rows of different lengths and adapters.

Works for every causal LM of transformers whose cache is made of keys and values only; models with a recurrent state are
refused when they are loaded. Which rows run together is decided elsewhere (`batch`).

Dimensions: R rows, P longest prompt, T columns of the cache, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.kv import RowCache, use_grouped_attention
from prime_rl.inference.embedded.weights import WholeWeights
from prime_rl.lora.inject import apply_lora_to_model
from prime_rl.lora.linear import AdapterRouting, MultiLoRALinear

# Of the memory that is free after loading: the cache is copied when the batch changes, and others live here too.
CACHE_SHARE = 0.25
# Layer kinds whose whole memory is keys and values, masked by column.
_KV_LAYERS = frozenset({"full_attention", "sliding_attention"})


class ModelError(ValueError):
    """A model that this engine cannot serve; the message has its name and the reason."""


@dataclass(frozen=True)
class Served:
    """A loaded model with room for adapters. `layers` is empty when adapters are switched off; `weights` are its own.

    `cache_tokens` is how many tokens of all rows together, padding included, the KV cache may hold.
    """

    runner: ModelRunner
    layers: Mapping[str, MultiLoRALinear]
    routing: AdapterRouting
    weights: WholeWeights
    vocab_size: int
    eos_ids: frozenset[int]
    cache_tokens: int


def load_model(config: InferenceConfig) -> Served:
    """Load the base model of `config` and put empty adapters into it. Raises ModelError or OSError."""
    device = pick_device(config.device)
    dtype = getattr(torch, config.model.dtype_on(device.type))
    model = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=dtype)
    _refuse_stateful(config.model.name, model)
    use_grouped_attention(model)
    model.to(device).eval().requires_grad_(False)
    lora = config.model.lora
    routing = AdapterRouting(config.max_loras)
    layers: dict[str, MultiLoRALinear] = {}
    if lora is not None:
        layers = apply_lora_to_model(model, lora.rank, config.max_loras, lora.target_modules, routing)
        model.requires_grad_(False)
    vocab_size = model.get_input_embeddings().num_embeddings
    runner = ModelRunner(model, routing)
    cache, _ = runner.prefill([[0]], [None])
    cache_tokens = int(_free_bytes(device) * CACHE_SHARE / cache.bytes_per_token)
    return Served(runner, layers, routing, WholeWeights(model), vocab_size, _eos_ids(model), cache_tokens)


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _refuse_stateful(name: str, model: PreTrainedModel) -> None:
    kinds = set(getattr(model.config, "layer_types", None) or ()) - _KV_LAYERS
    if kinds or getattr(model, "_is_stateful", False):
        raise ModelError(
            f"{name}: the embedded engine cannot serve a model with {', '.join(sorted(kinds)) or 'recurrent'} "
            'layers; use engine = "vllm"'
        )


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    found: set[int] = set()
    for value in (getattr(model.generation_config, "eos_token_id", None), getattr(model.config, "eos_token_id", None)):
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found)


class ModelRunner:
    """Forward passes without gradients. Not thread-safe: one thread owns it."""

    def __init__(self, model: PreTrainedModel, routing: AdapterRouting) -> None:
        self.device = model.device
        self._model = model
        self._routing = routing
        accepted = inspect.signature(model.forward).parameters
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._takes_positions = "position_ids" in accepted

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int | None]) -> tuple[RowCache, Tensor]:
        """Run whole prompts, padded at the left; returns their cache and the logits `[R, V]` after each."""
        longest = max(len(prompt) for prompt in prompts)
        ids_RP = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask_RP = torch.zeros((len(prompts), longest), dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids_RP[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask_RP[row, longest - len(prompt) :] = True
        positions_RP = (mask_RP.cumsum(dim=-1) - 1).clamp(min=0)
        cache = RowCache()
        return cache, self._forward(ids_RP, mask_RP, positions_RP, cache, slots)

    def decode(
        self, ids_R: Tensor, lengths_R: Tensor, mask_RT: Tensor, cache: RowCache, slots: Sequence[int | None]
    ) -> Tensor:
        """One more token for every row: its last token, its position (= tokens before it), the columns it may see."""
        return self._forward(ids_R[:, None], mask_RT, lengths_R[:, None], cache, slots)

    def _forward(
        self, ids_RP: Tensor, mask_RT: Tensor, positions_RP: Tensor, cache: RowCache, slots: Sequence[int | None]
    ) -> Tensor:
        self._routing.set_rows(slots)
        positions = {"position_ids": positions_RP.to(self.device)} if self._takes_positions else {}
        with torch.inference_mode():
            out = self._model(
                input_ids=ids_RP.to(self.device),
                attention_mask=mask_RT.to(self.device),
                past_key_values=cache,
                use_cache=True,
                **positions,
                **self._last_only,
            )
        logits_RV: Tensor = out.logits[:, -1]
        return logits_RV
