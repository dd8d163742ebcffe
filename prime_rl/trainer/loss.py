"""The loss of the rows of a pass: each run's own, summed over its loss tokens. Knows no runs and no files.

The formulas are in `losses`, the sums for reports in `loss_report`. A row comes with the scale that makes the sum over
any split of its run's batch the mean over that batch: it is made where the whole batch is known, in `packing`.

Dimensions: R rows, K positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import assert_never

import torch
from torch import Tensor

from prime_rl.configs import losses as configs
from prime_rl.configs.losses import LossConfig
from prime_rl.trainer.losses import (
    TokenLosses,
    Tokens,
    aipo,
    cispo,
    dapo,
    decoupled,
    dppo,
    dr_grpo,
    gspo,
    icepop,
    kl_to_base,
    mis,
    tis,
)


@dataclass(frozen=True)
class LossInputs:
    """Rows of a pass. Where `mask_RK` is false, logprobs may be anything, also infinite.

    Attributes:
        logprobs_RK: log pi, with gradient.
        sampled_logprobs_RK: log mu.
        advantages_R: one for all tokens of a row.
        mask_RK: true at loss tokens.
        scales_R: what makes the sum over a row's loss tokens its share of the mean over its run's batch.
        base_logprobs_RK: log-probabilities of the base model, needed in rows whose loss has a `kl_coef`.
    """

    logprobs_RK: Tensor
    sampled_logprobs_RK: Tensor
    advantages_R: Tensor
    mask_RK: Tensor
    scales_R: Tensor
    base_logprobs_RK: Tensor | None = None

    def split(self, num_rows: Sequence[int]) -> list[LossInputs]:
        """Neighbouring rows, `num_rows` at a time. One split of each tensor, so one node in the graph."""
        sizes = list(num_rows)
        parts = [
            [None] * len(sizes) if tensor is None else torch.split(tensor, sizes) for tensor in vars(self).values()
        ]
        return [LossInputs(*columns) for columns in zip(*parts, strict=True)]


@dataclass(frozen=True)
class RowLosses:
    """`loss_R` with gradient, scaled; for reports also which tokens a limit bound, and the KL to the base by token."""

    loss_R: Tensor
    clipped_RK: Tensor
    kl_base_RK: Tensor


def compute_losses(configs_R: Sequence[LossConfig], inputs: LossInputs) -> RowLosses:
    """`compute_loss` of rows of several runs, `configs_R` by row. Neighbours with one loss are computed together."""
    groups = [(config, len(list(rows))) for config, rows in groupby(configs_R)]
    parts = inputs.split([num_rows for _, num_rows in groups])
    losses = [compute_loss(config, part) for (config, _), part in zip(groups, parts, strict=True)]
    if len(losses) == 1:
        return losses[0]
    return RowLosses(*(torch.cat(columns) for columns in zip(*(vars(loss).values() for loss in losses), strict=True)))


def compute_loss(config: LossConfig, inputs: LossInputs) -> RowLosses:
    """The loss of rows by `config.type`: over the loss tokens of a row, the sum of the token losses times its scale.

    With a `kl_coef`, that much of the KL to the base model is added to each token. A token that is left out still
    counts in the scale: what is left out depends on the policy, and the scale must not.
    """
    mask_RK = inputs.mask_RK
    # where, not a product: infinity times zero is NaN, and so is its gradient.
    log_pi_RK, log_mu_RK = (torch.where(mask_RK, x, 0.0) for x in (inputs.logprobs_RK, inputs.sampled_logprobs_RK))
    loss_RK, clipped_RK = token_losses(config, Tokens(log_pi_RK, log_mu_RK, inputs.advantages_R[:, None], mask_RK))
    kl_base_RK = torch.zeros_like(log_mu_RK)
    if config.kl_coef:
        assert inputs.base_logprobs_RK is not None, "kl_coef needs the logprobs of the base model"
        kl_base_RK = kl_to_base(log_pi_RK, torch.where(mask_RK, inputs.base_logprobs_RK, 0.0))
        loss_RK = loss_RK + config.kl_coef * kl_base_RK
    loss_R = torch.where(mask_RK, loss_RK, 0.0).sum(-1) * inputs.scales_R
    return RowLosses(loss_R, clipped_RK, kl_base_RK.detach())


def token_losses(config: LossConfig, tokens: Tokens) -> TokenLosses:
    """The loss that `config` asks for, around the logprobs that it asks for."""
    if isinstance(config, configs.ClippedLossConfig) and config.old_logprobs == "trainer":
        return decoupled(partial(formula, config), tokens, config.weight_cap)
    return formula(config, tokens)


def formula(config: LossConfig, tokens: Tokens) -> TokenLosses:
    """The formula that `config.type` names, with its constants."""
    match config:
        case configs.AipoLossConfig():
            return aipo(tokens, config.delta)
        case configs.TisLossConfig():
            return tis(tokens, config.level, config.limit)
        case configs.IcePopLossConfig():
            return icepop(tokens, config.alpha, config.beta)
        case configs.DppoLossConfig():
            return dppo(tokens, config.low, config.high, config.tau)
        case configs.MisLossConfig():
            return mis(tokens, config.ratio, config.limits, config.veto)
        case configs.GspoLossConfig():
            return gspo(tokens, config.clip_low, config.clip_high)
        case configs.CispoLossConfig():
            return cispo(tokens, config.lower, config.upper)
        case configs.DapoLossConfig():
            return dapo(tokens, config.clip_low, config.clip_high)
        case configs.DrGrpoLossConfig():
            return dr_grpo(tokens, config.clip_low, config.clip_high)
        case _:
            assert_never(config)
