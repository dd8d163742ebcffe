"""The contents of a run's own files, read again only when one of them changed.

`workspace_reader` keeps one `RunFiles` per run. An idle run costs a few system calls a look. It reads no file of other
daemons and derives no state.
"""

from __future__ import annotations

import functools
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from prime_rl.contract.files import FileRefused, read_text
from prime_rl.contract.layout import RunDir, list_steps, stable_marker
from prime_rl.contract.status import RunStatus, Status, read_status
from prime_rl.utils.text import CleanText, clean_strings, one_line

# Ten times the largest that a daemon writes with 1,024 runs; what is larger was not written by a daemon.
MAX_FILE_BYTES = 4_000_000
MAX_REASON_BYTES = 10_000
MAX_SENTENCE_CHARS = 2_000
# A folder that changed later than this may change again without another time on it.
SETTLED_NS = 2 * 10**9
# Looked at below the folder of a run, by text: joining paths would cost more than the system calls.
_TOMLS = ("/control/orch.toml", "/configs/orch.toml")
_NOTES = ("/control/status.json", "/control/evicted.txt", "/control/config_validation_error.txt")
_MARKS = ("/control/paused.txt", "/control/finished.txt", "/control/preempted.txt")
_NAMES = (*_TOMLS, *_NOTES, "/broadcast", *_MARKS)

StatusT = TypeVar("StatusT", bound=Status)
_sentence = functools.partial(one_line, limit=MAX_SENTENCE_CHARS)


class Stamp(NamedTuple):
    """A value that differs when a file has changed; all zero when it does not exist."""

    mtime_ns: int = 0
    size: int = 0
    inode: int = 0
    is_file: bool = False

    @property
    def readable(self) -> bool:
        """Whether the file is a regular one of at most MAX_FILE_BYTES."""
        return self.is_file and self.size <= MAX_FILE_BYTES


NO_FILE = Stamp()


def stamp_of(path: Path | str) -> Stamp:
    """The stamp of a file; a link is not followed. NO_FILE when it does not exist or cannot be looked at."""
    try:
        info = os.lstat(path)
    except (OSError, ValueError):
        return NO_FILE
    return Stamp(info.st_mtime_ns, info.st_size, info.st_ino, stat.S_ISREG(info.st_mode))


def read_status_file(path: Path, stamp: Stamp, kind: type[StatusT]) -> StatusT | None:
    """The status in a file of that stamp, each of its texts clean and on one line.

    None when it is too large, damaged or missing.
    """
    try:
        return clean_strings(read_status(path, kind), _sentence) if stamp.readable else None
    except RecursionError:
        return None


class ConfigFacts(NamedTuple):
    """What is shown of a run's config: a config itself takes kilobytes, and a workspace may have thousands."""

    max_steps: int
    lr: float
    model: CleanText
    batch_size: int
    tags: tuple[CleanText, ...]
    weight: float
    priority: int
    max_tokens: int | None
    max_hours: float | None


@dataclass(frozen=True, slots=True)
class ParsedConfig:
    """What a run's config contains, or why it is invalid; both None while it has not been read."""

    config: ConfigFacts | None = None
    error: str | None = None


NOT_PARSED = ParsedConfig()


@dataclass(frozen=True, eq=False, slots=True)
class RunRecord:
    """All facts from a run's own files. `published` is its newest STABLE broadcast, 0 without one.

    `added_at` is when its config landed (Unix seconds), None when it has none. `paused`, `ended` and `preempted` are
    the texts of `paused.txt`, `finished.txt` and `preempted.txt`.
    """

    run: RunDir
    added_at: float | None
    parsed: ParsedConfig
    status: RunStatus | None
    evicted: str | None
    config_error: str | None
    published: int
    paused: str | None = None
    ended: str | None = None
    preempted: str | None = None


class RunFiles:
    """The files of one run. Raises OSError for a broadcast folder that cannot be listed."""

    __slots__ = ("_folder", "_record", "_stamps", "_whole", "run")

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._folder = str(run.path)
        self._stamps: tuple[Stamp, ...] = ()
        self._record: RunRecord | None = None
        self._whole: tuple[Stamp, int] = (NO_FILE, 0)

    def read(self, *, is_busy: bool, with_config: bool = True) -> RunRecord:
        """The record; the same object as long as nothing changed.

        Args:
            is_busy: it publishes, so look for what was completed inside its folders too.
            with_config: false leaves a config unread that was not read before.
        """
        stamps = tuple([stamp_of(self._folder + name) for name in _NAMES])
        known = self._record
        # Its config may be there and not read yet.
        is_unread = known is not None and known.added_at is not None and known.parsed is NOT_PARSED
        if known is not None and stamps == self._stamps and not (with_config and is_unread):
            published = self._published(stamps[5]) if is_busy else known.published
            if published == known.published:
                return known
        self._record, self._stamps = self._read(stamps, with_config), stamps
        return self._record

    def _read(self, stamps: tuple[Stamp, ...], with_config: bool) -> RunRecord:
        known, old, folder = self._record, self._stamps, self._folder
        index = next((i for i in (0, 1) if stamps[i] is not NO_FILE), 0)
        toml = stamps[index]
        parsed = known.parsed if known and old[: index + 1] == stamps[: index + 1] else NOT_PARSED
        if toml.is_file and with_config and parsed is NOT_PARSED:
            parsed = _parse(Path(folder + _TOMLS[index]), toml)
        same_status = known is not None and old[2] == stamps[2]
        return RunRecord(
            run=self.run,
            added_at=toml.mtime_ns / 1e9 if toml.is_file else None,
            parsed=parsed,
            status=known.status if known and same_status else read_status_file(self.run.status, stamps[2], RunStatus),
            evicted=_note(folder + _NOTES[1], stamps[3], empty="no reason was given"),
            config_error=_note(folder + _NOTES[2], stamps[4]),
            published=self._published(stamps[5]) if stamps[5] is not NO_FILE else 0,
            paused=_note(folder + _MARKS[0], stamps[6], empty="paused"),
            ended=_note(folder + _MARKS[1], stamps[7], empty="ended before max_steps"),
            preempted=_note(folder + _MARKS[2], stamps[8], empty="preempted by a more urgent run"),
        )

    def _published(self, stamp: Stamp) -> int:
        """The newest complete version. Not looked for where the folder is as it was and its newest was complete."""
        if stamp == self._whole[0]:
            return self._whole[1]
        began_ns = time.time_ns()
        steps = list_steps(self.run.broadcast)
        complete = (step for step in reversed(steps) if stable_marker(self.run.broadcast_dir(step)).exists())
        published = next(complete, 0)
        if steps and published == steps[-1] and began_ns - stamp.mtime_ns > SETTLED_NS:
            self._whole = (stamp, published)
        return published


def _parse(path: Path, stamp: Stamp) -> ParsedConfig:
    # Imported late: the rules of configs take longer to import than a look at a workspace takes.
    from prime_rl.configs.base import ConfigError
    from prime_rl.configs.validate import explain, load_run_config

    if not stamp.readable:
        return ParsedConfig(error=f"{path}: not a file of at most {MAX_FILE_BYTES // 1_000_000} MB")
    try:
        config = load_run_config(path)
        return ParsedConfig(
            ConfigFacts(
                max_steps=config.max_steps,
                lr=config.optim.lr,
                model=one_line(config.model.name),
                batch_size=config.batch_size,
                tags=tuple(one_line(tag) for tag in config.tags),
                weight=config.weight,
                priority=config.priority,
                max_tokens=config.budget.max_tokens,
                max_hours=config.budget.max_hours,
            )
        )
    except ConfigError as error:
        return ParsedConfig(error=explain(error))
    except RecursionError:
        return ParsedConfig(error=f"{path}: nested too deeply")


def _note(path: str, stamp: Stamp, empty: str | None = None) -> str | None:
    """Text of a note file (`evicted.txt`); `empty` when it is empty or not a regular file."""
    if stamp is NO_FILE or (empty is None and not stamp.is_file):
        return None
    try:
        return (read_text(Path(path), limit=MAX_REASON_BYTES) or "").strip() or empty
    except OSError as error:
        return str(error) if isinstance(error, FileRefused) else f"cannot read {path}: {error.strerror}"
