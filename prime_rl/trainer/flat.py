"""The run's own part of its slot as one vector: gradients of all layers in one sum, one norm, one optimizer step.

An adapter has hundreds of small matrices, and on each of them an update costs more in calls than in numbers. A run of a
lower rank than the slots' uses the first rows of A and columns of B; the rest is zero, stays so, and is not in here. So
moments, gradient norm and (for Muon) shapes are those of the run's own rank. The slot's parameters stay the one home of
the weights: those of a lower rank are gathered before an update and written back after it, the others lie in the
vector themselves.

Dimensions: P numbers of the run's own part, in the order of its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from prime_rl.trainer.optim import Moments
from prime_rl.trainer.world import World


class FlatWeights:
    """`named` are the slot's parameters, A `[K, in]` under a name that ends in `.lora_A`, B `[out, K]` in `.lora_B`.

    Attributes:
        values_P: what the optimizer updates, with its gradient; `vectors` is the list of it.
        matrices: views of both by parameter, for an optimizer that looks at shapes.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], rank: int) -> None:
        self.names = [name for name, _ in named]
        self._leaves = [leaf for _, leaf in named]
        self._own = [_own(name, leaf.detach(), rank) for name, leaf in named]
        self._rank = rank
        self.values_P = nn.Parameter(self._own[0].new_zeros(sum(own.numel() for own in self._own)))
        self.vectors = [self.values_P]
        self._gradients_P = torch.zeros_like(self.values_P)
        # Views: what is done to the vectors is done to them.
        self._values = self._parts(self.values_P.detach())
        self._gradients = self._parts(self._gradients_P)
        self.matrices = [nn.Parameter(values) for values in self._values]
        for matrix, gradients in zip(self.matrices, self._gradients, strict=True):
            matrix.grad = gradients
        self.values_P.grad = self._gradients_P
        self._apart = [at for at, leaf in enumerate(self._leaves) if not self._moved_in(leaf, self._values[at])]

    @property
    def num_weights(self) -> int:
        return self.values_P.numel()

    @torch.no_grad()
    def begin(self, world: World) -> float:
        """Take the weights from the slot, and give the optimizer the sum of all ranks' gradients; returns its norm.

        A rank that had no row of the run adds zeros. A collective.
        """
        self._copy_apart(self._values, self._own)
        parts, grads = [], []
        for name, leaf, part in zip(self.names, self._leaves, self._gradients, strict=True):
            if leaf.grad is not None:
                parts.append(part)
                grads.append(leaf.grad if leaf.grad.shape == part.shape else _own(name, leaf.grad, self._rank))
        if len(grads) < len(self._leaves):
            self._gradients_P.zero_()
        if grads:
            torch._foreach_copy_(parts, grads)
        return float(torch.linalg.vector_norm(world.sum(self._gradients_P)))

    def scale_gradients(self, factor: float) -> None:
        self._gradients_P.mul_(factor)

    @torch.no_grad()
    def finish(self) -> None:
        """Put the updated weights into the slot."""
        self._copy_apart(self._own, self._values)

    def drop_gradients(self) -> None:
        for leaf in self._leaves:
            leaf.grad = None

    def is_finite(self, world: World) -> bool:
        """Whether all updated weights are numbers. All ranks have the same."""
        # Not finite as soon as one of them is not; weights with so large a sum are invalid too.
        return math.isfinite(float(self.values_P.detach().sum()))

    def join_state(self, state: Moments, world: World) -> Moments:
        return state

    def cut_state(self, state: Moments) -> Moments:
        return state

    @staticmethod
    @torch.no_grad()
    def _moved_in(leaf: nn.Parameter, values: Tensor) -> bool:
        """Whether the slot's parameter is all the run's own; it is then in the vector and never copied again."""
        if leaf.shape == values.shape:
            values.copy_(leaf)
            leaf.data = values
        return leaf.shape == values.shape

    def _copy_apart(self, to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
        if self._apart:
            torch._foreach_copy_([to[at] for at in self._apart], [source[at] for at in self._apart])

    def _parts(self, vector_P: Tensor) -> list[Tensor]:
        parts = torch.split(vector_P, [own.numel() for own in self._own])
        return [part.view(own.shape) for part, own in zip(parts, self._own, strict=True)]


def _own(name: str, tensor: Tensor, rank: int) -> Tensor:
    return tensor[:rank] if name.endswith(".lora_A") else tensor[:, :rank]
