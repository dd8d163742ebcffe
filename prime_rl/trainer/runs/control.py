"""What the files of one run tell rank 0, and what it writes beside them: `control/`.

The config is read once for every content, when it has stopped changing. An editor may empty a file and write it again,
write it twice, or touch it. So a file that was written in place is left alone for a moment after each change, and an
invalid one is a problem only when it stays unchanged for `settle_s`. A file that was renamed into place is whole at
once. Written are `config_validation_error.txt`, which goes when the config is valid again, and `evicted.txt`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from prime_rl.configs.base import MAX_TOML_BYTES, ConfigError
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.validate import PARSE_ERROR_PREFIX, explain, load_run_config
from prime_rl.contract import audit
from prime_rl.contract.files import FileRefused, read_file, read_text, write_atomic
from prime_rl.contract.layout import RunDir, list_steps, refusal
from prime_rl.contract.resume import pending_request
from prime_rl.utils.text import error_text, printable

logger = logging.getLogger(__name__)

MAX_ERROR_CHARS = 20_000
# A reason may quote what a run wrote; people read one line.
MAX_REASON_CHARS = 2_000
# The beginning of a file can be a valid config with other defaults. Between two writes of one save less time passes.
QUIET_S = 0.05

# Null when the config is good, else what is wrong with it.
Validate = Callable[[OrchestratorConfig], str | None]


class Print(NamedTuple):
    """Of one path; another one after every write, rename and chmod."""

    inode: int
    mtime_ns: int
    ctime_ns: int
    size: int


def print_of(path: str | Path) -> Print | None:
    """The print of a path; a link is not followed. None when it cannot be looked at."""
    try:
        stat = os.lstat(path)
    except OSError:
        return None
    return Print(stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)


class ConfigFile:
    """What is known of a run's `orch.toml`. After a `read` that ended, either `config` or `problem` is set.

    Attributes:
        print: the file at the last look.
        is_reported: whether `report` wrote down the problem that the last `read` found.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.config: OrchestratorConfig | None = None
        self.problem: str | None = None
        self.print: Print | None = None
        self.is_reported = False
        self._since = 0.0
        self._is_judged = False
        self._digest: bytes | None = None

    def read(self, validate: Validate, settle_s: float, now: float) -> float | None:
        """Look at it: null, or when to look again because it may still change. OSError when it cannot be read.

        Args:
            settle_s: how long a bad file must stay as it is; 0 judges every file at once.
            now: monotonic seconds.
        """
        path = self.run.orch_toml
        found = print_of(path)
        if found is None:  # deleted meanwhile
            return now
        if found != self.print:
            self.print, self._since, self._is_judged = found, now, False
        if not self._is_judged:
            was_renamed, quiet_until = found.ctime_ns > found.mtime_ns, self._since + min(QUIET_S, settle_s)
            if not was_renamed and now < quiet_until:
                return quiet_until
            self._take_in(path)
            if self.config is None and self.problem is None:
                self.config, self.problem = _parse(path, validate)
            self._is_judged = True
        if self.problem is not None and now < self._since + settle_s:
            return self._since + settle_s
        self.is_reported = False
        if self.problem is None:
            with contextlib.suppress(IsADirectoryError):  # a folder was not written by us
                self.run.config_error.unlink(missing_ok=True)
        return None

    def has_changed(self) -> bool:
        """Whether the content is another one than at the last look; for a run that is not to be judged."""
        with contextlib.suppress(OSError):
            path = self.run.orch_toml
            found = print_of(path)
            if found is not None and found != self.print:
                has_changed, self._is_judged = self._take_in(path), False
                self.print = None if has_changed else found  # of a change `read` sees when it began
                return has_changed
        return False

    def forget_verdict(self) -> None:
        """It is validated again, whatever its content."""
        self.config, self.problem, self._is_judged = None, None, False

    def report(self) -> None:
        """Write the problem down where people look for it, not through a link that the run has become meanwhile."""
        try:
            known = read_text(self.run.config_error)
        except FileRefused:
            known = None
        if refusal(self.run.path.parent, self.run.path) is None and known != f"{self.problem}\n":
            logger.warning("%s: %s", self.run.run_id, self.problem)
            write_atomic(self.run.config_error, f"{self.problem}\n")
        self.is_reported = True

    def _take_in(self, path: Path) -> bool:
        """Whether the content is another one than before; then what was found of that one is forgotten."""
        try:
            digest = hashlib.blake2b(read_file(path, limit=MAX_TOML_BYTES), digest_size=16).digest()
        except (PermissionError, FileRefused):
            digest = b""  # the error is reported when it is read as a config
        is_new, self._digest = digest != self._digest, digest
        if is_new:
            self.forget_verdict()
        return is_new


def _parse(path: Path, validate: Validate) -> tuple[OrchestratorConfig | None, str | None]:
    try:
        config = load_run_config(path)
        problem = validate(config)
        text = f"{PARSE_ERROR_PREFIX}: {path}: {problem}" if problem else None
    except ConfigError as error:
        text = explain(error)
    except Exception as error:  # what a hostile file makes a parser do (nesting without end) is its own fault
        text = f"{PARSE_ERROR_PREFIX}: {path}: {error_text(error)}"
    return (config, None) if text is None else (None, printable(text)[:MAX_ERROR_CHARS])


def is_finished(run: RunDir, config: OrchestratorConfig) -> bool:
    """Whether the newest published version is the last one that the run asked for, and it does not ask to go back."""
    published = list_steps(run.broadcast, stable_only=True)
    return (
        bool(published) and published[-1] >= config.max_steps and pending_request(run, config.ckpt.resume_step) is None
    )


class Evictions:
    """Reasons of evictions that are not on disk yet, by run.

    One that cannot be written (the disk is full) still counts, and is written again at every look. A run whose folder
    was deleted meanwhile is not made again.
    """

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self.unwritten: dict[str, str] = {}

    def add(self, run_id: str, reason: str) -> None:
        """Evict the run for `reason`, which becomes one line of at most MAX_REASON_CHARS, and try to write it."""
        self.unwritten[run_id] = printable(" ".join(reason.split()))[:MAX_REASON_CHARS]
        logger.warning("evicting %s: %s", run_id, self.unwritten[run_id])
        self.write()

    def write(self) -> None:
        """Try to write each reason that is not on disk; what fails is logged and stays for the next call."""
        for run_id, reason in list(self.unwritten.items()):
            run = RunDir(self._output_dir / run_id)
            try:
                if run.path.is_dir():
                    write_atomic(run.evicted, reason)
                    audit.note(run, "trainer", "evict", reason)
                del self.unwritten[run_id]
            except OSError as error:
                logger.error("%s: cannot write the reason of its eviction: %s", run_id, error)
