"""The wire types between orchestrator and trainer, and between trainer ranks. Encoded as msgpack, never pickled.

A `TrainingBatch` is what one orchestrator hands over for one optimizer update of its run. A `MicroBatch` is what rank 0
of the trainer hands to a rank for one forward/backward pass. Nothing here checks a sample against a model; the packer
of the trainer does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from prime_rl.contract.files import FileRefused, read_file, write_atomic

BATCH_FORMAT_VERSION = 1
# No batch file is larger: 4,096 samples of 32,768 tokens take about this much.
MAX_BATCH_BYTES = 2 << 30
# A token is an id (5 bytes), a flag (1) and a logprob (9); a sample has names and numbers besides, a batch the state of
# the example sampler.
BYTES_A_TOKEN = 16
BYTES_A_SAMPLE = 4 << 10
BYTES_BESIDES = 1 << 20


class TrainingSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rollout as the trainer sees it. The lists over T (tokens of prompt and completion) have equal length.

    Attributes:
        token_ids: T ids, prompt first.
        loss_mask: T flags; true where the policy sampled the token, so prompts and tool outputs are false.
        logprobs: T log-probabilities under the policy that sampled (mu); 0.0 where `loss_mask` is false.
        advantage: one number for all loss tokens of the sample.
        reward: as the environment gave it, for reports only.
        temperature: what the logits were divided by when sampling.
        policy_version: the oldest policy version that any token of the sample came from.
        example_id: which example of which environment, e.g. "reverse-text/17".
        turn_versions: the policy version of each turn; [] where it was not recorded.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    advantage: float
    reward: float
    temperature: float
    policy_version: int
    example_id: str
    turn_versions: list[int] = []


class TrainingBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All samples of update number `step` of one run.

    `sampler_state` is where the orchestrator's example sampler stands after this batch, so an orchestrator that starts
    again continues at the next example from the newest batch file alone.
    """

    run_id: str
    step: int
    samples: list[TrainingSample]
    sampler_state: dict[str, Any]
    version: int = BATCH_FORMAT_VERSION


class MicroBatch(msgspec.Struct, frozen=True):
    """One forward/backward pass: R rows of T tokens, one sample a row, padded at the right, rows sorted by `run_idx`.

    Attributes:
        run_idxs: R slot numbers, ascending.
        token_ids, loss_mask, logprobs: R lists of at most T entries; `num_tokens` is T, the length to pad to.
        advantages, temperatures: R numbers.
        loss_scales: R numbers, what makes the sum over the loss tokens of a row its share of the mean over that run's
            whole batch, so the loss of a run does not depend on its neighbours or on how its batch was split.
        base_pass: the base model alone is asked first, for rows whose loss compares with it. Equal on all ranks of a
            pack: ranks that share a model go through it together.
    """

    run_idxs: list[int]
    token_ids: list[list[int]]
    loss_mask: list[list[bool]]
    logprobs: list[list[float]]
    advantages: list[float]
    temperatures: list[float]
    loss_scales: list[float]
    num_tokens: int
    base_pass: bool = False


def oldest_allowed(step: int, max_async_level: int) -> int:
    """The oldest policy version that any token of batch `step` (from 1) may come from; the newest is `step` - 1.

    The orchestrator keeps to it, the trainer checks it.
    """
    return max(0, step - 1 - max_async_level)


_batch_encoder = msgspec.msgpack.Encoder()
_batch_decoder = msgspec.msgpack.Decoder(TrainingBatch)
_sample_decoder = msgspec.msgpack.Decoder(TrainingSample)


class BadBatchError(ValueError):
    """An invalid batch file; the message has the file and the reason."""


class _RawSamples(msgspec.Struct):
    """A batch of which only the samples matter, undecoded."""

    samples: list[msgspec.Raw]


def write_batch(path: Path, batch: TrainingBatch) -> None:
    """Write a batch file. Its appearance under its final name is the signal to the trainer.

    Raises FileExistsError when another batch is there already. The same bytes are accepted: they were written before.
    """
    data = _batch_encoder.encode(batch)
    try:
        write_atomic(path, data, exclusive=True)
    except FileExistsError:
        if path.read_bytes() != data:
            raise


def max_batch_bytes(batch_size: int, seq_len: int) -> int:
    """How large the batch file of a run with these settings may be."""
    return min(MAX_BATCH_BYTES, BYTES_BESIDES + batch_size * (BYTES_A_SAMPLE + seq_len * BYTES_A_TOKEN))


def read_batch(path: Path, *, limit: int = MAX_BATCH_BYTES) -> TrainingBatch:
    """Read a batch file of at most `limit` bytes. Raises BadBatchError when it is not one, else OSError."""
    try:
        return decode_batch(read_file(path, limit=limit), str(path))
    except FileRefused as error:
        raise BadBatchError(str(error)) from error


def decode_batch(data: bytes, source: str) -> TrainingBatch:
    """The content of a batch file; `source` names it in messages. Raises BadBatchError when it is invalid."""
    try:
        batch = _batch_decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadBatchError(f"{source}: not a batch file: {_bad_sample(data) or error}") from error
    if batch.version != BATCH_FORMAT_VERSION:
        raise BadBatchError(f"{source}: format version {batch.version}, this program reads {BATCH_FORMAT_VERSION}")
    return batch


def _bad_sample(data: bytes) -> str | None:
    """The first sample that cannot be decoded, by its number, and why; None when the fault lies elsewhere.

    msgspec names the field and not the place in the list.
    """
    try:
        for index, raw in enumerate(msgspec.msgpack.decode(data, type=_RawSamples).samples):
            try:
                _sample_decoder.decode(raw)
            except (msgspec.MsgspecError, RecursionError) as error:
                return f"sample {index}: {error}"
    except (msgspec.MsgspecError, RecursionError):
        pass
    return None
