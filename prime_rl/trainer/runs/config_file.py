"""The `orch.toml` of runs without a slot: read once for every content, when it has stopped changing.

An editor may empty a file and write it again, write it twice, or touch it. So a file that was written in place is left
alone for a moment after each change, and an invalid one is reported only when it stays unchanged for `settle_s`. A file
that was renamed into place is whole at once. The same content is not judged twice. Writes nothing but
`config_validation_error.txt`: made by `report` when a config is bad, removed when it is valid again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from prime_rl.configs.base import ConfigError, ConfigProblem
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.validate import PARSE_ERROR_PREFIX, explain, load_run_config
from prime_rl.contract.files import FileRefused, open_file, read_text, write_atomic
from prime_rl.contract.layout import RunDir, refusal
from prime_rl.trainer.runs.hooks import error_text, printable

logger = logging.getLogger(__name__)

# Thousands of times what a config needs; parsing a larger file would hold up all runs.
MAX_CONFIG_BYTES = 1 << 20
MAX_ERROR_CHARS = 20_000
# The beginning of a file can be a valid config with other defaults. Between two writes of one save less time passes.
QUIET_S = 0.05

# So long, or so many of them, may reports hold up the other work of one look.
REPORT_S, MIN_REPORTS = 0.1, 16

# Null when the config is good, else what is wrong with it.
Validate = Callable[[OrchestratorConfig], str | None]
# Changes with every write, rename and change of permissions.
Signature = tuple[str, int, int, int, int]


@dataclass(frozen=True)
class Reading:
    """What one look at a file gave.

    `config` is None when it is bad, or while the file still changes: then read it again at `due` (seconds of the
    clock). `landed_ns` is the time of the file.
    """

    config: OrchestratorConfig | None
    landed_ns: int
    due: float | None = None


@dataclass
class _File:
    """What is known of a file. `seen_at` is when it was first seen with this signature."""

    signature: Signature
    seen_at: float
    is_judged: bool = False
    digest: bytes = b""
    config: OrchestratorConfig | None = None
    problem: str | None = None


class ConfigFiles:
    """Reads them, and remembers what it read.

    Args:
        settle_s: how long a bad file must stay as it is before that is reported; 0 judges every file at once.
        clock: monotonic seconds.
    """

    def __init__(self, validate: Validate, settle_s: float, clock: Callable[[], float]) -> None:
        self._validate = validate
        self._settle_s = settle_s
        self._clock = clock
        self._files: dict[str, _File] = {}
        self._unreported: dict[str, tuple[RunDir, str]] = {}

    @property
    def has_unreported(self) -> bool:
        """Whether `report` has more to write."""
        return bool(self._unreported)

    def read(self, run: RunDir) -> Reading:
        """Look at the config of `run`. OSError when it is gone or cannot be read."""
        path = run.orch_toml
        stat = path.lstat()
        now = self._clock()
        file = self._seen(run.run_id, _signature(path, stat), now)
        rest_s = now - file.seen_at
        quiet_s = min(QUIET_S, self._settle_s)
        if not file.is_judged:
            was_renamed = stat.st_ctime_ns > stat.st_mtime_ns
            if rest_s < quiet_s and not was_renamed:
                return Reading(None, stat.st_mtime_ns, due=file.seen_at + quiet_s)
            self._judge(file, path, stat.st_size)
        if file.problem is not None:
            if rest_s < self._settle_s:
                return Reading(None, stat.st_mtime_ns, due=file.seen_at + self._settle_s)
            self._unreported[run.run_id] = (run, file.problem)
        else:
            self._unreported.pop(run.run_id, None)
            with contextlib.suppress(IsADirectoryError):  # a folder was not written by us
                run.config_error.unlink(missing_ok=True)
        return Reading(file.config, stat.st_mtime_ns)

    def has_changed(self, run: RunDir) -> bool:
        """Whether the content is another one than at the last look; for a run that is not to be judged."""
        path = run.orch_toml
        file = self._files.get(run.run_id)
        try:
            signature = _signature(path, path.lstat())
            if file is None or file.signature == signature:
                return False
            before, digest = file.digest, _digest(path)
        except OSError:
            return False
        file.signature, file.is_judged = signature, False
        if digest != before:
            file.digest, file.config, file.problem = digest, None, None
        return digest != before

    def forget(self, run_id: str) -> None:
        self._files.pop(run_id, None)
        self._unreported.pop(run_id, None)

    def forget_all(self) -> None:
        self._files.clear()
        self._unreported.clear()

    def forget_except(self, run_ids: Collection[str]) -> None:
        for run_id in self._files.keys() - run_ids:
            self.forget(run_id)

    def report(self) -> list[str]:
        """Write down what is wrong with some bad configs, oldest first; the ids of the runs for which that failed.

        Each is a file that the disk must take: thousands must keep neither the next run waiting nor those that train.
        """
        failed = []
        end_s = self._clock() + REPORT_S
        for number, run_id in enumerate(list(self._unreported)):
            if number >= MIN_REPORTS and self._clock() >= end_s:
                break
            try:
                _report(*self._unreported.pop(run_id))
            except OSError as error:
                logger.debug("cannot write the config error of %s: %s", run_id, error)
                failed.append(run_id)
        return failed

    def _seen(self, run_id: str, signature: Signature, now: float) -> _File:
        file = self._files.setdefault(run_id, _File(signature, now))
        if file.signature != signature:
            file.signature, file.seen_at, file.is_judged = signature, now, False
        return file

    def _judge(self, file: _File, path: Path, size: int) -> None:
        try:
            digest = _digest(path)
        except (PermissionError, FileRefused):
            digest = b""  # the error is reported when it is read as a config
        if digest != file.digest or (file.config is None and file.problem is None):
            file.config, file.problem = self._parse(path, size)
            file.digest = digest
        file.is_judged = True

    def _parse(self, path: Path, size: int) -> tuple[OrchestratorConfig | None, str | None]:
        try:
            if size > MAX_CONFIG_BYTES:
                raise ConfigError(str(path), [ConfigProblem("", f"larger than {MAX_CONFIG_BYTES} bytes")])
            config = load_run_config(path)
            problem = self._validate(config)
            text = f"{PARSE_ERROR_PREFIX}: {path}: {problem}" if problem else None
        except ConfigError as error:
            text = explain(error)
        except Exception as error:  # what a hostile file makes a parser do (nesting without end) is its own fault
            text = f"{PARSE_ERROR_PREFIX}: {path}: {error_text(error)}"
        return (config, None) if text is None else (None, printable(text)[:MAX_ERROR_CHARS])


def _report(run: RunDir, problem: str) -> None:
    """Write it down where people look for it, once; not through a link that the run has become meanwhile."""
    try:
        known = read_text(run.config_error)
    except FileRefused:
        known = None
    if refusal(run.path.parent, run.path) is None and known != problem + "\n":
        logger.warning("%s: %s", run.run_id, problem)
        write_atomic(run.config_error, problem + "\n")


def _signature(path: Path, stat: os.stat_result) -> Signature:
    return (str(path), stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)


def _digest(path: Path) -> bytes:
    with os.fdopen(open_file(path), "rb") as file:
        return hashlib.blake2b(file.read(MAX_CONFIG_BYTES + 1), digest_size=16).digest()
