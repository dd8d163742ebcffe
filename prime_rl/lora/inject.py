"""Put a `MultiLoRALinear` in the place of every targeted linear layer of a model. Independent of runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from prime_rl.lora.linear import AdapterRouting, MultiLoRALinear


def apply_lora_to_model(
    model: nn.Module, rank: int, n_adapters: int, target_modules: Sequence[str], routing: AdapterRouting
) -> dict[str, MultiLoRALinear]:
    """Replace the linear layers whose last name is in `target_modules`; returns them by their name in the base model.

    Every adapter starts at zero, so the model's outputs are unchanged. Raises ValueError when a target names no linear
    layer, or weights of experts: such a run would train less than it asked for.
    """
    if experts := _expert_weights(model).intersection(target_modules):
        raise ValueError(
            f"target_modules {sorted(experts)} name weights of experts: adapters are for linear layers only; "
            f"the model has {_linear_names(model)}"
        )
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in target_modules
    }
    missing = set(target_modules) - {name.rpartition(".")[2] for name in found}
    if missing:
        raise ValueError(
            f"target_modules {sorted(missing)} match no linear layer of the model; it has {_linear_names(model)}"
        )
    layers = {name: MultiLoRALinear(base, rank, n_adapters, routing) for name, base in found.items()}
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
    return layers


def _expert_weights(model: nn.Module) -> set[str]:
    """The names of a mixture's weights: each is one tensor `[expert, out, in]`, two of them may be in one."""
    stacked = {name.rpartition(".")[2] for name, weight in model.named_parameters() if weight.dim() == 3}
    return stacked | ({"gate_proj", "up_proj"} if "gate_up_proj" in stacked else set())


def _linear_names(model: nn.Module) -> list[str]:
    return sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
