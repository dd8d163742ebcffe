"""The loss against a plain NumPy reference."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from prime_rl.trainer.loss import LossSums, aipo_loss, row_statistics, token_logprobs

R, K, V = 3, 5, 11
Array = npt.NDArray[np.float64]


def reference_logprobs(logits: Array, targets: npt.NDArray[np.int64], temperatures: Array) -> tuple[Array, Array]:
    scaled = logits / temperatures[:, None, None]
    scaled = scaled - scaled.max(-1, keepdims=True)
    probs = np.exp(scaled) / np.exp(scaled).sum(-1, keepdims=True)
    chosen = np.take_along_axis(probs, targets[..., None], -1)[..., 0]
    return np.log(chosen), -(probs * np.log(probs)).sum(-1)


def case(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "logits": torch.randn(R, K, V, generator=generator) * 3,
        "targets": torch.randint(0, V, (R, K), generator=generator),
        "mu": -torch.rand(R, K, generator=generator) * 5,
        "advantages": torch.tensor([1.5, -0.5, 0.25]),
        "mask": torch.rand(R, K, generator=generator) > 0.4,
        "scales": torch.tensor([0.1, 0.2, 0.05]),
        "deltas": torch.tensor([8.0, 1.1, 0.5]),
        "temperatures": torch.tensor([1.0, 0.7, 1.3]),
    }


def test_logprobs_and_entropy_are_those_after_temperature() -> None:
    c = case()
    logprobs, entropy = token_logprobs(c["logits"], c["targets"], c["temperatures"])
    expected = reference_logprobs(
        *(c[k].double().numpy() if k != "targets" else c[k].numpy() for k in ("logits", "targets", "temperatures"))
    )
    np.testing.assert_allclose(logprobs.numpy(), expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(entropy.numpy(), expected[1], rtol=1e-5, atol=1e-5)


def test_loss_and_gradient_equal_the_reference() -> None:
    c = case()
    logprobs = token_logprobs(c["logits"], c["targets"], c["temperatures"])[0].requires_grad_()
    loss_R = aipo_loss(logprobs, c["mu"], c["advantages"], c["mask"], c["scales"], c["deltas"])
    loss_R.sum().backward()
    expected = np.zeros(R)
    gradient = np.zeros((R, K))
    for row in range(R):
        for k in range(K):
            if c["mask"][row, k]:
                log_pi, log_mu = float(logprobs.detach()[row, k]), float(c["mu"][row, k])
                ratio = min(np.exp(log_pi - log_mu), float(c["deltas"][row]))
                gradient[row, k] = -ratio * float(c["advantages"][row]) * float(c["scales"][row])
                expected[row] += gradient[row, k] * log_pi
    assert (np.exp(logprobs.detach().numpy() - c["mu"].numpy()) > c["deltas"].numpy()[:, None]).any()
    np.testing.assert_allclose(loss_R.detach().numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(logprobs.grad.numpy(), gradient, rtol=1e-5)


def test_what_is_masked_may_be_anything() -> None:
    c = case()
    logprobs = torch.full((R, K), -1.0, requires_grad=True)
    mu = torch.where(c["mask"], c["mu"], torch.tensor(float("-inf")))
    loss_R = aipo_loss(logprobs, mu, c["advantages"], c["mask"], c["scales"], c["deltas"])
    loss_R.sum().backward()
    assert torch.isfinite(loss_R).all() and torch.isfinite(logprobs.grad).all()
    assert not logprobs.grad[~c["mask"]].any()


def test_a_row_that_is_not_finite_leaves_the_others_their_gradients() -> None:
    c = case()
    logprobs = torch.full((R, K), -1.0, requires_grad=True)
    advantages = torch.tensor([float("nan"), 1.0, 1.0])
    aipo_loss(logprobs, c["mu"], advantages, c["mask"], c["scales"], c["deltas"]).sum().backward()
    assert torch.isfinite(logprobs.grad[1:]).all()


def test_statistics_are_sums_over_loss_tokens() -> None:
    c = case()
    logprobs, entropy = token_logprobs(c["logits"], c["targets"], c["temperatures"])
    loss_R = aipo_loss(logprobs, c["mu"], c["advantages"], c["mask"], c["scales"], c["deltas"])
    stats = row_statistics(loss_R, logprobs, c["mu"], entropy, c["mask"], c["deltas"])
    sums = LossSums()
    for row in stats.tolist():
        sums.add(LossSums(*row))
    mask, ratio = c["mask"].numpy(), np.exp((logprobs - c["mu"]).double().numpy())
    assert sums.num_loss_tokens == mask.sum()
    assert sums.num_clipped == (mask & (ratio > c["deltas"].numpy()[:, None])).sum() > 0
    assert sums.loss == pytest.approx(float(loss_R.sum()), rel=1e-5)
    assert sums.mean(sums.importance_ratio) == pytest.approx(ratio[mask].mean(), rel=1e-4)
    assert sums.mean(sums.mismatch_kl) == pytest.approx((ratio - 1 - np.log(ratio))[mask].mean(), rel=1e-4)
    assert sums.mean(sums.entropy) == pytest.approx(entropy.numpy()[mask].mean(), rel=1e-5)


def test_on_policy_tokens_have_ratio_one_and_no_mismatch() -> None:
    c = case()
    logprobs, entropy = token_logprobs(c["logits"], c["targets"], c["temperatures"])
    stats = row_statistics(torch.zeros(R), logprobs, logprobs, entropy, c["mask"], c["deltas"].clamp(min=1.0))
    assert stats[:, 2].abs().max() < 1e-5
    torch.testing.assert_close(stats[:, 3], c["mask"].sum(-1).float())
    assert not stats[:, 4].any()
