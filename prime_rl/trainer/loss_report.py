"""What is reported of a run's loss tokens: sums that add up over rows, passes and ranks. Pure functions on tensors.

Dimensions: R rows, K positions, S statistics, G runs of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from prime_rl.trainer.loss import LossInputs, RowLosses, ratio_of


@dataclass
class LossSums:
    """Sums over loss tokens of one run; `loss` is already scaled to the mean over the run's batch."""

    loss: float = 0.0
    entropy: float = 0.0
    mismatch_kl: float = 0.0
    importance_ratio: float = 0.0
    num_clipped: float = 0.0
    kl_base: float = 0.0
    num_loss_tokens: float = 0.0

    def add(self, other: LossSums) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def as_list(self) -> list[float]:
        return list(astuple(self))

    def mean(self, total: float) -> float:
        return total / max(self.num_loss_tokens, 1.0)


@torch.no_grad()
def row_statistics(inputs: LossInputs, losses: RowLosses, entropy_RK: Tensor) -> Tensor:
    """`[R, S]`, the fields of LossSums in their order, summed over the loss tokens of each row.

    mismatch_kl is r - 1 - log r, an unbiased and never negative estimate of KL(mu || pi) from samples of mu.
    """
    ratio_RK = ratio_of(inputs.logprobs_RK - inputs.sampled_logprobs_RK)
    by_token = [
        entropy_RK,
        ratio_RK - 1 - ratio_RK.log(),
        ratio_RK,
        losses.clipped_RK.float(),
        losses.kl_base_RK,
        torch.ones_like(ratio_RK),
    ]
    sums = [torch.where(inputs.mask_RK, values_RK, 0.0).sum(-1) for values_RK in by_token]
    return torch.stack([losses.loss_R, *sums], dim=-1)


def sums_by_run(statistics_RS: Tensor, num_rows: Sequence[int]) -> list[LossSums]:
    """For each run its sums; the runs have `num_rows` neighbouring rows each. One copy from the device for all."""
    parts = torch.split(statistics_RS.double(), list(num_rows))
    statistics_GS = torch.stack([part_RS.sum(0) for part_RS in parts])
    return [LossSums(*values) for values in statistics_GS.tolist()]
