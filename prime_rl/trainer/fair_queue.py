"""The choice of the rows of the next forward/backward pass. Pure: no files, no tensors, no clock.

Rows of a batch that begin alike (the rollouts of a prompt, the branches of a conversation) make a bundle: in one pass
their common positions are computed once, for the first of them. So what counts here is positions that are computed.

Runs take turns bundle by bundle: next is always the run with the largest deficit, the one that had the fewest positions
for its weight. So a run with a large batch cannot hold up one with a small batch, and while all have work one of weight
2 gets twice the positions of one of weight 1. A pass ends early rather than take others far beyond what a run has had
that has no more rows for it. Where rows are padded, each is a bundle of its own and those of one pass have similar
length (the shortest is more than half of the longest), so little is padding; where they are packed end to end, any go
together. A batch may be spread over any number of passes: each row carries the scale that makes the sum over all of
them the mean over its run's whole batch.

With several ranks a pack has one pass for each. The ranks share the base model, so every rank takes part in every pack:
rows are dealt evenly, and a rank without rows gets a blank row, which has no loss token.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise

import msgspec
import numpy as np

from prime_rl.configs.losses import LossMean
from prime_rl.contract.types import (
    ADVANTAGE_DTYPE,
    HELD_OUT,
    TOKEN_BYTES,
    TOKEN_DTYPE,
    MicroBatch,
    SampleColumns,
    rollouts_of,
)

# In the mask of a sample.
LOSS_TOKEN = b"\x01"
# Of a sample.
MIN_TOKENS = 2
# A pass may be cut short for fairness or for padding, but not below this part (an eighth) of the tokens it may have:
# smaller ones hardly cost less.
SMALLEST_SHARE = 8
# At most this part (a fifth) of a larger pass is padding.
MAX_PADDING_SHARE = 5
# Positions that rows have in common are computed once from so many on, and from this part (a sixteenth) of those that a
# row sees: fewer cost more calls, and masks, than they save.
MIN_SHARED, MIN_SHARED_PART = 16, 16
# The positions that the rows of a pass look at are at most so many times those that it computes: what they share is
# looked at, and kept for backward, once for each of them.
MOST_SEEN = 2


@dataclass(frozen=True)
class Row:
    """One sample of one run, cut after its last loss token. `order` is its place in the batch.

    Attributes:
        kept: which of the samples it is that people get to read (`contract.samples`); -1: none of them.
        shared: of its first positions, how many are those of the row before it, where that is in the same pass.
    """

    run_idx: int
    order: int
    sample: SampleColumns
    num_tokens: int
    loss_scale: float
    kept: int = -1
    shared: int = 0

    @property
    def is_held_out(self) -> bool:
        """True when it is measured alone."""
        return self.sample.use == HELD_OUT

    @property
    def num_seen(self) -> int:
        """Positions that predict its tokens: nothing is predicted from the last one."""
        return self.num_tokens - 1

    @property
    def num_positions(self) -> int:
        """Positions that are computed for it, beside the row before it."""
        return self.num_seen - self.shared


def rows_of(
    run_idx: int,
    samples: Sequence[SampleColumns],
    mean: LossMean = "token",
    length: int | None = None,
    kept: Sequence[int] = (),
    *,
    needs_advantage: bool = False,
) -> list[Row]:
    """The rows of a batch, those that begin alike behind each other. Samples that train nothing make no row.

    Of a batch of such samples alone the shortest takes its run to an update with gradients of zero.

    Args:
        mean: what the run's loss is divided by; `length` is the constant of "constant".
        kept: places in the batch of the samples that people get to read.
        needs_advantage: a sample whose advantage is zero trains nothing, unless people get to read it.
    """
    kept_at = {place: number for number, place in enumerate(kept)}
    num_loss_tokens = [sample.loss_mask.count(LOSS_TOKEN) for sample in samples]
    trained = [place for place, sample in enumerate(samples) if sample.use != HELD_OUT]
    of_trained = [samples[place] for place in trained]
    found = loss_scales([num_loss_tokens[place] for place in trained], mean, length, rollouts_of(of_trained))
    scales = dict(zip(trained, found, strict=True))
    rows = []
    for order, sample in enumerate(samples):
        if num_loss_tokens[order]:
            num_tokens = sample.loss_mask.rindex(LOSS_TOKEN) + 1
            rows.append(Row(run_idx, order, sample, num_tokens, scales.get(order, 0.0), kept_at.get(order, -1)))
    if not rows:
        return [Row(run_idx, 0, samples[0], MIN_TOKENS, 0.0)]
    if needs_advantage:
        with_gradient = [row for row in rows if row.kept >= 0 or row.is_held_out or has_advantage(row.sample)]
        rows = with_gradient or [min(rows, key=lambda row: row.num_tokens)]
    return sharing(rows)


def has_advantage(sample: SampleColumns) -> bool:
    """True when the advantage of any of its tokens is not zero."""
    own = sample.token_advantages
    return bool(np.frombuffer(own, ADVANTAGE_DTYPE).any()) if own else sample.advantage != 0


def sharing(rows: Sequence[Row]) -> list[Row]:
    """`rows` of one run in an order in which those that begin alike are neighbours, each with what it shares.

    What rows of one beginning have in common comes to few numbers, at least MIN_SHARED apart, so that many share
    equally: their attention is one call. The smallest comes first, of rows that begin alike and of rows that share
    equally.
    """
    # In the order of their tokens a row has most in common with its neighbours.
    rows = sorted(rows, key=lambda row: (row.sample.token_ids[: row.num_seen * TOKEN_BYTES], row.order))
    common = [0, *(_in_common(one, other) for one, other in pairwise(rows))]
    starts = [at for at, shared in enumerate(common) if shared < MIN_SHARED]
    found: list[list[Row]] = []
    for start, stop in pairwise([*starts, len(rows)]):
        levels = [0]
        for shared in sorted(set(common[start + 1 : stop])):
            if shared - levels[-1] >= MIN_SHARED:
                levels.append(shared)
        rounded = [0, *(levels[bisect.bisect_right(levels, shared) - 1] for shared in common[start + 1 : stop])]
        found.append(_by_length([replace(row, shared=n) for row, n in zip(rows[start:stop], rounded, strict=True)]))
    found.sort(key=lambda alike: (sum(row.num_positions for row in alike), alike[0].order))
    return [row for alike in found for row in alike]


def _in_common(one: Row, other: Row) -> int:
    """The first positions that `other` may share with `one` and still have one of its own; 0 where it does not pay."""
    most = min(one.num_seen, other.num_seen - 1)
    a, b = (np.frombuffer(row.sample.token_ids, TOKEN_DTYPE, most) for row in (one, other))
    different = a != b
    shared = int(different.argmax()) if different.any() else most
    return shared if shared * MIN_SHARED_PART >= other.num_seen else 0


def _by_length(rows: Sequence[Row]) -> list[Row]:
    """Rows that share equally, the shorter first; but the last of them stays last: the next may share more with it."""
    found: list[Row] = []
    for _, same in groupby(rows, lambda row: row.shared):
        *free, last = same
        found += [*sorted(free, key=lambda row: row.num_tokens), last]
    return found


@dataclass(frozen=True)
class Bundle:
    """Rows of one run that stay together; the first shares nothing, and each other one with the row before it."""

    rows: tuple[Row, ...]

    @property
    def run_idx(self) -> int:
        """The slot of its run."""
        return self.rows[0].run_idx

    @cached_property
    def num_positions(self) -> int:
        """Positions that are computed for it."""
        return sum(row.num_positions for row in self.rows)

    @cached_property
    def num_seen(self) -> int:
        """Positions that its rows look at."""
        return sum(row.num_seen for row in self.rows)


def bundles_of(rows: Iterable[Row], max_positions: float, max_seen: float) -> list[Bundle]:
    """`rows` (as `rows_of` gives them) in bundles that compute and look at no more than so many positions.

    The smallest is first. A row that does not fit beside the one before it computes what they share once more.
    """
    bundles: list[list[Row]] = []
    positions = seen = 0
    for row in rows:
        positions, seen = positions + row.num_positions, seen + row.num_seen
        if row.shared and positions <= max_positions and seen <= max_seen:
            bundles[-1].append(row)
        else:
            bundles.append([replace(row, shared=0)])
            positions = seen = row.num_seen
    return sorted((Bundle(tuple(each)) for each in bundles), key=lambda each: (each.num_positions, each.rows[0].order))


def loss_scales(
    num_loss_tokens: Sequence[int], mean: LossMean, length: int | None, rollouts: Sequence[Sequence[int]]
) -> list[float]:
    """For each sample of a batch, what its token losses are multiplied by, so that the sum over the batch is the mean.

    Rollouts without a loss token count as rollouts; one of several samples counts once.

    Args:
        rollouts: the places of the samples of each.
    """
    if mean == "token":
        return [1.0 / max(1, sum(num_loss_tokens))] * len(num_loss_tokens)
    scales = [0.0] * len(num_loss_tokens)
    for places in rollouts:
        divisor = length if mean == "constant" else max(1, sum(num_loss_tokens[place] for place in places))
        assert divisor, "a constant mean needs its length"
        for place in places:
            scales[place] = 1.0 / (len(rollouts) * divisor)
    return scales


def to_micro_batch(rows: Sequence[Row], base_pass: bool = False) -> MicroBatch:
    """Rows as the wire type, sorted by slot; those of a bundle are neighbours and stay so."""
    ordered = sorted(rows, key=lambda row: row.run_idx)
    token_advantages = [row.sample.token_advantages[: row.num_tokens * TOKEN_BYTES] for row in ordered]
    is_soft = any(row.sample.soft_ids for row in ordered)
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
        shared=[row.shared for row in ordered] if any(row.shared for row in ordered) else [],
        uses=[row.sample.use for row in ordered] if any(row.sample.use for row in ordered) else [],
        soft_ids=[row.sample.soft_ids for row in ordered] if is_soft else [],
        soft_probs=[row.sample.soft_probs for row in ordered] if is_soft else [],
    )


def blank_micro_batch(rows: Sequence[Row], base_pass: bool = False) -> MicroBatch:
    """A pass for a rank without rows: the shortest of `rows` without its loss tokens. It adds zero to its own run."""
    row = min(rows, key=lambda row: row.num_tokens)
    sample = msgspec.structs.replace(row.sample, use="", soft_ids=b"", soft_probs=b"")
    micro_batch = to_micro_batch([replace(row, sample=sample, shared=0)], base_pass)
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
    """The rows that wait, by run, in bundles, the smallest first; and how many positions each run had by its weight.

    Attributes:
        max_tokens: positions of one pass (padded: rows x longest row); a single row may be longer.
        packs: whether rows are packed; only then do they share positions.
    """

    max_tokens: int
    packs: bool = False
    _waiting: dict[int, list[Bundle]] = field(default_factory=dict)
    _weights: dict[int, float] = field(default_factory=dict)
    # Also of the runs whose next batch is not there yet.
    _served: dict[int, float] = field(default_factory=dict)
    # What the run that had least had when the last pass began.
    _level: float = 0.0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, run_idx: int, rows: Sequence[Row], weight: float = 1.0, num_ranks: int = 1) -> int:
        """Queue a whole batch, as `rows_of` gives it; returns the positions that are computed for it.

        Args:
            weight: its run's, for this batch.
            num_ranks: each is to have a part of it.
        """
        assert rows and run_idx not in self._waiting, "a run queues one batch at a time, and not an empty one"
        self._weights[run_idx] = weight
        # Waiting for its own rollouts earns a run no priority, so it is level with the run that had least; what it had
        # beyond that in its last batch is not forgotten.
        self._served[run_idx] = max(self._served.get(run_idx, 0.0), self._level)
        self._waiting[run_idx] = self._bundles(rows, num_ranks)
        return sum(bundle.num_positions for bundle in self._waiting[run_idx])

    def _bundles(self, rows: Sequence[Row], num_ranks: int = 1) -> list[Bundle]:
        """Of the sizes that are tried the one with which the busiest rank has least to compute.

        A rank computes what its rows share once more, so that may be each row alone, too.
        """
        shared, share = max(row.shared for row in rows), sum(row.num_positions for row in rows) / num_ranks
        sizes = [float(self.max_tokens)] if self.packs else [0.0]
        if self.packs and shared and num_ranks > 1:
            sizes = [0.0, *(min(self.max_tokens, shared + share * eighth / 8) for eighth in range(1, 17))]
        tried = [bundles_of(rows, size, MOST_SEEN * self.max_tokens) for size in sizes]
        return min(tried, key=lambda bundles: _of_busiest(bundles, num_ranks))

    def limit(self, max_tokens: float) -> None:
        """Make no pass of more positions from now on, unless it has a single row."""
        if max_tokens < self.max_tokens:
            self.max_tokens = int(max_tokens)
            rows = {idx: [row for each in bundles for row in each.rows] for idx, bundles in self._waiting.items()}
            self._waiting = {idx: self._bundles(each) for idx, each in rows.items()}

    def drop(self, run_idx: int) -> None:
        """Forget the run in this slot: its rows, and how many positions it had."""
        self._waiting.pop(run_idx, None)
        self._served.pop(run_idx, None)
        self._weights.pop(run_idx, None)

    def num_waiting(self, run_idx: int) -> int:
        """Rows of the run that were not handed out yet."""
        return sum(len(bundle.rows) for bundle in self._waiting.get(run_idx, ()))

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

        The run that had least comes first with its largest bundle; where rows are padded, that gives the length.
        """
        if not self._waiting:
            return []
        leader = self._least_served(self._waiting)
        self._level = self._served[leader]
        longest = self._waiting[leader][-1].num_positions
        max_positions = self._max_positions(longest, num_ranks)
        whole = self.max_tokens if self.packs else max_positions
        taken = _Taken(longest, max_positions, whole, MOST_SEEN * self.max_tokens, self.packs)
        fitting = {
            idx: at for idx, each in self._waiting.items() if (at := _last_fitting(each, taken.largest_next)) >= 0
        }
        # What a run had that is in this pass and can take no further part in it. It waits for the next pass, or for its
        # next batch, which comes after this pass; neither must find others far ahead.
        limit = math.inf
        part_of_it: set[int] = set()
        while fitting and not taken.is_full:
            run_idx = self._least_served(fitting)
            bundles = self._waiting[run_idx]
            at = min(fitting.pop(run_idx), _last_fitting(bundles, taken.largest_next))
            if self._served[run_idx] > limit and not taken.is_small:
                break
            if at >= 0 and taken.takes(bundles[at]):
                self._served[run_idx] += taken.add(bundles.pop(at)) / self._weights[run_idx]
                part_of_it.add(run_idx)
                if at:
                    fitting[run_idx] = at - 1
            if run_idx in part_of_it and run_idx not in fitting:
                limit = min(limit, self._served[run_idx])
        self._waiting = {run_idx: bundles for run_idx, bundles in self._waiting.items() if bundles}
        return [row for bundle in taken.bundles for row in bundle.rows]

    def _max_positions(self, longest: int, num_ranks: int) -> int:
        if not self.packs:
            return num_ranks * max(1, self.max_tokens // longest) * longest
        waiting = sum(bundle.num_positions for bundles in self._waiting.values() for bundle in bundles)
        # What is left for the last passes is shared out evenly: the ranks wait for each other.
        return max(longest, min(self.max_tokens, -(-waiting // num_ranks)))

    def _least_served(self, run_idxs: Iterable[int]) -> int:
        return min(run_idxs, key=lambda run_idx: (self._served[run_idx], run_idx))


@dataclass
class _Taken:
    """Bundles taken one by one for a pass (or, padded, for several, one a rank).

    Attributes:
        longest: of the first one; where rows are padded, all have as many positions.
        whole: positions of a whole pass, of which these may get less.
        max_seen: positions that the rows of a pass may look at.
    """

    longest: int
    max_positions: int
    whole: int
    max_seen: int
    packs: bool
    bundles: list[Bundle] = field(default_factory=list)
    num_computed: int = 0
    num_seen: int = 0

    def add(self, bundle: Bundle) -> int:
        """Returns the positions that were added, without padding."""
        self.bundles.append(bundle)
        self.num_computed += bundle.num_positions
        self.num_seen += bundle.num_seen
        return bundle.num_positions

    @property
    def num_positions(self) -> int:
        return self.num_computed if self.packs else len(self.bundles) * self.longest

    @property
    def largest_next(self) -> int:
        """Positions of the largest bundle that could come next."""
        return self.max_positions - self.num_positions if self.packs else self.longest

    @property
    def is_full(self) -> bool:
        return self.max_positions - self.num_positions < (1 if self.packs else self.longest)

    @property
    def is_small(self) -> bool:
        """Too small to be quicker than a larger pass."""
        return self.num_positions * SMALLEST_SHARE < self.whole

    def takes(self, bundle: Bundle) -> bool:
        """True when `bundle` would neither make too much of the pass padding nor have it look at too much."""
        if self.packs:
            return not self.bundles or self.num_seen + bundle.num_seen <= self.max_seen
        if 2 * bundle.num_positions <= self.longest:
            return False
        positions = (len(self.bundles) + 1) * self.longest
        return self.is_small or MAX_PADDING_SHARE * (positions - self.num_computed - bundle.num_positions) <= positions


def _of_busiest(bundles: Sequence[Bundle], num_ranks: int) -> int:
    """Positions of the rank that has most, where each bundle, the largest first, goes to the one that has least."""
    ranks = [0] * num_ranks
    for bundle in reversed(bundles):
        heapq.heapreplace(ranks, ranks[0] + bundle.num_positions)
    return max(ranks)


def _last_fitting(bundles: Sequence[Bundle], largest: int) -> int:
    """Index of the largest of `bundles` of at most `largest` positions; -1 without one."""
    return bisect.bisect_right(bundles, largest, key=lambda bundle: bundle.num_positions) - 1
