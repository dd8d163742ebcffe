"""Jobs, their rows, and the rows that are decoded together: one token for all of them a step.

Collaborators: `Served` does the forwards, `sample` draws, `compose` copies rows together when the batch
changes. Rows are sorted by adapter. A row that ends is a hole, computed along until enough holes are worth a copy. No
threads, no clients: the engine calls it from its one thread.

A row whose logits are not finite ends alone. When an exception comes out of a computation, its rows are computed apart
until those are found that cause it: these end, the others get what they would have got. Out of memory is no row's
fault: it is raised, and the tokens of the rows are all that is needed to compute them again (`release`).

Rows that begin alike, for the same adapter, share what is computed for that, those that come later too (`PrefixCache`).

Each row has a random stream of its own, so a seeded request gets the same tokens whatever else is in the batch and
whenever it joined.

The next token is chosen by pure functions over one decode step's logits. A request's settings act in vLLM's order:
tokens that may not end it yet, penalties, temperature, `min_p`, `top_k`, `top_p`. What comes out is the distribution
that is sampled from. The token is drawn by inverting the distribution function, which needs one random number a row:
the caller's.

Dimensions: R rows (holes included), V vocabulary, C columns of the cache, K most likely alternatives.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from itertools import groupby
from random import Random
from typing import Annotated, Any, NamedTuple

import torch
from msgspec import Meta, Struct
from torch import Tensor
from transformers.cache_utils import Cache

from prime_rl.contract.served import MAX_TOP_LOGPROBS
from prime_rl.inference.embedded.model import (
    BLOCK,
    SPARE_COLUMNS,
    PrefixCache,
    Scored,
    Served,
    columns_of,
    compose,
    new_cache,
)
from prime_rl.inference.guard import NOT_FINITE, ApiError
from prime_rl.lora.linear import sent
from prime_rl.utils.runtime import is_out_of_memory

TokenId = Annotated[int, Meta(ge=0)]
_StopString = Annotated[str, Meta(min_length=1)]
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
        prompt_logprobs: the same of the prompt, whose own tokens are reported too; None: nothing is.
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
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
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
            starts = range(0, len(ids) * num_vocabulary, num_vocabulary)
            cells = [start + i for start, chosen in zip(starts, ids, strict=True) for i in chosen if i < num_vocabulary]
            cells_N = sent(torch.tensor(cells, dtype=torch.long), device)
            counts = torch.zeros(len(ids) * num_vocabulary, dtype=torch.int32, device=device)
            return counts.index_add_(0, cells_N, torch.ones_like(cells_N, dtype=torch.int32)).view(-1, num_vocabulary)

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
        self.temperature_R1 = sent(torch.tensor([[p.temperature or 1.0] for p in params]), device)
        self.greedy_R = sent(torch.tensor([p.temperature == 0 for p in params]), device)
        self.any_random = any(p.temperature for p in params)
        self.num_top_logprobs = max(p.top_logprobs for p in params)
        self.settings = {name: sent(torch.tensor(values[name]), device)[:, None] for name in used}
        self.num_tokens_R1 = sent(torch.tensor([[len(token_ids)] for token_ids in completions]), device)
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
        # What is not finite stays: it ends the row.
        unwanted_RV = params.ends_RV & too_short_R1 & (logits_RV < math.inf)
        logits_RV = logits_RV.masked_fill(unwanted_RV, float("-inf"))
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
    cdf_RV = logprobs_RV.double().exp_().cumsum_(dim=-1)
    # 52 bits: the largest number times any total stays below that total after rounding.
    threshold_R = sent(torch.tensor(uniforms, dtype=torch.float64), cdf_RV.device) * cdf_RV[:, -1]
    # In a row of NaN nothing is above the threshold.
    return torch.searchsorted(cdf_RV, threshold_R[:, None], right=True)[:, 0].clamp(max=cdf_RV.shape[1] - 1)


def find_stop(text: str, stop: Sequence[str], too_early: int = 0) -> tuple[int, str] | None:
    """Where the earliest of the `stop` strings begins in `text`, and which one it is; None when not found.

    Those that end in the first `too_early` characters do not count.
    """
    found = [(at, s) for s in stop if (at := text.find(s, max(0, too_early - len(s) + 1))) >= 0]
    return min(found, default=None)


logger = logging.getLogger(__name__)

# Token positions (prompts x longest prompt) of one prefill forward: bounds its activations to tens of MB a layer.
MAX_PREFILL_TOKENS = 8192
# Of them at most so many are computed only because others in the same forward need more: about what a forward costs.
MAX_PADDED_TOKENS = 512
# Copying the cache costs about as much as computing an eighth of the rows for a few steps.
MAX_HOLES = 1 / 8

Decode = Callable[[Sequence[int]], str]


class Job:
    """One request: prompts with n choices each, its `rows`. It has ended when they all have, or with an `error`.

    Args:
        slot: of the adapter; None: the base model.
        max_length: of a prompt and what follows it, in tokens.
        model: what errors call the adapter.
        run_id: the run that asks, as far as that is known.

    Attributes:
        is_kept: what is computed for it may serve later ones; not when its adapter was unloaded.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        slot: int | None,
        max_length: int,
        model: str = "the base model",
        run_id: str = "",
    ) -> None:
        self.prompts = [tuple(prompt) for prompt in prompts]
        self.params = params
        self.slot = slot
        self.rank = -1 if slot is None else slot
        self.model = model
        self.run_id = run_id
        self.rows: list[Row] = []
        for prompt in self.prompts:
            seed = secrets.randbits(64) if params.seed is None else params.seed
            max_tokens = min(params.max_tokens, max_length - len(prompt))
            self.rows += [Row(self, prompt, max_tokens, f"{seed}/{idx}") for idx in range(params.n)]
        self.num_open = len(self.rows)
        self.is_cancelled = False
        self.is_kept = True
        self.ended = asyncio.Event()
        self.error: ApiError | None = None

    async def result(self) -> list[Row]:
        """The rows when the last one has ended. Raises `error`."""
        await self.ended.wait()
        if self.error is not None:
            raise self.error
        return self.rows


@dataclass(eq=False)
class Row:
    """One choice: what has been generated, and how it ended.

    Attributes:
        seed: of its random stream.
        token_ids: the end-of-sequence token included when it ended the row.
        logprobs: of each token, as in `sample`.
        top: the most likely tokens at each position; empty when not asked for.
        scored: of the prompt's tokens but the first, `[P]` and `[P, K]`; None when not asked for, or not yet computed.
        finish_reason: "stop" (end of sequence, a stop token or a stop string), "length", "abort" (its job was
            cancelled) or "error" (its job has it); None while it runs.
        stop_at: length of the text before the stop string, None when no stop string ended it.
        stop_reason: the stop string or stop token that ended it.
    """

    job: Job
    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    scored: Scored | None = None
    finish_reason: str | None = None
    stop_at: int | None = None
    stop_reason: str | int | None = None
    _keys: list[bytes] = field(default_factory=list)

    @property
    def max_length(self) -> int:
        """Tokens that prompt and completion together may come to."""
        return len(self.prompt_ids) + self.max_tokens

    @property
    def all_ids(self) -> tuple[int, ...]:
        """Prompt and completion so far."""
        return (*self.prompt_ids, *self.token_ids)

    @property
    def is_scored(self) -> bool:
        """True when log-probabilities of its prompt are to be computed with it: then nothing of it is known before."""
        return self.job.params.prompt_logprobs is not None and self.scored is None and len(self.prompt_ids) > 1

    @property
    def prefill_key(self) -> tuple[int, int, tuple[int, ...], bool]:
        """Rows with the same one share a prefill. Sorts by adapter, the base model first, then by length."""
        ids = self.all_ids
        return self.job.rank, len(ids), ids, self.is_scored

    @property
    def keys(self) -> list[bytes]:
        """Those of the whole blocks of its tokens, without the last token, which a step takes."""
        ids = self.all_ids
        for start in range(BLOCK * len(self._keys), len(ids) - BLOCK, BLOCK):
            before = self._keys[-1] if self._keys else sha256(f"{self.job.rank} {self.job.model}".encode()).digest()
            self._keys.append(sha256(before + array("q", ids[start : start + BLOCK]).tobytes()).digest())
        return self._keys

    @cached_property
    def _stream(self) -> Random:
        return Random(self.seed)

    @cached_property
    def next_uniform(self) -> float:
        """The number for its next token, however often that is tried."""
        return self.uniform()

    def uniform(self) -> float:
        """The next number of its stream, of 52 bits."""
        return self._stream.getrandbits(52) * 2.0**-52

    def fail(self, problem: str, status: int = 422) -> None:
        """End it with an error, and its job with it."""
        self.finish_reason = "error"
        self.job.error = self.job.error or ApiError(status, f"{self.job.model}: {problem}")
        self.job.is_cancelled = True


class Batch:
    """All running rows.

    Args:
        decode: text of token ids, for stop strings.
        raw_logprobs: as in `sample`.

    Attributes:
        prefixes: what later rows may begin with.
        num_generated_tokens: since the start.
        num_prefix_queries: tokens of the rows that joined, the last of each left out, since the start.
        num_prefix_hits: those of them that were not computed, since they had been.
    """

    # Of all rows, holes too, made new whenever the batch changes: the newest tokens, which are not in the cache yet;
    # the number of tokens before them; the columns that a row may see, columns to come included.
    _ids_R: Tensor
    _lengths_R: Tensor
    _mask_RC: Tensor
    _slots: list[int | None]
    _params: BatchParams

    def __init__(self, served: Served, decode: Decode, *, raw_logprobs: bool = False) -> None:
        self._served = served
        self._decode = decode
        self._raw_logprobs = raw_logprobs
        self._rows: list[Row] = []  # those that have ended too, until the next copy
        self._cache = new_cache()
        self.prefixes = PrefixCache(served.prefix_blocks)
        self.num_generated_tokens = self.num_prefix_queries = self.num_prefix_hits = 0

    @property
    def rows(self) -> list[Row]:
        """Those that still generate; holes are left out."""
        return [row for row in self._rows if row.finish_reason is None]

    @property
    def num_rows(self) -> int:
        """The number of `rows`."""
        return len(self.rows)

    @property
    def longest(self) -> int:
        """Tokens that the longest row may come to."""
        return max((row.max_length for row in self.rows), default=0)

    def add(self, rows: Sequence[Row]) -> list[Row]:
        """Let `rows` join: their tokens are in the cache then, but for the last one, which the next step takes.

        Returns those that have ended, because their jobs were cancelled meanwhile or they cannot be computed.
        """
        joining: dict[Row, tuple[Cache, int]] = {}

        def prefill(chunk: Sequence[Sequence[Row]]) -> None:
            firsts = [same[0] for same in chunk]
            prompts, num_new = [row.all_ids[:-1] for row in firsts], max(map(self._num_missing, firsts))
            kept = [self.prefixes.find(row.keys) for row in firsts]
            read = partial(self._score, chunk) if firsts[0].is_scored else None
            cache = self._served.prefill(prompts, [row.job.slot for row in firsts], kept, num_new, read)
            new = {row: (cache, at) for at, same in enumerate(chunk) for row in same if row.finish_reason is None}
            joining.update(new)
            num_tokens = sum(len(same) * len(prompt) for same, prompt in zip(chunk, prompts, strict=True))
            self.num_prefix_queries += num_tokens
            self.num_prefix_hits += num_tokens - sum(min(num_new, len(prompt)) for prompt in prompts)
            for row in filter(new.__contains__, firsts):
                self._keep(row, *new[row])

        for chunk in (chunk for turn in self._turns(rows) for chunk in _chunks(turn, self._num_missing)):
            if all(row.job.is_cancelled for same in chunk for row in same):
                for same in chunk:
                    for row in same:
                        row.finish_reason = "abort"
            else:
                self._apart(chunk, prefill)
        if joining:
            self._apart([[row] for row in joining], lambda some: self._recompose({row: joining[row] for [row] in some}))
        return [row for row in rows if row.finish_reason is not None]

    def step(self) -> list[Row]:
        """One token for every row. Returns the rows that finished with it."""
        rows = self.rows
        parts: dict[Row, tuple[Cache, int]] = {}

        def advance(some: Sequence[Sequence[Row]]) -> None:
            if len(some) == len(rows):
                self._advance()
                return
            part = Batch(self._served, self._decode, raw_logprobs=self._raw_logprobs)
            part._recompose({row: (self._cache, self._rows.index(row)) for [row] in some})
            part._advance()
            self.num_generated_tokens += part.num_generated_tokens
            parts.update({row: (part._cache, idx) for idx, row in enumerate(part._rows)})

        if rows:
            self._apart([[row] for row in rows], advance)
        ended = [row for row in rows if row.finish_reason is not None]
        for row in ended:
            if row.finish_reason in ("stop", "length"):
                self._keep(row, *(parts.get(row) or (self._cache, self._rows.index(row))))
        if not self.num_rows:
            self.release()
        elif parts:
            self._recompose({row: source for row, source in parts.items() if row.finish_reason is None})
        return ended

    def release(self) -> None:
        """Forget the rows and what was computed for them; they go on when they are added again."""
        self._rows, self._cache = [], new_cache()

    def _num_missing(self, row: Row) -> int:
        """Its tokens, the last left out, that must be computed before it joins."""
        num_known = 0 if row.is_scored else BLOCK * self.prefixes.num_known(row.keys)
        return max(1, len(row.all_ids) - 1) - num_known

    def _score(self, chunk: Sequence[Sequence[Row]], read_RPH: Tensor) -> None:
        """Give rows what the model says of their prompts, of which `read_RPH` is what its head reads."""
        targets_RP = torch.zeros(read_RPH.shape[:2], dtype=torch.long)
        for targets_P, same in zip(targets_RP, chunk, strict=True):
            given = same[0].prompt_ids[1:]
            targets_P[-len(given) :] = torch.tensor(given)
        num_top = max(row.job.params.prompt_logprobs or 0 for same in chunk for row in same)
        scored = self._served.score(read_RPH, targets_RP, num_top)
        for at, same in enumerate(chunk):
            own = Scored(*(each[at, 1 - len(same[0].prompt_ids) :] for each in scored))
            for row in same:
                row.scored = own
                if not own.logprobs.isfinite().all():
                    row.fail(NOT_FINITE)

    def _keep(self, row: Row, cache: Cache, source: int) -> None:
        """Let later rows begin with the tokens of `row`, which are the last columns of row `source` of `cache`."""
        if row.job.is_kept:
            first = cache.get_seq_length() - len(row.all_ids) + 1
            self.prefixes.keep(
                row.keys,
                lambda start, stop: columns_of(cache, source, first + start, first + stop),
                slot=row.job.slot,
                run_id=row.job.run_id,
            )

    def _turns(self, rows: Sequence[Row]) -> Iterator[list[list[Row]]]:
        """Groups of rows with the same tokens. Of those that lack the same block, the longest is a turn ahead.

        Those whose prompts are scored compute all of their tokens, ahead of all others.
        """
        every, tried = _same(rows), set[bytes]()
        groups = [same for same in every if not same[0].is_scored]
        if scored := [same for same in every if same[0].is_scored]:
            yield scored
        while groups:
            turn, later, heads = list[list[Row]](), list[list[Row]](), set[bytes]()
            for same in reversed(groups):
                head = self.prefixes.next_missing(same[0].keys)
                (later if head in heads else turn).append(same)
                if head is not None and head not in tried:
                    heads.add(head)
            yield turn
            groups, tried = later[::-1], tried | heads

    def _apart(self, groups: Sequence[Sequence[Row]], compute: Callable[[Sequence[Sequence[Row]]], None]) -> None:
        """Compute all `groups` together. Where that raises, compute halves of them: one that raises alone ends.

        Raises when the base model cannot compute a token either: then no row is at fault.
        """
        try:
            compute(groups)
            return
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if len(groups) == 1:
                logger.error("a request cannot be computed", exc_info=error)
                self._served.prefill([[0]], [None])
                for row in groups[0]:
                    row.fail(f"this request cannot be computed: {type(error).__name__}: {error}")
                return
        middle = len(groups) // 2
        for half in (groups[:middle], groups[middle:]):
            self._apart(half, compute)

    def _advance(self) -> None:
        """One token for every row. When it raises, the cache is that of before."""
        is_full = self._cache.get_seq_length() == self._mask_RC.shape[1]
        if is_full or len(self._rows) - self.num_rows > MAX_HOLES * len(self._rows):
            self._recompose({})
        num_columns = self._cache.get_seq_length()
        mask_RT = self._mask_RC[:, : num_columns + 1]
        try:
            logits_RV = self._served.forward(
                self._ids_R[:, None], mask_RT, self._lengths_R[:, None], self._cache, self._slots
            )
            uniforms = [row.next_uniform for row in self._rows]
            sampled = sample(logits_RV, self._params, uniforms, raw_logprobs=self._raw_logprobs)
            values = [[] if each is None else each.tolist() for each in sampled]
            self._ids_R = sampled.token_ids_R
            self._lengths_R += 1
            self._params.advance(sampled.token_ids_R)
        except BaseException:
            for layer in self._cache.layers:
                layer.num_columns = num_columns
            raise
        self._append(*values)

    def _append(self, token_ids: list[Any], logprobs: list[Any], top_ids: list[Any], top_logprobs: list[Any]) -> None:
        """Hand every row its token."""
        for idx, row in enumerate(self._rows):
            if row.finish_reason is not None:
                continue
            if not math.isfinite(logprobs[idx]):
                row.fail(NOT_FINITE)
                continue
            row.token_ids.append(token_ids[idx])
            row.logprobs.append(logprobs[idx])
            del row.next_uniform
            self.num_generated_tokens += 1
            if num_top := row.job.params.top_logprobs:
                row.top.append(list(zip(top_ids[idx], top_logprobs[idx], strict=True))[:num_top])
            try:
                self._note_end(row, token_ids[idx])
            except Exception as error:  # of the tokenizer, which has its own ideas of some tokens
                row.fail(f"its text cannot be decoded: {type(error).__name__}: {error}")

    def _note_end(self, row: Row, token_id: int) -> None:
        params = row.job.params
        if row.job.is_cancelled:
            row.finish_reason = "abort"
        elif token_id in self._served.eos_ids and not params.ignore_eos:
            row.finish_reason = "stop"
        elif token_id in params.stop_token_ids:
            row.finish_reason, row.stop_reason = "stop", token_id
        elif params.stop and (stop := self._stop_string(row.token_ids, params)):
            row.finish_reason = "stop"
            row.stop_at, row.stop_reason = stop
        elif len(row.token_ids) >= row.max_tokens:
            row.finish_reason = "length"

    def _stop_string(self, token_ids: Sequence[int], params: SamplingParams) -> tuple[int, str] | None:
        """A stop string that the last token completed. Only the tail is decoded until then."""
        if len(token_ids) <= params.min_tokens:
            return None
        stop = params.stops
        # A token has at least one byte, special tokens apart, of which a few are allowed for.
        tail = max(len(s.encode()) for s in stop) + 8
        if find_stop(self._decode(token_ids[-tail:]), stop) is None:
            return None
        too_early = len(self._decode(token_ids[: params.min_tokens])) if params.min_tokens else 0
        return find_stop(self._decode(token_ids), stop, too_early)

    def _recompose(self, joining: dict[Row, tuple[Cache, int]]) -> None:
        """Copy the rows that live and those that join into a new cache with room, sorted by adapter."""
        sources = {row: (self._cache, idx) for idx, row in enumerate(self._rows) if row.finish_reason is None}
        sources |= joining
        rows, device = sorted(sources, key=lambda row: row.job.rank), self._served.device
        lengths = [len(row.prompt_ids) + len(row.token_ids) - 1 for row in rows]
        cache = compose([sources[row] for row in rows], max(lengths))
        params = BatchParams(
            [row.job.params for row in rows],
            [row.prompt_ids for row in rows],
            [row.token_ids for row in rows],
            eos_ids=self._served.eos_ids,
            num_vocabulary=self._served.num_logits,
            device=device,
        )
        ids_R = sent(torch.tensor([(row.token_ids or row.prompt_ids)[-1] for row in rows]), device)
        lengths_R = sent(torch.tensor(lengths), device)
        columns_C = torch.arange(max(lengths) + SPARE_COLUMNS, device=device)
        # All or nothing: what raises above can be tried again with other rows.
        self._mask_RC = columns_C >= max(lengths) - lengths_R[:, None]
        self._rows, self._slots, self._cache, self._params = rows, [row.job.slot for row in rows], cache, params
        self._ids_R, self._lengths_R = ids_R, lengths_R


def _same(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that share a prefill: by adapter, then by length."""
    in_order = sorted(rows, key=lambda row: row.prefill_key)
    return [list(same) for _, same in groupby(in_order, lambda row: row.prefill_key)]


def _chunks(groups: Sequence[list[Row]], num_new: Callable[[Row], int]) -> list[list[list[Row]]]:
    """As many of `groups` together as one forward takes, by adapter. It computes as many tokens of each as of any.

    (Prompts x longest prompt) stays within MAX_PREFILL_TOKENS; a longer prompt is alone.
    """
    chunks: list[list[list[Row]]] = []
    longest = total = 0
    for num, same in sorted(((num_new(same[0]), same) for same in groups), key=lambda each: each[0]):
        size, longest = len(chunks[-1]) if chunks else 0, max(longest, len(same[0].all_ids))
        if not size or longest * (size + 1) > MAX_PREFILL_TOKENS or num * size - total > MAX_PADDED_TOKENS:
            chunks.append([])
            longest, total = len(same[0].all_ids), 0
        chunks[-1].append(same)
        total += num
    return [sorted(chunk, key=lambda same: same[0].job.rank) for chunk in chunks]
