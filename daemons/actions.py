"""Actions on runs: add, evict, readmit, delete, undelete, purge. Used by `prl` and by the TUI.

Every action works on files alone, so it works with the daemons down; doing it twice does no more than doing it once;
each is appended to `logs/audit.jsonl`. A run is checked with the trainer's own rules (`configs.validate`). Failure is
an `ActionError` of one line. Actions start and end no process: the supervisor does that.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from daemons import audit
from daemons.client import RunView, WorkspaceReader
from daemons.errors import ActionError, WrongUseError, in_one_line, one_line_errors, printable
from daemons.in_use import users_of_run
from daemons.trash import (
    DELETED_NOTE,
    delete_run,
    existing_run,
    list_trash,
    purge_trash,
    undelete_run,
)
from prime_rl.configs.base import (
    MAX_TOML_BYTES,
    ConfigError,
    ConfigProblem,
    build,
    load_config,
    load_toml,
    merge,
    parse_toml,
)
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.validate import TrainerLimits, find_problems
from prime_rl.contract.files import read_file, read_text, remove, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import DaemonStatus, RunState, RunStatus, TrainerStatus, is_alive, read_status

__all__ = [
    "DELETED_NOTE",
    "ActionError",
    "WrongUseError",
    "add_run",
    "check_file",
    "delete_run",
    "evict_run",
    "list_trash",
    "purge_trash",
    "readmit_run",
    "trainer_limits",
    "undelete_run",
    "users_of_run",
    "validate_file",
]

_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME_CHARS = 58  # of the 64 that an id allows; the rest is for "-2", "-3", ...
_PUBLIC_MODE = 0o644


def trainer_limits(output_dir: Path) -> TrainerLimits | None:
    """The limits that a run must meet: of the living trainer, else of its last config, else None."""
    output = OutputDir(output_dir)
    status = read_status(output.trainer_status, TrainerStatus)
    if status is not None and status.model and is_alive(status, time.time()):
        return TrainerLimits(status.model, status.max_seq_len, status.max_rank, max_async_level=status.max_async_level)
    try:
        return TrainerLimits.of(load_config(TrainerConfig, output.component_config("trainer")))
    except ConfigError:
        return None


def check_file(
    output_dir: Path, source: Path | str, *, overrides: Mapping[str, Any] | None = None
) -> list[ConfigProblem]:
    """All problems of a run's TOML file, as the trainer reports them; [] when it would be admitted."""
    try:
        data = merge(load_toml(Path(source)), overrides or {})
    except ConfigError as error:
        return error.problems
    return find_problems(data, str(source), trainer_limits(Path(output_dir)))


def validate_file(
    output_dir: Path, source: Path | str, *, overrides: Mapping[str, Any] | None = None
) -> OrchestratorConfig:
    """Check a run's TOML file as the trainer would. Raises ActionError with every problem."""
    try:
        return _checked(Path(output_dir), load_toml(Path(source)), str(source), overrides)
    except ConfigError as error:
        raise ActionError(in_one_line(str(error))) from error


def _checked(
    output_dir: Path, data: Mapping[str, Any], source: str, overrides: Mapping[str, Any] | None
) -> OrchestratorConfig:
    data = merge(data, overrides or {})
    if problems := find_problems(data, source, trainer_limits(output_dir)):
        raise ConfigError(source, problems)
    return build(OrchestratorConfig, data, source)


def add_run(
    output_dir: Path,
    source: Path | str,
    *,
    run_id: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> str:
    """Add a run from a TOML file and return its id; the default id comes from the file's name.

    The file's text is kept as it is, unless there are `overrides`; a file that only its owner may read stays so. The
    folder appears complete, so the trainer never sees half a run. If `run_id` is given and that run has the same text
    already, nothing changes. Raises ActionError.
    """
    output, source = OutputDir(Path(output_dir)), Path(source)
    with one_line_errors(f"adding {source}"):
        if run_id is not None:
            output.run(run_id)
        text, mode = _checked_text(output.path, source, overrides)
        if run_id is not None and _same_text(output.run(run_id), text):
            return run_id
        if dry_run:
            return _free_id(output, run_id, source)
        output.path.mkdir(parents=True, exist_ok=True)
        run = _place(output, run_id, source, text, mode)
        audit.record(output, "add", run.run_id, detail=f"from {source}")
        return run.run_id


def _checked_text(output_dir: Path, source: Path, overrides: Mapping[str, Any] | None) -> tuple[str, int]:
    """The checked text, which is the text that is placed, and the mode of its file."""
    try:
        data = load_toml(source)
        text = read_file(source, limit=MAX_TOML_BYTES, follow_links=True).decode()
        if parse_toml(text, str(source)) != data:
            raise ActionError(f"{source} changed while it was read: try again")
        _checked(output_dir, data, str(source), overrides)
    except ConfigError as error:
        raise ActionError(in_one_line(str(error))) from error
    private = not stat.S_IMODE(source.stat().st_mode) & 0o077
    return tomli_w.dumps(merge(data, overrides)) if overrides else text, 0o600 if private else _PUBLIC_MODE


def evict_run(output_dir: Path, run_id: str, reason: str) -> bool:
    """Evict a run from training; false when it is already evicted (its first reason stays)."""
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"evicting {run_id}"):
        run = existing_run(output, run_id)
        if run.evicted.exists():
            return False
        write_atomic(run.evicted, printable(reason).strip() or "no reason was given")
        audit.record(output, "evict", run_id, reason=reason)
        return True


def readmit_run(output_dir: Path, run_id: str, *, reason: str = "") -> bool:
    """Continue an evicted or failed run; false when it is neither."""
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"readmitting {run_id}"):
        run = existing_run(output, run_id)
        view = _view(output, run_id)
        if view.state is RunState.INVALID:
            raise ActionError(in_one_line(f"{run_id} is invalid: fix its orch.toml instead ({view.reason})"))
        if view.state not in (RunState.EVICTED, RunState.FAILED):
            return False
        remove(run.evicted)
        status = read_status(run.status, RunStatus)
        if status is not None and status.state == "failed":
            run.status.unlink(missing_ok=True)
        daemon = read_status(output.daemon_status(run_id), DaemonStatus)
        if daemon is not None and daemon.state == "failed":
            output.daemon_status(run_id).unlink(missing_ok=True)
        if output.daemons.exists():
            write_atomic(output.start_request(run_id), "readmit")
        audit.record(output, "readmit", run_id, reason=reason)
        return True


def _view(output: OutputDir, run_id: str) -> RunView:
    workspace = WorkspaceReader(output.path).read()
    if (view := workspace.run(run_id)) is not None:
        return view
    reason = next((each.reason for each in workspace.refused if each.name == run_id), "its folder is gone")
    raise ActionError(in_one_line(f"{run_id} is not a run: {reason}"))


def _candidates(run_id: str | None, source: Path) -> Iterator[str]:
    if run_id is not None:
        yield run_id
        return
    name = _NOT_IN_ID.sub("-", source.stem.removeprefix("run_"))[:_MAX_NAME_CHARS] or "run"
    yield f"run_{name}"
    for number in range(2, 10_000):
        yield f"run_{name}-{number}"


def _free_id(output: OutputDir, run_id: str | None, source: Path) -> str:
    for candidate in _candidates(run_id, source):
        if not output.run(candidate).path.exists():
            return candidate
    raise _taken(output, run_id, source)


def _place(output: OutputDir, run_id: str | None, source: Path, text: str, mode: int) -> RunDir:
    """Fill a folder beside the runs and rename it to the first free id, so that two adds at once get two ids."""
    staged = Path(tempfile.mkdtemp(prefix=".adding.", dir=output.path))
    try:
        staged.chmod(0o755)
        write_atomic(RunDir(staged).orch_toml, text, mode=mode)
        for candidate in _candidates(run_id, source):
            run = output.run(candidate)
            try:
                os.rename(staged, run.path)
                return run
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
        raise _taken(output, run_id, source)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _taken(output: OutputDir, run_id: str | None, source: Path) -> ActionError:
    return ActionError(f"run {run_id or source.stem!r} already exists in {output.path}: choose another id with --id")


def _same_text(run: RunDir, text: str) -> bool:
    return read_text(run.orch_toml, limit=MAX_TOML_BYTES) == text
