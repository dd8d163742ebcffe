"""Some of a run's newest rollouts, for people: whole groups with their tokens, and every reward of a batch.

The orchestrator writes `metrics/samples.jsonl`: of each batch a line with all rewards, then a line for each rollout of
the kept groups. The trainer writes `metrics/ratios.jsonl`: of each update, the log-ratios of the tokens that are kept.
`Keeping` decides for both which those are, from the batch alone. Both files are bounded and have one writer.

The text comes from environment and policy, so it is untrusted: stored as it is (JSON in ASCII), cleaned by the program
that shows it (`utils.text.clean_strings`). A reader sees whole lines only; when a file gets too long its writer
replaces it with one that has the newest lines.

An evaluation that a person asks for is in `evaluations/NAME`: what is evaluated, each rollout, and the figures. `prl
eval` writes `job.json`, and starts `prime_rl.orchestrator.eval_job`, which appends a rollout a line to `samples.jsonl`
and prints `EvalProgress` and `EvalResult`, one line of JSON each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.contract.files import UNDECODABLE, append_line, read_end, write_atomic
from prime_rl.contract.types import HELD_OUT, SampleColumns, TrainingSample, rollouts_of
from prime_rl.utils.text import clean_strings, one_line

# However long the texts are that a run asks to keep.
MAX_FILE_BYTES = 16_000_000
# Tokens kept of one rollout, and of all of a batch: each becomes text in the orchestrator's one thread (microseconds).
MAX_TOKENS = 512
MAX_BATCH_TOKENS = 16_384
MIN_TOKENS = 32
# Of one rollout.
MAX_KEPT_BRANCHES = 8
# How the first line of a batch begins.
_BATCH_START = b'{"rewards"'


@dataclass(frozen=True)
class Keeping:
    """The rollouts of a batch that are kept, by their place in it, and their tokens that are.

    Attributes:
        per_step: about so many rollouts; 0: none.
        group_size: rollouts of one example; the whole group is kept or nothing of it.
    """

    per_step: int
    group_size: int

    def places(self, rewards: Sequence[float]) -> list[int]:
        """Of groups evenly from the lowest mean reward to the highest; of one alone, that whose rewards differ most."""
        size, num_wanted = self.group_size, self.per_step // self.group_size
        groups = [rewards[start : start + size] for start in range(0, len(rewards), size)]
        if not self.per_step or not groups:
            return []
        if num_wanted <= 1:
            chosen = [max(range(len(groups)), key=lambda number: max(groups[number]) - min(groups[number]))]
        else:
            chosen = sorted(spread([sum(group) / len(group) for group in groups], num_wanted))
        return [number * size + at for number in chosen for at in range(len(groups[number]))]

    def samples(self, samples: Sequence[TrainingSample | SampleColumns]) -> list[int]:
        """The places of the samples of a batch that are kept: of the kept rollouts the first MAX_KEPT_BRANCHES.

        Texts are kept in a batch without rollouts alone, and none of those that are measured on.
        """
        use = min((each.use for each in samples if each.use != HELD_OUT), default="")
        rollouts = [places for places in rollouts_of(samples) if samples[places[0]].use == use]
        chosen = self.places([samples[places[0]].reward for places in rollouts])
        return [place for number in chosen for place in rollouts[number][:MAX_KEPT_BRANCHES]]

    @property
    def max_tokens(self) -> int:
        """Of one sample."""
        return max(MIN_TOKENS, min(MAX_TOKENS, MAX_BATCH_TOKENS // max(self.per_step, self.group_size)))

    def positions(self, loss_mask: bytes) -> list[int]:
        """From the first token that the policy sampled to the last; of more than `max_tokens`, their two ends."""
        start, end = loss_mask.find(1), loss_mask.rfind(1) + 1
        if start < 0 or end - start <= self.max_tokens:
            return list(range(max(start, 0), end))
        head = self.max_tokens // 2
        return [*range(start, start + head), *range(end - (self.max_tokens - head), end)]


class SampleTurn(msgspec.Struct, frozen=True):
    """One message of the policy or the environment. It may be cut in its middle."""

    by_policy: bool
    text: str


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rollout, or one of its branches. `prompt` and `completion` may be cut in their middle.

    Attributes:
        step: the batch that it is in.
        policy_versions: those that its turns were sampled from, each once, ascending.
        num_tokens: of the whole sequence.
        num_completion_tokens: what the policy sampled, over all turns; of branches each token counts in one.
        turns: after the prompt, when the policy spoke more than once; else empty.
        place: in its batch; -1 in files of an earlier version, which have no whole groups.
        group: which example of its batch; -1 likewise.
        branch, num_branches: which of the branches of its rollout it is, from 0, and how many there are.
        num_shared: tokens with which the branch `shared_with` begins as well; `prompt` has what follows them.
        output: the end of what an agent's program printed; it may be cut in its middle.
        turn_rewards: of each turn of the policy (the completion, where `turns` is empty) the reward that was posted for
            it alone, None without one; [] where none was.
    """

    step: int
    env: str
    example_id: str
    prompt: str
    completion: str
    reward: float
    advantage: float
    policy_versions: list[int]
    num_tokens: int
    num_completion_tokens: int
    turns: list[SampleTurn] = []
    place: int = -1
    group: int = -1
    branch: int = 0
    num_branches: int = 1
    num_shared: int = 0
    shared_with: int = 0
    output: str = ""
    turn_rewards: list[float | None] = []

    def said(self) -> list[tuple[SampleTurn, float | None]]:
        """The turns after the prompt, at least one, each with the reward that was posted for it."""
        rewards = iter(self.turn_rewards)
        turns = self.turns or [SampleTurn(True, self.completion)]
        return [(turn, next(rewards, None) if turn.by_policy else None) for turn in turns]


class SampleTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens of a rollout after its prompt, as `Keeping.positions` chooses them.

    Attributes:
        pieces: their texts; that of a character in several tokens stands at the last of them.
        logprobs: under the policy that sampled; None for a token of the environment.
        num_left_out: in the middle, after the first half of `pieces`.
        advantages: those of the tokens where the environment gave them, else [].
    """

    pieces: list[str]
    logprobs: list[float | None]
    num_left_out: int = 0
    advantages: list[float] = []


class TokenSample(Sample, frozen=True, omit_defaults=True):
    """A rollout with its tokens."""

    tokens: SampleTokens | None = None


class KeptSample(TokenSample, frozen=True, omit_defaults=True):
    """A rollout as it is kept: also what was said, to be learned again.

    Attributes:
        messages: of a branch, all of them, and its `tools`, both in OpenAI's form; [] where they are too long, where
            the policy was asked without messages, or where it did not say all that the assistant says in them.
        ended: the policy ended each of its turns itself, with the model's own token.
    """

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    ended: bool = False


class BatchRewards(msgspec.Struct, frozen=True):
    """The rewards of all rollouts of a batch, by place."""

    rewards: list[float]
    step: int


class BatchRatios(msgspec.Struct, frozen=True):
    """log(pi / mu) of the kept tokens that the policy sampled, by the place of their sample; None: not finite."""

    step: int
    ratios: dict[int, list[float | None]]


class LineFile:
    """The one writer of a bounded file, which holds the newest `keep` to 2 x `keep` lines. Raises OSError.

    Args:
        start: how a line begins with which the file may begin.
    """

    def __init__(self, path: Path, keep: int, max_bytes: int = MAX_FILE_BYTES, start: bytes = b"") -> None:
        self._path = path
        self._keep = keep
        self._max_bytes = max_bytes
        self._start = start
        self._num_lines: int | None = None  # not counted yet

    def append(self, lines: Sequence[str]) -> None:
        """Add lines, the newest last; then drop old ones if there are too many."""
        if not lines:
            return
        if self._num_lines is None:
            self._num_lines = len(_tail_lines(self._path, self._max_bytes))
        append_line(self._path, "\n".join(lines))
        self._num_lines += len(lines)
        if self._num_lines > 2 * self._keep or self._path.stat().st_size > self._max_bytes:
            kept = _tail_lines(self._path, self._max_bytes // 2)[-self._keep :]
            first = next((at for at, line in enumerate(kept) if line.startswith(self._start)), 0)
            write_atomic(self._path, b"".join(line + b"\n" for line in kept[first:]))
            self._num_lines = len(kept) - first


class SampleFile:
    """The one writer of a samples file: about `keep` to 2 x `keep` lines of whole batches. Raises OSError."""

    def __init__(self, path: Path, keep: int, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._lines = LineFile(path, keep, max_bytes, start=_BATCH_START)

    def append(self, records: Sequence[BatchRewards | Sample]) -> None:
        """A batch: its rewards, then its kept rollouts."""
        self._lines.append([json.dumps(msgspec.to_builtins(each)) for each in records])


class RatioFile:
    """The one writer of a file of ratios, one line an update. Raises OSError."""

    def __init__(self, path: Path, keep: int, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._lines = LineFile(path, keep, max_bytes)

    def append(self, ratios: BatchRatios) -> None:
        """Add the line of one update."""
        self._lines.append([msgspec.json.encode(ratios).decode()])


def read_samples(path: Path, limit: int) -> list[Sample]:
    """The samples of the newest `limit` rollouts, without tokens, the newest last. Invalid lines are skipped.

    What was sampled before the run was rolled back to an earlier step is left out. [] without a file.
    """
    samples = (each for each in _newest_first(path, Sample) if isinstance(each, Sample))
    found: list[Sample] = []
    for sample in islice(samples, limit * MAX_KEPT_BRANCHES):
        found.append(sample)
        limit -= sample.branch == 0  # the last of its rollout to be read
        if limit <= 0:
            break
    return found[::-1]


def read_kept(path: Path) -> list[list[KeptSample]]:
    """All rollouts of a samples file, the newest last, each with its branches that are kept; as `read_samples`."""
    found: dict[tuple[int, int], list[KeptSample]] = {}
    for each in _newest_first(path, KeptSample):
        if isinstance(each, KeptSample):
            found.setdefault((each.step, each.place - each.branch), []).insert(0, each)
    return list(found.values())[::-1]


def clean_sample(sample: Sample) -> Sample:
    """`sample` with all its text clean, its names on one line."""
    names = {"env": one_line(sample.env), "example_id": one_line(sample.example_id)}
    return msgspec.structs.replace(clean_strings(sample), **names)


@dataclass(frozen=True)
class Batch:
    """All that is kept of one batch.

    Attributes:
        rewards: of all its rollouts; () in a file of an earlier version.
        samples: the kept rollouts in the order of their places.
        ratios: by place; {} until the trainer has updated the run.
    """

    step: int
    rewards: Sequence[float]
    samples: Sequence[TokenSample]
    ratios: dict[int, list[float | None]]


def read_rewards(path: Path, limit: int) -> dict[int, list[float]]:
    """All rewards of the newest batches by step, ascending: of so many batches that it is about `limit` rewards."""
    found: dict[int, list[float]] = {}
    for each in _newest_first(path, None):
        if isinstance(each, BatchRewards):
            found[each.step] = each.rewards
            limit -= len(each.rewards)
            if limit <= 0:
                break
    return dict(sorted(found.items()))


def read_batches(samples: Path, ratios: Path, limit: int, step: int | None = None) -> list[Batch]:
    """The newest `limit` batches, the newest last, or that of `step` alone.

    Text is not cleaned yet. Raises OSError for what is not a file.
    """
    rewards: dict[int, list[float]] = {}
    rollouts: dict[int, list[TokenSample]] = {}
    for each in _newest_first(samples, TokenSample, step):
        if each.step not in rollouts and len(rollouts) == limit:
            break
        same = rollouts.setdefault(each.step, [])
        if isinstance(each, BatchRewards):
            rewards[each.step] = each.rewards
        elif isinstance(each, TokenSample):
            same.insert(0, each)
    by_step = read_ratios(ratios, step) if rollouts else {}
    return [
        Batch(step, tuple(rewards.get(step, ())), tuple(rollouts[step]), by_step.get(step, {}))
        for step in sorted(rollouts)
    ]


def read_ratios(path: Path, step: int | None = None) -> dict[int, dict[int, list[float | None]]]:
    """By step and place, or of `step` alone; of a step that was trained on again, the newest."""
    found: dict[int, dict[int, list[float | None]]] = {}
    for line in _tail_lines(path, MAX_FILE_BYTES):
        try:
            if step is not None and msgspec.json.decode(line, type=_OfStep).step != step:
                continue
            batch = msgspec.json.decode(line, type=BatchRatios)
        except UNDECODABLE:
            continue
        found[batch.step] = batch.ratios
    return found


def token_ratios(tokens: SampleTokens, ratios: Sequence[float | None]) -> list[float | None]:
    """The log-ratio of each of `tokens`; None for a token without one."""
    left = iter(ratios)
    return [None if logprob is None else next(left, None) for logprob in tokens.logprobs]


class _OfStep(msgspec.Struct):
    """The fields that every line has."""

    step: int


def _newest_first(path: Path, kind: type[Sample] | None, step: int | None = None) -> Iterator[Sample | BatchRewards]:
    """The records of a samples file but those of steps that a later batch made again.

    Args:
        kind: of the rollouts; None: only the rewards.
        step: only rollouts of this one.
    """
    upto = math.inf
    for line in reversed(_tail_lines(path, MAX_FILE_BYTES)):
        is_start = line.startswith(_BATCH_START)
        try:
            found: Sample | BatchRewards
            if is_start:
                found = msgspec.json.decode(line, type=BatchRewards)
            elif kind is None or (step is not None and msgspec.json.decode(line, type=_OfStep).step != step):
                continue
            else:
                found = msgspec.json.decode(line, type=kind)
        except UNDECODABLE:
            continue
        if found.step < upto and (step is None or found.step == step):
            yield found
        if is_start:
            upto = min(upto, found.step)


def spread(values: Sequence[float], count: int) -> list[int]:
    """The places of `count` values, evenly from the lowest to the highest; of one alone, the highest."""
    order = sorted(range(len(values)), key=lambda place: (values[place], place))
    last, count = len(order) - 1, min(count, len(order))
    if count <= 1:
        return order[-1:] * count
    return [order[round(number * last / (count - 1))] for number in range(count)]


def _tail_lines(path: Path, max_bytes: int) -> list[bytes]:
    """The whole lines within the last `max_bytes` of a file; [] when it is not there."""
    data = read_end(path, max_bytes + 1)
    *lines, _unfinished = data.split(b"\n")
    return lines[1:] if len(data) > max_bytes else lines


JOB_FILE, SAMPLES_FILE = "job.json", "samples.jsonl"


class EvalJob(msgspec.Struct, frozen=True):
    """`targets`: by their names for people, the folder of the adapter below `evaluations/`; None: the base model.

    `config`: a run's, whose `[eval]` and environments are used. `source`: the file it comes from; what its environments
    name is beside that.
    """

    targets: dict[str, str | None]
    config: dict[str, Any]
    source: str


class EvalProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Rollouts made and failed of `total`. `waiting_on`: what holds them up, None when nothing does."""

    target: str
    done: int
    total: int
    waiting_on: str | None = None


class EvalResult(msgspec.Struct, frozen=True, tag="result"):
    """The figures of one target in one environment, without the prefix `eval/ENV/`; `problem`: why one failed."""

    target: str
    env: str
    num_examples: int = 0
    num_rollouts: int = 0
    num_failed: int = 0
    figures: dict[str, float] = {}
    problem: str | None = None


class EvalSample(msgspec.Struct, frozen=True):
    """One rollout; `number` counts those of its example. Its texts are untrusted: of environment and policy."""

    target: str
    env: str
    example_id: str
    number: int
    reward: float
    prompt: str
    completion: str
    num_completion_tokens: int
    truncated: bool
    metrics: dict[str, float] = {}
