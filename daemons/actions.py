"""What people do to runs: add, evict, readmit, delete, undelete, purge. Used by `prl` and by the TUI.

Every action works on files alone, so it works with the daemons down; doing it twice does no more than doing it once;
what it did is appended to `logs/audit.jsonl`. A run is checked with the very rules and words of the trainer
(`configs.validate`). Failure is an `ActionError` of one line. It starts and ends no process: the supervisor does that.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from daemons.client import HouseReader, RunView
from prime_rl.configs.base import ConfigError, load_config, load_toml, merge
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.validate import TrainerLimits, check_against_trainer, load_run_config
from prime_rl.contract.files import WaitTimeout, append_line, read_text, wait_for, write_atomic
from prime_rl.contract.layout import LayoutError, OutputDir, RunDir, parse_trashed
from prime_rl.contract.status import DaemonStatus, RunState, RunStatus, TrainerStatus, is_alive, read_status
from prime_rl.utils.process import same_process

# The note in `evicted.txt` of a deleted run; undelete takes away this one and leaves any other.
DELETED_NOTE = "deleted with prl; prl runs undelete brings it back"
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME_CHARS = 58  # of the 64 that an id allows; the rest is for "-2", "-3", ...

Progress = Callable[[str], None]


class ActionError(RuntimeError):
    """An action that was refused or failed. The message is one line: what, where, what to do."""

    exit_code = 1


class WrongUseError(ActionError):
    """Asked for something that cannot be meant, such as a run id with a slash in it."""

    exit_code = 2


def trainer_limits(output_dir: Path) -> TrainerLimits | None:
    """What a run must fit into: the living trainer's limits, else those it was last configured for, else None."""
    output = OutputDir(output_dir)
    status = read_status(output.trainer_status, TrainerStatus)
    if status is not None and status.model and is_alive(status, time.time()):
        return TrainerLimits(status.model, status.max_seq_len, status.max_rank, max_async_level=status.max_async_level)
    try:
        return TrainerLimits.of(load_config(TrainerConfig, output.component_config("trainer")))
    except ConfigError:
        return None


def validate_file(
    output_dir: Path, source: Path | str, *, overrides: Mapping[str, Any] | None = None
) -> OrchestratorConfig:
    """Check a run's TOML file as the trainer would. Raises ActionError with every problem."""
    try:
        config = load_run_config(Path(source), overrides)
        limits = trainer_limits(Path(output_dir))
        problems = check_against_trainer(config, limits) if limits else []
        if problems:
            raise ConfigError(str(source), problems)
    except ConfigError as error:
        raise ActionError(_one_line(str(error))) from error
    return config


def add_run(
    output_dir: Path,
    source: Path | str,
    *,
    run_id: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> str:
    """Add a run from a TOML file and return its id; the default id comes from the file's name.

    The file's text is kept as it is, unless there are `overrides`. The folder appears whole, so the trainer never sees
    half a run. With an explicit `run_id` that holds the very same text already, nothing is done.
    """
    output = OutputDir(Path(output_dir))
    with _one_line_errors(f"adding {source}"):
        if run_id is not None:
            output.run(run_id)
        validate_file(output.path, source, overrides=overrides)
        text = Path(source).read_text()
        if overrides:
            text = tomli_w.dumps(merge(load_toml(Path(source)), overrides))
        if run_id is not None and _same_text(output.run(run_id), text):
            return run_id
        if dry_run:
            return _free_id(output, run_id, Path(source))
        output.path.mkdir(parents=True, exist_ok=True)
        run = _place(output, run_id, Path(source), text)
        _audit(output, "add", run.run_id, f"from {source}")
        return run.run_id


def evict_run(output_dir: Path, run_id: str, reason: str) -> bool:
    """Take a run out of training; false when it is evicted already (its first reason stays)."""
    output = OutputDir(Path(output_dir))
    with _one_line_errors(f"evicting {run_id}"):
        run = _existing(output, run_id)
        if run.evicted.exists():
            return False
        write_atomic(run.evicted, reason.strip() or "no reason was given")
        _audit(output, "evict", run_id, reason)
        return True


def readmit_run(output_dir: Path, run_id: str) -> bool:
    """Let an evicted or failed run train again; false when it is neither."""
    output = OutputDir(Path(output_dir))
    with _one_line_errors(f"readmitting {run_id}"):
        run = _existing(output, run_id)
        view = _view(output, run_id)
        if view.state is RunState.INVALID:
            raise ActionError(_one_line(f"{run_id} is invalid, mend its orch.toml instead: {view.reason}"))
        if view.state not in (RunState.EVICTED, RunState.FAILED):
            return False
        run.evicted.unlink(missing_ok=True)
        word = read_status(run.status, RunStatus)
        if word is not None and word.state == "failed":
            run.status.unlink(missing_ok=True)
        daemon = read_status(output.daemon_status(run_id), DaemonStatus)
        if daemon is not None and daemon.state == "failed":
            output.daemon_status(run_id).unlink(missing_ok=True)
        if output.daemons.exists():
            write_atomic(output.start_request(run_id), "readmit")
        _audit(output, "readmit", run_id, "")
        return True


def delete_run(
    output_dir: Path,
    run_id: str,
    *,
    force: bool = False,
    wait_s: float = 60.0,
    on_progress: Progress = lambda message: None,
) -> Path:
    """Move a run to the trash and return where it lies there; `undelete_run` brings it back.

    A run that trains, or whose orchestrator lives, is refused unless `force`: then it is evicted, and the move waits up
    to `wait_s` seconds until trainer and orchestrator have let go.
    """
    output = OutputDir(Path(output_dir))
    with _one_line_errors(f"deleting {run_id}"):
        if not output.run(run_id).path.exists() and (lies := _in_trash(output, run_id)):
            return lies
        run = _existing(output, run_id)
        holders = _holders(output, run)
        if holders and not force:
            raise ActionError(
                f"{run_id} is in use by {' and '.join(holders)}: evict it first (prl runs evict {run_id} "
                "--reason ...), or delete it all the same (prl runs delete --yes)"
            )
        if not run.evicted.exists() and run.control.exists():
            write_atomic(run.evicted, DELETED_NOTE)
        _wait_until_let_go(output, run, wait_s, on_progress)
        lies = _move_to_trash(output, run)
        output.start_request(run_id).unlink(missing_ok=True)
        _audit(output, "delete", run_id, f"to {lies.name}")
        return lies


def users_of_run(output_dir: Path, run_id: str) -> list[str]:
    """Who uses a run now, such as "the trainer (slot 1)"; while anybody does, deleting it needs `force`."""
    output = OutputDir(Path(output_dir))
    with _one_line_errors(f"looking at {run_id}"):
        return _holders(output, output.run(run_id))


def undelete_run(output_dir: Path, run_id: str) -> bool:
    """Bring back the newest deleted run of this id; false when the run is there already."""
    output = OutputDir(Path(output_dir))
    with _one_line_errors(f"undeleting {run_id}"):
        run = output.run(run_id)
        lies = _in_trash(output, run_id)
        if run.path.exists():
            if lies is None:
                return False
            raise ActionError(
                f"{run_id} exists in {output.path}: delete or move it before an older one is brought back"
            )
        if lies is None:
            raise ActionError(f"{run_id} is not in {output.trash}: nothing to bring back")
        if read_text(RunDir(lies).evicted) == DELETED_NOTE:
            RunDir(lies).evicted.unlink()
        os.rename(lies, run.path)
        _audit(output, "undelete", run_id, f"from {lies.name}")
        return True


def list_trash(output_dir: Path) -> list[tuple[str, str]]:
    """(run id, time of deletion) of what lies in the trash, oldest first."""
    trash = OutputDir(Path(output_dir)).trash
    names = [entry.name for entry in trash.iterdir()] if trash.is_dir() else []
    return sorted((p for name in names if (p := parse_trashed(name))), key=lambda each: each[1])


def purge_trash(output_dir: Path) -> int:
    """Remove the deleted runs for good; returns how many."""
    output = OutputDir(Path(output_dir))
    with _one_line_errors(f"purging {output.trash}"):
        if output.trash.is_symlink():
            raise ActionError(f"{output.trash} is a symbolic link: remove the link; nothing was purged")
        entries = sorted(output.trash.iterdir()) if output.trash.is_dir() else []
        for entry in entries:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        if entries:
            _audit(output, "purge", None, ", ".join(entry.name for entry in entries))
        return len(entries)


def _existing(output: OutputDir, run_id: str) -> RunDir:
    run = output.run(run_id)
    if not run.path.is_dir():
        raise ActionError(f"no run {run_id!r} in {output.path}: prl runs list shows what is there")
    return run


def _view(output: OutputDir, run_id: str) -> RunView:
    house = HouseReader(output.path).read()
    if (view := house.run(run_id)) is not None:
        return view
    reason = next((each.reason for each in house.refused if each.name == run_id), "it is gone")
    raise ActionError(_one_line(f"{run_id} is not a run: {reason}"))


def _holders(output: OutputDir, run: RunDir) -> list[str]:
    """Who must let go of a run before its folder may move."""
    now = time.time()
    holders = []
    trainer = read_status(output.trainer_status, TrainerStatus)
    if trainer is not None and is_alive(trainer, now):
        if run.run_id in trainer.runs:
            holders.append(f"the trainer (slot {trainer.runs[run.run_id].run_idx})")
        elif run.run_id in trainer.waiting and run.evicted.exists():
            holders.append("the trainer (its queue)")
    word = read_status(run.status, RunStatus)
    daemon = read_status(output.daemon_status(run.run_id), DaemonStatus)
    if word is not None and same_process(word.pid, word.pid_create_time):
        holders.append(f"its orchestrator (pid {word.pid})")
    elif daemon is not None and daemon.child_pid and same_process(daemon.child_pid, daemon.child_create_time or 0.0):
        holders.append(f"its orchestrator (pid {daemon.child_pid})")
    return holders


def _wait_until_let_go(output: OutputDir, run: RunDir, wait_s: float, on_progress: Progress) -> None:
    said: list[str] = []

    def free() -> bool:
        said[:] = _holders(output, run)
        if said:
            on_progress(f"waiting for {' and '.join(said)} to let go of {run.run_id}")
        return not said

    try:
        wait_for(free, f"{run.run_id} to be let go", timeout_s=wait_s, poll_s=0.2)
    except WaitTimeout as error:
        raise ActionError(
            f"{run.run_id} was not deleted: {' and '.join(said)} did not let go within {wait_s:g} s; "
            "it stays evicted, try again"
        ) from error


def _move_to_trash(output: OutputDir, run: RunDir) -> Path:
    if output.trash.is_symlink():
        raise ActionError(f"{output.trash} is a symbolic link: remove the link; {run.run_id} was not deleted")
    output.trash.mkdir(exist_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    lies, number = output.trashed(run.run_id, stamp), 1
    while lies.exists():
        number += 1
        lies = output.trashed(run.run_id, f"{stamp}-{number:03}")
    os.rename(run.path, lies)
    return lies


def _in_trash(output: OutputDir, run_id: str) -> Path | None:
    stamps = [stamp for name, stamp in list_trash(output.path) if name == run_id]
    return output.trashed(run_id, stamps[-1]) if stamps else None


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


def _place(output: OutputDir, run_id: str | None, source: Path, text: str) -> RunDir:
    """Fill a folder beside the runs and rename it to the first free id: two adds at once get two ids."""
    staged = Path(tempfile.mkdtemp(prefix=".adding.", dir=output.path))
    try:
        staged.chmod(0o755)
        write_atomic(RunDir(staged).orch_toml, text)
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
    return ActionError(f"run {run_id or source.stem!r} exists already in {output.path}: choose another id")


def _same_text(run: RunDir, text: str) -> bool:
    return run.orch_toml.is_file() and run.orch_toml.read_text() == text


def _audit(output: OutputDir, action: str, run_id: str | None, reason: str) -> None:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    who = f"{user}@{socket.gethostname()}"
    record = {"time": time.time(), "who": who, "action": action, "run_id": run_id, "reason": reason}
    append_line(output.audit, json.dumps(record))


@contextlib.contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    try:
        yield
    except LayoutError as error:
        raise WrongUseError(_one_line(str(error))) from error
    except (OSError, UnicodeError) as error:
        raise ActionError(_one_line(f"{what} failed: {error}")) from error


def _one_line(text: str) -> str:
    return " ".join(text.split())
