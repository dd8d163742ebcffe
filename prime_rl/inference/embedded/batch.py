"""Jobs, their rows, and the rows that are decoded together: one token for all of them a step.

Collaborators: `ModelRunner` does the forwards, `sampling` draws, `kv.compose` copies rows together when the batch
changes. Rows are sorted by adapter. A row that ends leaves a hole that is computed along until enough holes are worth a
copy. No threads, no clients: the engine calls it from its one thread.

Dimensions: R rows (holes included), T columns of the cache, C columns of the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from prime_rl.inference.embedded.kv import SPARE_COLUMNS, RowCache, compose
from prime_rl.inference.embedded.model import ModelRunner
from prime_rl.inference.embedded.sampling import (
    BatchParams,
    History,
    Sampled,
    SamplingParams,
    find_stop,
    sample,
    stream_key,
)

# Token positions (prompts x longest prompt) of one prefill forward: bounds its activations to tens of MB a layer.
MAX_PREFILL_TOKENS = 8192
# Copying the cache costs about as much as computing an eighth of the rows for a few steps.
MAX_HOLES = 1 / 8

Decode = Callable[[Sequence[int]], str]


class Job:
    """One prompt with n choices, its `rows`. `future` gets them when the last one has ended."""

    def __init__(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, num_choices: int, seed: int, slot: int | None
    ) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.params = params
        self.slot = slot
        self.cancelled = False
        self.future: Future[list[Row]] = Future()
        self.future.set_running_or_notify_cancel()  # from now on only the engine ends it
        self.rows = [Row(self, stream_key(seed, idx)) for idx in range(num_choices)]
        self.num_open = num_choices


@dataclass(eq=False)
class Row:
    """One choice: what has been generated, and how it ended.

    Attributes:
        key: of its random stream.
        token_ids: the end-of-sequence token included when it ended the row.
        logprobs: of each token, as in `sample`.
        top: the most likely tokens at each position; empty when not asked for.
        finish_reason: "stop" (end of sequence, a stop token or a stop string) or "length"; None while it runs.
        stop_at: length of the text before the stop string, None when no stop string ended it.
        stop_reason: the stop string or stop token that ended it.
    """

    job: Job
    key: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_at: int | None = None
    stop_reason: str | int | None = None

    @property
    def max_length(self) -> int:
        return len(self.job.prompt_ids) + self.job.params.max_tokens

    @property
    def slot_order(self) -> int:
        """Sort key that puts rows of one adapter together, rows of the base model first."""
        return -1 if self.job.slot is None else self.job.slot


@dataclass
class _State:
    """What the next step needs of all rows, as tensors; rebuilt whenever the batch changes.

    `ids_R` are the newest tokens, not in the cache yet, `lengths_R` the tokens before them, `positions_R` the tokens
    generated so far. A column that a row may see is true in `mask_RC`; columns to come are true for all.
    """

    slots: list[int | None]
    ids_R: Tensor
    lengths_R: Tensor
    positions_R: npt.NDArray[np.uint64]
    params: BatchParams
    mask_RC: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], lengths: Sequence[int], params: BatchParams, device: torch.device) -> _State:
        lengths_R = torch.tensor(lengths, device=device)
        columns_C = torch.arange(max(lengths) + SPARE_COLUMNS, device=device)
        return cls(
            slots=[row.job.slot for row in rows],
            ids_R=torch.tensor([row.token_ids[-1] for row in rows], device=device),
            lengths_R=lengths_R,
            positions_R=np.array([len(row.token_ids) for row in rows], dtype=np.uint64),
            params=params,
            mask_RC=columns_C >= max(lengths) - lengths_R[:, None],
        )

    def mask(self, num_columns: int) -> Tensor:
        if num_columns > self.mask_RC.shape[1]:
            self.mask_RC = pad(self.mask_RC, (0, SPARE_COLUMNS), value=True)
        return self.mask_RC[:, :num_columns]

    def advance(self, ids_R: Tensor) -> None:
        self.ids_R = ids_R
        self.lengths_R = self.lengths_R + 1
        self.positions_R = self.positions_R + np.uint64(1)
        self.params.advance(ids_R)


class Batch:
    """All running rows.

    Args:
        decode: text of token ids, for stop strings.
        raw_logprobs: as in `sample`.

    Attributes:
        num_generated_tokens: since the start.
    """

    def __init__(
        self, runner: ModelRunner, eos_ids: frozenset[int], decode: Decode, *, raw_logprobs: bool = False
    ) -> None:
        self._runner = runner
        self._eos_ids = eos_ids
        self._decode = decode
        self._raw_logprobs = raw_logprobs
        self._rows: list[Row | None] = []
        self._cache = RowCache()
        self._state: _State | None = None
        self._num_vocabulary = 0
        self.num_generated_tokens = 0

    @property
    def num_rows(self) -> int:
        return sum(row is not None for row in self._rows)

    @property
    def longest(self) -> int:
        """Tokens that the longest row may come to."""
        return max((row.max_length for row in self._rows if row is not None), default=0)

    def add(self, rows: Sequence[Row]) -> list[Row]:
        """Prefill `rows`, give each its first token, and let them join. Returns those that are finished already."""
        finished: list[Row] = []
        joining: dict[Row, tuple[RowCache, int]] = {}
        for chunk in _chunks(_by_prompt(rows)):
            cache, logits_RV = self._runner.prefill(
                [key[1] for key, _ in chunk], [None if key[0] < 0 else key[0] for key, _ in chunk]
            )
            members = [(row, source) for source, (_, same) in enumerate(chunk) for row in same]
            firsts, sources = [row for row, _ in members], [source for _, source in members]
            self._num_vocabulary = logits_RV.shape[1]
            positions_R = np.zeros(len(firsts), dtype=np.uint64)
            sampled = sample(logits_RV[sources], self._params(firsts), positions_R, raw_logprobs=self._raw_logprobs)
            finished += self._append(firsts, sampled)
            joining.update({row: (cache, source) for row, source in members if row.finish_reason is None})
        if joining:
            self._recompose(joining)
        return finished

    def step(self) -> list[Row]:
        """One token for every row. Returns the rows that finished with it."""
        if not self._rows:
            return []
        state = self._state
        assert state is not None
        logits_RV = self._runner.decode(
            state.ids_R, state.lengths_R, state.mask(self._cache.num_columns + 1), self._cache, state.slots
        )
        sampled = sample(logits_RV, state.params, state.positions_R, raw_logprobs=self._raw_logprobs)
        state.advance(sampled.token_ids_R)
        finished = self._append(self._rows, sampled)
        self._punch_holes(lambda row: row.finish_reason is not None)
        return finished

    def drop_cancelled(self) -> list[Row]:
        """Take out the rows whose client is gone; returns them."""
        dropped = [row for row in self._rows if row is not None and row.job.cancelled]
        if dropped:
            self._punch_holes(lambda row: row.job.cancelled)
        return dropped

    def _params(self, rows: Sequence[Row]) -> BatchParams:
        return BatchParams.of(
            [row.job.params for row in rows],
            [row.key for row in rows],
            [History(row.job.prompt_ids, row.token_ids) for row in rows],
            eos_ids=self._eos_ids,
            num_vocabulary=self._num_vocabulary,
            device=self._runner.device,
        )

    def _append(self, rows: Sequence[Row | None], sampled: Sampled) -> list[Row]:
        """Hand every row its token; returns the rows that end with it."""
        token_ids, logprobs = sampled.token_ids_R.tolist(), sampled.logprobs_R.tolist()
        top_ids = [] if sampled.top_ids_RK is None else sampled.top_ids_RK.tolist()
        top_logprobs = [] if sampled.top_logprobs_RK is None else sampled.top_logprobs_RK.tolist()
        finished = []
        for idx, row in enumerate(rows):
            if row is None:
                continue
            row.token_ids.append(token_ids[idx])
            row.logprobs.append(logprobs[idx])
            self.num_generated_tokens += 1
            if row.job.params.top_logprobs:
                row.top.append(list(zip(top_ids[idx], top_logprobs[idx], strict=True))[: row.job.params.top_logprobs])
            if self._ends(row, token_ids[idx]):
                finished.append(row)
        return finished

    def _ends(self, row: Row, token_id: int) -> bool:
        params = row.job.params
        if token_id in self._eos_ids and not params.ignore_eos:
            row.finish_reason = "stop"
        elif token_id in params.stop_token_ids:
            row.finish_reason, row.stop_reason = "stop", token_id
        elif params.stop and (stop := self._stop_string(row.token_ids, params)):
            row.finish_reason = "stop"
            row.stop_at, row.stop_reason = stop
        elif len(row.token_ids) >= params.max_tokens:
            row.finish_reason = "length"
        return row.finish_reason is not None

    def _stop_string(self, token_ids: Sequence[int], params: SamplingParams) -> tuple[int, str] | None:
        """A stop string that the last token completed. Only the tail is decoded until then."""
        if len(token_ids) <= params.min_tokens:
            return None
        stop = params.stop_strings
        # A token has at least one byte, special tokens apart, of which a few are allowed for.
        tail = max(len(s.encode()) for s in stop) + 8
        if find_stop(self._decode(token_ids[-tail:]), stop) is None:
            return None
        too_early = len(self._decode(token_ids[: params.min_tokens])) if params.min_tokens else 0
        return find_stop(self._decode(token_ids), stop, too_early)

    def _punch_holes(self, leaves: Callable[[Row], bool]) -> None:
        self._rows = [None if row is not None and leaves(row) else row for row in self._rows]
        num_holes = len(self._rows) - self.num_rows
        if num_holes == len(self._rows):
            self._rows, self._cache, self._state = [], RowCache(), None
        elif num_holes > MAX_HOLES * len(self._rows):
            self._recompose({})

    def _recompose(self, joining: dict[Row, tuple[RowCache, int]]) -> None:
        """Copy the rows that live and those that join into a new cache, sorted by adapter."""
        sources = {row: (self._cache, idx) for idx, row in enumerate(self._rows) if row is not None} | joining
        rows = sorted(sources, key=lambda row: row.slot_order)
        # The newest token of a row is not in the cache yet: the next step puts it there.
        lengths = [len(row.job.prompt_ids) + len(row.token_ids) - 1 for row in rows]
        self._cache = compose([sources[row] for row in rows], max(lengths))
        self._rows = list(rows)
        self._state = _State.of(rows, lengths, self._params(rows), self._runner.device)


Group = tuple[tuple[int, tuple[int, ...]], list[Row]]


def _by_prompt(rows: Sequence[Row]) -> list[Group]:
    """Rows that share adapter and prompt share one prefill; sorted by adapter, then length."""
    groups: dict[tuple[int, tuple[int, ...]], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.slot_order, row.job.prompt_ids), []).append(row)
    return sorted(groups.items(), key=lambda item: (item[0][0], len(item[0][1])))


def _chunks(groups: Sequence[Group]) -> list[list[Group]]:
    """Cut so that (prompts x longest prompt) of a chunk stays within MAX_PREFILL_TOKENS; a longer prompt is alone."""
    chunks: list[list[Group]] = []
    longest = 0
    for group in groups:
        length = len(group[0][1])
        if not chunks or max(longest, length) * (len(chunks[-1]) + 1) > MAX_PREFILL_TOKENS:
            chunks.append([])
            longest = 0
        chunks[-1].append(group)
        longest = max(longest, length)
    return chunks
