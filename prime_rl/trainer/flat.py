"""The run's own part of its slot as one vector: gradients of all layers in one sum, one norm, one optimizer step.

An adapter has hundreds of small matrices, and on each of them an update costs more in calls than in numbers. A run of a
lower rank than the slots' uses the first rows of A and columns of B; the rest is zero, stays so, and is not in here. So
moments, gradient norm and (for Muon) shapes are those of the run's own rank. The slot's parameters stay the one home of
the weights: they are gathered before an update and written back after it.

Dimensions: P numbers of the run's own part, in the order of its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prime_rl.trainer.world import World

# An optimizer's state: by number of the parameter, its own names and values.
Moments = dict[int, dict[str, Any]]


class FlatWeights:
    """`named` are the slot's parameters, A `[K, in]` under a name that ends in `.lora_A`, B `[out, K]` in `.lora_B`.

    Attributes:
        values_P: what the optimizer updates; `vectors` is the list of it.
        matrices: views of it by parameter, for an optimizer that looks at shapes.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], rank: int) -> None:
        self.names = [name for name, _ in named]
        self._leaves = [leaf for _, leaf in named]
        self._own = [_own(name, leaf.detach(), rank) for name, leaf in named]
        self._sizes = [own.numel() for own in self._own]
        self._rank = rank
        self.values_P = nn.Parameter(self._gathered(self._own))
        self.vectors = [self.values_P]
        parts = torch.split(self.values_P.detach(), self._sizes)
        self.matrices = [nn.Parameter(part.view(own.shape)) for part, own in zip(parts, self._own, strict=True)]

    @property
    def num_weights(self) -> int:
        return self.values_P.numel()

    def gradients(self) -> Tensor:
        """What backward left in the slot, `[P]`; zeros where it left nothing."""
        return self._gathered(
            [
                torch.zeros_like(own) if leaf.grad is None else _own(name, leaf.grad, self._rank)
                for name, leaf, own in zip(self.names, self._leaves, self._own, strict=True)
            ]
        )

    @torch.no_grad()
    def begin(self, world: World) -> float:
        """Take the weights from the slot, and give the optimizer the sum of all ranks' gradients; returns its norm.

        A rank that had no row of the run adds zeros. A collective.
        """
        gradients_P = world.sum(self.gradients())
        self.values_P.copy_(self._gathered(self._own))
        self.values_P.grad = gradients_P
        for matrix, part in zip(self.matrices, torch.split(gradients_P, self._sizes), strict=True):
            matrix.grad = part.view(matrix.shape)
        return float(torch.linalg.vector_norm(gradients_P))

    def scale_gradients(self, factor: float) -> None:
        assert self.values_P.grad is not None, "begin comes first"
        self.values_P.grad.mul_(factor)

    @torch.no_grad()
    def finish(self) -> None:
        """Put the updated weights into the slot."""
        torch._foreach_copy_(self._own, [matrix.detach() for matrix in self.matrices])

    def drop_gradients(self) -> None:
        for parameter in (*self._leaves, self.values_P, *self.matrices):
            parameter.grad = None

    def is_finite(self, world: World) -> bool:
        """Whether all updated weights are numbers. All ranks have the same."""
        # The sum of squares is infinite or no number when one of them is; one pass, and no table of flags.
        return math.isfinite(float(torch.linalg.vector_norm(self.values_P.detach(), dtype=torch.float64)))

    def join_state(self, state: Moments, world: World) -> Moments:
        return state

    def cut_state(self, state: Moments) -> Moments:
        return state

    @staticmethod
    def _gathered(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.reshape(-1) for part in parts])


def _own(name: str, tensor: Tensor, rank: int) -> Tensor:
    return tensor[:rank] if name.endswith(".lora_A") else tensor[:, :rank]
