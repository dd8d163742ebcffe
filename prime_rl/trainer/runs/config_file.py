"""The `orch.toml` of one run: read once for every content, when it has stopped changing.

An editor may empty a file and write it again, write it twice, or touch it. So a file that was written in place is left
alone for a moment after each change, and an invalid one is a problem only when it stays unchanged for `settle_s`. A
file that was renamed into place is whole at once. The same content is not judged twice. Writes nothing but
`config_validation_error.txt`: made by `report` when a config is bad, removed when it is valid again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
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

# Null when the config is good, else what is wrong with it.
Validate = Callable[[OrchestratorConfig], str | None]
# Of one path: inode, times of content and of attributes, size. Another one after every write, rename and chmod.
Print = tuple[int, int, int, int]


class ConfigFile:
    """What is known of it. After a `read` that ended, either `config` or `problem` is set.

    Attributes:
        landed_ns: the time of the file.
        is_reported: whether `report` wrote down the problem that the last `read` found.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.config: OrchestratorConfig | None = None
        self.problem: str | None = None
        self.landed_ns = 0
        self.is_reported = False
        self._print: Print | None = None
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
        stat = path.lstat()
        if print_of(stat) != self._print:
            self._print, self._since, self._is_judged = print_of(stat), now, False
        self.landed_ns = stat.st_mtime_ns
        quiet_until = self._since + min(QUIET_S, settle_s)
        was_renamed = stat.st_ctime_ns > stat.st_mtime_ns
        if not (self._is_judged or was_renamed) and now < quiet_until:
            return quiet_until
        self._judge(path, stat.st_size, validate)
        if self.problem is not None and now < self._since + settle_s:
            return self._since + settle_s
        self.is_reported = False
        if self.problem is None:
            with contextlib.suppress(IsADirectoryError):  # a folder was not written by us
                self.run.config_error.unlink(missing_ok=True)
        return None

    def has_changed(self) -> bool:
        """Whether the content is another one than at the last look; for a run that is not to be judged."""
        path = self.run.orch_toml
        try:
            found = print_of(path.lstat())
            if found == self._print:
                return False
            before, digest = self._digest, _digest(path)
        except OSError:
            return False
        self._print, self._is_judged = found, False
        if digest != before:
            self._digest, self.config, self.problem = digest, None, None
        return digest != before

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

    def _judge(self, path: Path, size: int, validate: Validate) -> None:
        if self._is_judged:
            return
        try:
            digest = _digest(path)
        except (PermissionError, FileRefused):
            digest = b""  # the error is reported when it is read as a config
        if digest != self._digest or (self.config is None and self.problem is None):
            self.config, self.problem = _parse(path, size, validate)
            self._digest = digest
        self._is_judged = True


def print_of(stat: os.stat_result) -> Print:
    return (stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)


def _parse(path: Path, size: int, validate: Validate) -> tuple[OrchestratorConfig | None, str | None]:
    try:
        if size > MAX_CONFIG_BYTES:
            raise ConfigError(str(path), [ConfigProblem("", f"larger than {MAX_CONFIG_BYTES} bytes")])
        config = load_run_config(path)
        problem = validate(config)
        text = f"{PARSE_ERROR_PREFIX}: {path}: {problem}" if problem else None
    except ConfigError as error:
        text = explain(error)
    except Exception as error:  # what a hostile file makes a parser do (nesting without end) is its own fault
        text = f"{PARSE_ERROR_PREFIX}: {path}: {error_text(error)}"
    return (config, None) if text is None else (None, printable(text)[:MAX_ERROR_CHARS])


def _digest(path: Path) -> bytes:
    with os.fdopen(open_file(path), "rb") as file:
        return hashlib.blake2b(file.read(MAX_CONFIG_BYTES + 1), digest_size=16).digest()
