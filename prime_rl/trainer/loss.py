"""The head of a pass, and the loss of its rows: each run's own, summed over its loss tokens. Functions on tensors.

The head gives log-probability of the sampled tokens and entropy, a chunk of tokens at a time. The logits of a real
vocabulary are most of the memory of a pass: 16,384 tokens of 151,936 entries are 9.3 GiB in float32, and autograd
keeps several tables of that size. Here only a chunk of them exists at a time. The gradient with respect to a hidden
state, `(W[target] - sum_v p_v W[v]) / temperature`, needs nothing but the chunk, so it is worked out there and
backward only multiplies. Where the head itself is trained, backward computes each chunk again instead.

Then the rows, and which formula a run's config names; then the formulas; then the sums for reports. In all formulas
r = pi / mu is the importance ratio, pi the policy that is trained and mu the (older, or differently computed) one that
sampled, A the advantage of the sample (or the token's own), and sg(x) is x held constant in the gradient. The "old"
policy of the papers is mu here, or, in `decoupled`, the trainer's at the start of the update. A row comes with the
scale that makes the sum over any split of its run's batch the mean over that batch: it is made where the whole batch is
known, in `fair_queue`.

Dimensions: R rows (samples), K positions that predict a loss token of at least one row; `_R1` is broadcast over K; S
statistics, G runs of a pass. In the head N tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, assert_never

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prime_rl.configs import losses as configs
from prime_rl.configs.losses import RowLoss
from prime_rl.lora.parts import head_chunks

# exp of this is 5e8, far above any limit of a ratio: it keeps sums finite. Beyond it a ratio has no gradient.
MAX_LOG_RATIO = 20.0
MAX_RATIO = 1e9  # a limit beyond every ratio has no effect, and need not fit into float32


def token_logprobs(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperatures_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(log pi of the targets, entropy, 1 where no token is likelier), `[N]` in float32, after temperature.

    Only the first carries a gradient: the others are reported, not trained.

    Args:
        weight_VH: the head's weight; it may be frozen or trained.
    """
    found: tuple[Tensor, Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, targets_N, temperatures_N
    )
    return found


def _scaled(hidden_CH: Tensor, weight_VH: Tensor, temperatures_C: Tensor) -> Tensor:
    """Logits after temperature, in float32 (or wider)."""
    if hidden_CH.dtype.itemsize >= torch.float32.itemsize:  # H of a token is much less than V
        return (hidden_CH / temperatures_C[:, None]) @ weight_VH.T
    scaled_CV: Tensor = (hidden_CH @ weight_VH.T) / temperatures_C[:, None]
    return scaled_CV


class _TokenLogprobs(torch.autograd.Function):
    """The tables of a chunk are locals of `_found` and `_grad`: gone before those of the next are made."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperatures_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        trains_head, trains_hidden = ctx.needs_input_grad[1], ctx.needs_input_grad[0]
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        all_N = [hidden_NH.new_empty(len(hidden_NH), dtype=dtype) for _ in range(4)]
        slope_NH = torch.empty_like(hidden_NH) if trains_hidden and not trains_head else None
        for chunk in head_chunks(len(hidden_NH), len(weight_VH)):
            slope_CH = None if slope_NH is None else slope_NH[chunk]
            found = _found(hidden_NH[chunk], weight_VH, targets_N[chunk], temperatures_N[chunk], slope_CH)
            for each_N, each_C in zip(all_N, found, strict=True):
                each_N[chunk] = each_C
        logprobs_N, entropy_N, is_top_N, log_total_N = all_N
        if trains_head:
            ctx.save_for_backward(hidden_NH, weight_VH, targets_N, temperatures_N, log_total_N)
        else:
            ctx.save_for_backward(slope_NH)
        ctx.mark_non_differentiable(entropy_N, is_top_N)
        return logprobs_N, entropy_N, is_top_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        if not ctx.needs_input_grad[1]:
            (slope_NH,) = ctx.saved_tensors
            return slope_NH * grad_N[:, None].to(slope_NH.dtype), None, None, None
        hidden_NH, weight_VH, *of_tokens = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH)
        # Many chunks are summed: in float32, whatever the weight's own type.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.promote_types(weight_VH.dtype, torch.float32))
        for chunk in head_chunks(len(hidden_NH), len(weight_VH)):
            grad_CV = _grad(hidden_NH[chunk], weight_VH, *(each_N[chunk] for each_N in (*of_tokens, grad_N)))
            grad_hidden_NH[chunk] = grad_CV @ weight_VH
            grad_weight_VH.add_(grad_CV.T @ hidden_NH[chunk])
            del grad_CV
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype), None, None


def _found(
    hidden_CH: Tensor, weight_VH: Tensor, targets_C: Tensor, temperatures_C: Tensor, slope_CH: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `token_logprobs`, and the logarithm of the sum of all exponentials; fills `slope_CH`.

    Of all operations on a whole table, the exponential alone makes another one.
    """
    scaled_CV = _scaled(hidden_CH, weight_VH, temperatures_C)
    most_C = scaled_CV.amax(-1)
    exps_CV = scaled_CV.sub_(most_C[:, None]).exp()
    total_C = exps_CV.sum(-1)
    log_total_C = total_C.log()
    of_targets_C = scaled_CV.gather(-1, targets_C[:, None]).squeeze(-1)  # less what the likeliest has
    logprobs_C = of_targets_C - log_total_C
    entropy_C = log_total_C - scaled_CV.mul_(exps_CV).sum(-1) / total_C
    if slope_CH is not None:
        del scaled_CV
        at_target_C = 1 / temperatures_C.to(exps_CV.dtype)
        slope_CV = _slope(exps_CV, targets_C, at_target_C, at_target_C / total_C)
        slope_CH.copy_(slope_CV.to(hidden_CH.dtype) @ weight_VH)
    return logprobs_C, entropy_C, (of_targets_C == 0).to(logprobs_C.dtype), most_C + log_total_C


def _grad(
    hidden_CH: Tensor,
    weight_VH: Tensor,
    targets_C: Tensor,
    temperatures_C: Tensor,
    log_total_C: Tensor,
    grad_C: Tensor,
) -> Tensor:
    """`[C, V]`, of the logits, in the type of the hidden states."""
    probs_CV = _scaled(hidden_CH, weight_VH, temperatures_C).sub_(log_total_C[:, None]).exp_()
    weights_C = grad_C / temperatures_C.to(probs_CV.dtype)
    return _slope(probs_CV, targets_C, weights_C, weights_C).to(hidden_CH.dtype)


def _slope(exps_CV: Tensor, targets_C: Tensor, at_target_C: Tensor, scales_C: Tensor) -> Tensor:
    """`at_target` at the target, less the scaled exponentials: d log pi(target) / d logits; in place of `exps_CV`."""
    return exps_CV.mul_(-scales_C[:, None]).scatter_add_(-1, targets_C[:, None], at_target_C[:, None])


@dataclass(frozen=True)
class LossInputs:
    """Rows of a pass. Where `mask_RK` is false, logprobs may be anything, also infinite.

    Attributes:
        logprobs_RK: log pi, with gradient.
        sampled_logprobs_RK: log mu.
        advantages_RK: finite also where `mask_RK` is false; or `[R, 1]`, one for all tokens of a row.
        mask_RK: true at loss tokens.
        scales_R: what makes the sum over a row's loss tokens its share of the mean over its run's batch; 0 in a row
            that is only measured.
        base_logprobs_RK: log-probabilities of the base model, needed in rows whose loss has a `kl_coef`.
        uses_R3: 1 in one column of each: it was sampled, it is supervised, it is held out; None: all were sampled.
    """

    logprobs_RK: Tensor
    sampled_logprobs_RK: Tensor
    advantages_RK: Tensor
    mask_RK: Tensor
    scales_R: Tensor
    base_logprobs_RK: Tensor | None = None
    uses_R3: Tensor | None = None

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


def compute_losses(configs_R: Sequence[RowLoss], inputs: LossInputs) -> RowLosses:
    """`compute_loss` of rows of several runs, `configs_R` by row. Neighbours with one loss are computed together."""
    groups = [(config, len(list(rows))) for config, rows in groupby(configs_R)]
    parts = inputs.split([num_rows for _, num_rows in groups])
    losses = [compute_loss(config, part) for (config, _), part in zip(groups, parts, strict=True)]
    if len(losses) == 1:
        return losses[0]
    return RowLosses(*(torch.cat(columns) for columns in zip(*(vars(loss).values() for loss in losses), strict=True)))


def compute_loss(config: RowLoss, inputs: LossInputs) -> RowLosses:
    """The loss of rows by `config.type`: over the loss tokens of a row, the sum of the token losses times its scale.

    With a `kl_coef`, that much of the KL to the base model is added to each token. A token that is left out still
    counts in the scale: what is left out depends on the policy, and the scale must not.
    """
    mask_RK = inputs.mask_RK
    # where, not a product: infinity times zero is NaN, and so is its gradient.
    log_pi_RK, log_mu_RK = (torch.where(mask_RK, x, 0.0) for x in (inputs.logprobs_RK, inputs.sampled_logprobs_RK))
    loss_RK, clipped_RK = token_losses(config, Tokens(log_pi_RK, log_mu_RK, inputs.advantages_RK, mask_RK))
    kl_base_RK = torch.zeros_like(log_mu_RK)
    if config.kl_coef:
        assert inputs.base_logprobs_RK is not None, "kl_coef needs the logprobs of the base model"
        kl_base_RK = kl_to_base(log_pi_RK, torch.where(mask_RK, inputs.base_logprobs_RK, 0.0))
        loss_RK = loss_RK + config.kl_coef * kl_base_RK
    loss_R = torch.where(mask_RK, loss_RK, 0.0).sum(-1) * inputs.scales_R
    return RowLosses(loss_R, clipped_RK, kl_base_RK.detach())


def token_losses(config: RowLoss, tokens: Tokens) -> TokenLosses:
    """The loss that `config` asks for, around the logprobs that it asks for."""
    if isinstance(config, configs.ClippedLossConfig) and config.old_logprobs == "trainer":
        return decoupled(partial(formula, config), tokens, config.weight_cap)
    return formula(config, tokens)


def formula(config: RowLoss, tokens: Tokens) -> TokenLosses:
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
        case configs.CrossEntropyLossConfig():
            return cross_entropy(tokens)
        case _:
            assert_never(config)


class TokenLosses(NamedTuple):
    """`loss_RK`, and true in `clipped_RK` where a limit bound: tokens that were clipped or left out."""

    loss_RK: Tensor
    clipped_RK: Tensor


@dataclass(frozen=True)
class Tokens:
    """Rows whose loss tokens are true in `mask_RK`; elsewhere both logprobs must be 0, so that sums need no mask.

    Attributes:
        log_pi_RK: with gradient.
        log_mu_RK: without.
        advantages_RK: or `[R, 1]`, one for all tokens of a row.
    """

    log_pi_RK: Tensor
    log_mu_RK: Tensor
    advantages_RK: Tensor
    mask_RK: Tensor

    @cached_property
    def log_ratio_RK(self) -> Tensor:
        """log r, with gradient."""
        return self.log_pi_RK - self.log_mu_RK

    @cached_property
    def ratio_RK(self) -> Tensor:
        """r, with gradient; its logarithm is limited by MAX_LOG_RATIO."""
        return ratio_of(self.log_ratio_RK)

    @property
    def log_product_R1(self) -> Tensor:
        """Log of the product of the ratios of a row."""
        return self.log_ratio_RK.sum(-1, keepdim=True)

    @property
    def log_mean_R1(self) -> Tensor:
        """Log of the geometric mean of the ratios of a row."""
        return self.log_product_R1 / self.num_tokens_R1

    @property
    def num_tokens_R1(self) -> Tensor:
        """Loss tokens of a row; 1 for a row without any."""
        return self.mask_RK.sum(-1, keepdim=True).clamp(min=1)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp, limited by MAX_LOG_RATIO."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def weighted(tokens: Tokens, weight_RK: Tensor) -> Tensor:
    """-sg(weight) * A * log pi: a policy gradient whose tokens count by their weight."""
    return -weight_RK.detach() * tokens.advantages_RK * tokens.log_pi_RK


def clipped_surrogate(tokens: Tokens, ratio_RK: Tensor, clip_low: float, clip_high: float) -> TokenLosses:
    """PPO: -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) (Schulman et al., arXiv 1707.06347).

    The minimum binds from above where A > 0 and from below where A < 0; a bound token has no gradient.
    """
    rises_RK = tokens.advantages_RK > 0
    low, high = 1 - clip_low, min(1 + clip_high, MAX_RATIO)
    bound_RK = torch.where(rises_RK, ratio_RK.clamp(max=high), ratio_RK.clamp(min=low))
    clipped_RK = torch.where(rises_RK, ratio_RK > high, ratio_RK < low)
    return TokenLosses(-bound_RK * tokens.advantages_RK, clipped_RK)


def decoupled(loss: Callable[[Tokens], TokenLosses], tokens: Tokens, cap: float) -> TokenLosses:
    """sg(min(pi_old / mu, cap)) * `loss` of r = pi / pi_old: what is clipped is the change of the policy alone.

    The decoupled objective of AReaL (arXiv 2505.24298), its weight truncated. pi_old is the trainer's policy at the
    start of the update, and a batch is trained on once, so it is pi itself, held constant.
    """
    weight_RK = tokens.ratio_RK.detach()
    inner = loss(replace(tokens, log_mu_RK=tokens.log_pi_RK.detach()))
    return TokenLosses(weight_RK.clamp(max=min(cap, MAX_RATIO)) * inner.loss_RK, inner.clipped_RK | (weight_RK > cap))


def aipo(tokens: Tokens, delta: float) -> TokenLosses:
    """-sg(min(r, delta)) * A * log pi (LlamaRL, arXiv 2505.24034)."""
    return TokenLosses(weighted(tokens, tokens.ratio_RK.clamp(max=min(delta, MAX_RATIO))), tokens.ratio_RK > delta)


def tis(tokens: Tokens, level: Literal["token", "sequence"], cap: float) -> TokenLosses:
    """Truncated importance sampling: -sg(min(w, cap)) * A * log pi.

    w is r, or for level "sequence" the product of r over the sample. Source: Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training".
    """
    ratio_RK = tokens.ratio_RK if level == "token" else _to_tokens(tokens, ratio_of(tokens.log_product_R1))
    return TokenLosses(weighted(tokens, ratio_RK.clamp(max=min(cap, MAX_RATIO))), ratio_RK > cap)


def icepop(tokens: Tokens, alpha: float, beta: float) -> TokenLosses:
    """-sg(r) * A * log pi where alpha <= r <= beta, else 0 (Ring-1T, arXiv 2510.18855)."""
    dropped_RK = (tokens.ratio_RK < alpha) | (tokens.ratio_RK > beta)
    return TokenLosses(weighted(tokens, tokens.ratio_RK.masked_fill(dropped_RK, 0.0)), dropped_RK)


def dppo(tokens: Tokens, low: float, high: float, tau: float) -> TokenLosses:
    """-[keep] * A * r + tau * (log r)^2, with the gradient through r.

    A token is left out of the first term where A > 0 and pi - mu > high, or A <= 0 and pi - mu < -low: its probability
    already moved far enough the way A pulls. The second term has every loss token. Source of the mask: the binary
    total variation of Qi et al., arXiv 2602.04879; of the whole: prime-rl.
    """
    moved_RK = (tokens.log_pi_RK.exp() - tokens.log_mu_RK.exp()).detach()
    dropped_RK = torch.where(tokens.advantages_RK > 0, moved_RK > high, moved_RK < -low)
    surrogate_RK = tokens.ratio_RK.masked_fill(dropped_RK, 0.0) * tokens.advantages_RK
    return TokenLosses(tau * tokens.log_ratio_RK.square() - surrogate_RK, dropped_RK)


def mis(
    tokens: Tokens, ratio: Literal["geometric", "product"], limits: tuple[float, float], veto: float
) -> TokenLosses:
    """Masked importance sampling: -sg(s) * A * log pi for samples with low <= s <= high, nothing for the others.

    s is the geometric mean of r over the sample, or the product. A sample with a token of r < veto is left out too.
    Source: Liu, Li et al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference
    mismatch".
    """
    low, high = limits
    s_R1 = ratio_of(tokens.log_mean_R1 if ratio == "geometric" else tokens.log_product_R1)
    vetoed_R1 = (tokens.ratio_RK < veto).any(-1, keepdim=True)
    dropped_R1 = (s_R1 < low) | (s_R1 > high) | vetoed_R1
    weight_RK = _to_tokens(tokens, s_R1.masked_fill(dropped_R1, 0.0))
    return TokenLosses(weighted(tokens, weight_RK), dropped_R1.expand_as(weight_RK))


def gspo(tokens: Tokens, clip_low: float, clip_high: float) -> TokenLosses:
    """PPO's clipping on s = exp(mean log r) of the sample (arXiv 2507.18071). Every token of a sample has its loss.

    Where tokens have their own advantages it is GSPO-token, of the same paper: the value of s at every token, with the
    gradient of that token's logprob alone. Here too a sample has one loss, the mean of its tokens', so that the weights
    of `decoupled` are averaged over the sample. With equal advantages both have the same gradient.
    """
    if tokens.advantages_RK.shape[-1] == 1:
        return clipped_surrogate(tokens, _to_tokens(tokens, ratio_of(tokens.log_mean_R1)), clip_low, clip_high)
    s_RK = ratio_of(tokens.log_mean_R1.detach() + (tokens.log_pi_RK - tokens.log_pi_RK.detach()))
    loss_RK, clipped_RK = clipped_surrogate(tokens, s_RK, clip_low, clip_high)
    mean_R1 = torch.where(tokens.mask_RK, loss_RK, 0.0).sum(-1, keepdim=True) / tokens.num_tokens_R1
    return TokenLosses(_to_tokens(tokens, mean_R1), clipped_RK)


def cispo(tokens: Tokens, lower: float, upper: float) -> TokenLosses:
    """-sg(clip(r, lower, upper)) * A * log pi (MiniMax-M1, arXiv 2506.13585; one upper limit: arXiv 2510.13786)."""
    lower, upper = min(lower, MAX_RATIO), min(upper, MAX_RATIO)
    clipped_RK = (tokens.ratio_RK < lower) | (tokens.ratio_RK > upper)
    return TokenLosses(weighted(tokens, tokens.ratio_RK.clamp(lower, upper)), clipped_RK)


def dapo(tokens: Tokens, clip_low: float, clip_high: float) -> TokenLosses:
    """PPO's clipping on r with a higher upper limit; the mean is over tokens (arXiv 2503.14476)."""
    return clipped_surrogate(tokens, tokens.ratio_RK, clip_low, clip_high)


def dr_grpo(tokens: Tokens, clip_low: float, clip_high: float) -> TokenLosses:
    """PPO's clipping on r; what differs is the mean, over samples * a constant length (arXiv 2503.20783)."""
    return clipped_surrogate(tokens, tokens.ratio_RK, clip_low, clip_high)


def cross_entropy(tokens: Tokens) -> TokenLosses:
    """-A * log pi, A being a weight: of a text that nobody sampled, so there is no ratio."""
    loss_RK = -tokens.advantages_RK * tokens.log_pi_RK
    return TokenLosses(loss_RK, torch.zeros_like(loss_RK, dtype=torch.bool))


def kl_to_base(log_pi_RK: Tensor, log_base_RK: Tensor) -> Tensor:
    """q - 1 - log q with q = base / pi, and the gradient through pi: never negative, and small where pi is the base.

    The k3 estimate of KL(pi || base) (Schulman 2020, "Approximating KL divergence") as GRPO adds it to the loss
    (arXiv 2402.03300). The tokens come from mu, and that is not corrected for.
    """
    log_q_RK = log_base_RK - log_pi_RK
    return ratio_of(log_q_RK) - 1 - log_q_RK


def _to_tokens(tokens: Tokens, values_R1: Tensor) -> Tensor:
    return values_R1.expand_as(tokens.log_pi_RK)


@dataclass
class LossSums:
    """Sums over loss tokens of one run; `loss` is already scaled to the mean over the run's batch.

    Mismatch, ratio and clipped tokens are those of tokens that were sampled. Of supervised and of held out tokens: how
    many, the sum of their -log pi, and how many of them are the likeliest.
    """

    loss: float = 0.0
    entropy: float = 0.0
    kl_base: float = 0.0
    num_loss_tokens: float = 0.0
    mismatch_kl: float = 0.0
    importance_ratio: float = 0.0
    num_clipped: float = 0.0
    num_supervised: float = 0.0
    supervised_loss: float = 0.0
    supervised_right: float = 0.0
    num_held_out: float = 0.0
    held_out_loss: float = 0.0
    held_out_right: float = 0.0

    def add(self, other: LossSums) -> None:
        """Add each sum of `other` to the same one here."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def as_list(self) -> list[float]:
        """The sums in the order of the fields."""
        return list(astuple(self))

    def mean(self, total: float) -> float:
        """`total` by loss token; without a loss token `total` itself."""
        return total / max(self.num_loss_tokens, 1.0)

    def mean_of_sampled(self, total: float) -> float:
        """`total` by loss token that was sampled."""
        return total / max(self.num_loss_tokens - self.num_supervised, 1.0)


@torch.no_grad()
def row_statistics(inputs: LossInputs, losses: RowLosses, entropy_RK: Tensor, is_top_RK: Tensor) -> Tensor:
    """`[R, S]`, the fields of LossSums in their order, summed over the loss tokens of each row.

    mismatch_kl is r - 1 - log r, an unbiased and never negative estimate of KL(mu || pi) from samples of mu.
    """
    ratio_RK, ones_RK = ratio_of(inputs.logprobs_RK - inputs.sampled_logprobs_RK), torch.ones_like(entropy_RK)
    of_trained = [entropy_RK, losses.kl_base_RK, ones_RK]
    of_sampled = [ratio_RK - 1 - ratio_RK.log(), ratio_RK, losses.clipped_RK.float()]
    of_texts = [ones_RK, -inputs.logprobs_RK, is_top_RK] if inputs.uses_R3 is not None else []
    by_token = [*of_trained, *of_sampled, *of_texts]
    sums_RS = torch.stack([torch.where(inputs.mask_RK, each_RK, 0.0).sum(-1) for each_RK in by_token], dim=-1)
    if inputs.uses_R3 is None:
        return torch.cat([losses.loss_R[:, None], sums_RS, sums_RS.new_zeros(len(sums_RS), 6)], dim=-1)
    sampled_R1, supervised_R1, held_out_R1 = inputs.uses_R3.bool().unsqueeze(1).unbind(-1)
    trained_R3, sampled_R3, texts_R3 = sums_RS.view(-1, 3, 3).unbind(1)
    chosen = [(trained_R3, ~held_out_R1), (sampled_R3, sampled_R1), (texts_R3, supervised_R1), (texts_R3, held_out_R1)]
    parts = [torch.where(is_R1, each_R3, 0.0) for each_R3, is_R1 in chosen]  # what is left out need not be finite
    return torch.cat([losses.loss_R[:, None], *parts], dim=-1)


def sums_by_run(statistics_RS: Tensor, num_rows: Sequence[int]) -> list[LossSums]:
    """For each run its sums; the runs have `num_rows` neighbouring rows each. One copy from the device for all."""
    parts = torch.split(statistics_RS.double(), list(num_rows))
    statistics_GS = torch.stack([part_RS.sum(0) for part_RS in parts])
    return [LossSums(*values) for values in statistics_GS.tolist()]
