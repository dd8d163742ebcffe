"""Usage of runs: lines of `usage/<run_id>.jsonl` (by the run's orchestrator) and `usage/trainer.jsonl`.

Counters are cumulative over one day (UTC) of one life of one run: of lines with the same key only the last one counts.
So a writer that is killed loses what it had not written yet and nothing is counted twice. A file that has grown is
rewritten with its last lines only. A life ends when the run is deleted and another one gets its id; going back to a
checkpoint ends none.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from prime_rl.contract.files import UNDECODABLE, append_line, closing, open_file, read_file, write_atomic
from prime_rl.contract.layout import RunDir

logger = logging.getLogger(__name__)

USAGE_VERSION = 1
# A file is rewritten when it has grown to this, and to twice what it had after that: some thousand steps of one run.
COMPACT_BYTES = 256_000
# No file of ours is larger, unless it was not written by us.
MAX_USAGE_BYTES = 64_000_000
_LIFE_BYTES = 64
Key = tuple[str, str, str]


class UsageLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line. `day` is a UTC date; `life` tells runs apart that had the same id one after another.

    `tokens`: sampled, evaluations included. `inference_s`: the durations of all requests together, `work_s`: the
    orchestrator at work. `trained_tokens` (of the samples of its updates), `computed_tokens` (positions of its passes)
    and `trainer_s` are the trainer's. `judge_*`: tokens that judges read and wrote; what the base model wrote as one is
    in `tokens` too. `teacher_tokens`: tokens that teachers read.
    """

    version: int = USAGE_VERSION
    run_id: str
    day: str
    life: str = ""
    time: float = 0.0
    step: int = 0
    tokens: int = 0
    inference_s: float = 0.0
    work_s: float = 0.0
    judge_prompt_tokens: int = 0
    judge_completion_tokens: int = 0
    teacher_tokens: int = 0
    trained_tokens: int = 0
    computed_tokens: int = 0
    trainer_s: float = 0.0
    tags: list[str] = []

    @property
    def key(self) -> Key:
        """(run_id, life, day); of lines with the same key only the last one counts."""
        return self.run_id, self.life, self.day


_decoder = msgspec.json.Decoder(UsageLine)


def read_usage(path: Path) -> dict[Key, UsageLine]:
    """The last line of each key, in the order of the file; damaged lines are left out. Raises OSError."""
    try:
        data = read_file(path, limit=MAX_USAGE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found: dict[Key, UsageLine] = {}
    for raw in data.splitlines():
        try:
            line = _decoder.decode(raw)
        except UNDECODABLE:
            continue
        if line.version == USAGE_VERSION:
            found[line.key] = line
    return found


def used_in_life(path: Path, life: str) -> tuple[int, float]:
    """(tokens sampled, hours of its orchestrator) that one life of a run has used. Raises OSError."""
    lines = [line for line in read_usage(path).values() if line.life == life]
    return sum(line.tokens for line in lines), sum(line.work_s for line in lines) / 3600


class UsageLog:
    """The one writer of a usage file. A disk that takes nothing costs no count: the next line has everything."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._lines: dict[Key, UsageLine] = {}
        self._compact_at = COMPACT_BYTES
        self._unwritten: set[Key] = set()
        self._complained = False
        try:
            self._lines = read_usage(path)
        except OSError as error:
            self._complain(error)

    def of_life(self, run_id: str, life: str) -> list[UsageLine]:
        """The usage of one life of a run, by day."""
        return [line for line in self._lines.values() if (line.run_id, line.life) == (run_id, life)]

    def add(
        self,
        run_id: str,
        *,
        life: str = "",
        step: int = 0,
        tags: Iterable[str] = (),
        used: Mapping[str, float],
    ) -> None:
        """Add `used` (counters by field name) to what the run has used today, and write the line. Never raises."""
        now = self._clock()
        key = (run_id, life, datetime.datetime.fromtimestamp(now, datetime.UTC).date().isoformat())
        line = self._lines.setdefault(key, UsageLine(run_id=run_id, life=life, day=key[2]))
        line.time, line.step, line.tags = now, step, list(tags)
        for name, value in used.items():
            setattr(line, name, getattr(line, name) + value)
        self._unwritten.add(key)
        try:
            self._write()
        except OSError as error:
            self._complain(error)

    def _write(self) -> None:
        self._path.parent.mkdir(exist_ok=True)  # not its parents: a deleted workspace is not made again
        for key in sorted(self._unwritten):
            append_line(self._path, _encoded(self._lines[key]))
        self._unwritten.clear()
        self._complained = False
        if self._size() >= self._compact_at:
            write_atomic(self._path, "".join(f"{_encoded(line)}\n" for line in self._lines.values()))
            self._compact_at = max(COMPACT_BYTES, 2 * self._size())

    def _size(self) -> int:
        with closing(open_file(self._path)) as fd:
            return os.fstat(fd).st_size

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            logger.warning("%s cannot be used, what runs use is counted in memory: %s", self._path, error)
        self._complained = True


def _encoded(line: UsageLine) -> str:
    return msgspec.json.encode(line).decode()


def life_of(run: RunDir) -> str:
    """The name of this life of the run, in its own folder; made at the first call. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        write_atomic(run.life, os.urandom(8).hex(), exclusive=True)
    return read_file(run.life, limit=_LIFE_BYTES).decode(errors="replace")


def budget_reason(
    tokens: int, hours: float, *, max_tokens: int | None = None, max_hours: float | None = None
) -> str | None:
    """Why a run ends that has used so much, or None."""
    if max_tokens is not None and tokens >= max_tokens:
        return f"budget used up: {tokens:,} of {max_tokens:,} tokens"
    if max_hours is not None and hours >= max_hours:
        return f"budget used up: {hours:.2f} of {max_hours:g} hours"
    return None
