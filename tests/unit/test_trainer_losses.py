"""Each loss against its formula, written out a second time token by token, and its gradient against differences."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from prime_rl.configs.losses import (
    AipoLossConfig,
    BaseLossConfig,
    CispoLossConfig,
    DppoLossConfig,
    GspoLossConfig,
    IcePopLossConfig,
    LossConfig,
    MisLossConfig,
    TisLossConfig,
)
from prime_rl.trainer.loss import LossInputs, compute_loss
from tests.loss_support import EVERY_LOSS, by_token, inputs_of, name_of

pytestmark = pytest.mark.numeric

# One row: log pi that gradients go through, log pi that is held constant, log mu, A of each token -> by token the loss,
# and whether a limit bound. Python floats, no tensors.
Row = list[float]
Reference = Callable[[Row, Row, Row, Row], tuple[Row, list[bool]]]


def reference(config: LossConfig) -> Reference:
    """The formula of `config.type`."""
    c = config

    def ratios(log_pi: Row, log_mu: Row) -> Row:
        return [math.exp(p - m) for p, m in zip(log_pi, log_mu, strict=True)]

    def token_weights(held: Row, mu: Row) -> tuple[Row, list[bool]]:
        r = ratios(held, mu)
        if c.type == "aipo":
            return [min(x, c.delta) for x in r], [x > c.delta for x in r]
        if c.type == "cispo":
            return [max(c.lower, min(x, c.upper)) for x in r], [not c.lower <= x <= c.upper for x in r]
        if c.type == "icepop":
            return [x if c.alpha <= x <= c.beta else 0.0 for x in r], [not c.alpha <= x <= c.beta for x in r]
        if c.type == "tis" and c.level == "token":
            return [min(x, c.cap) for x in r], [x > c.cap for x in r]
        if c.type == "tis":
            return [min(math.prod(r), c.cap)] * len(r), [math.prod(r) > c.cap] * len(r)
        assert c.type == "mis"
        s = math.prod(r) ** (1 / len(r)) if c.ratio == "geometric" else math.prod(r)
        keep = c.low <= s <= c.high and min(r) >= c.veto
        return [s if keep else 0.0] * len(r), [not keep] * len(r)

    def policy_gradient(live: Row, held: Row, mu: Row, a: Row) -> tuple[Row, list[bool]]:
        weights, bound = token_weights(held, mu)
        return [-w * x * p for w, x, p in zip(weights, a, live, strict=True)], bound

    def ppo(live: Row, held: Row, mu: Row, a: Row) -> tuple[Row, list[bool]]:
        decouples = c.old_logprobs == "trainer"
        old = held if decouples else mu
        r = ratios(live, old)
        if c.type == "gspo" and len(set(a)) > 1:
            s = math.exp(sum(h - o for h, o in zip(held, old, strict=True)) / len(old))
            r = [s * x for x in ratios(live, held)]
        elif c.type == "gspo":
            r = [math.exp(sum(map(math.log, r)) / len(r))] * len(r)
        clipped = [max(1 - c.clip_low, min(x, 1 + c.clip_high)) for x in r]
        values = [min(x * z, y * z) for x, y, z in zip(r, clipped, a, strict=True)]
        bound = [v != x * z for v, x, z in zip(values, r, a, strict=True)]
        if c.type == "gspo":
            values = [sum(values) / len(values)] * len(values)
        if not decouples:
            return [-v for v in values], bound
        weights = ratios(held, mu)
        losses = [-min(w, c.weight_cap) * v for w, v in zip(weights, values, strict=True)]
        return losses, [was or w > c.weight_cap for was, w in zip(bound, weights, strict=True)]

    def dppo(live: Row, held: Row, mu: Row, a: Row) -> tuple[Row, list[bool]]:
        losses, bound = [], []
        for p, h, m, x in zip(live, held, mu, a, strict=True):
            moved = math.exp(h) - math.exp(m)
            drop = moved > c.high if x > 0 else moved < -c.low
            losses.append(c.tau * (p - m) ** 2 - (0.0 if drop else x * math.exp(p - m)))
            bound.append(drop)
        return losses, bound

    return dppo if c.type == "dppo" else ppo if c.type in ("gspo", "dapo", "dr_grpo") else policy_gradient


def row_loss(config: LossConfig, inputs: LossInputs, row: int, live: Tensor | None = None) -> tuple[float, list[bool]]:
    """Scaled loss of a row, and at each of its loss tokens whether a limit bound."""
    at = inputs.mask_RK[row]
    held, mu = inputs.logprobs_RK[row][at].tolist(), inputs.sampled_logprobs_RK[row][at].tolist()
    moving = held if live is None else live[row][at].tolist()
    advantages = inputs.advantages_RK.expand_as(inputs.mask_RK)[row][at].tolist()
    losses, bound = reference(config)(moving, held, mu, advantages)
    if config.kl_coef:
        assert inputs.base_logprobs_RK is not None
        logs = [b - p for b, p in zip(inputs.base_logprobs_RK[row][at].tolist(), moving, strict=True)]
        losses = [x + config.kl_coef * (math.exp(q) - 1 - q) for x, q in zip(losses, logs, strict=True)]
    return sum(losses) * float(inputs.scales_R[row]), bound


def test_every_type_is_here() -> None:
    union = get_args(get_args(LossConfig)[0])
    assert {type(config) for config in EVERY_LOSS} == set(union) and all(
        issubclass(each, BaseLossConfig) for each in union
    )


# With one advantage a row, and with one a token.
EVERY_INPUT = {"row": inputs_of(), "token": by_token(inputs_of())}


@pytest.mark.parametrize("advantages", EVERY_INPUT)
@pytest.mark.parametrize("config", EVERY_LOSS, ids=name_of)
def test_loss_and_limits_are_those_of_the_formula(config: LossConfig, advantages: str) -> None:
    inputs = EVERY_INPUT[advantages]
    losses = compute_loss(config, inputs)
    seen = set()
    for row in range(6):
        expected, bound = row_loss(config, inputs, row)
        assert float(losses.loss_R[row]) == pytest.approx(expected, rel=1e-9)
        assert losses.clipped_RK[row][inputs.mask_RK[row]].tolist() == bound
        seen.update(bound)
    assert seen == {True, False} or config.kl_coef, "the rows must lie on both sides of the limits"


@pytest.mark.parametrize("advantages", EVERY_INPUT)
@pytest.mark.parametrize("config", EVERY_LOSS, ids=name_of)
def test_gradient_is_that_of_the_formula(config: LossConfig, advantages: str) -> None:
    """Central differences of the formula, with what it holds constant held constant."""
    inputs = EVERY_INPUT[advantages]
    logprobs = inputs.logprobs_RK.clone().requires_grad_()
    compute_loss(config, replace(inputs, logprobs_RK=logprobs)).loss_R.sum().backward()
    assert logprobs.grad is not None
    eps = 1e-6
    for row, k in inputs.mask_RK.nonzero().tolist():
        step = torch.zeros_like(inputs.logprobs_RK)
        step[row, k] = eps
        up, down = (row_loss(config, inputs, row, inputs.logprobs_RK + s)[0] for s in (step, -step))
        assert float(logprobs.grad[row, k]) == pytest.approx((up - down) / (2 * eps), rel=1e-6, abs=1e-8)
    assert not logprobs.grad[~inputs.mask_RK].any()


@pytest.mark.parametrize("config", EVERY_LOSS, ids=name_of)
def test_equal_advantages_of_all_tokens_are_that_of_the_row(config: LossConfig) -> None:
    """To the last bit; GSPO, whose formula is another one then, but for rounding."""
    inputs = inputs_of()
    spread = replace(inputs, advantages_RK=inputs.advantages_RK.expand_as(inputs.mask_RK).clone())
    found = []
    for each in (inputs, spread):
        logprobs = each.logprobs_RK.clone().requires_grad_()
        losses = compute_loss(config, replace(each, logprobs_RK=logprobs))
        losses.loss_R.sum().backward()
        assert logprobs.grad is not None and logprobs.grad.any()
        found.append((losses, logprobs.grad))
    (one, one_grad), (other, other_grad) = found
    assert torch.equal(one.clipped_RK, other.clipped_RK)
    if config.type == "gspo":
        torch.testing.assert_close(one.loss_R, other.loss_R, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(one_grad, other_grad, rtol=1e-12, atol=1e-15)
    else:
        assert torch.equal(one.loss_R, other.loss_R) and torch.equal(one_grad, other_grad)


@pytest.mark.parametrize("config", [c for c in EVERY_LOSS if getattr(c, "old_logprobs", "") != "trainer"], ids=name_of)
def test_autograd_agrees_with_itself(config: LossConfig) -> None:
    """torch's own check. mu moves along with pi where the ratio is held constant: then the ratio stays as it is."""
    inputs = inputs_of()
    is_held = config.type in ("aipo", "tis", "icepop", "mis", "cispo")

    def loss(logprobs_RK: Tensor) -> Tensor:
        moved_RK = logprobs_RK.detach() - inputs.logprobs_RK if is_held else 0.0
        mu_RK = inputs.sampled_logprobs_RK + moved_RK
        return compute_loss(config, replace(inputs, logprobs_RK=logprobs_RK, sampled_logprobs_RK=mu_RK)).loss_R

    assert torch.autograd.gradcheck(loss, (inputs.logprobs_RK.clone().requires_grad_(),))


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        (TisLossConfig(type="tis"), TisLossConfig(type="tis", cap=2)),
        (TisLossConfig(type="tis", level="sequence"), TisLossConfig(type="tis", level="sequence", cap=5)),
        (MisLossConfig(type="mis"), MisLossConfig(type="mis", low=0.99, high=1.01)),
        (MisLossConfig(type="mis", ratio="product"), MisLossConfig(type="mis", ratio="product", low=0.5, high=2)),
    ],
    ids=repr,
)
def test_constants_that_are_left_out_take_what_belongs_to_the_choice(left_out: LossConfig, said: LossConfig) -> None:
    inputs = inputs_of()
    # Far enough from the policy for a cap of 5, near enough for a mean of 1.01.
    mu_RK = inputs.logprobs_RK + torch.tensor([-3.0, 0.001, -0.004, -1.0, 0.2, 0.05])[:, None]
    spread = replace(inputs, sampled_logprobs_RK=mu_RK)
    losses = compute_loss(left_out, spread)
    assert torch.equal(losses.loss_R, compute_loss(said, spread).loss_R)
    clipped = {bool(row[mask].any()) for row, mask in zip(losses.clipped_RK, inputs.mask_RK, strict=True)}
    assert clipped == {True, False}


NOISE = 0.05
"""How far inference and a trainer in bfloat16 are apart, a token."""


def test_an_engine_s_rounding_clips_no_sample_around_the_trainer_s_own_logprobs() -> None:
    """Before any change of the policy: around inference's logprobs GSPO loses samples to noise alone."""
    generator = torch.Generator().manual_seed(0)
    log_pi_RK = (-2 * torch.rand(64, 200, generator=generator)).requires_grad_()
    noise_RK = NOISE * torch.randn(64, 200, generator=generator)
    inputs = LossInputs(
        logprobs_RK=log_pi_RK,
        sampled_logprobs_RK=log_pi_RK.detach() + noise_RK,
        advantages_RK=torch.ones(64, 1),
        mask_RK=torch.ones(64, 200, dtype=torch.bool),
        scales_R=torch.full((64,), 1 / (64 * 200)),
    )
    kept = {}
    for old in ("trainer", "inference"):
        losses = compute_loss(GspoLossConfig.model_validate({"type": "gspo", "old_logprobs": old}), inputs)
        (grad_RK,) = torch.autograd.grad(losses.loss_R.sum(), log_pi_RK)
        kept[old] = int((grad_RK != 0).all(-1).sum())
        assert bool(losses.clipped_RK.any()) == (old == "inference")
    # The mean of 200 such errors is 0.0035, the limit 0.0004: nearly half of the samples are beyond it.
    assert kept["trainer"] == 64 and 16 < kept["inference"] < 48


REJECTING: list[LossConfig] = [
    IcePopLossConfig(type="icepop", alpha=90, beta=91),
    MisLossConfig(type="mis", low=90, high=91),
    MisLossConfig(type="mis", veto=0.999),
    DppoLossConfig(type="dppo", low=0, high=0, tau=0),
    CispoLossConfig(type="cispo", lower=0, upper=1e-300),
]


@pytest.mark.parametrize("config", REJECTING, ids=name_of)
def test_a_batch_of_which_nothing_is_kept_has_no_loss_and_no_gradient(config: LossConfig) -> None:
    inputs = inputs_of()
    # Every token moved the way its advantage pulls, none of them by nothing.
    towards_RK = inputs.advantages_RK.sign() * 0.1
    if config.type == "mis":
        towards_RK = -torch.ones_like(towards_RK) * 0.1
    logprobs = inputs.logprobs_RK.clone().requires_grad_()
    losses = compute_loss(
        config, replace(inputs, logprobs_RK=logprobs, sampled_logprobs_RK=inputs.logprobs_RK - towards_RK)
    )
    losses.loss_R.sum().backward()
    assert losses.clipped_RK[inputs.mask_RK].all()
    assert logprobs.grad is not None
    torch.testing.assert_close(losses.loss_R, torch.zeros_like(losses.loss_R))
    assert float(logprobs.grad.abs().max()) < 1e-200


def test_a_policy_that_is_the_base_has_no_kl_and_no_gradient_of_it() -> None:
    inputs = inputs_of()
    logprobs = inputs.logprobs_RK.clone().requires_grad_()
    quiet = replace(inputs, logprobs_RK=logprobs, base_logprobs_RK=inputs.logprobs_RK, advantages_RK=torch.zeros(6, 1))
    losses = compute_loss(AipoLossConfig(kl_coef=5.0), quiet)
    losses.loss_R.sum().backward()
    assert not losses.loss_R.any() and not losses.kl_base_RK.any()
    assert logprobs.grad is not None and not logprobs.grad.any()


@pytest.mark.parametrize("config", EVERY_LOSS, ids=name_of)
def test_a_constant_that_float32_does_not_hold_ends_no_pass(config: LossConfig) -> None:
    inputs = inputs_of()
    halves = {
        key: value.float() for key, value in vars(inputs).items() if value is not None and value.is_floating_point()
    }
    for key, value in config:
        if value is None or isinstance(value, float):
            with contextlib.suppress(ValidationError):
                compute_loss(config.replace(**{key: 1e300}), replace(inputs, **halves))
