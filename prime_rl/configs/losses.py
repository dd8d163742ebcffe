"""The losses that a run may choose by `loss.type`, each with its own constants and their defaults.

One config per type: a constant that the chosen type does not use is an unknown key. Where the formulas come from is in
`docs/losses.md` and `trainer/loss.py`. In the texts below r = pi / mu is the importance ratio of a token, A the
advantage of its sample, and sg(x) is x held constant in the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from prime_rl.configs.base import BaseConfig

# What a token's part is divided by: the loss tokens of the batch; those of its rollout and the number of rollouts; or a
# constant length and the number of rollouts.
LossMean = Literal["token", "sequence", "constant"]

LossT = TypeVar("LossT", bound="BaseLossConfig")


class BaseLossConfig(BaseConfig):
    """Constants of every loss."""

    mean: ClassVar[LossMean] = "token"

    kl_coef: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of an estimate of KL(pi || base model) in the loss; above 0 it costs a second forward pass."""

    @property
    def needs_advantage(self) -> bool:
        """True when a token whose advantage is zero has no gradient."""
        return not self.kl_coef


class AipoLossConfig(BaseLossConfig):
    """LlamaRL's loss, the default."""

    type: Literal["aipo"] = "aipo"
    """-sg(min(r, delta)) * A * log pi, mean over the loss tokens of the batch."""

    delta: float = Field(8.0, gt=0)
    """Upper limit of the importance ratio."""


class TisLossConfig(BaseLossConfig):
    """Truncated importance sampling."""

    type: Literal["tis"]
    """-sg(min(w, cap)) * A * log pi, w being r (level token) or the product of r over the sample (level sequence)."""

    level: Literal["token", "sequence"] = "token"
    """What is truncated: the ratio of each token, or that of the whole sample."""

    cap: float | None = Field(None, gt=0)
    """Upper limit of the ratio; null takes 2 for level token and 5 for level sequence."""

    @property
    def limit(self) -> float:
        """Upper limit of the ratio: `cap`, or the default of `level`."""
        return self.cap or {"token": 2.0, "sequence": 5.0}[self.level]


class IcePopLossConfig(BaseLossConfig):
    """Drops tokens on which trainer and inference disagree too much."""

    type: Literal["icepop"]
    """-sg(r) * A * log pi for tokens with alpha <= r <= beta, nothing for the others."""

    alpha: float = Field(0.5, ge=0)
    """Tokens with a ratio below this are dropped."""

    beta: float = Field(5.0, gt=0)
    """Tokens with a ratio above this are dropped."""

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        return _ordered(self, "alpha", "beta", self.alpha, self.beta)


class DppoLossConfig(BaseLossConfig):
    """Drops tokens whose probability has already moved far enough in the direction of the advantage."""

    type: Literal["dppo"]
    """-[keep] * A * r + tau * (log r)^2; left out: pi - mu > high where A > 0, pi - mu < -low where A <= 0."""

    low: float = Field(0.2, ge=0, le=1)
    """How far the probability of a token may fall."""

    high: float = Field(0.2, ge=0, le=1)
    """How far the probability of a token may rise."""

    tau: float = Field(1e-3, ge=0, allow_inf_nan=False)
    """Weight of (log r)^2, which pulls every loss token back to the policy that sampled it."""

    @property
    def needs_advantage(self) -> bool:
        """True when a token whose advantage is zero has no gradient."""
        return not self.tau and super().needs_advantage


class MisLossConfig(BaseLossConfig):
    """Drops whole samples on which trainer and inference disagree too much."""

    type: Literal["mis"]
    """-sg(s) * A * log pi for samples with low <= s <= high, s being the mean or product of r over the sample."""

    ratio: Literal["geometric", "product"] = "geometric"
    """s: the geometric mean of r over the loss tokens of a sample, or their product."""

    low: float | None = Field(None, ge=0)
    """Samples below this are dropped; null takes 0.99 for geometric and 0.5 for product."""

    high: float | None = Field(None, gt=0)
    """Samples above this are dropped; null takes 1.01 for geometric and 2 for product."""

    veto: float = Field(1e-4, ge=0, lt=1)
    """A sample with any token of a lower ratio is dropped; 0: off."""

    @property
    def limits(self) -> tuple[float, float]:
        """(low, high)."""
        low, high = {"geometric": (0.99, 1.01), "product": (0.5, 2.0)}[self.ratio]
        return low if self.low is None else self.low, high if self.high is None else self.high

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        return _ordered(self, "low", "high", *self.limits)


class CrossEntropyLossConfig(BaseLossConfig):
    """The loss of texts that the policy did not sample. No run chooses it: such samples have it."""

    type: Literal["cross_entropy"] = "cross_entropy"
    """-A * log pi, A being the weight of the sample or token; mean over the loss tokens of the batch."""


class ClippedLossConfig(BaseLossConfig):
    """Constants of the losses that clip closely around 1."""

    old_logprobs: Literal["trainer", "inference"] = "trainer"
    """What the clip is around. `trainer`: the trainer's own logprobs at the start of the update, so that only a change
    of the policy is clipped; a weight min(pi_old / mu, weight_cap) corrects for old rollouts and for the engine's own
    rounding. `inference`: the logprobs that came with the batch; there the engine's rounding alone may clip."""

    weight_cap: float = Field(2.0, gt=0)
    """With `old_logprobs` = trainer: upper limit of the weight pi_old / mu of a token."""


class GspoLossConfig(ClippedLossConfig):
    """PPO's clipping on the ratio of the whole sample."""

    mean: ClassVar[LossMean] = "sequence"

    type: Literal["gspo"]
    """-min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A), s = exp(mean log r) of the sample; mean over rollouts."""

    clip_low: float = Field(3e-4, ge=0, le=1)
    """How far s may fall below 1 before a sample stops counting."""

    clip_high: float = Field(4e-4, ge=0)
    """How far s may rise above 1 before a sample stops counting."""


class CispoLossConfig(BaseLossConfig):
    """The ratio is clipped and held constant, so every token keeps a gradient."""

    type: Literal["cispo"]
    """-sg(clip(r, lower, upper)) * A * log pi, mean over the loss tokens of the batch."""

    lower: float = Field(0.0, ge=0)
    """Lower limit of the importance ratio; 0: no limit."""

    upper: float = Field(5.0, gt=0)
    """Upper limit of the importance ratio."""

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        return _ordered(self, "lower", "upper", self.lower, self.upper)


class DapoLossConfig(ClippedLossConfig):
    """PPO's clipping with a higher upper limit."""

    type: Literal["dapo"]
    """-min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A), mean over the loss tokens of the batch."""

    clip_low: float = Field(0.2, ge=0, le=1)
    """How far r may fall below 1 before a token stops counting."""

    clip_high: float = Field(0.28, ge=0)
    """How far r may rise above 1 before a token stops counting."""


class DrGrpoLossConfig(ClippedLossConfig):
    """PPO's clipping without division by the length of a sample. Use it with `advantage.type = "dr_grpo"`."""

    mean: ClassVar[LossMean] = "constant"

    type: Literal["dr_grpo"]
    """-min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A), summed and divided by rollouts * length."""

    clip_low: float = Field(0.2, ge=0, le=1)
    """How far r may fall below 1 before a token stops counting."""

    clip_high: float = Field(0.2, ge=0)
    """How far r may rise above 1 before a token stops counting."""

    length: int | None = Field(None, ge=1)
    """Constant used in place of the length of a sample, in tokens; null takes `sampling.max_tokens`."""


LossConfig = Annotated[
    AipoLossConfig
    | TisLossConfig
    | IcePopLossConfig
    | DppoLossConfig
    | MisLossConfig
    | GspoLossConfig
    | CispoLossConfig
    | DapoLossConfig
    | DrGrpoLossConfig,
    Field(discriminator="type"),
    # The default type is aipo.
    BeforeValidator(lambda value: {"type": "aipo", **value} if isinstance(value, Mapping) else value),
]


# Of a row of a pass.
RowLoss = LossConfig | CrossEntropyLossConfig


def _ordered(config: LossT, low_key: str, high_key: str, low: float, high: float) -> LossT:
    if low > high:
        raise ValueError(f"{low_key}: found {low:g}: must be at most {high_key} = {high:g}")
    return config
