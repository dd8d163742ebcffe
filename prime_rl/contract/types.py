"""The wire types between orchestrator and trainer, and between trainer ranks. Encoded as msgpack, never pickled.

A `TrainingBatch` is what one orchestrator hands over for one optimizer update of its run. `BatchColumns` is the same
with the tokens of each sample as the bytes of arrays, so that the trainer needs no loop over tokens; a batch file has
one or the other. A `MicroBatch` is what rank 0 of the trainer hands to a rank for one forward/backward pass. Nothing
here checks a sample against a model; `trainer.batches` does.

A rank file has a rank's part of an iteration's rollouts: one finished task a frame, appended as it is done. A frame is
length and checksum (two big-endian 32-bit numbers), then msgpack. What a killed writer left of its last frame is
ignored by readers and cut off by the next writer, so every task that was acknowledged counts and no other. One writer a
file. What a node asks of the rollout workers on its machine, and what comes of an evaluation, is JSON beside these
files, which `prime_rl.orchestrator.share` reads. A task is a number as text: the index of a group in the run's example
order, or of an example of the evaluation.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

import msgspec

from prime_rl.contract.files import UNDECODABLE, FileRefused, open_append, open_file, read_file, write_atomic

# Version 1 has lists (`TrainingBatch`), version 2 bytes (`BatchColumns`), version 3 rollouts of several samples
# (`rollout_id`) as well. All are read, version 3 is written.
LISTS_VERSION = 1
BYTES_VERSION = 2
BATCH_FORMAT_VERSION = 3
# A rollout has at most so many samples.
MAX_BRANCHES = 256
# The columns of a sample: four bytes for an id, a logprob and an advantage, one for a flag. By the names of numpy.
TOKEN_DTYPE, MASK_DTYPE, LOGPROB_DTYPE, ADVANTAGE_DTYPE = "<i4", "|u1", "<f4", "<f4"
TOKEN_BYTES = 4
# Of one loss token; inference servers tell the likeliest 20. Each is an id and a probability.
MAX_SOFT_TARGETS, SOFT_TARGET_BYTES = 20, 2 * TOKEN_BYTES
# No batch file is larger: 2,500 samples of 32,768 tokens take about this much. The trainer has two of a run in memory,
# and one that it decodes twice.
MAX_BATCH_BYTES = 1 << 30
# In version 1 a token is an id (5 bytes), a flag (1), a logprob and an advantage (9 each), in version 2 at most 13
# bytes; a sample has names and numbers too, a batch the state of the example sampler.
BYTES_A_TOKEN = 24
COLUMN_BYTES_A_TOKEN = 13
BYTES_A_SAMPLE = 4 << 10
BYTES_BESIDES = 1 << 20

# What a run learns from: rewards, texts, a teacher.
Kind = Literal["rl", "sft", "distill"]

# A sample is what the policy sampled (""), or a text of somebody else: learned by its cross-entropy, or only measured.
Use = Literal["", "supervised", "held_out"]
HELD_OUT: Use = "held_out"
USES: tuple[Use, ...] = get_args(Use)

OneT = TypeVar("OneT")
OtherT = TypeVar("OtherT")
# As it decodes: files of version 1 have none, whose empty lists take sixty times as much memory as of the file.
ByToken = Annotated[list[list[OneT]], msgspec.Meta(max_length=0)]


class TrainingSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rollout, or a branch of one, as the trainer sees it. The lists over T (its tokens) have equal length.

    Attributes:
        token_ids: T ids, prompt first.
        loss_mask: T flags; true where the policy sampled the token, so prompts and tool outputs are false. Of a text
            that the policy did not sample: true where it is to be learned, or measured.
        logprobs: T log-probabilities under the policy that sampled (mu); 0.0 where `loss_mask` is false, and in a text
            that it did not sample.
        advantage: one number for all loss tokens of the sample; their mean where each has its own. Of a supervised one
            its weight.
        reward: as the environment gave it, for reports only.
        temperature: what the logits were divided by when sampling.
        policy_version: the oldest policy version that any token of the sample came from.
        example_id: which example of which environment, e.g. "reverse-text/17".
        turn_versions: the policy version of each turn; [] where it was not recorded.
        token_advantages: T numbers that stand in for `advantage`, 0.0 where `loss_mask` is false; [] without them.
        rollout_id: samples behind each other with the same one are branches of one rollout; "": it is a rollout alone.
        use: "supervised" or "held_out" for a text that the policy did not sample.
        turn_rewards: of each turn in `turn_versions` the reward that was posted for it alone, None without one; []
            where none was. For reports only: `reward` is that of the whole, their sum where no other was given.
        soft_ids, soft_probs: in place of the token at T, what a teacher would have there: 1 to MAX_SOFT_TARGETS ids and
            their probabilities, [] where `loss_mask` is false; or both []. Of a supervised text alone.
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
    token_advantages: list[float] = []
    rollout_id: str = ""
    turn_rewards: list[float | None] = []
    use: Use = ""
    soft_ids: ByToken[int] = []
    soft_probs: ByToken[float] = []

    def columns(self) -> SampleColumns:
        """Logprobs, advantages and probabilities are rounded to float32.

        Raises ValueError with field and number when one has no place in 32 bits, or is not in its place.
        """
        ids, probs = _of_loss_tokens(self)
        columns = {
            "token_ids": _packed("token_ids", "i", self.token_ids),
            "loss_mask": bytes(self.loss_mask),
            "logprobs": _packed("logprobs", "f", self.logprobs),
            "token_advantages": _packed("token_advantages", "f", self.token_advantages),
            "soft_ids": _packed("soft_ids", "i", ids),
            "soft_probs": _packed("soft_probs", "f", probs),
        }
        return SampleColumns(**{**msgspec.structs.asdict(self), **columns})


class SampleColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A `TrainingSample` whose lists over T are arrays, as bytes; the other fields are the same, in the same order.

    A field at its default is left out of the file.

    Attributes:
        token_ids: T little-endian int32 (`TOKEN_DTYPE`).
        loss_mask: T bytes, 0 or 1.
        logprobs: T little-endian float32 (`LOGPROB_DTYPE`).
        token_advantages: T little-endian float32 (`ADVANTAGE_DTYPE`), or none.
        soft_ids, soft_probs: as many little-endian int32 and float32 for each loss token, or none. A token that has
            fewer than another of the sample is filled up with probabilities of 0.
    """

    token_ids: bytes
    loss_mask: bytes
    logprobs: bytes
    advantage: float
    reward: float
    temperature: float
    policy_version: int
    example_id: str
    turn_versions: list[int] = []
    token_advantages: bytes = b""
    rollout_id: str = ""
    turn_rewards: list[float | None] = []
    use: Use = ""
    soft_ids: bytes = b""
    soft_probs: bytes = b""

    def lists(self) -> TrainingSample:
        """Raises ValueError when the bytes are not whole numbers, or not as many for each loss token."""
        columns = {
            "token_ids": _unpacked("token_ids", "i", self.token_ids),
            "loss_mask": list(map(bool, self.loss_mask)),
            "logprobs": _unpacked("logprobs", "f", self.logprobs),
            "token_advantages": _unpacked("token_advantages", "f", self.token_advantages),
            "soft_ids": _by_token("soft_ids", "i", self.soft_ids, self.loss_mask),
            "soft_probs": _by_token("soft_probs", "f", self.soft_probs, self.loss_mask),
        }
        return TrainingSample(**{**msgspec.structs.asdict(self), **columns})


class TrainingBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All samples of update number `step` of one run.

    `sampler_state` is where the orchestrator's example sampler stands after this batch, so an orchestrator that starts
    again continues at the next example from the newest batch file alone.
    """

    run_id: str
    step: int
    samples: list[TrainingSample]
    sampler_state: dict[str, Any]
    version: int = LISTS_VERSION

    def columns(self) -> BatchColumns:
        """Raises ValueError with sample, field and number when a number has no place in 32 bits."""
        samples = _each(TrainingSample.columns, self.samples)
        return BatchColumns(self.run_id, self.step, samples, self.sampler_state)


class BatchColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `TrainingBatch` as it is written: with the columns of its samples."""

    run_id: str
    step: int
    samples: list[SampleColumns]
    sampler_state: dict[str, Any]
    version: int = BATCH_FORMAT_VERSION

    def lists(self) -> TrainingBatch:
        """Raises ValueError with sample and field when bytes are not whole numbers."""
        return TrainingBatch(self.run_id, self.step, _each(SampleColumns.lists, self.samples), self.sampler_state)


class MicroBatch(msgspec.Struct, frozen=True):
    """One forward/backward pass: R rows of T tokens, one sample a row, padded at the right, rows sorted by `run_idx`.

    Attributes:
        run_idxs: R slot numbers, ascending.
        token_ids, loss_mask, logprobs: R columns (see `SampleColumns`) of at most T entries; `num_tokens` is T, the
            length to pad to.
        advantages, temperatures: R numbers.
        loss_scales: R numbers, what makes the sum over the loss tokens of a row its share of the mean over that run's
            whole batch, so the loss of a run does not depend on its neighbours or on how its batch was split.
        base_pass: the base model alone is asked first, for rows whose loss compares with it. Equal on all ranks of a
            pack: ranks that share a model go through it together.
        kept: R numbers: which of its run's kept samples a row is (`ReadyRun.kept`), -1 for all others; [] for none.
        token_advantages: R columns that stand in for the number in `advantages`, empty for a row that has none; [] when
            that is so for all rows.
        shared: R numbers: of a row's first positions, how many are those of the row before it, and are computed there;
            [] where no row shares any.
        uses: R words (`TrainingSample.use`); [] where the policy sampled all rows.
        soft_ids, soft_probs: R columns, empty for a row that has none; [] when that is so for all rows.
    """

    run_idxs: list[int]
    token_ids: list[bytes]
    loss_mask: list[bytes]
    logprobs: list[bytes]
    advantages: list[float]
    temperatures: list[float]
    loss_scales: list[float]
    num_tokens: int
    base_pass: bool = False
    kept: list[int] = []
    token_advantages: list[bytes] = []
    shared: list[int] = []
    uses: list[Use] = []
    soft_ids: list[bytes] = []
    soft_probs: list[bytes] = []


def rollouts_of(samples: Sequence[TrainingSample | SampleColumns]) -> list[list[int]]:
    """The places of the samples of each rollout, in their order."""
    found: list[list[int]] = []
    before = ""
    for place, sample in enumerate(samples):
        if sample.rollout_id and sample.rollout_id == before:
            found[-1].append(place)
        else:
            found.append([place])
        before = sample.rollout_id
    return found


def oldest_allowed(step: int, max_async_level: int) -> int:
    """The oldest policy version that any token of batch `step` (from 1) may come from; the newest is `step` - 1.

    The orchestrator keeps to it, the trainer checks it.
    """
    return max(0, step - 1 - max_async_level)


class BadBatchError(ValueError):
    """An invalid batch file; the message has the file and the reason."""


class _Head(msgspec.Struct):
    """The fields that decode a batch file."""

    version: int = LISTS_VERSION


class _Samples(msgspec.Struct, Generic[OneT], frozen=True, forbid_unknown_fields=True):
    """A batch without the state of the sampler, whose empty lists take sixty times as much memory as of the file."""

    run_id: str
    step: int
    samples: list[OneT]
    sampler_state: msgspec.Raw
    version: int = LISTS_VERSION


class _RawSamples(msgspec.Struct):
    """A batch of which only the samples matter, undecoded."""

    samples: list[msgspec.Raw]


_encoder = msgspec.msgpack.Encoder()
_head_decoder = msgspec.msgpack.Decoder(_Head)
_BATCH_TYPES: dict[int, type[TrainingBatch | BatchColumns]] = {
    LISTS_VERSION: TrainingBatch,
    BYTES_VERSION: BatchColumns,
    BATCH_FORMAT_VERSION: BatchColumns,
}
_SAMPLES_TYPES: dict[int, Any] = {
    LISTS_VERSION: _Samples[TrainingSample],
    BYTES_VERSION: _Samples[SampleColumns],
    BATCH_FORMAT_VERSION: _Samples[SampleColumns],
}


def write_batch(path: Path, batch: TrainingBatch) -> None:
    """Write a batch file. Its appearance under its final name is the signal to the trainer.

    Raises FileExistsError when another batch is there already (the same bytes are accepted: they were written before),
    ValueError when a number has no place in 32 bits.
    """
    data = _encoder.encode(batch.columns())
    try:
        write_atomic(path, data, exclusive=True)
    except FileExistsError:
        if path.read_bytes() != data:
            raise


def full_batch_bytes(batch_size: int, seq_len: int, num_soft: int = 0) -> int:
    """The size of a batch of a run with these settings, if all of its samples have `seq_len` tokens."""
    return batch_size * sample_bytes(seq_len, num_soft)


def sample_bytes(num_tokens: int, num_soft: int = 0) -> int:
    """The largest size of a sample of so many tokens in a batch file, each with at most `num_soft` soft targets."""
    return BYTES_A_SAMPLE + num_tokens * (COLUMN_BYTES_A_TOKEN + num_soft * SOFT_TARGET_BYTES)


def max_batch_bytes(num_samples: int, seq_len: int, num_soft: int = 0) -> int:
    """The largest size that a batch file of at most `num_samples` of at most `seq_len` tokens may have."""
    a_sample = BYTES_A_SAMPLE + seq_len * (BYTES_A_TOKEN + num_soft * SOFT_TARGET_BYTES)
    return min(MAX_BATCH_BYTES, BYTES_BESIDES + num_samples * a_sample)


def max_rollout_bytes(batch_size: int, max_branches: int, seq_len: int, num_soft: int = 0) -> int:
    """The bytes that the samples of one rollout may take, so that a batch file of `batch_size` of them has its size."""
    room = max_batch_bytes(batch_size * max_branches, seq_len, num_soft) - BYTES_BESIDES
    return max(room // batch_size, sample_bytes(seq_len, num_soft))


def read_batch(path: Path, *, limit: int = MAX_BATCH_BYTES) -> TrainingBatch:
    """Read a batch file of at most `limit` bytes. Raises BadBatchError when it is not one, else OSError."""
    batch: TrainingBatch | BatchColumns = _read(path, limit, _BATCH_TYPES)
    try:
        return batch if isinstance(batch, TrainingBatch) else batch.lists()
    except ValueError as error:
        raise BadBatchError(f"{path}: {error}") from error


def read_columns(path: Path, *, limit: int = MAX_BATCH_BYTES) -> BatchColumns:
    """The same as arrays, whose bytes are unchecked, and without `sampler_state`. Raises as `read_batch` does."""
    batch: _Samples[Any] = _read(path, limit, _SAMPLES_TYPES)
    try:
        samples = batch.samples if batch.version != LISTS_VERSION else _each(TrainingSample.columns, batch.samples)
        return BatchColumns(batch.run_id, batch.step, samples, {})
    except ValueError as error:
        raise BadBatchError(f"{path}: {error}") from error


def _read(path: Path, limit: int, types: Mapping[int, Any]) -> Any:
    """A batch as the file has it, in the one of `types` that is of its version."""
    try:
        data = read_file(path, limit=limit)
    except FileRefused as error:
        raise BadBatchError(str(error)) from error
    version = LISTS_VERSION
    try:
        version = _head_decoder.decode(data).version
        if version not in types:
            known = f"{', '.join(map(str, sorted(types)[:-1]))} and {max(types)}"
            raise BadBatchError(f"{path}: format version {version}, this program reads {known}")
        return msgspec.msgpack.decode(data, type=types[version])
    except UNDECODABLE as error:
        raise BadBatchError(f"{path}: not a batch file: {_bad_sample(data, version) or error}") from error


def _bad_sample(data: bytes, version: int) -> str | None:
    """The first sample that cannot be decoded, by its number, and why; None when the fault lies elsewhere.

    msgspec names the field and not the place in the list.
    """
    try:
        for index, raw in enumerate(msgspec.msgpack.decode(data, type=_RawSamples).samples):
            try:
                msgspec.msgpack.decode(raw, type=TrainingSample if version == LISTS_VERSION else SampleColumns)
            except UNDECODABLE as error:
                return f"sample {index}: {error}"
    except UNDECODABLE:
        pass
    return None


def _each(convert: Callable[[OneT], OtherT], samples: Sequence[OneT]) -> list[OtherT]:
    """All `samples` converted; a ValueError gets the number of its sample."""
    converted = []
    for index, sample in enumerate(samples):
        try:
            converted.append(convert(sample))
        except ValueError as error:
            raise ValueError(f"sample {index}: {error}") from error
    return converted


def _packed(name: str, code: str, values: Sequence[float]) -> bytes:
    """`values` as the bytes of an array; `code` as in `struct`."""
    try:
        return struct.pack(f"<{len(values)}{code}", *values)
    except (struct.error, OverflowError):
        at = next(at for at, value in enumerate(values) if not _has_place(code, value))
        raise ValueError(f"{name}[{at}] is {values[at]}, which has no place in 32 bits") from None


def _has_place(code: str, value: float) -> bool:
    try:
        struct.pack(f"<{code}", value)
    except (struct.error, OverflowError):
        return False
    return True


def _unpacked(name: str, code: str, data: bytes) -> list[Any]:
    if len(data) % TOKEN_BYTES:
        raise ValueError(f"{name} has {len(data)} bytes, expected {TOKEN_BYTES} for each token")
    return list(struct.unpack(f"<{len(data) // TOKEN_BYTES}{code}", data))


def _of_loss_tokens(sample: TrainingSample) -> tuple[list[int], list[float]]:
    """The soft targets of all loss tokens, each filled up to as many as the one that has most."""
    nums = list(map(len, sample.soft_ids))
    if nums != list(map(len, sample.soft_probs)):
        raise ValueError("soft_ids and soft_probs have different lengths")
    if nums and len(nums) != len(sample.loss_mask):
        raise ValueError(f"soft_ids has {len(nums)} entries, expected {len(sample.loss_mask)} or none")
    for at, (num, is_loss) in enumerate(zip(nums, sample.loss_mask, strict=False)):
        if not is_loss <= num <= MAX_SOFT_TARGETS * is_loss:
            raise ValueError(
                f"soft_ids[{at}] has {num} ids, expected 1 to {MAX_SOFT_TARGETS} at a loss token, else none"
            )
    most = max(nums, default=0)
    ids = [each for some in sample.soft_ids if some for each in (some + most * [0])[:most]]
    return ids, [each for some in sample.soft_probs if some for each in (some + most * [0.0])[:most]]


def _by_token(name: str, code: str, data: bytes, loss_mask: bytes) -> list[list[Any]]:
    """Numbers of all loss tokens, for each token its own."""
    if not data:
        return []
    values, num = iter(_unpacked(name, code, data)), len(loss_mask) - loss_mask.count(0)
    if not num or len(data) % (TOKEN_BYTES * num):
        raise ValueError(f"{name} has {len(data)} bytes, expected as many for each of {num} loss tokens")
    return [list(islice(values, len(data) // TOKEN_BYTES // num)) if is_loss else [] for is_loss in loss_mask]


_HEAD = struct.Struct(">II")
# Far above a group of long rollouts; a length beyond it is a damaged head, not a frame.
MAX_FRAME_BYTES = 1 << 30


class RankEntry(msgspec.Struct, frozen=True):
    """One finished task: its name and its encoded result."""

    task: str
    result: bytes


class RankFileWriter:
    """Appends to one rank file; an entry is on disk when `append` returns. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._file = open_append(path)
        whole = sum(_HEAD.size + len(payload) for payload in _payloads(path))
        self._file.truncate(whole)

    def append(self, entry: RankEntry) -> None:
        """Write one frame and wait until it is on disk."""
        payload = msgspec.msgpack.encode(entry)
        self._file.write(_HEAD.pack(len(payload), zlib.crc32(payload)) + payload)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_rank_file(path: Path) -> Iterator[RankEntry]:
    """The whole entries of a rank file, in the order of writing; none without a file."""
    for payload in _payloads(path):
        yield msgspec.msgpack.decode(payload, type=RankEntry)


def _payloads(path: Path) -> Iterator[bytes]:
    try:
        fd = open_file(path)
    except FileNotFoundError:
        return
    with os.fdopen(fd, "rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            size, checksum = _HEAD.unpack(head)
            left = os.fstat(fd).st_size - file.tell()
            payload = file.read(size) if size <= min(left, MAX_FRAME_BYTES) else b""
            if len(payload) != size or zlib.crc32(payload) != checksum:
                return
            yield payload


Split = Literal["train", "eval"]


class MakeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Make `tasks` with `policy_version`, served at `base_url`, into `rank_file`. `run` is the run's folder.

    `sampler_state` is that of the last batch before: what is known of the examples, the same on every node.
    """

    run: str
    base_url: str
    policy_version: int
    seq_len: int
    split: Split
    tasks: list[str]
    rank_file: str
    sampler_state: dict[str, Any] = {}


class JoinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Join the tasks, each from the rank file named for it: into batch files, or into the mean of an evaluation.

    `steps` are the updates that the groups feed, in equal parts and in order; of an evaluation the one policy version.
    `sampler_state` is the one that the groups were drawn with.
    """

    run: str
    split: Split
    sources: dict[str, str]
    steps: list[int]
    result: str
    sampler_state: dict[str, Any] = {}


class JoinResult(msgspec.Struct, frozen=True, kw_only=True):
    """The joined rollouts: their number, and the mean reward of each step, or of each environment.

    `steps` are those of the request, `sampler_state` is that of the last batch.
    """

    rewards: dict[str, float]
    num_rollouts: int
    steps: list[int]
    sampler_state: dict[str, Any] = {}
