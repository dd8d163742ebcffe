"""`metrics/samples.jsonl`: some of a run's newest rollouts as text, for people. One writer, bounded, append-only.

The text comes from environment and policy, so it is untrusted: stored as it is (JSON in ASCII), cleaned by the program
that shows it (`utils.text.clean_strings`). A reader sees whole lines only; when the file gets too long the writer
replaces it with one that has the newest lines.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from prime_rl.contract.files import append_line, read_end, write_atomic

# However long the texts are that a run asks to keep.
MAX_FILE_BYTES = 16_000_000


class SampleTurn(msgspec.Struct, frozen=True):
    """One message of the policy or the environment. It may be cut in its middle."""

    by_policy: bool
    text: str


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rollout. `prompt` and `completion` may be cut in their middle; `num_tokens` counts the whole sequence.

    Attributes:
        step: the batch that it is in.
        policy_versions: those that its turns were sampled from, each once, ascending.
        num_completion_tokens: what the policy sampled, over all turns.
        turns: after the prompt, when the policy spoke more than once; else empty.
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


class SampleFile:
    """The one writer of a samples file, which holds the newest `keep` to 2 x `keep` samples. Raises OSError."""

    def __init__(self, path: Path, keep: int, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._path = path
        self._keep = keep
        self._max_bytes = max_bytes
        self._num_lines: int | None = None  # not counted yet

    def append(self, samples: list[Sample]) -> None:
        """Add samples, the newest last; then drop old ones if there are too many."""
        if not samples:
            return
        if self._num_lines is None:
            self._num_lines = len(_tail_lines(self._path, self._max_bytes))
        for sample in samples:
            append_line(self._path, json.dumps(msgspec.to_builtins(sample)))
        self._num_lines += len(samples)
        if self._num_lines > 2 * self._keep or self._path.stat().st_size > self._max_bytes:
            lines = _tail_lines(self._path, self._max_bytes // 2)[-self._keep :]
            write_atomic(self._path, b"".join(line + b"\n" for line in lines))
            self._num_lines = len(lines)


def read_samples(path: Path, limit: int) -> list[Sample]:
    """The newest `limit` samples, the newest last. Invalid lines are skipped; [] when the file is missing."""
    samples: list[Sample] = []
    for line in reversed(_tail_lines(path, MAX_FILE_BYTES)):
        if len(samples) == limit:
            break
        try:
            samples.append(msgspec.json.decode(line, type=Sample))
        except (msgspec.MsgspecError, RecursionError):
            continue
    return samples[::-1]


def _tail_lines(path: Path, max_bytes: int) -> list[bytes]:
    """The whole lines within the last `max_bytes` of a file; [] when it is not there."""
    data = read_end(path, max_bytes + 1)
    *lines, _unfinished = data.split(b"\n")
    return lines[1:] if len(data) > max_bytes else lines
