"""Rank 0: ask for the next batch of each run, queue its rows, hand out passes.

A run trains on `rollouts/step_{progress.step + 1}` and on nothing else, so one batch of a run is in work at a time; the
next one is read meanwhile. A batch that cannot be trained on (`batch_files` judges it) evicts its run, with the sample,
the field and the numbers. Which rows go together is decided in `fair_queue`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from prime_rl.contract.layout import list_rollout_steps
from prime_rl.contract.types import BadBatchError, BatchColumns, MicroBatch
from prime_rl.trainer.batch_files import BatchLimits, BatchReader
from prime_rl.trainer.fair_queue import RowQueue, blank_micro_batch, rows_of, to_micro_batch
from prime_rl.trainer.kept import keeping_of
from prime_rl.trainer.runs import MultiRunManager, TrainerRun
from prime_rl.trainer.runs.sync import ReadyRun

# While no rows wait there is nothing better to do than to wait for a file that is being read; but a stop and the next
# look at the runs must not wait long.
READ_WAIT_S = 0.05


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
        self._queue.max_tokens = int(min(self._queue.max_tokens, max_tokens))

    def get_batch(self, held: Collection[str] = ()) -> dict[int, BatchColumns]:
        """Take in the next batch of each run that has none in work: by slot, those that were read.

        Runs in `held` (ids) have to wait: the disk has yet to take their last updates. While rows wait, this does not.
        """
        active = self._manager.active
        for run in active:
            self._want(run, is_due=run.run_id not in held)
        found = self._reader.take(0.0 if self._queue else READ_WAIT_S)
        batches = {}
        for run in active:
            if run.run_id in found:
                with self._manager.run_boundary(run, f"reading rollouts/step_{run.progress.step + 1}"):
                    batches[run.run_idx] = self._take_in(run, found[run.run_id])
        return batches

    def _want(self, run: TrainerRun, is_due: bool) -> None:
        """Have the batch read that the run needs next: while one is in work, the one after it."""
        step = run.progress.step + (1 if run.in_work is None else 2)
        limits = BatchLimits.of(run.config, run.run_id, step, self._vocab_size)
        self._reader.want(run.dir.rollout_file(step), limits, due=is_due and run.in_work is None)

    def _take_in(self, run: TrainerRun, found: BatchColumns | str) -> BatchColumns:
        if isinstance(found, str):
            raise BadBatchError(found)
        config, num_tokens = run.config, sum(len(sample.loss_mask) for sample in found.samples)
        kept = keeping_of(config).places([sample.reward for sample in found.samples])
        rows = rows_of(run.run_idx, found.samples, config.loss.mean, config.loss_length, kept)
        self._queue.add(run.run_idx, rows, config.weight)
        run.in_work = ReadyRun(run.run_idx, num_tokens, len(found.samples), kept)
        return found

    def pack(self, held: Collection[str] = ()) -> Pack | None:
        """Take in what came, but not of the runs in `held`; the next pass of each rank, or None when no rows wait."""
        self.get_batch(held)
        for run in self._manager.used:
            if run.leaving is not None:
                self._queue.drop(run.run_idx)
        if not self._queue:
            return None
        hands = self._queue.next_pack(self._num_ranks)
        rows = [row for hand in hands for row in hand]
        runs = [self._manager.run(run_idx) for run_idx in sorted({row.run_idx for row in rows})]
        for row in rows:
            self._manager.run(row.run_idx).pass_tokens += row.num_tokens
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
        """What the trainer waits for when nothing is in work, in words; None when rows wait."""
        if self._queue:
            return None
        wanted = [f"{run.run_id} (step {run.progress.step + 1})" for run in self._manager.active]
        return f"a batch of {_or(wanted)}" if wanted else None


def _or(words: list[str], limit: int = 8) -> str:
    """As a sentence has it: "a", "a or b", "a, b or c". A long list is cut."""
    shown = words[:limit] + ([f"{len(words) - limit} more"] if len(words) > limit else [])
    return " or ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
