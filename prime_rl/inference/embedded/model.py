"""The model of the embedded engine: loading it, one forward over rows of many adapters, changing its weights.

Works for every causal LM of transformers whose cache is made of keys and values only; models with a recurrent state are
refused when they are loaded. Which rows run together is decided elsewhere (`batch`).

Dimensions: R rows, P longest prompt, T columns of the cache, V vocabulary.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.checks import StartError
from prime_rl.inference.embedded.kv import new_cache, use_grouped_attention
from prime_rl.inference.errors import ApiError
from prime_rl.inference.weight_files import WEIGHTS_FILE, check_fit, readable, weights_label
from prime_rl.lora.linear import AdapterRouting, MultiLoRALinear, apply_lora_to_model
from prime_rl.lora.tensor_files import load_tensors, shapes_of
from prime_rl.transfer import TransferError, WeightReceiver

# Of the memory that is free after loading: the cache is copied when the batch changes, and others live here too.
CACHE_SHARE = 0.25
# Layer kinds whose whole memory is keys and values, masked by column.
_KV_LAYERS = frozenset({"full_attention", "sliding_attention"})
_ADAPTERS = (".lora_A.", ".lora_B.")


class WholeWeights:
    """The parameters of `model`, and other weights for them.

    Those are read and checked first, then put in place at once. When it is safe to change them is the caller's
    business.

    Each has the name that a model folder has for it, whatever adapters were put around the layers. `shapes` are those
    that a weight file must have; a tied weight is there once.
    """

    def __init__(self, model: nn.Module, config: InferenceConfig) -> None:
        self._parameters = {
            name.replace(".base_layer.", "."): parameter
            for name, parameter in model.named_parameters()
            if not any(part in name for part in _ADAPTERS)
        }
        self.shapes = shapes_of(self._parameters)
        self._config = config
        self._receiver: WeightReceiver | None = None
        self._base: dict[str, Tensor] | None = None  # made when it is first needed: adapters alone never do

    def read(self, folder: Path) -> dict[str, Tensor]:
        """The weights that were published in `folder`: from its file, or from the trainer's memory.

        Raises ApiError (400) when they do not fit the model. Changes nothing.
        """
        if self._config.broadcast.type == "nccl":
            name = weights_label(self._config.output_dir.resolve(), folder)
            tensors = self._received(name)
        else:
            name = str(folder / WEIGHTS_FILE)
            with readable(folder / WEIGHTS_FILE):
                tensors = load_tensors(folder / WEIGHTS_FILE, mapped=True)
        check_fit(name, shapes_of(tensors), self.shapes)
        return tensors

    def _received(self, label: str) -> dict[str, Tensor]:
        if self._receiver is None:
            source, device = self._config.broadcast, next(iter(self._parameters.values())).device
            self._receiver = WeightReceiver(source.host, source.port, timeout_s=source.timeout_s, device=device)
        try:
            return self._receiver.receive(label, ticket=uuid.uuid4().hex)
        except TransferError as error:
            raise ApiError(400, f"The weights stay as they are: {error}", param="weight_dir") from error

    @torch.no_grad()
    def apply(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Put what `read` returned in place; None: the weights that the model was loaded with.

        No forward may run meanwhile.
        """
        if self._base is None:
            if tensors is None:
                return
            self._base = {name: parameter.to("cpu", copy=True) for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            parameter.copy_((tensors or self._base)[name])


@dataclass
class Served:
    """A loaded model with room for adapters. Not thread-safe: one thread owns it.

    Attributes:
        layers: those that take adapters, by name; empty when adapters are switched off.
        weights: its own.
        eos_ids: tokens that end a sequence.
        cache_tokens: how many tokens of all rows together, padding included, the KV cache may hold.
    """

    model: PreTrainedModel
    layers: Mapping[str, MultiLoRALinear]
    routing: AdapterRouting
    weights: WholeWeights
    eos_ids: frozenset[int]
    cache_tokens: int = 0

    def __post_init__(self) -> None:
        self.device: torch.device = self.model.device
        self.vocab_size: int = self.model.get_input_embeddings().num_embeddings
        # V, which a model may have padded beyond its tokens.
        self.num_logits: int = self.model.get_output_embeddings().weight.shape[0]
        self._accepted = inspect.signature(self.model.forward).parameters

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int | None]) -> Cache:
        """The cache of whole prompts, padded at the left. They may be empty: there is one column at least."""
        longest = max(1, *map(len, prompts))
        ids_RP = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask_RP = torch.zeros((len(prompts), longest), dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids_RP[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
            mask_RP[row, longest - len(prompt) :] = True
        positions_RP = (mask_RP.cumsum(dim=-1) - 1).clamp(min=0)
        cache = new_cache()
        self.forward(ids_RP, mask_RP, positions_RP, cache, slots)
        return cache

    def forward(
        self, ids_RP: Tensor, mask_RT: Tensor, positions_RP: Tensor, cache: Cache, slots: Sequence[int | None]
    ) -> Tensor:
        """The logits `[R, V]` after the new tokens of every row.

        Given are the tokens, the columns that the row may see, the positions (= tokens before each), and the row's
        adapter. The cache then has the tokens too.
        """
        self.routing.set_rows(slots)
        optional = {"position_ids": positions_RP.to(self.device), "logits_to_keep": 1}
        with torch.inference_mode():
            out = self.model(
                input_ids=ids_RP.to(self.device),
                attention_mask=mask_RT.to(self.device),
                past_key_values=cache,
                use_cache=True,
                **{name: value for name, value in optional.items() if name in self._accepted},
            )
        logits_RV: Tensor = out.logits[:, -1]
        return logits_RV


def load_model(config: InferenceConfig) -> Served:
    """Load the base model of `config` and put empty adapters into it. Raises StartError or OSError."""
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if config.device == "auto" else config.device)
    model = AutoModelForCausalLM.from_pretrained(
        config.model.name, dtype=getattr(torch, config.model.dtype_on(device.type)), trust_remote_code=False
    )
    _refuse_stateful(config.model.name, model)
    use_grouped_attention(model)
    model.to(device).eval()
    routing = AdapterRouting(config.max_loras)
    layers: dict[str, MultiLoRALinear] = {}
    if (lora := config.model.lora) is not None:
        layers = apply_lora_to_model(model, lora.rank, config.max_loras, lora.target_modules, routing)
    model.requires_grad_(False)
    served = Served(model, layers, routing, WholeWeights(model, config), _eos_ids(model))
    layers_of_one = served.prefill([[0]], [None]).layers
    token_bytes = sum(each.nbytes for layer in layers_of_one for each in (layer.keys, layer.values))
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    served.cache_tokens = int(free * CACHE_SHARE / token_bytes)
    return served


def _refuse_stateful(name: str, model: PreTrainedModel) -> None:
    kinds = set(getattr(model.config, "layer_types", None) or ()) - _KV_LAYERS
    if kinds or getattr(model, "_is_stateful", False):
        raise StartError(
            f"{name}: the embedded engine cannot serve a model with {', '.join(sorted(kinds)) or 'recurrent'} "
            'layers; use engine = "vllm"'
        )


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    given = [getattr(each, "eos_token_id", None) for each in (model.generation_config, model.config)]
    return frozenset(eos for value in given for eos in ([value] if isinstance(value, int) else value or []))
