"""A frozen linear layer with a low-rank adapter for each slot, and the object that maps rows to slots.

Every adapter has its own leaf parameters, so gradients of different runs cannot mix and a slot that no row uses takes
part in nothing. `AdapterRouting.set_rows` sets the rows of each adapter once for all layers, before the model is
called. The products are in `grouped`.

Dimensions: R rows (sequences), T tokens of a row, N tokens of all rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor, nn

from prime_rl.lora.grouped import Layer, Plan, TokenGroup, grouped_lora, make_plan


@dataclass(frozen=True)
class RowGroup:
    """Neighbours that use `adapter` (None: the base model alone): so many rows, or, in a packed row, tokens."""

    adapter: int | None
    size: int


class AdapterRouting:
    """Which row of the activations uses which adapter. One object for all layers of a model.

    Attributes:
        scaling: alpha / rank of each adapter.
        groups: equal neighbours merged, in the order of the rows. Sorted rows make few groups and quick passes.
    """

    def __init__(self, n_adapters: int) -> None:
        self.scaling: list[float] = [1.0] * n_adapters
        self.groups: list[RowGroup] = []
        self.num_rows = 0
        self._is_packed = False
        self._plan: tuple[int, Plan] | None = None

    def set_rows(self, adapter_idxs: Sequence[int | None], lengths: Sequence[int] | None = None) -> None:
        """Say for each row of dim 0 of the next activations which adapter it uses; None is the base model alone.

        With `lengths` the rows are packed: they lie end to end in one row, of so many tokens each.
        """
        for idx in adapter_idxs:
            if idx is not None and not 0 <= idx < len(self.scaling):
                raise ValueError(f"adapter {idx} does not exist: there are {len(self.scaling)}")
        sizes = lengths or [1] * len(adapter_idxs)
        pairs = zip(adapter_idxs, sizes, strict=True)
        self.groups = [
            RowGroup(idx, sum(size for _, size in same)) for idx, same in groupby(pairs, lambda pair: pair[0])
        ]
        self._is_packed = lengths is not None
        self.num_rows = 1 if self._is_packed else len(adapter_idxs)
        self._plan = None

    @property
    def all_base(self) -> bool:
        """Whether all rows use the base model alone."""
        return all(group.adapter is None for group in self.groups)

    def plan(self, num_tokens: int, *, one_kernel: bool = False) -> Plan:
        """How the products of rows of `num_tokens` are computed: worked out once, and the same for all layers."""
        if self._plan is None or self._plan[0] != num_tokens:
            groups = self._token_groups(num_tokens)
            self._plan = num_tokens, make_plan(groups, self.num_rows * num_tokens, one_kernel=one_kernel)
        return self._plan[1]

    def _token_groups(self, num_tokens: int) -> list[TokenGroup]:
        groups, start = [], 0
        for group in self.groups:
            stop = start + group.size * (1 if self._is_packed else num_tokens)
            if group.adapter is not None:
                groups.append(TokenGroup(group.adapter, start, stop, self.scaling[group.adapter]))
            start = stop
        return groups


class LayerRegistry(Protocol):
    """A registry of adapted layers (the trainer's MultiRunManager)."""

    def register_module(self, name: str, module: MultiLoRALinear) -> None:
        """Take up an adapted layer under its name in the model."""


class MultiLoRALinear(nn.Module):
    """`base_layer(x) + scaling * (x A^T) B^T`, with A and B those of the row's adapter.

    Args:
        base_layer: the frozen layer, weights `[out, in]`.
        rank: the largest rank; an adapter of a lower one leaves the rest of A and B at zero, which adds nothing to
            outputs or gradients.
        n_adapters: slots.
        routing: shared by all layers of the model; default: the layer has its own.

    The adapters are kept in float32 and used in the type of the activations.
    """

    def __init__(
        self, base_layer: nn.Linear, rank: int, n_adapters: int, routing: AdapterRouting | None = None
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.rank = rank
        self.routing = routing or AdapterRouting(n_adapters)
        device = base_layer.weight.device
        num_in, num_out = base_layer.in_features, base_layer.out_features
        self.lora_A = nn.ParameterList([torch.zeros(rank, num_in, device=device) for _ in range(n_adapters)])
        self.lora_B = nn.ParameterList([torch.zeros(num_out, rank, device=device) for _ in range(n_adapters)])
        # The same parameters once more: looking one up in a ParameterList costs more than a small product.
        self._pairs = list(zip(self.lora_A, self.lora_B, strict=True))

    def register_with_runs(self, manager: LayerRegistry, name: str) -> None:
        """Enter this layer into `manager` under `name`, its name in the model."""
        manager.register_module(name, self)

    def parameters_of(self, idx: int) -> tuple[nn.Parameter, nn.Parameter]:
        """A `[rank, in]` and B `[out, rank]` of adapter `idx`."""
        return self._pairs[idx]

    def plan_for(self, x_RTI: Tensor) -> Plan | None:
        """How the products of these activations are computed; None where all rows are the base model's alone."""
        routing = self.routing
        if x_RTI.shape[0] != routing.num_rows:
            raise ValueError(f"activations have {x_RTI.shape[0]} rows, the routing was set for {routing.num_rows}")
        if routing.all_base:
            return None
        # A rank that is no multiple of eight has strides that the kernel does not take.
        one_kernel = x_RTI.is_cuda and x_RTI.dtype == torch.bfloat16 and self.rank % 8 == 0
        return routing.plan(x_RTI.shape[1], one_kernel=one_kernel)

    def with_adapters(self, plan: Plan) -> Layer:
        """The frozen layer with A and B of each group of `plan`."""
        A_G, B_G = zip(*(self._pairs[idx] for idx in plan.adapters), strict=True)
        return Layer(self.base_layer.weight, self.base_layer.bias, A_G, B_G)

    def forward(self, x_RTI: Tensor) -> Tensor:
        """`[R, T, O]`."""
        plan = self.plan_for(x_RTI)
        if plan is None:
            base_RTO: Tensor = self.base_layer(x_RTI)
            return base_RTO
        out_NO = grouped_lora(x_RTI.reshape(-1, x_RTI.shape[-1]), self.with_adapters(plan), plan)
        return out_NO.reshape(*x_RTI.shape[:-1], -1)


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
