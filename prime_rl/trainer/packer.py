"""Rank 0: find the next batch file of each run, check it, queue its rows, hand out passes.

A run trains on `rollouts/step_{progress.step + 1}` and on nothing else, so one batch of a run is in work at a time. A
batch that cannot be trained on evicts its run, with the sample, the field and the numbers. Which rows go together is
decided in `packing`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from stat import S_ISREG

from prime_rl.contract.layout import list_rollout_steps
from prime_rl.contract.types import BadBatchError, MicroBatch, TrainingBatch, TrainingSample, read_batch
from prime_rl.trainer.packing import RowQueue, rows_of, to_micro_batch
from prime_rl.trainer.runs import MultiRunManager
from prime_rl.trainer.runs.sync import ReadyRun

# A batch of 4,096 samples of 32,768 tokens is about this large; what is larger is no batch, and would fill the memory.
MAX_BATCH_BYTES = 2 << 30


@dataclass(frozen=True)
class BatchLimits:
    """What a batch must fit into."""

    run_id: str
    step: int
    seq_len: int
    vocab_size: int


@dataclass(frozen=True)
class Pack:
    """One pass for each rank (null: none for it), and the runs whose batch is complete with it."""

    micro_batches: list[MicroBatch | None]
    ready: list[ReadyRun]


def check_batch(batch: TrainingBatch, limits: BatchLimits) -> None:
    """Raises BadBatchError with sample, field and numbers when the batch cannot be trained on."""
    if batch.run_id != limits.run_id:
        raise BadBatchError(f"run_id is {batch.run_id!r}, expected {limits.run_id!r}")
    if batch.step != limits.step:
        raise BadBatchError(f"step is {batch.step}, expected {limits.step}")
    if not batch.samples:
        raise BadBatchError("it has no samples")
    for index, sample in enumerate(batch.samples):
        if problem := _sample_problem(sample, limits):
            raise BadBatchError(f"sample {index}: {problem}")
    if not any(any(sample.loss_mask) for sample in batch.samples):
        raise BadBatchError(f"loss_mask is false everywhere: none of the {len(batch.samples)} samples trains a token")


def _sample_problem(sample: TrainingSample, limits: BatchLimits) -> str | None:
    ids, mask, logprobs = sample.token_ids, sample.loss_mask, sample.logprobs
    if not len(ids) == len(mask) == len(logprobs):
        return f"token_ids has {len(ids)} entries, loss_mask {len(mask)}, logprobs {len(logprobs)}"
    if not 2 <= len(ids) <= limits.seq_len:
        return f"token_ids has {len(ids)} entries, allowed are 2 to seq_len = {limits.seq_len}"
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        at, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < limits.vocab_size)
        return f"token_ids[{at}] is {bad}, the vocabulary has {limits.vocab_size}"
    if mask[0]:
        return "loss_mask[0] is true, but nothing predicts the first token"
    if not all(map(math.isfinite, logprobs)):
        at, value = next((i, p) for i, p in enumerate(logprobs) if not math.isfinite(p))
        return f"logprobs[{at}] is {value}"
    if not math.isfinite(sample.advantage):
        return f"advantage is {sample.advantage}"
    if not (math.isfinite(sample.temperature) and sample.temperature > 0):
        return f"temperature is {sample.temperature}, must be above 0"
    return None


class Packer:
    """See the module. `rank 0` only.

    Args:
        vocab_size: ids must be below it.
        max_tokens: token positions of one pass of one rank.
        num_ranks: passes of one pack.
    """

    def __init__(self, manager: MultiRunManager, vocab_size: int, max_tokens: int, num_ranks: int) -> None:
        self._manager = manager
        self._vocab_size = vocab_size
        self._num_ranks = num_ranks
        self._queue = RowQueue(max_tokens)
        self._in_work: dict[int, ReadyRun] = {}

    def discovered_hook(self, run_idx: int, run_id: str, config: object) -> None:
        """Refuse a run whose next batch can never come, instead of waiting for it in silence."""
        run, step = self._manager.run_dir(run_idx), self._manager.progress[run_idx].step + 1
        steps = list_rollout_steps(run)
        if steps and step not in steps and steps[-1] > step:
            raise ValueError(
                f"it is at step {step - 1}, but {run.rollout_file(step)} is missing while step {steps[-1]} is there; "
                "put the file back, or start anew with ckpt.resume_step = 0"
            )

    def forgotten_hook(self, run_idx: int, run_id: str) -> None:
        self._queue.drop(run_idx)
        self._in_work.pop(run_idx, None)

    def poll(self) -> None:
        """Take in the next batch of each run that has none in work. One `stat` a run when there is none."""
        for run_idx in self._manager.active_idxs:
            if run_idx not in self._in_work:
                self._take_in(run_idx)

    def _take_in(self, run_idx: int) -> None:
        run, step = self._manager.run_dir(run_idx), self._manager.progress[run_idx].step + 1
        path = run.rollout_file(step)
        with self._manager.run_boundary(run_idx, f"reading rollouts/step_{step}"):
            try:
                stat = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return
            # A pipe would hold up the whole trainer.
            if not S_ISREG(stat.st_mode) or stat.st_size > MAX_BATCH_BYTES:
                raise BadBatchError(f"{path} must be a file of at most {MAX_BATCH_BYTES} bytes, not {stat.st_size}")
            batch = read_batch(path)
            seq_len = self._manager.config[run_idx].seq_len
            assert seq_len is not None, "the config in a slot is resolved"
            check_batch(batch, BatchLimits(run.run_id, step, seq_len, self._vocab_size))
            num_tokens = sum(len(sample.token_ids) for sample in batch.samples)
            self._queue.add(run_idx, rows_of(run_idx, batch.samples))
            self._in_work[run_idx] = ReadyRun(run_idx, num_tokens, len(batch.samples))

    def pack(self) -> Pack | None:
        """The next pass of each rank, or None when no rows wait."""
        for run_idx in set(self._in_work) - set(self._manager.active_idxs):
            self._queue.drop(run_idx)
        if not self._queue:
            return None
        micro_batches = []
        touched: set[int] = set()
        for _ in range(self._num_ranks):
            rows = self._queue.next_rows()
            touched.update(row.run_idx for row in rows)
            micro_batches.append(to_micro_batch(rows) if rows else None)
        done = [idx for idx in sorted(touched) if not self._queue.num_waiting(idx)]
        return Pack(micro_batches, [self._in_work.pop(idx) for idx in done])

    def waits_for(self) -> str | None:
        """What the trainer waits for when nothing is in work, in words; None when rows wait."""
        if self._queue:
            return None
        ids, progress = self._manager.idx_2_id, self._manager.progress
        wanted = [f"{ids[idx]} (step {progress[idx].step + 1})" for idx in self._manager.active_idxs]
        return f"a batch of {_or(wanted)}" if wanted else None


def _or(words: list[str], limit: int = 8) -> str:
    """ "a", "a or b", "a, b or c"; a long list is cut."""
    shown = words[:limit] + ([f"{len(words) - limit} more"] if len(words) > limit else [])
    return " or ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
