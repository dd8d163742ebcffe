"""Which rows go into the next forward/backward pass. Pure: no files, no tensors, no clock.

Runs take turns by deficit round robin, counted in tokens, so a run with a large batch cannot hold up one with a small
batch. Rows of one pass have similar length (the shortest is more than half of the longest), so little is padding. A
batch may be spread over any number of passes: each row carries the scale of its run's whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prime_rl.contract.types import MicroBatch, TrainingSample


@dataclass(frozen=True)
class Row:
    """One sample of one run, cut after its last loss token. `order` is its place in the batch."""

    run_idx: int
    order: int
    sample: TrainingSample
    num_tokens: int
    loss_scale: float


def rows_of(run_idx: int, samples: Sequence[TrainingSample]) -> list[Row]:
    """The rows of a batch, shortest first. Samples without a loss token train nothing and make no row."""
    num_loss_tokens = sum(sum(sample.loss_mask) for sample in samples)
    rows = []
    for order, sample in enumerate(samples):
        if any(sample.loss_mask):
            num_tokens = len(sample.loss_mask) - sample.loss_mask[::-1].index(True)
            rows.append(Row(run_idx, order, sample, num_tokens, 1.0 / num_loss_tokens))
    return sorted(rows, key=lambda row: (row.num_tokens, row.order))


def to_micro_batch(rows: Sequence[Row]) -> MicroBatch:
    """Rows as the wire type, sorted by slot."""
    ordered = sorted(rows, key=lambda row: (row.run_idx, row.order))
    return MicroBatch(
        run_idxs=[row.run_idx for row in ordered],
        token_ids=[row.sample.token_ids[: row.num_tokens] for row in ordered],
        loss_mask=[row.sample.loss_mask[: row.num_tokens] for row in ordered],
        logprobs=[row.sample.logprobs[: row.num_tokens] for row in ordered],
        advantages=[row.sample.advantage for row in ordered],
        temperatures=[row.sample.temperature for row in ordered],
        loss_scales=[row.loss_scale for row in ordered],
        num_tokens=max(row.num_tokens for row in ordered),
    )


@dataclass
class RowQueue:
    """The rows that wait, by run, and whose turn it is.

    Attributes:
        max_tokens: token positions (rows x longest row) of one pass; a single row may be longer.
    """

    max_tokens: int
    _rows: dict[int, list[Row]] = field(default_factory=dict)
    _deficits: dict[int, int] = field(default_factory=dict)
    _turns: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, run_idx: int, rows: Sequence[Row]) -> None:
        """Queue a whole batch, shortest row first (as `rows_of` gives it)."""
        assert rows and run_idx not in self._rows, "a run queues one batch at a time, and not an empty one"
        self._rows[run_idx] = list(rows)
        self._deficits[run_idx] = 0
        self._turns.append(run_idx)

    def drop(self, run_idx: int) -> None:
        """Forget a run's rows: it was evicted or deleted."""
        if run_idx in self._rows:
            del self._rows[run_idx], self._deficits[run_idx]
            self._turns.remove(run_idx)

    def num_waiting(self, run_idx: int) -> int:
        """Rows of the run that were not handed out yet."""
        return len(self._rows.get(run_idx, ()))

    def next_rows(self) -> list[Row]:
        """Rows of the next pass; [] when none wait. The run whose turn it is gives the length."""
        if not self._turns:
            return []
        longest = self._rows[self._turns[0]][-1].num_tokens
        max_rows = max(1, self.max_tokens // longest)
        quantum = max(longest, self.max_tokens // len(self._turns))
        taken: list[Row] = []
        before = -1
        while before < len(taken) < max_rows:
            before = len(taken)
            for run_idx in self._turns:
                taken += self._serve(run_idx, longest, quantum, max_rows - len(taken))
        self._end_turn()
        return taken

    def _serve(self, run_idx: int, longest: int, quantum: int, max_rows: int) -> list[Row]:
        """Up to a quantum of tokens of one run, its longest fitting rows first."""
        rows = self._rows[run_idx]
        taken: list[Row] = []
        at = _last_fitting(rows, longest)
        if at < 0 or not max_rows:
            return taken
        # What was saved up is limited to one quantum, or a run could later block the others for long.
        self._deficits[run_idx] = min(self._deficits[run_idx], quantum) + quantum
        while at >= 0 and len(taken) < max_rows and _fits(rows[at], longest, self._deficits[run_idx]):
            row = rows.pop(at)
            self._deficits[run_idx] -= row.num_tokens
            taken.append(row)
            at -= 1
        return taken

    def _end_turn(self) -> None:
        self._turns.append(self._turns.pop(0))
        for run_idx in [idx for idx in self._turns if not self._rows[idx]]:
            self.drop(run_idx)


def _last_fitting(rows: Sequence[Row], longest: int) -> int:
    """Index of the longest row that is at most `longest` and more than half of it; -1 when there is none."""
    at = len(rows) - 1
    while at >= 0 and rows[at].num_tokens > longest:
        at -= 1
    return at if at >= 0 and 2 * rows[at].num_tokens > longest else -1


def _fits(row: Row, longest: int, deficit: int) -> bool:
    return 2 * row.num_tokens > longest and row.num_tokens <= deficit
