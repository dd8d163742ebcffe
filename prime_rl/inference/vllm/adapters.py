"""What vLLM does not check of an adapter: that every tensor belongs to the model.

vLLM serves an adapter whose names match nothing as the base model. That is refused here, before vLLM sees the request,
with the words of the embedded engine. And after it has loaded an adapter, what its layers hold is measured against the
file: an adapter that it ignored or cut is not served.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.errors import adapter_refused
from prime_rl.lora.adapter_state import AdapterConfig, check_finite, check_served_adapter, load_peft
from prime_rl.lora.linear import AdapterRouting, MultiLoRALinear, apply_lora_to_model
from prime_rl.lora.tensor_files import shapes_of

# Sum of squares of all A and of all scaled B.
AdapterSize = tuple[float, float]
# Rounding to bfloat16 changes the sum of many squares by far less; a layer that is missing by more.
SIZE_TOLERANCE = 5e-4


def _size(tensors: Mapping[str, Tensor], config: AdapterConfig) -> AdapterSize:
    def squares(kind: str) -> float:
        return math.fsum(float(t.double().square().sum()) for key, t in tensors.items() if f".{kind}." in key)

    return squares("lora_A"), squares("lora_B") * (config.alpha / config.rank) ** 2


def _is_close(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=SIZE_TOLERANCE)


def _is_there(found: float, expected: float) -> bool:
    return math.isfinite(found) and (found > 0) == (expected > 0)


class AdapterGate:
    """Call it with name and folder of an adapter; it returns the path that vLLM is to load, or raises ApiError."""

    def __init__(self, config: InferenceConfig) -> None:
        self._base = config.model.name
        self._num_loads: Counter[str] = Counter()
        self._sizes: dict[str, AdapterSize] = {}
        self._layers: dict[str, MultiLoRALinear] = {}
        if config.model.lora is not None:
            # A model without weights, only for the names and shapes of its layers.
            with torch.device("meta"):
                shape = AutoConfig.from_pretrained(config.model.name, trust_remote_code=False)
                model = AutoModelForCausalLM.from_config(shape)
            lora = config.model.lora
            self._layers = apply_lora_to_model(model, lora.rank, 1, lora.target_modules, AdapterRouting(1))

    def __call__(self, name: str, folder: Path) -> str:
        """Check the adapter's names, shapes and numbers, and keep its size for `check_sizes`."""
        try:
            tensors, config = load_peft(folder)
            check_served_adapter(self._layers, shapes_of(tensors), config, self._base)
            check_finite(tensors)
        except (ValueError, OSError) as error:
            raise adapter_refused(name, error) from error
        self._sizes[name] = _size(tensors, config)
        return self._fresh_path(name, folder)

    def check_sizes(self, name: str, found: Sequence[Sequence[AdapterSize | None]]) -> None:
        """Raises ValueError unless vLLM's layers, on each worker of each engine, hold what the adapter's file holds."""
        expected = self._sizes.pop(name)
        for workers in found:
            # vLLM decides how layers are cut over several workers, so only check that each holds something where it
            # should.
            fits = _is_close if len(workers) == 1 else _is_there
            for size in workers:
                if size is None or not all(fits(one, other) for one, other in zip(size, expected, strict=True)):
                    raise ValueError(f"its layers hold {size}, the file holds {expected}")

    def _fresh_path(self, name: str, folder: Path) -> str:
        """The same folder, spelled differently every time a name is loaded again.

        vLLM's prefix cache identifies an adapter by name and path. A run that was rolled back publishes other weights
        under a version that was served before, and must not meet the keys and values of those.
        """
        spelling = str(folder) + "/." * self._num_loads[name]
        self._num_loads[name] += 1
        return spelling
