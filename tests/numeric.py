"""How far two ways to compute one number may be apart: from the float type and the length of its sums alone.

CPUs add in other orders, with or without fused multiply-add, so the last bits of a sum differ. Each of n additions is
off by at most half a unit in the last place, and these errors add up like a random walk: sqrt(n) of them, by Higham,
"Accuracy and Stability of Numerical Algorithms", 2.6. The tolerance is four times that.

Not for weights after a few updates of Adam, which divides noise by noise where a gradient is near zero: compare
gradients, logits, or the whole adapter with `trainer_support.relative_difference`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

NUM_DEVIATIONS = 4.0


def rounding(num_terms: int, dtype: torch.dtype = torch.float32) -> float:
    """The tolerance of a sum of `num_terms` terms in `dtype`, relative to the largest number that is compared."""
    return NUM_DEVIATIONS * math.sqrt(num_terms) * torch.finfo(dtype).eps


def num_terms(model: nn.Module) -> int:
    """Of the sums that follow each other in a forward pass: the inputs of all linear layers together."""
    return sum(module.in_features for module in model.modules() if isinstance(module, nn.Linear))


def check_same(found: Tensor, expected: Tensor, num_terms: int, dtype: torch.dtype = torch.float32) -> None:
    """Equal but for rounding in `dtype`, measured by the largest difference and the largest expected number."""
    assert found.shape == expected.shape, f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    found, expected = found.detach().double(), expected.detach().double()
    difference = float((found - expected).abs().max())
    limit = rounding(num_terms, dtype) * float(expected.abs().max())
    assert difference <= limit, f"differs by {difference:.3g}, rounding explains {limit:.3g}"
