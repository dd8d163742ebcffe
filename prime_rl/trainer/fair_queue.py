"""The choice of the rows of the next forward/backward pass. Pure: no files, no tensors, no clock.

Runs take turns row by row: next is always the run with the largest deficit, the one that had the fewest tokens for its
weight. So a run with a large batch cannot hold up one with a small batch, and while all have work one of weight 2 gets
twice the tokens of one of weight 1. A pass ends early rather than take others far beyond what
a run has had that has no more rows for it. Where rows are padded, those of one pass have similar length (the shortest
is more than half of the longest), so little is padding; where they are packed end to end, any go together. A batch may
be spread over any number of passes: each row carries the scale that makes the sum over all of them the mean over its
run's whole batch.

With several ranks a pack has one pass for each. The ranks share the base model, so every rank takes part in every pack:
rows are dealt evenly, and a rank without rows gets a blank row, which has no loss token.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from prime_rl.configs.losses import LossMean
from prime_rl.contract.types import TOKEN_BYTES, MicroBatch, SampleColumns

# In the mask of a sample.
LOSS_TOKEN = b"\x01"
# Of a sample.
MIN_TOKENS = 2
# A pass may be cut short for fairness or for padding, but not below this part (an eighth) of the tokens it may have:
# smaller ones hardly cost less.
SMALLEST_SHARE = 8
# At most this part (a fifth) of a larger pass is padding.
MAX_PADDING_SHARE = 5


@dataclass(frozen=True)
class Row:
    """One sample of one run, cut after its last loss token. `order` is its place in the batch.

    `kept`: which of the rollouts it is that people get to read (`contract.samples`); -1: none of them.
    """

    run_idx: int
    order: int
    sample: SampleColumns
    num_tokens: int
    loss_scale: float
    kept: int = -1


def rows_of(
    run_idx: int,
    samples: Sequence[SampleColumns],
    mean: LossMean = "token",
    length: int | None = None,
    kept: Sequence[int] = (),
) -> list[Row]:
    """The rows of a batch, shortest first. Samples without a loss token train nothing and make no row.

    Of a batch without any loss token there is one row, which takes its run to an update with gradients of zero.

    Args:
        mean: what the run's loss is divided by; `length` is the constant of "constant".
        kept: places in the batch of the rollouts that people get to read.
    """
    kept_at = {place: number for number, place in enumerate(kept)}
    num_loss_tokens = [sample.loss_mask.count(LOSS_TOKEN) for sample in samples]
    scales = loss_scales(num_loss_tokens, mean, length)
    rows = []
    for order, (sample, scale) in enumerate(zip(samples, scales, strict=True)):
        if num_loss_tokens[order]:
            num_tokens = sample.loss_mask.rindex(LOSS_TOKEN) + 1
            rows.append(Row(run_idx, order, sample, num_tokens, scale, kept_at.get(order, -1)))
    if not rows:
        return [Row(run_idx, 0, samples[0], MIN_TOKENS, 0.0)]
    return sorted(rows, key=lambda row: (row.num_tokens, row.order))


def loss_scales(num_loss_tokens: Sequence[int], mean: LossMean, length: int | None) -> list[float]:
    """For each sample of a batch, what its token losses are multiplied by, so that the sum over the batch is the mean.

    Samples without a loss token count as samples.
    """
    num_samples = len(num_loss_tokens)
    if mean == "token":
        return [1.0 / max(1, sum(num_loss_tokens))] * num_samples
    if mean == "sequence":
        return [1.0 / (num_samples * max(1, count)) for count in num_loss_tokens]
    assert length, "a constant mean needs its length"
    return [1.0 / (num_samples * length)] * num_samples


def to_micro_batch(rows: Sequence[Row], base_pass: bool = False) -> MicroBatch:
    """Rows as the wire type, sorted by slot."""
    ordered = sorted(rows, key=lambda row: (row.run_idx, row.order))
    token_advantages = [row.sample.token_advantages[: row.num_tokens * TOKEN_BYTES] for row in ordered]
    return MicroBatch(
        run_idxs=[row.run_idx for row in ordered],
        token_ids=[row.sample.token_ids[: row.num_tokens * TOKEN_BYTES] for row in ordered],
        loss_mask=[row.sample.loss_mask[: row.num_tokens] for row in ordered],
        logprobs=[row.sample.logprobs[: row.num_tokens * TOKEN_BYTES] for row in ordered],
        advantages=[row.sample.advantage for row in ordered],
        temperatures=[row.sample.temperature for row in ordered],
        loss_scales=[row.loss_scale for row in ordered],
        num_tokens=max(row.num_tokens for row in ordered),
        base_pass=base_pass,
        kept=[row.kept for row in ordered],
        token_advantages=token_advantages if any(token_advantages) else [],
    )


def blank_micro_batch(rows: Sequence[Row], base_pass: bool = False) -> MicroBatch:
    """A pass for a rank without rows: the shortest of `rows` without its loss tokens. It adds zero to its own run."""
    row = min(rows, key=lambda row: row.num_tokens)
    micro_batch = to_micro_batch([row], base_pass)
    return msgspec.structs.replace(micro_batch, loss_mask=[bytes(row.num_tokens)], loss_scales=[0.0], kept=[-1])


def deal(rows: Sequence[Row], num_ranks: int) -> list[list[Row]]:
    """Rows by rank: as many for each, up to one, and nearly as many tokens. There must be one for each rank."""
    assert len(rows) >= num_ranks
    most = -(-len(rows) // num_ranks)
    hands: list[list[Row]] = [[] for _ in range(num_ranks)]
    for row in sorted(rows, key=lambda row: (-row.num_tokens, row.run_idx, row.order)):
        open_hands = [hand for hand in hands if len(hand) < most]
        min(open_hands, key=lambda hand: sum(held.num_tokens for held in hand)).append(row)
    return hands


@dataclass
class RowQueue:
    """The rows that wait, by run, shortest first, and how many tokens each run had, divided by its weight.

    Attributes:
        max_tokens: positions of one pass (padded: rows x longest row; packed: tokens); a single row may be longer.
        packs: whether rows are packed.
    """

    max_tokens: int
    packs: bool = False
    _rows: dict[int, list[Row]] = field(default_factory=dict)
    _weights: dict[int, float] = field(default_factory=dict)
    # Also of the runs whose next batch is not there yet.
    _served: dict[int, float] = field(default_factory=dict)
    # What the run that had least had when the last pass began.
    _level: float = 0.0

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, run_idx: int, rows: Sequence[Row], weight: float = 1.0) -> None:
        """Queue a whole batch, shortest row first (as `rows_of` gives it). `weight`: its run's, for this batch."""
        assert rows and run_idx not in self._rows, "a run queues one batch at a time, and not an empty one"
        self._weights[run_idx] = weight
        # Waiting for its own rollouts earns a run no priority, so it is level with the run that had least; what it had
        # beyond that in its last batch is not forgotten.
        self._served[run_idx] = max(self._served.get(run_idx, 0.0), self._level)
        self._rows[run_idx] = list(rows)

    def drop(self, run_idx: int) -> None:
        """Forget the run in this slot: its rows, and how many tokens it had."""
        self._rows.pop(run_idx, None)
        self._served.pop(run_idx, None)
        self._weights.pop(run_idx, None)

    def num_waiting(self, run_idx: int) -> int:
        """Rows of the run that were not handed out yet."""
        return len(self._rows.get(run_idx, ()))

    def next_pack(self, num_ranks: int) -> list[list[Row]]:
        """Rows of the next pass of each rank; less than `num_ranks` passes when fewer rows wait."""
        hands: list[list[Row]] = []
        while self and len(hands) < num_ranks:
            num_open = num_ranks - len(hands)
            rows = self.next_rows(num_open)
            hands += [rows] if self.packs else deal(rows, min(num_open, len(rows)))
        return hands

    def next_rows(self, num_ranks: int = 1) -> list[Row]:
        """Rows of similar length for up to `num_ranks` passes; packed: of any, for one of so many. [] when none wait.

        The run that had least comes first with its longest row, and that gives the length.
        """
        if not self._rows:
            return []
        leader = self._least_served(self._rows)
        self._level = self._served[leader]
        longest = self._rows[leader][-1].num_tokens
        max_positions = self._max_positions(longest, num_ranks)
        taken = _Taken(longest, max_positions, self.max_tokens if self.packs else max_positions, self.packs)
        fitting = {idx: at for idx, rows in self._rows.items() if (at := _last_fitting(rows, taken.longest_next)) >= 0}
        # What a run had that is in this pass and can take no further part in it. It waits for the next pass, or for its
        # next batch, which comes after this pass; neither must find others far ahead.
        limit = math.inf
        part_of_it: set[int] = set()
        while fitting and not taken.is_full:
            run_idx = self._least_served(fitting)
            rows = self._rows[run_idx]
            at = min(fitting.pop(run_idx), _last_fitting(rows, taken.longest_next))
            if self._served[run_idx] > limit and not taken.is_small:
                break
            if at >= 0 and taken.takes(rows[at]):
                self._served[run_idx] += taken.add(rows.pop(at)) / self._weights[run_idx]
                part_of_it.add(run_idx)
                if at:
                    fitting[run_idx] = at - 1
            if run_idx in part_of_it and run_idx not in fitting:
                limit = min(limit, self._served[run_idx])
        self._rows = {run_idx: rows for run_idx, rows in self._rows.items() if rows}
        return taken.rows

    def _max_positions(self, longest: int, num_ranks: int) -> int:
        if not self.packs:
            return num_ranks * max(1, self.max_tokens // longest) * longest
        waiting = sum(row.num_tokens for rows in self._rows.values() for row in rows)
        # What is left for the last passes is shared out evenly: the ranks wait for each other.
        return max(longest, min(self.max_tokens, -(-waiting // num_ranks)))

    def _least_served(self, run_idxs: Iterable[int]) -> int:
        return min(run_idxs, key=lambda run_idx: (self._served[run_idx], run_idx))


@dataclass
class _Taken:
    """Rows taken one by one for a pass (or, padded, for several, one a rank).

    Attributes:
        longest: of the first row; where rows are padded, all have as many positions.
        whole: positions of a whole pass, of which these rows may get less.
    """

    longest: int
    max_positions: int
    whole: int
    packs: bool
    rows: list[Row] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, row: Row) -> int:
        """Returns the tokens that were added."""
        self.rows.append(row)
        self.num_tokens += row.num_tokens
        return row.num_tokens

    @property
    def num_positions(self) -> int:
        return self.num_tokens if self.packs else len(self.rows) * self.longest

    @property
    def longest_next(self) -> int:
        """Tokens of the longest row that could come next."""
        return self.max_positions - self.num_positions if self.packs else self.longest

    @property
    def is_full(self) -> bool:
        return self.max_positions - self.num_positions < (1 if self.packs else self.longest)

    @property
    def is_small(self) -> bool:
        """Too small to be quicker than a larger pass."""
        return self.num_positions * SMALLEST_SHARE < self.whole

    def takes(self, row: Row) -> bool:
        """True when `row` would not make too much of the pass padding."""
        if self.packs:
            return True
        if 2 * row.num_tokens <= self.longest:
            return False
        positions = (len(self.rows) + 1) * self.longest
        return self.is_small or MAX_PADDING_SHARE * (positions - self.num_tokens - row.num_tokens) <= positions


def _last_fitting(rows: Sequence[Row], longest: int) -> int:
    """Index of the longest row of at most `longest` tokens; -1 without one."""
    return bisect.bisect_right(rows, longest, key=lambda row: row.num_tokens) - 1
