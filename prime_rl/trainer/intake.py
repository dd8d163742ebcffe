"""Read one batch file of a run, and check it: every sample, before any of it comes near a tensor.

Whatever a run left in place of the file is not trusted: nothing is followed, waited for, or read beyond what the run's
own config allows. When to look, and what becomes of the samples, is the packer's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.types import (
    MAX_BATCH_BYTES,
    BadBatchError,
    TrainingBatch,
    TrainingSample,
    max_batch_bytes,
    oldest_allowed,
    read_batch,
)

# Numbers become float32, which has no place for others.
MAX_FLOAT = 3.4e38
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class BatchLimits:
    run_id: str
    step: int
    seq_len: int
    vocab_size: int
    max_async_level: int
    max_bytes: int = MAX_BATCH_BYTES

    @classmethod
    def of(cls, config: OrchestratorConfig, run_id: str, step: int, vocab_size: int) -> BatchLimits:
        """The limits of batch `step` of a run with this (resolved) config."""
        assert config.seq_len is not None, "the config in a slot is resolved"
        max_bytes = max_batch_bytes(config.batch_size, config.seq_len)
        return cls(run_id, step, config.seq_len, vocab_size, config.max_async_level, max_bytes)


def take_batch(path: Path, limits: BatchLimits) -> TrainingBatch | None:
    """The checked batch in `path`, or None when there is nothing yet. Raises BadBatchError or OSError."""
    try:
        batch = read_batch(path, limit=limits.max_bytes)
    except (FileNotFoundError, NotADirectoryError):
        return None
    check_batch(batch, limits)
    return batch


def check_batch(batch: TrainingBatch, limits: BatchLimits) -> None:
    """Raises BadBatchError with sample, field and numbers when the batch cannot be trained on."""
    if batch.run_id != limits.run_id:
        raise BadBatchError(f"run_id is {batch.run_id!r}, expected {limits.run_id!r}")
    if batch.step != limits.step:
        raise BadBatchError(f"step is {batch.step}, expected {limits.step}")
    if not batch.samples:
        raise BadBatchError("the batch has no samples")
    for index, sample in enumerate(batch.samples):
        if problem := _token_problem(sample, limits) or _number_problem(sample, limits):
            raise BadBatchError(f"sample {index}: {problem}")
    if not any(any(sample.loss_mask) for sample in batch.samples):
        raise BadBatchError(f"loss_mask is false everywhere: the {len(batch.samples)} samples have no loss tokens")


def _token_problem(sample: TrainingSample, limits: BatchLimits) -> str | None:
    ids, mask, logprobs = sample.token_ids, sample.loss_mask, sample.logprobs
    if not len(ids) == len(mask) == len(logprobs):
        return f"token_ids has {len(ids)} entries, loss_mask {len(mask)}, logprobs {len(logprobs)}"
    if not 2 <= len(ids) <= limits.seq_len:
        return f"token_ids has {len(ids)} entries, expected 2 to seq_len = {limits.seq_len}"
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        at, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < limits.vocab_size)
        return f"token_ids[{at}] is {bad}, the vocabulary has {limits.vocab_size}"
    if mask[0]:
        return "loss_mask[0] is true, but nothing predicts the first token"
    return None


def _number_problem(sample: TrainingSample, limits: BatchLimits) -> str | None:
    if not all(map(_fits, sample.logprobs)):
        at, value = next((i, p) for i, p in enumerate(sample.logprobs) if not _fits(p))
        return f"logprobs[{at}] is {value}"
    if not _fits(sample.advantage):
        return f"advantage is {sample.advantage}"
    if not (_fits(sample.temperature) and sample.temperature >= MIN_TEMPERATURE):
        return f"temperature is {sample.temperature}, must be at least {MIN_TEMPERATURE}"
    oldest, newest = oldest_allowed(limits.step, limits.max_async_level), limits.step - 1
    if not oldest <= sample.policy_version <= newest:
        return (
            f"policy_version is {sample.policy_version}, batch {limits.step} may hold versions {oldest} to {newest} "
            f"with max_async_level = {limits.max_async_level}"
        )
    return None


def _fits(value: float) -> bool:
    """Whether float32 has a place for `value`. False for nan."""
    return math.fabs(value) <= MAX_FLOAT
