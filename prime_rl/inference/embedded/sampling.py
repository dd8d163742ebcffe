"""Choosing the next token: pure functions over one decode step's logits. No model, no requests, no state.

A request's settings act in vLLM's order: tokens that may not end it yet, penalties, temperature, `min_p`, `top_k`,
`top_p`. What comes out is the distribution that is sampled from.

Randomness is counter-based: the uniform number for a token depends on the row's key and the token's position alone, so
a seeded request gets the same tokens whatever else is in the batch and whenever it joined. The generator is SplitMix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014). The token is drawn by inverting the
distribution function, which needs one number a row.

Dimensions: R rows, V vocabulary, K most likely alternatives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Meta, Struct
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


TokenId = Annotated[int, Meta(ge=0)]
# The ranges of OpenAI and vLLM.
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_StopString = Annotated[str, Meta(min_length=1)]
MAX_TOP_LOGPROBS = 20


class SamplingParams(Struct, kw_only=True):
    """How one request is sampled, in the fields of clients; what is not said here is in `configs.sampling`.

    Attributes:
        temperature: 0 takes the most likely token.
        top_logprobs: how many of the most likely tokens are reported at each position; 0 none.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end it, beside the end of sequence.
        ignore_eos: go on after an end-of-sequence token (for measurements).
    """

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    max_tokens: Annotated[int, Meta(ge=1)] = 16
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    stop: _StopString | Annotated[list[_StopString], Meta(max_length=16)] = []
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] = []
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    ignore_eos: bool = False

    @property
    def penalizes(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


@dataclass(frozen=True)
class History:
    """What one row has so far."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]


@dataclass(frozen=True)
class BatchParams:
    """The parameters of all rows of a batch as tensors, made once whenever the batch changes.

    Null where no row has such a setting. `min_tokens_R` come with `ends_RV`, the tokens that may not come before.
    """

    temperature_R: Tensor
    greedy_R: Tensor
    keys_R: npt.NDArray[np.uint64]
    any_random: bool
    top_p_R: Tensor | None
    top_k_R: Tensor | None
    min_p_R: Tensor | None
    min_tokens_R: Tensor | None
    ends_RV: Tensor | None
    penalties: Penalties | None
    num_top_logprobs: int

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        keys: Sequence[int],
        histories: Sequence[History],
        *,
        eos_ids: Collection[int],
        num_vocabulary: int,
        device: torch.device,
    ) -> BatchParams:
        """Stack `params` of the rows; `keys` are their random streams (`stream_key`)."""

        def column(name: str, off: float) -> Tensor | None:
            # What a greedy row takes is the same whatever is left out.
            values = [getattr(p, name) if p.temperature > 0 else off for p in params]
            return torch.tensor(values, device=device) if any(value != off for value in values) else None

        temperatures = [p.temperature for p in params]
        min_tokens = [p.min_tokens for p in params]
        ends = [(*p.stop_token_ids, *(() if p.ignore_eos else eos_ids)) for p in params]
        penalizes = any(p.penalizes for p in params)
        return cls(
            # A greedy row reports the logprobs of the unscaled distribution.
            temperature_R=torch.tensor([t or 1.0 for t in temperatures], device=device),
            greedy_R=torch.tensor([t == 0 for t in temperatures], device=device),
            keys_R=np.array(keys, dtype=np.uint64),
            any_random=any(temperatures),
            top_p_R=column("top_p", 1.0),
            top_k_R=column("top_k", 0),
            min_p_R=column("min_p", 0.0),
            min_tokens_R=torch.tensor(min_tokens, device=device) if any(min_tokens) else None,
            ends_RV=_marked(ends, num_vocabulary, device) if any(min_tokens) else None,
            penalties=Penalties.of(params, histories, num_vocabulary, device) if penalizes else None,
            num_top_logprobs=max(p.top_logprobs for p in params),
        )

    def advance(self, token_ids_R: Tensor) -> None:
        """Every row has one more token."""
        if self.penalties is not None:
            ones_R1 = torch.ones_like(token_ids_R, dtype=torch.int32)[:, None]
            self.penalties.counts_RV.scatter_add_(1, token_ids_R[:, None], ones_R1)


@dataclass(frozen=True)
class Penalties:
    """Of tokens that a row has already.

    Attributes:
        prompt_RV: whether the prompt has the token.
        counts_RV: how often the completion has it.
    """

    repetition_R: Tensor
    presence_R: Tensor
    frequency_R: Tensor
    prompt_RV: Tensor
    counts_RV: Tensor

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], histories: Sequence[History], num_vocabulary: int, device: torch.device
    ) -> Penalties:
        counts_RV = torch.zeros(len(params), num_vocabulary, dtype=torch.int32, device=device)
        for row, history in enumerate(histories):
            if history.token_ids:
                ids = torch.tensor(history.token_ids, device=device)
                counts_RV[row].scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        return cls(
            torch.tensor([p.repetition_penalty for p in params], device=device),
            torch.tensor([p.presence_penalty for p in params], device=device),
            torch.tensor([p.frequency_penalty for p in params], device=device),
            _marked([history.prompt_ids for history in histories], num_vocabulary, device),
            counts_RV,
        )

    def applied(self, logits_RV: Tensor) -> Tensor:
        has_RV = self.counts_RV > 0
        repetition_RV = torch.where(self.prompt_RV | has_RV, self.repetition_R[:, None], 1.0)
        logits_RV = torch.where(logits_RV > 0, logits_RV / repetition_RV, logits_RV * repetition_RV)
        return logits_RV - self.frequency_R[:, None] * self.counts_RV - self.presence_R[:, None] * has_RV


def _marked(ids: Sequence[Sequence[int]], num_vocabulary: int, device: torch.device) -> Tensor:
    """`[R, V]`: true at the `ids` of each row."""
    marked_RV = torch.zeros(len(ids), num_vocabulary, dtype=torch.bool, device=device)
    for row, chosen in enumerate(ids):
        marked_RV[row, [token_id for token_id in chosen if token_id < num_vocabulary]] = True
    return marked_RV


@dataclass(frozen=True)
class Sampled:
    """One token a row, with its logprob."""

    token_ids_R: Tensor
    logprobs_R: Tensor
    top_ids_RK: Tensor | None
    top_logprobs_RK: Tensor | None


def stream_key(seed: int, choice_idx: int) -> int:
    """The key of the random stream of choice number `choice_idx` of a request seeded with `seed`: 64 bits."""
    of_request = _mix(np.array([seed & _MASK], dtype=np.uint64))
    return int(_mix(of_request + np.uint64((choice_idx + 1) * _GOLDEN & _MASK))[0])


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(keys_R: npt.NDArray[np.uint64], positions_R: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Number `positions_R` of each row's stream, in [0, 1 - 2^-52]."""
    z = _mix(keys_R + (positions_R + np.uint64(1)) * np.uint64(_GOLDEN))
    # 52 bits: the largest number times any total stays below that total after rounding.
    fractions_R: npt.NDArray[np.float64] = (z >> np.uint64(12)).astype(np.float64) * 2.0**-52
    return fractions_R


def sample(
    logits_RV: Tensor, params: BatchParams, positions_R: npt.NDArray[np.uint64], *, raw_logprobs: bool = False
) -> Sampled:
    """Draw one token a row. `positions_R` counts the tokens that each row has generated before this one.

    With `raw_logprobs` the reported logprobs are those of `logits_RV` as they are, else of what was drawn from.
    """
    allowed_RV = _allowed(logits_RV.float(), params, positions_R)
    logprobs_RV = torch.log_softmax(_narrowed(allowed_RV / params.temperature_R[:, None], params), dim=-1)
    token_ids_R = allowed_RV.argmax(dim=-1)
    if params.any_random:
        drawn_R = _draw(logprobs_RV, uniforms(params.keys_R, positions_R))
        token_ids_R = torch.where(params.greedy_R, token_ids_R, drawn_R)
    if raw_logprobs:
        logprobs_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    logprobs_R = logprobs_RV.gather(1, token_ids_R[:, None])[:, 0]
    if not params.num_top_logprobs:
        return Sampled(token_ids_R, logprobs_R, None, None)
    top = logprobs_RV.topk(min(params.num_top_logprobs, logprobs_RV.shape[1]), dim=-1)
    return Sampled(token_ids_R, logprobs_R, top.indices, top.values)


def _allowed(logits_RV: Tensor, params: BatchParams, positions_R: npt.NDArray[np.uint64]) -> Tensor:
    """Without an end before `min_tokens`, and with penalties."""
    if params.min_tokens_R is not None and params.ends_RV is not None:
        num_tokens_R = torch.from_numpy(positions_R.astype(np.int64)).to(logits_RV.device)
        too_short_R = num_tokens_R < params.min_tokens_R
        logits_RV = logits_RV.masked_fill(params.ends_RV & too_short_R[:, None], float("-inf"))
    return logits_RV if params.penalties is None else params.penalties.applied(logits_RV)


def _narrowed(scaled_RV: Tensor, params: BatchParams) -> Tensor:
    """-inf where a token is not sampled at all."""
    if params.min_p_R is not None:
        # p < min_p x p_max is scaled < max + log(min_p).
        limit_R = scaled_RV.amax(-1) + params.min_p_R.log()
        scaled_RV = scaled_RV.masked_fill(scaled_RV < limit_R[:, None], float("-inf"))
    if params.top_k_R is not None:
        k_R1 = params.top_k_R.clamp(max=scaled_RV.shape[1])[:, None]
        best_RK = scaled_RV.topk(int(k_R1.max())).values
        last_R1 = best_RK.gather(1, (k_R1 - 1).clamp(min=0)).masked_fill(k_R1 == 0, float("-inf"))
        scaled_RV = scaled_RV.masked_fill(scaled_RV < last_R1, float("-inf"))
    return scaled_RV if params.top_p_R is None else _keep_top_p(scaled_RV, params.top_p_R)


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


def find_stop(text: str, stop: Sequence[str], too_early: int = 0) -> tuple[int, str] | None:
    """Where the earliest of the `stop` strings begins in `text`, and which one it is; None when not found.

    Those that end in the first `too_early` characters do not count.
    """
    found = [(at, s) for s in stop if (at := text.find(s, max(0, too_early - len(s) + 1))) >= 0]
    return min(found, default=None)
