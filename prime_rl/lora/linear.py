"""A frozen linear layer with a low-rank adapter for each slot, and the object that says which row uses which slot.

Every adapter has its own leaf parameters, so gradients of different runs cannot mix and a slot that no row uses takes
part in nothing. Which rows belong to whom is said once for all layers (`AdapterRouting.set_rows`), before the model is
called. This module knows nothing of runs, files or models.

Dimensions: R rows (sequences), T tokens of a row, I inputs, O outputs, K rank, G groups (neighbouring rows of one
adapter), N tokens of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class RowGroup:
    """`num_rows` neighbouring rows that use `adapter` (None: the base model alone)."""

    adapter: int | None
    num_rows: int


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

    def set_rows(self, adapter_idxs: Sequence[int | None]) -> None:
        """Say for each row of dim 0 of the next activations which adapter it uses; None is the base model alone."""
        for idx in adapter_idxs:
            if idx is not None and not 0 <= idx < len(self.scaling):
                raise ValueError(f"adapter {idx} does not exist: there are {len(self.scaling)}")
        self.groups = [RowGroup(idx, len(list(rows))) for idx, rows in groupby(adapter_idxs)]
        self.num_rows = len(adapter_idxs)

    @property
    def all_base(self) -> bool:
        return all(group.adapter is None for group in self.groups)

    @property
    def stackable(self) -> list[int] | None:
        """The adapters when all groups have one and the same size, else None."""
        adapters = [group.adapter for group in self.groups if group.adapter is not None]
        sizes = {group.num_rows for group in self.groups}
        return adapters if len(sizes) == 1 and len(adapters) == len(self.groups) else None


class LayerRegistry(Protocol):
    """Who wants to know of every adapted layer (the trainer's MultiRunManager)."""

    def register_module(self, name: str, module: MultiLoRALinear) -> None: ...


class MultiLoRALinear(nn.Module):
    """`base_layer(x) + scaling * (x A^T) B^T`, with A and B those of the row's adapter.

    Args:
        base_layer: the frozen layer, weights `[out, in]`.
        rank: the largest rank; an adapter of a lower one leaves the rest of A and B at zero, which adds nothing to
            outputs or gradients.
        n_adapters: slots.
        routing: shared by all layers of the model; without, the layer has one of its own.

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

    def register_with_runs(self, manager: LayerRegistry, name: str) -> None:
        manager.register_module(name, self)

    def parameters_of(self, idx: int) -> tuple[nn.Parameter, nn.Parameter]:
        """A `[rank, in]` and B `[out, rank]` of adapter `idx`."""
        return self.lora_A[idx], self.lora_B[idx]

    def forward(self, x_RTI: Tensor) -> Tensor:
        routing = self.routing
        if x_RTI.shape[0] != routing.num_rows:
            raise ValueError(f"activations have {x_RTI.shape[0]} rows, the routing was set for {routing.num_rows}")
        base_RTO: Tensor = self.base_layer(x_RTI)
        if routing.all_base:
            return base_RTO
        adapters = routing.stackable
        # Padding unequal groups to one size was measured slower than the loop for every shape with more than one token.
        delta_RTO = self._stacked(adapters, x_RTI) if adapters and len(adapters) > 1 else self._looped(x_RTI)
        return base_RTO + delta_RTO

    def _stacked(self, adapters: list[int], x_RTI: Tensor) -> Tensor:
        """Groups of equal size: two batched products for all. Only adapters in use are stacked."""
        x_GNI = x_RTI.reshape(len(adapters), -1, x_RTI.shape[-1])
        A_GKI = torch.stack([self.lora_A[idx] for idx in adapters]).to(x_RTI.dtype)
        # The scale goes onto B, which is smaller than any activation.
        B_GOK = torch.stack([self.lora_B[idx] * self.routing.scaling[idx] for idx in adapters]).to(x_RTI.dtype)
        delta_GNO = torch.bmm(torch.bmm(x_GNI, A_GKI.transpose(1, 2)), B_GOK.transpose(1, 2))
        return delta_GNO.reshape(*x_RTI.shape[:-1], -1)

    def _looped(self, x_RTI: Tensor) -> Tensor:
        """Groups of any size: one pair of products each."""
        groups = self.routing.groups
        parts = torch.split(x_RTI, [group.num_rows for group in groups])
        deltas = [self._one(group.adapter, part) for group, part in zip(groups, parts, strict=True)]
        return torch.cat(deltas) if len(deltas) > 1 else deltas[0]

    def _one(self, idx: int | None, x_RTI: Tensor) -> Tensor:
        if idx is None:
            return x_RTI.new_zeros(*x_RTI.shape[:-1], self.base_layer.out_features)
        lora_A, lora_B = self.parameters_of(idx)
        scaled_B = (lora_B * self.routing.scaling[idx]).to(x_RTI.dtype)
        return x_RTI @ lora_A.to(x_RTI.dtype).T @ scaled_B.T
