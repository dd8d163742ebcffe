"""What every loss goes through: logprobs, masks, scales, runs side by side, and the sums that are reported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from prime_rl.configs.losses import AipoLossConfig, DapoLossConfig, GspoLossConfig, LossConfig, TisLossConfig
from prime_rl.lora import parts
from prime_rl.trainer.loss import (
    LossInputs,
    LossSums,
    compute_loss,
    compute_losses,
    row_statistics,
    sums_by_run,
    token_logprobs,
)
from tests.loss_support import EVERY_LOSS, by_token, inputs_of, name_of
from tests.numeric import check_same

pytestmark = pytest.mark.numeric

V = 11
Array = npt.NDArray[np.float64]


H = 5


def reference_logprobs(logits: Array, targets: npt.NDArray[np.int64], temperatures: Array) -> tuple[Array, Array]:
    scaled = logits / temperatures[:, None]
    scaled = scaled - scaled.max(-1, keepdims=True)
    probs = np.exp(scaled) / np.exp(scaled).sum(-1, keepdims=True)
    chosen = np.take_along_axis(probs, targets[:, None], -1)[:, 0]
    return np.log(chosen), -(probs * np.log(probs)).sum(-1)


def some_tokens(num: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(hidden states, head, targets, temperatures)"""
    generator = torch.Generator().manual_seed(0)
    hidden_NH, head_VH = (torch.randn(size, H, generator=generator, dtype=torch.float64) for size in (num, V))
    targets_N = torch.randint(0, V, (num,), generator=generator)
    temperatures_N = 0.5 + torch.rand(num, generator=generator, dtype=torch.float64)
    return hidden_NH.to(dtype), (2 * head_VH).to(dtype), targets_N, temperatures_N.float()


def test_logprobs_and_entropy_are_those_after_temperature() -> None:
    hidden, head, targets, temperatures = some_tokens(15, torch.float32)
    logprobs, entropy, _ = token_logprobs(hidden, head, targets, temperatures)
    logits = hidden.double() @ head.double().T
    expected = reference_logprobs(logits.numpy(), targets.numpy(), temperatures.double().numpy())
    np.testing.assert_allclose(logprobs.numpy(), expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(entropy.numpy(), expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trained", ["hidden states", "head", "both"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens_of_a_chunk", [1, 4, 100])
def test_the_gradient_of_logprobs_is_that_of_a_plain_log_softmax(
    trained: str, dtype: torch.dtype, tokens_of_a_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "CHUNK_BYTES", 4 * V * tokens_of_a_chunk)
    hidden, head, targets, temperatures = some_tokens(10, dtype)
    hidden.requires_grad_(trained != "head")
    head.requires_grad_(trained != "hidden states")
    weight_N = torch.randn(10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logprobs, entropy, _ = token_logprobs(hidden, head, targets, temperatures)
    (logprobs * weight_N).sum().backward()
    plain = [tensor.detach().double().requires_grad_() for tensor in (hidden, head)]
    expected = torch.log_softmax(plain[0] @ plain[1].T / temperatures[:, None].double(), -1)
    (expected.gather(-1, targets[:, None]).squeeze(-1) * weight_N).sum().backward()
    assert not entropy.requires_grad
    for ours, theirs in zip((hidden, head), plain, strict=True):
        assert (ours.grad is not None) == ours.requires_grad
        if ours.grad is not None and theirs.grad is not None:
            assert ours.grad.dtype == dtype and theirs.grad.any()
            check_same(ours.grad, theirs.grad, V + H, dtype)


def test_logits_of_any_size_overflow_nowhere() -> None:
    hidden = torch.tensor([[1e30]], requires_grad=True)
    head = torch.tensor([[1.0], [-1.0], [0.0]])
    logprobs, entropy, _ = token_logprobs(hidden, head, torch.tensor([0]), torch.ones(1))
    logprobs.sum().backward()
    assert logprobs.item() == 0 and entropy.item() == 0 and hidden.grad is not None and not hidden.grad.any()


def gradient(config: LossConfig, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss_R, gradient of their sum)"""
    logprobs = inputs.logprobs_RK.detach().clone().requires_grad_()
    loss_R = compute_loss(config, replace(inputs, logprobs_RK=logprobs)).loss_R
    loss_R.sum().backward()
    assert logprobs.grad is not None
    return loss_R.detach(), logprobs.grad


@pytest.mark.parametrize("config", EVERY_LOSS, ids=name_of)
@pytest.mark.parametrize("junk", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("clean", [inputs_of(), by_token(inputs_of())], ids=["row", "token"])
def test_what_is_masked_may_be_anything(config: LossConfig, clean: LossInputs, junk: float) -> None:
    assert clean.base_logprobs_RK is not None
    dirty = replace(
        clean,
        logprobs_RK=clean.logprobs_RK.masked_fill(~clean.mask_RK, junk),
        sampled_logprobs_RK=clean.sampled_logprobs_RK.masked_fill(~clean.mask_RK, -junk),
        base_logprobs_RK=clean.base_logprobs_RK.masked_fill(~clean.mask_RK, junk),
    )
    loss_R, grad_RK = gradient(config, dirty)
    expected_R, expected_RK = gradient(config, clean)
    assert torch.equal(loss_R, expected_R) and torch.equal(grad_RK, expected_RK)
    assert torch.isfinite(loss_R).all() and grad_RK[clean.mask_RK].any() and not grad_RK[~clean.mask_RK].any()


@pytest.mark.parametrize("config", EVERY_LOSS, ids=name_of)
def test_a_row_that_is_not_finite_leaves_the_others_their_gradients(config: LossConfig) -> None:
    inputs = inputs_of()
    spoiled = replace(inputs, advantages_RK=inputs.advantages_RK.index_fill(0, torch.tensor([1]), float("nan")))
    loss_R, grad_RK = gradient(config, spoiled)
    _, expected_RK = gradient(config, inputs)
    assert loss_R.isnan().tolist() == [row == 1 for row in range(6)]
    others = [row for row in range(6) if row != 1]
    assert torch.equal(grad_RK[others], expected_RK[others])


@pytest.mark.parametrize("config", EVERY_LOSS, ids=name_of)
@pytest.mark.parametrize("far", [-200.0, 200.0])
@pytest.mark.parametrize("given", [inputs_of(), by_token(inputs_of())], ids=["row", "token"])
def test_a_far_ratio_gives_numbers(config: LossConfig, given: LossInputs, far: float) -> None:
    """In float32, where exp(200) is infinite; a ratio far from 1 is reported as such."""
    tensors = {name: x.float() for name, x in vars(given).items() if name not in ("mask_RK", "uses_R3")}
    inputs = LossInputs(**tensors, mask_RK=inputs_of().mask_RK)
    assert inputs.base_logprobs_RK is not None
    inputs = replace(
        inputs,
        sampled_logprobs_RK=inputs.logprobs_RK - far,
        base_logprobs_RK=inputs.base_logprobs_RK + far,
    )
    loss_R, grad_RK = gradient(config, inputs)
    assert torch.isfinite(loss_R).all() and torch.isfinite(grad_RK).all()
    statistics_RS = row_statistics(inputs, compute_loss(config, inputs), torch.zeros(6, 8), torch.zeros(6, 8))
    assert torch.isfinite(statistics_RS).all()
    (sums,) = sums_by_run(statistics_RS, [6])
    assert sums.mean(sums.importance_ratio) > 1e8 if far > 0 else sums.mean(sums.importance_ratio) < 1e-8


def test_runs_with_different_losses_in_one_pass_get_what_they_get_alone() -> None:
    inputs = inputs_of()
    tis, gspo = TisLossConfig(type="tis", kl_coef=0.3), GspoLossConfig(type="gspo")
    by_row: list[LossConfig] = [tis, tis, tis, gspo, gspo, AipoLossConfig()]
    together = compute_losses(by_row, inputs)
    for row, config in enumerate(by_row):
        alone = compute_loss(config, inputs.split([1] * len(by_row))[row])
        torch.testing.assert_close(together.loss_R[row : row + 1], alone.loss_R)
        assert torch.equal(together.clipped_RK[row : row + 1], alone.clipped_RK)
        torch.testing.assert_close(together.kl_base_RK[row : row + 1], alone.kl_base_RK)
    assert together.kl_base_RK[:3].any() and not together.kl_base_RK[3:].any()


def test_statistics_are_sums_over_the_loss_tokens_of_each_run() -> None:
    inputs, entropy = inputs_of(), torch.rand(6, 8, dtype=torch.float64)
    config = TisLossConfig(type="tis", cap=1.1, kl_coef=0.5)
    losses = compute_loss(config, inputs)
    by_run = sums_by_run(row_statistics(inputs, losses, entropy, torch.zeros_like(entropy)), [2, 4])
    for sums, rows in zip(by_run, (slice(0, 2), slice(2, 6)), strict=True):
        mask = inputs.mask_RK[rows].numpy()
        log_pi, log_mu = inputs.logprobs_RK[rows].numpy(), inputs.sampled_logprobs_RK[rows].numpy()
        ratio = np.exp(log_pi - log_mu)[mask]
        assert inputs.base_logprobs_RK is not None
        base = np.exp(inputs.base_logprobs_RK[rows].numpy() - log_pi)[mask]
        assert sums.num_loss_tokens == mask.sum()
        assert sums.num_clipped == (ratio > 1.1).sum() > 0
        assert sums.loss == pytest.approx(float(losses.loss_R[rows].sum()))
        assert sums.mean(sums.importance_ratio) == pytest.approx(ratio.mean())
        assert sums.mean(sums.mismatch_kl) == pytest.approx((ratio - 1 - np.log(ratio)).mean())
        assert sums.mean(sums.kl_base) == pytest.approx((base - 1 - np.log(base)).mean())
        assert sums.mean(sums.entropy) == pytest.approx(entropy[rows].numpy()[mask].mean())
    total = LossSums()
    for sums in by_run:
        total.add(sums)
    assert total.num_loss_tokens == inputs.mask_RK.sum()


def test_on_policy_tokens_have_ratio_one_and_no_mismatch() -> None:
    inputs = inputs_of()
    on_policy = replace(inputs, sampled_logprobs_RK=inputs.logprobs_RK)
    losses = compute_loss(DapoLossConfig(type="dapo"), on_policy)
    (sums,) = sums_by_run(row_statistics(on_policy, losses, torch.zeros(6, 8), torch.zeros(6, 8)), [6])
    assert sums.mean(sums.importance_ratio) == pytest.approx(1.0)
    assert sums.mismatch_kl == pytest.approx(0.0, abs=1e-9) and sums.num_clipped == 0
