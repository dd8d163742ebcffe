"""The loss of a run, and what is reported of it. Pure functions on tensors; knows no runs and no files.

AIPO (LlamaRL, arXiv 2505.24034): the mean over loss tokens of -min(r, delta) * A * log pi, where r = pi / mu is held
constant, pi is the policy that is trained and mu the older one that sampled. The mean is over the run's whole batch:
every row carries the scale 1 / (loss tokens of that batch), so a sum over any split of the batch gives the same.

Dimensions: R rows, K positions, V vocabulary, S statistics.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

# exp of this is 5e8, far above any delta: the limit keeps reports finite and changes no gradient.
MAX_LOG_RATIO = 20.0


@dataclass
class LossSums:
    """Sums over loss tokens of one run; `loss` is already scaled to the mean over the run's batch."""

    loss: float = 0.0
    entropy: float = 0.0
    mismatch_kl: float = 0.0
    importance_ratio: float = 0.0
    num_clipped: float = 0.0
    num_loss_tokens: float = 0.0

    def add(self, other: LossSums) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def as_list(self) -> list[float]:
        return list(astuple(self))

    def mean(self, total: float) -> float:
        """`total` over the loss tokens."""
        return total / max(self.num_loss_tokens, 1.0)


def token_logprobs(logits_RKV: Tensor, targets_RK: Tensor, temperatures_R: Tensor) -> tuple[Tensor, Tensor]:
    """(log pi of the targets, entropy), both `[R, K]` in float32, of the distribution after temperature.

    The entropy carries no gradient: it is reported, not trained.
    """
    scaled_RKV = logits_RKV.float() / temperatures_R[:, None, None]
    log_z_RK = scaled_RKV.logsumexp(-1)
    logprobs_RK = scaled_RKV.gather(-1, targets_RK[..., None]).squeeze(-1) - log_z_RK
    with torch.no_grad():
        probs_RKV = (scaled_RKV - log_z_RK[..., None]).exp()
        entropy_RK = log_z_RK - (probs_RKV * scaled_RKV).sum(-1)
    return logprobs_RK, entropy_RK


def aipo_loss(
    logprobs_RK: Tensor,
    sampled_logprobs_RK: Tensor,
    advantages_R: Tensor,
    mask_RK: Tensor,
    scales_R: Tensor,
    deltas_R: Tensor,
) -> Tensor:
    """The loss of each row, `[R]`: its share of the mean over its run's batch.

    Args:
        logprobs_RK: log pi, with gradient.
        sampled_logprobs_RK: log mu.
        mask_RK: true at loss tokens.
        scales_R: 1 / (loss tokens of the run's whole batch).
        deltas_R: upper limit of the importance ratio.
    """
    ratio_RK = importance_ratio(logprobs_RK.detach(), sampled_logprobs_RK)
    weight_RK = torch.minimum(ratio_RK, deltas_R[:, None]) * advantages_R[:, None] * scales_R[:, None]
    # where, not a product: what stands under a false mask may be anything, also infinite.
    return torch.where(mask_RK, -weight_RK * logprobs_RK, 0.0).sum(-1)


def importance_ratio(logprobs_RK: Tensor, sampled_logprobs_RK: Tensor) -> Tensor:
    """pi / mu by token."""
    return (logprobs_RK - sampled_logprobs_RK).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@torch.no_grad()
def row_statistics(
    loss_R: Tensor,
    logprobs_RK: Tensor,
    sampled_logprobs_RK: Tensor,
    entropy_RK: Tensor,
    mask_RK: Tensor,
    deltas_R: Tensor,
) -> Tensor:
    """`[R, S]`, the fields of LossSums in their order, summed over the loss tokens of each row.

    mismatch_kl is r - 1 - log r, an unbiased and never negative estimate of KL(mu || pi) from samples of mu.
    """
    ratio_RK = importance_ratio(logprobs_RK, sampled_logprobs_RK)
    by_token = [
        entropy_RK,
        ratio_RK - 1 - ratio_RK.log(),
        ratio_RK,
        (ratio_RK > deltas_R[:, None]).float(),
        torch.ones_like(ratio_RK),
    ]
    sums = [torch.where(mask_RK, values_RK, 0.0).sum(-1) for values_RK in by_token]
    return torch.stack([loss_R, *sums], dim=-1)
