"""One adapter as tensors and as files: start values, PEFT names, export, load. Every name and shape is checked.

An adapter whose names do not match the model would silently act as the base model, so loading is all or
nothing. Files are safetensors and JSON; nothing is pickled. Whether a folder is complete (`STABLE`) is the caller's
business.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

# Re-exported: who loads an adapter needs them.
from prime_rl.contract.peft import ADAPTER_FILE as ADAPTER_FILE
from prime_rl.contract.peft import CONFIG_FILE, read_adapter_config
from prime_rl.contract.peft import AdapterConfig as AdapterConfig
from prime_rl.lora.linear import MultiLoRALinear
from prime_rl.lora.misfit import misfit, shapes_of
from prime_rl.lora.tensor_files import load_tensors

# A rank of 256 in every linear layer of a model with 70 billion parameters takes about as much.
MAX_ADAPTER_BYTES = 8 << 30
PEFT_PREFIX = "base_model.model."


def peft_names(layer_name: str) -> tuple[str, str]:
    """`model.layers.0.mlp.up_proj` -> the names of its A and its B in a PEFT file."""
    return f"{PEFT_PREFIX}{layer_name}.lora_A.weight", f"{PEFT_PREFIX}{layer_name}.lora_B.weight"


@torch.no_grad()
def reset_adapter(
    layers: Mapping[str, MultiLoRALinear],
    idx: int,
    generator: torch.Generator,
    rank: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Start values of adapter `idx`: A Kaiming uniform in its first `rank` rows (null: all), the rest and B zero.

    The values depend on the generator (on the CPU), the layers and `rank` alone, not on the slot, and are rounded to
    `dtype`. Gradients are dropped.
    """
    for layer in layers.values():
        lora_A, lora_B = layer.parameters_of(idx)
        num_in = lora_A.shape[1]
        # Kaiming uniform with a = sqrt(5), as nn.Linear and PEFT start theirs: bound 1 / sqrt(fan_in).
        start = torch.rand(rank or layer.rank, num_in, generator=generator) * 2 - 1
        lora_A.zero_()
        lora_A[: start.shape[0]].copy_((start / math.sqrt(num_in)).to(dtype))
        lora_B.zero_()
        lora_A.grad = lora_B.grad = None


def export_adapter(layers: Mapping[str, MultiLoRALinear], idx: int, rank: int) -> dict[str, Tensor]:
    """Adapter `idx` under PEFT names, cut to its own rank; copies on the CPU."""
    tensors = {}
    for name, layer in layers.items():
        lora_A, lora_B = layer.parameters_of(idx)
        name_A, name_B = peft_names(name)
        tensors[name_A] = lora_A.detach()[:rank].to("cpu", copy=True).contiguous()
        tensors[name_B] = lora_B.detach()[:, :rank].to("cpu", copy=True).contiguous()
    return tensors


@torch.no_grad()
def load_adapter(layers: Mapping[str, MultiLoRALinear], idx: int, tensors: Mapping[str, Tensor], rank: int) -> None:
    """Put `tensors` (PEFT names, of `rank`) into slot `idx`; what is above `rank` becomes zero. Gradients are dropped.

    Raises ValueError, before anything is changed, when a name is missing or unknown or a shape is wrong.
    """
    problem = misfit(shapes_of(tensors), _expected_shapes(layers, rank))
    if problem:
        raise ValueError(f"adapter does not fit the model: {problem}")
    for name, layer in layers.items():
        lora_A, lora_B = layer.parameters_of(idx)
        name_A, name_B = peft_names(name)
        lora_A[:rank].copy_(tensors[name_A])
        lora_A[rank:].zero_()
        lora_B[:, :rank].copy_(tensors[name_B])
        lora_B[:, rank:].zero_()
        lora_A.grad = lora_B.grad = None


@torch.no_grad()
def load_served_adapter(
    layers: Mapping[str, MultiLoRALinear], idx: int, tensors: Mapping[str, Tensor], config: AdapterConfig
) -> None:
    """Put an adapter that may have fewer target modules than `layers` into slot `idx`; the other layers become zero.

    Raises ValueError, before anything is changed, when it targets what takes no adapter here, or when its tensors are
    not exactly those that it lists.
    """
    targeted = {name: layer for name, layer in layers.items() if _is_target(name, config.target_modules)}
    idle = [target for target in config.target_modules if not any(_is_target(name, [target]) for name in layers)]
    if idle or not targeted:
        takes = sorted({name.rpartition(".")[2] for name in layers})
        raise ValueError(
            f"its target_modules are {sorted(config.target_modules)}, this model takes adapters in {takes} only"
        )
    load_adapter(targeted, idx, tensors, config.rank)
    for name in layers.keys() - targeted.keys():
        for parameter in layers[name].parameters_of(idx):
            parameter.zero_()


def _is_target(layer_name: str, targets: Sequence[str]) -> bool:
    """As in PEFT: a target is the whole name of a layer, or its end after a dot."""
    return any(layer_name == target or layer_name.endswith(f".{target}") for target in targets)


def _expected_shapes(layers: Mapping[str, MultiLoRALinear], rank: int) -> dict[str, tuple[int, int]]:
    shapes: dict[str, tuple[int, int]] = {}
    for name, layer in layers.items():
        if rank > layer.rank:
            raise ValueError(f"adapter has rank {rank}, the model allows at most {layer.rank}")
        name_A, name_B = peft_names(name)
        shapes[name_A] = (rank, layer.base_layer.in_features)
        shapes[name_B] = (layer.base_layer.out_features, rank)
    return shapes


def save_peft(
    folder: Path, tensors: dict[str, Tensor], *, rank: int, alpha: float, target_modules: Sequence[str], base_model: str
) -> None:
    """Write the two files of the PEFT format into `folder`, which must exist. Raises OSError."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "target_modules": sorted(target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }
    # Not `save_file`: its error for a full disk is no OSError and names no path.
    (folder / ADAPTER_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def load_peft(folder: Path, *, limit: int = MAX_ADAPTER_BYTES) -> tuple[dict[str, Tensor], AdapterConfig]:
    """Read what `save_peft` wrote, at most `limit` bytes of weights.

    Raises ValueError when the files are not an adapter that this project can use, OSError when they cannot be read.
    """
    config = read_adapter_config(folder)
    try:
        tensors = load_tensors(folder / ADAPTER_FILE, limit=limit)
    except ValueError as error:
        raise ValueError(f"{folder}: not an adapter: {error}") from error
    return tensors, config
