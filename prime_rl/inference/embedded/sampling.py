"""Choosing the next token: pure functions over one decode step's logits. No model, no requests, no random state.

A request's settings act in vLLM's order: tokens that may not end it yet, penalties, temperature, `min_p`, `top_k`,
`top_p`. What comes out is the distribution that is sampled from. The token is drawn by inverting the distribution
function, which needs one random number a row: the caller's.

Dimensions: R rows, V vocabulary, K most likely alternatives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, NamedTuple

import torch
from msgspec import Meta, Struct
from torch import Tensor

TokenId = Annotated[int, Meta(ge=0)]
_StopString = Annotated[str, Meta(min_length=1)]
MAX_TOP_LOGPROBS = 20
_CUTS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
# Settings of a row, and the value at which each changes nothing.
_OFF = {**_CUTS, **_PENALTIES, "min_tokens": 0}


class SamplingParams(Struct, kw_only=True):
    """The sampling of one request, in the fields of clients; the rest is described in `configs.sampling`.

    The values of a request are within `contract.served` before they come here.

    Attributes:
        n: choices of each prompt.
        seed: of the choices of each prompt; None: another one for each prompt.
        temperature: 0 takes the most likely token.
        top_logprobs: how many of the most likely tokens are reported at each position; 0 none.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end it, beside the end of sequence.
        ignore_eos: go on after an end-of-sequence token (for measurements).
    """

    n: int = 1
    seed: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: _StopString | list[_StopString] = []
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] = []
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    ignore_eos: bool = False

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list, also when the client sent a single one."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


class BatchParams:
    """The parameters of all rows of a batch as tensors, made once whenever the batch changes.

    Args:
        params, prompts, completions: settings, prompt and tokens so far of each row.

    Attributes:
        settings: by name, `[R, 1]`, only those that some row has.
        num_tokens_R1: how many tokens each row has.
        ends_RV: the tokens that may not come before `min_tokens`; None where no row has it.
        prompt_RV: whether the prompt has the token; None without penalties.
        counts_RV: how often the completion has it; None without penalties.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        *,
        eos_ids: Collection[int],
        num_vocabulary: int,
        device: torch.device,
    ) -> None:
        def counted(ids: Sequence[Sequence[int]]) -> Tensor:
            counts_RV = torch.zeros(len(ids), num_vocabulary, dtype=torch.int32, device=device)
            for row, chosen in enumerate(ids):
                known = torch.tensor([i for i in chosen if i < num_vocabulary], dtype=torch.long, device=device)
                counts_RV[row].scatter_add_(0, known, torch.ones_like(known, dtype=torch.int32))
            return counts_RV

        # What a greedy row takes is the same whatever is cut off.
        values = {
            name: [off if name in _CUTS and not p.temperature else getattr(p, name) for p in params]
            for name, off in _OFF.items()
        }
        used = {name for name, column in values.items() if any(value != _OFF[name] for value in column)}
        if penalizes := not used.isdisjoint(_PENALTIES):
            used.update(_PENALTIES)
        ends = [(*p.stop_token_ids, *(() if p.ignore_eos else eos_ids)) for p in params]
        # A greedy row reports the logprobs of the unscaled distribution.
        self.temperature_R1 = torch.tensor([[p.temperature or 1.0] for p in params], device=device)
        self.greedy_R = torch.tensor([p.temperature == 0 for p in params], device=device)
        self.any_random = any(p.temperature for p in params)
        self.num_top_logprobs = max(p.top_logprobs for p in params)
        self.settings = {name: torch.tensor(values[name], device=device)[:, None] for name in used}
        self.num_tokens_R1 = torch.tensor([[len(token_ids)] for token_ids in completions], device=device)
        self.ends_RV = counted(ends) > 0 if "min_tokens" in used else None
        self.prompt_RV = counted(prompts) > 0 if penalizes else None
        self.counts_RV = counted(completions) if penalizes else None

    def advance(self, token_ids_R: Tensor) -> None:
        """Every row has one more token."""
        self.num_tokens_R1.add_(1)
        if self.counts_RV is not None:
            ones_R1 = torch.ones_like(token_ids_R, dtype=torch.int32)[:, None]
            self.counts_RV.scatter_add_(1, token_ids_R[:, None], ones_R1)


class Sampled(NamedTuple):
    """One token a row, with its logprob, and the most likely ones where some row asks for them."""

    token_ids_R: Tensor
    logprobs_R: Tensor
    top_ids_RK: Tensor | None = None
    top_logprobs_RK: Tensor | None = None


def sample(logits_RV: Tensor, params: BatchParams, uniforms: Sequence[float], *, raw_logprobs: bool = False) -> Sampled:
    """Draw one token a row. `uniforms` are random numbers of at most 52 bits in [0, 1), one a row.

    With `raw_logprobs` the reported logprobs are those of `logits_RV` as they are, else of what was drawn from. Where
    the distribution or that logprob is not finite, the logprob of the token is not, and the token means nothing.
    """
    allowed_RV = _penalized(logits_RV.float(), params)
    logprobs_RV = torch.log_softmax(_narrowed(allowed_RV / params.temperature_R1, params), dim=-1)
    token_ids_R = allowed_RV.argmax(dim=-1)
    if params.any_random:
        token_ids_R = torch.where(params.greedy_R, token_ids_R, _draw(logprobs_RV, uniforms))
    logprobs_R = logprobs_RV.gather(1, token_ids_R[:, None])[:, 0]
    if raw_logprobs:
        is_finite_R = logprobs_R.isfinite()
        logprobs_RV = torch.log_softmax(logits_RV.float(), dim=-1)
        raw_R = logprobs_RV.gather(1, token_ids_R[:, None])[:, 0]
        logprobs_R = torch.where(is_finite_R, raw_R, float("nan"))
    if not params.num_top_logprobs:
        return Sampled(token_ids_R, logprobs_R)
    top = logprobs_RV.topk(min(params.num_top_logprobs, logprobs_RV.shape[1]), dim=-1)
    return Sampled(token_ids_R, logprobs_R, top.indices, top.values)


def _penalized(logits_RV: Tensor, params: BatchParams) -> Tensor:
    """Without an end before `min_tokens`, and with penalties on tokens that a row has already."""
    if params.ends_RV is not None:
        too_short_R1 = params.num_tokens_R1 < params.settings["min_tokens"]
        logits_RV = logits_RV.masked_fill(params.ends_RV & too_short_R1, float("-inf"))
    if params.counts_RV is None or params.prompt_RV is None:
        return logits_RV
    has_RV = params.counts_RV > 0
    repetition_R1, presence_R1, frequency_R1 = (params.settings[name] for name in _PENALTIES)
    repetition_RV = torch.where(params.prompt_RV | has_RV, repetition_R1, 1.0)
    logits_RV = torch.where(logits_RV > 0, logits_RV / repetition_RV, logits_RV * repetition_RV)
    return logits_RV - frequency_R1 * params.counts_RV - presence_R1 * has_RV


def _narrowed(scaled_RV: Tensor, params: BatchParams) -> Tensor:
    """-inf where a token is not sampled at all; what a greedy row takes stays."""
    if (min_p_R1 := params.settings.get("min_p")) is not None:
        # p < min_p x p_max is scaled < max + log(min_p).
        limit_R1 = scaled_RV.amax(-1, keepdim=True) + min_p_R1.log()
        scaled_RV = scaled_RV.masked_fill(scaled_RV < limit_R1, float("-inf"))
    if (top_k_R1 := params.settings.get("top_k")) is not None:
        k_R1 = top_k_R1.clamp(max=scaled_RV.shape[1])
        best_RK = scaled_RV.topk(int(k_R1.max())).values
        last_R1 = best_RK.gather(1, (k_R1 - 1).clamp(min=0)).masked_fill(k_R1 == 0, float("-inf"))
        scaled_RV = scaled_RV.masked_fill(scaled_RV < last_R1, float("-inf"))
    if (top_p_R1 := params.settings.get("top_p")) is not None:
        # The smallest set of tokens that holds at least `top_p` of the probability.
        sorted_RV, order_RV = scaled_RV.sort(dim=-1, descending=True)
        probs_RV = sorted_RV.softmax(dim=-1)
        drop_RV = (probs_RV.cumsum(dim=-1) - probs_RV >= top_p_R1) & (top_p_R1 < 1)
        drop_RV[:, 0] = False
        scaled_RV = scaled_RV.masked_fill(torch.zeros_like(drop_RV).scatter(1, order_RV, drop_RV), float("-inf"))
    return scaled_RV


def _draw(logprobs_RV: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Invert the distribution function at `uniforms`; float64, so that rare tokens keep their probability."""
    cdf_RV = logprobs_RV.double().exp().cumsum(dim=-1)
    # 52 bits: the largest number times any total stays below that total after rounding.
    threshold_R = torch.tensor(uniforms, dtype=torch.float64, device=cdf_RV.device) * cdf_RV[:, -1]
    # In a row of NaN nothing is above the threshold.
    return torch.searchsorted(cdf_RV, threshold_R[:, None], right=True)[:, 0].clamp(max=cdf_RV.shape[1] - 1)


def find_stop(text: str, stop: Sequence[str], too_early: int = 0) -> tuple[int, str] | None:
    """Where the earliest of the `stop` strings begins in `text`, and which one it is; None when not found.

    Those that end in the first `too_early` characters do not count.
    """
    found = [(at, s) for s in stop if (at := text.find(s, max(0, too_early - len(s) + 1))) >= 0]
    return min(found, default=None)
