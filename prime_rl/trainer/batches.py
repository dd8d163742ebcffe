"""Rank 0: read and check the next batch of each run, queue its rows, hand out passes.

A run trains on `rollouts/step_{progress.step + 1}` and on nothing else, so one batch of a run is in work at a time; the
next one is read meanwhile, in the thread of a `BatchReader`, so the main thread never waits for the disk. Whatever a
run left in place of the file is not trusted: nothing is followed, waited for, or read beyond what the run's own config
allows, and every sample is checked before any of it comes near a tensor. A batch that cannot be trained on evicts its
run, with the sample, the field and the numbers. Which rows go together is decided in `fair_queue`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.layout import list_rollout_steps
from prime_rl.contract.notes import Item, WorkNote
from prime_rl.contract.served import TEMPERATURE
from prime_rl.contract.types import (
    ADVANTAGE_DTYPE,
    HELD_OUT,
    LOGPROB_DTYPE,
    MASK_DTYPE,
    MAX_BATCH_BYTES,
    MAX_SOFT_TARGETS,
    TOKEN_BYTES,
    TOKEN_DTYPE,
    BadBatchError,
    BatchColumns,
    MicroBatch,
    SampleColumns,
    max_batch_bytes,
    oldest_allowed,
    read_columns,
)
from prime_rl.trainer.fair_queue import LOSS_TOKEN, RowQueue, blank_micro_batch, rows_of, to_micro_batch
from prime_rl.trainer.runs import MultiRunManager, TrainerRun
from prime_rl.trainer.runs.sync import ReadyRun
from prime_rl.utils.text import error_text

logger = logging.getLogger(__name__)

# While no rows wait there is nothing better to do than to wait for a file that is being read; but a stop and the next
# look at the runs must not wait long.
READ_WAIT_S = 0.05
# Numbers become float32, which has no place for others.
MAX_FLOAT = 3.4e38
# A disk that does not answer must not keep the trainer from ending.
CLOSE_TIMEOUT_S = 5.0
# Rounded probabilities of a teacher may add up to so much.
MAX_PROB_SUM = 1 + 1e-3


@dataclass(frozen=True)
class Pack:
    """One pass for each rank, and the runs whose batch is complete with it."""

    micro_batches: list[MicroBatch]
    ready: list[ReadyRun]


class Packer:
    """See the module. `rank 0` only.

    Args:
        reader: reads the batches; of this packer alone.
        vocab_size: ids must be below it.
        max_tokens: token positions of one pass of one rank.
        num_ranks: passes of one pack.
        packs: rows of a pass lie end to end.
    """

    def __init__(
        self,
        manager: MultiRunManager,
        reader: BatchReader,
        vocab_size: int,
        max_tokens: int,
        num_ranks: int,
        packs: bool = False,
    ) -> None:
        self._manager = manager
        self._reader = reader
        self._vocab_size = vocab_size
        self._num_ranks = num_ranks
        self._queue = RowQueue(max_tokens, packs)

    def admitted(self, run: TrainerRun) -> None:
        """Refuse a run whose next batch can never come, instead of waiting for it in silence. Raises ValueError."""
        step, steps = run.progress.step + 1, list_rollout_steps(run.dir)
        if steps and step not in steps and steps[-1] > step:
            raise ValueError(
                f"it is at step {step - 1}, but {run.dir.rollout_file(step)} is missing while step {steps[-1]} exists; "
                "put the file back, or start over with ckpt.resume_step = 0"
            )

    def forgotten(self, run: TrainerRun) -> None:
        """Drop the rows of a run that loses its slot, and the batch that was read for it."""
        self._queue.drop(run.run_idx)
        self._reader.forget(run.run_id)

    def close(self) -> None:
        """End the thread of the reader."""
        self._reader.close()

    def limit(self, max_tokens: float) -> None:
        """Make no pass of more positions than `max_tokens` from now on, unless it has a single row."""
        self._queue.limit(max_tokens)

    def get_batch(self, held: Collection[str] = ()) -> dict[int, BatchColumns]:
        """Take in the next batch of each run that has none in work: by slot, those that were read.

        Runs in `held` (ids) have to wait: the disk has yet to take their last updates. While rows wait, this does not.
        """
        active = self._manager.active
        for run in active:
            # While a batch of the run is in work, the one after it is read.
            step = run.progress.step + (1 if run.in_work is None else 2)
            limits = BatchLimits.of(run.config, run.run_id, step, self._vocab_size)
            is_due = run.in_work is None and run.run_id not in held
            self._reader.want(run.dir.rollout_file(step), limits, due=is_due)
        found = self._reader.take(0.0 if self._queue else READ_WAIT_S)
        batches = {}
        for run in active:
            if run.run_id in found:
                with self._manager.run_boundary(run, f"reading rollouts/step_{run.progress.step + 1}"):
                    batches[run.run_idx] = self._take_in(run, found[run.run_id])
        return batches

    def _take_in(self, run: TrainerRun, found: BatchColumns | str) -> BatchColumns:
        if isinstance(found, str):
            raise BadBatchError(found)
        config, loss, samples = run.config, run.config.loss, found.samples
        trained = [sample for sample in samples if sample.use != HELD_OUT]
        num_tokens = sum(len(sample.loss_mask) for sample in trained)
        kept = [place for place in run.keeping.samples(samples) if not samples[place].use]  # others have no ratio
        needs_advantage = loss.needs_advantage
        rows = rows_of(run.run_idx, samples, loss.mean, config.loss_length, kept, needs_advantage=needs_advantage)
        run.in_work = ReadyRun(
            run.run_idx,
            num_tokens,
            len(trained),
            kept,
            num_rows=sum(row.loss_scale > 0 for row in rows),
            num_trained=sum(row.num_tokens for row in rows if not row.is_held_out),
            num_computed=self._queue.add(run.run_idx, rows, config.weight, self._num_ranks),
        )
        return found

    def pack(self, held: Collection[str] = ()) -> Pack | None:
        """Take in what came, but not of the runs in `held`; the next pass of each rank, or None when no rows wait."""
        self.get_batch(held)
        for run in self._manager.used:
            if run.is_leaving:
                self._queue.drop(run.run_idx)
        if not self._queue:
            return None
        hands = self._queue.next_pack(self._num_ranks)
        rows = [row for hand in hands for row in hand]
        runs = [self._manager.run(run_idx) for run_idx in sorted({row.run_idx for row in rows})]
        for row in rows:
            self._manager.run(row.run_idx).pass_positions += row.num_positions
        base_pass = any(run.config.loss.kl_coef for run in runs)
        blanks = [blank_micro_batch(rows, base_pass) for _ in range(self._num_ranks - len(hands))]
        ready = [self._finished(run) for run in runs if not self._queue.num_waiting(run.run_idx)]
        return Pack([*(to_micro_batch(hand, base_pass) for hand in hands), *blanks], ready)

    @staticmethod
    def _finished(run: TrainerRun) -> ReadyRun:
        """The batch of a run whose last rows were handed out."""
        batch, run.in_work = run.in_work, None
        assert batch is not None, "rows come from a batch"
        return batch

    def waits_for(self) -> str | None:
        """The batches that the trainer waits for when nothing is in work, in words; None when rows wait."""
        if self._queue:
            return None
        wanted = [f"{run.run_id} (step {run.progress.step + 1})" for run in self._manager.active]
        return f"a batch of {_or(wanted)}" if wanted else None


def _or(words: list[str], limit: int = 8) -> str:
    """As a sentence has it: "a", "a or b", "a, b or c". A long list is cut."""
    shown = words[:limit] + ([f"{len(words) - limit} more"] if len(words) > limit else [])
    return " or ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


@dataclass(frozen=True)
class BatchLimits:
    """The run and step that a batch file must have, and the limits of its rows, token ids, versions and size.

    `may_lack_loss`: no sample has to have a loss token, since the run masks rollouts that were cut.
    """

    run_id: str
    step: int
    seq_len: int
    vocab_size: int
    max_async_level: int
    max_bytes: int = MAX_BATCH_BYTES
    may_lack_loss: bool = False

    @classmethod
    def of(cls, config: OrchestratorConfig, run_id: str, step: int, vocab_size: int) -> BatchLimits:
        """The limits of batch `step` of a run with this (resolved) config."""
        assert config.seq_len is not None, "the config in a slot is resolved"
        max_bytes = max_batch_bytes(config.max_rollouts * config.max_branches, config.seq_len, config.num_soft)
        masks = config.advantage.mask_truncated
        return cls(run_id, step, config.seq_len, vocab_size, config.max_async_level, max_bytes, masks)


def take_batch(path: Path, limits: BatchLimits) -> BatchColumns | None:
    """The checked batch in `path`, or None when there is nothing yet. Raises BadBatchError or OSError."""
    try:
        batch = read_columns(path, limit=limits.max_bytes)
    except (FileNotFoundError, NotADirectoryError):
        return None
    check_batch(batch, limits)
    return batch


def noting(note: WorkNote) -> Callable[[Path, BatchLimits], BatchColumns | None]:
    """`take_batch` that notes which file it reads, so that one that ends the trainer has a name."""

    def take(path: Path, limits: BatchLimits) -> BatchColumns | None:
        if not os.path.lexists(path):
            return None
        with note.alone(Item(limits.run_id, f"read {'/'.join(path.parts[-4:])}")):
            return take_batch(path, limits)

    return take


def check_batch(batch: BatchColumns, limits: BatchLimits) -> None:
    """Raises BadBatchError with sample, field and numbers when the batch cannot be trained on."""
    if batch.run_id != limits.run_id:
        raise BadBatchError(f"run_id is {batch.run_id!r}, expected {limits.run_id!r}")
    if batch.step != limits.step:
        raise BadBatchError(f"step is {batch.step}, expected {limits.step}")
    if not batch.samples:
        raise BadBatchError("the batch has no samples")
    for index, sample in enumerate(batch.samples):
        if problem := _length_problem(sample, limits) or _soft_problem(sample) or _number_problem(sample, limits):
            raise BadBatchError(f"sample {index}: {problem}")
    _check_tokens(batch.samples, limits)


def _length_problem(sample: SampleColumns, limits: BatchLimits) -> str | None:
    advantages = sample.token_advantages
    for name, data in (
        ("token_ids", sample.token_ids),
        ("logprobs", sample.logprobs),
        ("token_advantages", advantages),
    ):
        if len(data) % TOKEN_BYTES:
            return f"{name} has {len(data)} bytes, expected {TOKEN_BYTES} for each token"
    num_ids, num_logprobs = len(sample.token_ids) // TOKEN_BYTES, len(sample.logprobs) // TOKEN_BYTES
    if not num_ids == len(sample.loss_mask) == num_logprobs:
        return f"token_ids has {num_ids} entries, loss_mask {len(sample.loss_mask)}, logprobs {num_logprobs}"
    if advantages and len(advantages) != len(sample.token_ids):
        return f"token_advantages has {len(advantages) // TOKEN_BYTES} entries, expected {num_ids} or none"
    if not 2 <= num_ids <= limits.seq_len:
        return f"token_ids has {num_ids} entries, expected 2 to seq_len = {limits.seq_len}"
    return None


def _soft_problem(sample: SampleColumns) -> str | None:
    if not (sample.soft_ids or sample.soft_probs):
        return None
    if sample.use != "supervised":
        return f"soft_ids in a sample of use {sample.use!r}, only 'supervised' ones may have them"
    num, size, size_of_probs = sample.loss_mask.count(LOSS_TOKEN), len(sample.soft_ids), len(sample.soft_probs)
    each = TOKEN_BYTES * num
    if size == size_of_probs and size in range(each, MAX_SOFT_TARGETS * each + 1, max(1, each)):
        return None
    expected = f"1 to {MAX_SOFT_TARGETS} times {TOKEN_BYTES} for each of {num} loss tokens"
    return f"soft_ids has {size} bytes, soft_probs {size_of_probs}, expected {expected}, as many for all"


def _number_problem(sample: SampleColumns, limits: BatchLimits) -> str | None:
    if not math.fabs(sample.advantage) <= MAX_FLOAT:  # nan is not
        return f"advantage is {sample.advantage}"
    if not TEMPERATURE.lowest <= sample.temperature <= TEMPERATURE.highest:
        return f"temperature is {sample.temperature}, must be {TEMPERATURE.lowest} to {TEMPERATURE.highest}"
    oldest, newest = oldest_allowed(limits.step, limits.max_async_level), limits.step - 1
    if not oldest <= sample.policy_version <= newest:
        return (
            f"policy_version is {sample.policy_version}, batch {limits.step} may hold versions {oldest} to {newest} "
            f"with max_async_level = {limits.max_async_level}"
        )
    return None


def _check_tokens(samples: Sequence[SampleColumns], limits: BatchLimits) -> None:
    """Check the N tokens of all samples together; their lengths are right. Raises BadBatchError."""
    lengths = [len(sample.loss_mask) for sample in samples]
    ids_N = np.frombuffer(b"".join(sample.token_ids for sample in samples), TOKEN_DTYPE)
    mask_N = np.frombuffer(b"".join(sample.loss_mask for sample in samples), MASK_DTYPE)
    logprobs_N = np.frombuffer(b"".join(sample.logprobs for sample in samples), LOGPROB_DTYPE)
    vocab_size = limits.vocab_size
    _refuse("token_ids", ids_N, (ids_N < 0) | (ids_N >= vocab_size), lengths, f", the vocabulary has {vocab_size}")
    _refuse("loss_mask", mask_N, mask_N > 1, lengths, ", must be 0 or 1")
    _refuse("logprobs", logprobs_N, ~(np.abs(logprobs_N) <= MAX_FLOAT), lengths)
    if columns := [sample.token_advantages for sample in samples if sample.token_advantages]:
        values_A = np.frombuffer(b"".join(columns), ADVANTAGE_DTYPE)
        lengths_A = [len(sample.token_advantages) // TOKEN_BYTES for sample in samples]
        _refuse("token_advantages", values_A, ~(np.abs(values_A) <= MAX_FLOAT), lengths_A)
    if any(sample.soft_ids for sample in samples):
        _check_soft(samples, vocab_size)
    for index, sample in enumerate(samples):
        if sample.loss_mask[0]:
            raise BadBatchError(f"sample {index}: loss_mask[0] is true, but nothing predicts the first token")
    has_loss = any(sample.use != HELD_OUT and any(sample.loss_mask) for sample in samples)
    if not has_loss and not limits.may_lack_loss:
        raise BadBatchError(f"loss_mask is false everywhere: the {len(samples)} samples have no loss tokens")


def _check_soft(samples: Sequence[SampleColumns], vocab_size: int) -> None:
    """Check the soft targets of all samples together; their lengths are right. Raises BadBatchError."""
    lengths = [len(sample.soft_ids) // TOKEN_BYTES for sample in samples]
    ids_N = np.frombuffer(b"".join(sample.soft_ids for sample in samples), TOKEN_DTYPE)
    probs_N = np.frombuffer(b"".join(sample.soft_probs for sample in samples), LOGPROB_DTYPE)
    _refuse("soft_ids", ids_N, (ids_N < 0) | (ids_N >= vocab_size), lengths, f", the vocabulary has {vocab_size}")
    _refuse("soft_probs", probs_N, ~((probs_N >= 0) & (probs_N <= MAX_PROB_SUM)), lengths, ", must be 0 to 1")
    nums = [sample.loss_mask.count(LOSS_TOKEN) if sample.soft_ids else 0 for sample in samples]
    widths = np.repeat([length // max(1, num) for length, num in zip(lengths, nums, strict=True)], nums)
    sums_N = np.add.reduceat(probs_N, np.cumsum(widths) - widths)
    _refuse("the sum of soft_probs of loss token", sums_N, ~(sums_N <= MAX_PROB_SUM), nums, ", must be at most 1")


def _refuse(
    name: str, values_N: npt.NDArray[Any], bad_N: npt.NDArray[np.bool_], lengths: Sequence[int], rule: str = ""
) -> None:
    """Raises BadBatchError with the first bad value and its place, if there is one."""
    if not bad_N.any():
        return
    at, ends = int(bad_N.argmax()), np.cumsum(lengths)
    index = int(np.searchsorted(ends, at, side="right"))
    place = at - (int(ends[index]) - lengths[index])
    raise BadBatchError(f"sample {index}: {name}[{place}] is {values_N[at]!s}{rule}")


@dataclass(eq=False)
class _Order:
    """A file to read for one run.

    Attributes:
        due: the turn of the run has come.
        found: the batch, or why it cannot be trained on; None while that is not known.
    """

    path: Path
    limits: BatchLimits
    due: bool = False
    is_begun: bool = False
    found: BatchColumns | str | None = None


class BatchReader:
    """One thread that reads and checks batch files. It keeps one batch of a run until that is taken or forgotten.

    A file may be asked for before its turn. A good batch is then the batch of that turn, whatever becomes of the file;
    a bad one is read again when its turn comes, so a file is refused only for what is in it at its turn. Files whose
    turn has come are read first. All methods are for the main thread, and none waits for the disk.

    Args:
        read: a checked batch, or None when there is no file; raises when it cannot be trained on.
    """

    def __init__(self, read: Callable[[Path, BatchLimits], BatchColumns | None] = take_batch) -> None:
        self._read = read
        self._changed = threading.Condition()
        # By run.
        self._orders: dict[str, _Order] = {}
        # What is to be read, by whether it is due. An order may stand in both, and longer than it is wanted.
        self._queues: dict[bool, deque[_Order]] = {True: deque(), False: deque()}
        self._current: _Order | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="batch reader", daemon=True)
        self._thread.start()

    def want(self, path: Path, limits: BatchLimits, *, due: bool) -> None:
        """Read this file for the run in `limits`, once. A file that was not there has to be asked for again.

        What was read for the run from another file, or checked against other limits, is dropped.
        """
        with self._changed:
            order = self._orders.get(limits.run_id)
            gets_due = order is not None and due and not order.due
            is_other = order is None or (order.path, order.limits) != (path, limits)
            if order is None or is_other or (gets_due and isinstance(order.found, str)):
                order = self._orders[limits.run_id] = _Order(path, limits)
                self._put(order, due)
            elif gets_due and not order.is_begun:
                self._put(order, due)
            order.due = due

    def take(self, timeout_s: float = 0.0) -> dict[str, BatchColumns | str]:
        """By run, what was found in each file whose turn has come: a checked batch, or the problem. Each is given once.

        Waits at most `timeout_s` until all of them were looked at.
        """
        with self._changed:
            self._changed.wait_for(self._has_looked, timeout_s)
            found = {
                run_id: order.found for run_id, order in self._orders.items() if order.due and order.found is not None
            }
            for run_id in found:
                del self._orders[run_id]
        return found

    def forget(self, run_id: str) -> None:
        """Drop what was or is being read for a run that leaves; it may come back."""
        with self._changed:
            self._orders.pop(run_id, None)

    def close(self) -> None:
        """End the thread; a file that it still reads is waited for, at most CLOSE_TIMEOUT_S."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _has_looked(self) -> bool:
        """True when nothing whose turn has come is still to be read."""
        return not self._queues[True] and not (self._current and self._current.due)

    def _put(self, order: _Order, due: bool) -> None:
        self._queues[due].append(order)
        self._changed.notify_all()

    # The thread

    def _work(self) -> None:
        # Between two files this thread holds on to none of them.
        while self._read_next():
            pass

    def _read_next(self) -> bool:
        """Wait for a file to read, and read it; false at the end."""
        order = self._next()
        if order is None:
            return False
        due, found = order.due, self._look(order)
        with self._changed:
            self._current = None
            if isinstance(found, str) and order.due and not due:
                order.is_begun = False
                self._put(order, due=True)  # its turn came while it was read
            elif found is not None:
                order.found = found
            elif self._is_wanted(order):
                del self._orders[order.limits.run_id]
        return True

    def _next(self) -> _Order | None:
        with self._changed:
            while not self._closed:
                if self._has_looked():
                    self._changed.notify_all()
                queue = self._queues[True] or self._queues[False]
                if not queue:
                    self._changed.wait()
                elif self._is_wanted(order := queue.popleft()) and not order.is_begun:
                    order.is_begun, self._current = True, order
                    return order
            return None

    def _is_wanted(self, order: _Order) -> bool:
        return self._orders.get(order.limits.run_id) is order

    def _look(self, order: _Order) -> BatchColumns | str | None:
        """The batch, or why it cannot be trained on, in words: an exception would hold on to the file's content."""
        try:
            return self._read(order.path, order.limits)
        except Exception as error:  # the boundary of a run: the main thread evicts it with these words
            logger.debug("%s cannot be read", order.path, exc_info=True)
            return error_text(error)
