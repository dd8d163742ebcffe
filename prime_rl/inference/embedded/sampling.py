"""Choosing the next token: pure functions over one decode step's logits. No model, no requests, no state.

Randomness is counter-based: the uniform number for a token depends on the row's key and the token's position alone, so
a seeded request gets the same tokens whatever else is in the batch and whenever it joined. The generator is SplitMix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014). The token is drawn by inverting the
distribution function, which needs one number a row.

Dimensions: R rows, V vocabulary, K most likely alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
        temperature: 0 takes the most likely token.
        top_p: only the smallest set of tokens with at least this probability is sampled from.
        num_top_logprobs: how many of the most likely tokens are reported at each position; 0 none.
        stop: strings that end the text; they are not part of it.
        ignore_eos: go on after an end-of-sequence token (for measurements).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    num_top_logprobs: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True)
class BatchParams:
    """The parameters of all rows of a batch as tensors, made once whenever the batch changes."""

    temperature_R: Tensor
    greedy_R: Tensor
    top_p_R: Tensor
    keys_R: npt.NDArray[np.uint64]
    any_random: bool
    any_top_p: bool
    num_top_logprobs: int

    @classmethod
    def of(cls, params: Sequence[SamplingParams], keys: Sequence[int], device: torch.device) -> BatchParams:
        """Stack `params` of the rows; `keys` are their random streams (`stream_key`)."""
        temperatures = [p.temperature for p in params]
        top_ps = [1.0 if p.temperature == 0 else p.top_p for p in params]
        return cls(
            # A greedy row reports the logprobs of the unscaled distribution.
            temperature_R=torch.tensor([t or 1.0 for t in temperatures], device=device),
            greedy_R=torch.tensor([t == 0 for t in temperatures], device=device),
            top_p_R=torch.tensor(top_ps, device=device),
            keys_R=np.array(keys, dtype=np.uint64),
            any_random=any(t > 0 for t in temperatures),
            any_top_p=any(p < 1 for p in top_ps),
            num_top_logprobs=max(p.num_top_logprobs for p in params),
        )


@dataclass(frozen=True)
class Sampled:
    """One token a row, with its logprob in the distribution it was drawn from (after temperature and top_p)."""

    token_ids_R: Tensor
    logprobs_R: Tensor
    top_ids_RK: Tensor | None
    top_logprobs_RK: Tensor | None


def stream_key(seed: int, choice_idx: int) -> int:
    """The key of the random stream of choice number `choice_idx` of a request seeded with `seed`: 64 bits."""
    return _mix(_mix(seed & _MASK) + (choice_idx + 1) * _GOLDEN)


def _mix(value: int) -> int:
    z = value & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniforms(keys_R: npt.NDArray[np.uint64], positions_R: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Number `positions_R` of each row's stream, in [0, 1 - 2^-52]."""
    z = keys_R + (positions_R + np.uint64(1)) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    # 52 bits: the largest number times any total stays below that total after rounding.
    fractions_R: npt.NDArray[np.float64] = (z >> np.uint64(12)).astype(np.float64) * 2.0**-52
    return fractions_R


def sample(logits_RV: Tensor, params: BatchParams, positions_R: npt.NDArray[np.uint64]) -> Sampled:
    """Draw one token a row. `positions_R` counts the tokens that each row has generated before this one."""
    scaled_RV = logits_RV.float() / params.temperature_R[:, None]
    if params.any_top_p:
        scaled_RV = _keep_top_p(scaled_RV, params.top_p_R)
    logprobs_RV = torch.log_softmax(scaled_RV, dim=-1)
    token_ids_R = logits_RV.argmax(dim=-1)
    if params.any_random:
        drawn_R = _draw(logprobs_RV, uniforms(params.keys_R, positions_R))
        token_ids_R = torch.where(params.greedy_R, token_ids_R, drawn_R)
    logprobs_R = logprobs_RV.gather(1, token_ids_R[:, None])[:, 0]
    if not params.num_top_logprobs:
        return Sampled(token_ids_R, logprobs_R, None, None)
    top = logprobs_RV.topk(min(params.num_top_logprobs, logprobs_RV.shape[1]), dim=-1)
    return Sampled(token_ids_R, logprobs_R, top.indices, top.values)


def _draw(logprobs_RV: Tensor, uniforms_R: npt.NDArray[np.float64]) -> Tensor:
    """Invert the distribution function at `uniforms_R`; float64, so that rare tokens keep their probability."""
    cdf_RV = logprobs_RV.double().exp().cumsum(dim=-1)
    threshold_R1 = torch.from_numpy(uniforms_R).to(cdf_RV.device)[:, None] * cdf_RV[:, -1:]
    return torch.searchsorted(cdf_RV, threshold_R1, right=True)[:, 0]


def _keep_top_p(logits_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """Set to -inf what is outside the smallest set of tokens that holds at least `top_p` of the probability."""
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True)
    probs_RV = sorted_RV.softmax(dim=-1)
    before_RV = probs_RV.cumsum(dim=-1) - probs_RV
    drop_RV = (before_RV >= top_p_R[:, None]) & (top_p_R[:, None] < 1)
    drop_RV[:, 0] = False
    return logits_RV.masked_fill(torch.zeros_like(drop_RV).scatter(1, order_RV, drop_RV), float("-inf"))


def find_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Where the earliest of the `stop` strings begins in `text`, and which one it is; None when not found."""
    found = [(at, s) for s in stop if (at := text.find(s)) >= 0]
    return min(found, default=None)
