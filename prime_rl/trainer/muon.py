"""Muon for LoRA matrices: momentum, then the nearest orthogonal matrix instead of the gradient (K. Jordan, 2024).

torch's own Muon rounds to bfloat16 on the way. Gradients that differ in their last bit, as they do when a batch was
split otherwise, then lead to updates that differ by a thousandth, so neighbours would change a run's result. Here all
is in float32, which adapters of a few rows can afford.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Five steps of X <- aX + b(XX')X + c(XX')^2 X bring every singular value near one; the factors are the published ones.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_NUM_STEPS = 5
_EPS = 1e-7


class Muon(Optimizer):
    """Nesterov momentum, orthogonalized; the rate grows with sqrt(rows / columns) of a tall matrix. Takes matrices."""

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every matrix that has a gradient. Takes no `closure`."""
        assert closure is None, "a run's loss is not evaluated again"
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return None

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, momentum, lr = self.state[param], group["momentum"], group["lr"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        running = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        direction = orthogonalized(grad.lerp(running, momentum))
        param.sub_(direction, alpha=lr * math.sqrt(max(1.0, param.shape[0] / param.shape[1])))


def orthogonalized(matrix: Tensor) -> Tensor:
    """Nearly the orthogonal matrix that is nearest to `matrix`; zero stays zero."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if is_tall else matrix
    x = x / (torch.linalg.matrix_norm(x) + _EPS)
    for _ in range(_NUM_STEPS):
        gram = x @ x.T
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.T if is_tall else x
