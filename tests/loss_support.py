"""Rows for tests of losses: ratios on both sides of every limit, advantages of both signs, gaps in the mask."""

from __future__ import annotations

from dataclasses import replace

import torch

from prime_rl.configs.losses import (
    AipoLossConfig,
    CispoLossConfig,
    DapoLossConfig,
    DppoLossConfig,
    DrGrpoLossConfig,
    GspoLossConfig,
    IcePopLossConfig,
    LossConfig,
    MisLossConfig,
    TisLossConfig,
)
from prime_rl.trainer.loss import LossInputs

# Every type, and each choice in it. Limits of the whole sample are such that some of the rows below pass them.
EVERY_LOSS: list[LossConfig] = [
    AipoLossConfig(delta=1.2),
    TisLossConfig(type="tis", cap=1.2),
    TisLossConfig(type="tis", level="sequence", cap=1.2),
    IcePopLossConfig(type="icepop", alpha=0.7, beta=1.3),
    DppoLossConfig(type="dppo", low=0.05, high=0.1, tau=0.2),
    MisLossConfig(type="mis", low=0.8, high=1.1),
    MisLossConfig(type="mis", ratio="product", low=0.2, high=3.0, veto=0.45),
    GspoLossConfig(type="gspo", clip_low=0.1, clip_high=0.1, old_logprobs="inference"),
    CispoLossConfig(type="cispo", lower=0.8, upper=1.2),
    DapoLossConfig(type="dapo", old_logprobs="inference"),
    DrGrpoLossConfig(type="dr_grpo", old_logprobs="inference"),
    GspoLossConfig(type="gspo", weight_cap=1.2),
    DapoLossConfig(type="dapo", weight_cap=1.5),
    DrGrpoLossConfig(type="dr_grpo", weight_cap=1.1),
    AipoLossConfig(kl_coef=0.7),
]


def name_of(config: LossConfig) -> str:
    """For the names of tests: the type, and every word that was chosen."""
    words = [value for key, value in config if isinstance(value, str) and key != "type"]
    return "-".join([config.type, *words, *(["kl"] if config.kl_coef else [])])


def by_token(inputs: LossInputs, seed: int = 2) -> LossInputs:
    """The same rows with an advantage for each token, of both signs in a row; also where there is no loss token."""
    generator = torch.Generator().manual_seed(seed)
    own_RK = torch.randn(inputs.mask_RK.shape, generator=generator, dtype=inputs.advantages_RK.dtype)
    return replace(inputs, advantages_RK=own_RK)


def inputs_of(seed: int = 1) -> LossInputs:
    """Six rows of eight positions in float64, at most six of them loss tokens."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    log_pi_RK = -0.1 - 2 * random(6, 8)
    mask_RK = random(6, 8) > 0.4
    mask_RK[:, 3] = True
    # Half of the rows are near the policy, half are far from it.
    spread_R1 = torch.tensor([0.1, 1.0, 0.1, 1.0, 0.1, 1.0], dtype=torch.float64)[:, None]
    return LossInputs(
        log_pi_RK,
        log_pi_RK + spread_R1 * (2 * random(6, 8) - 1),
        torch.tensor([1.5, -0.5, -0.7, 1.0, 0.3, 0.8], dtype=torch.float64)[:, None],
        mask_RK,
        torch.tensor([0.1, 0.2, 0.05, 0.3, 0.3, 0.15], dtype=torch.float64),
        -0.1 - 2 * random(6, 8),
    )
