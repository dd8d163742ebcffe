"""Actions on runs: add, pause, continue, evict, readmit, delete, undelete, purge. Used by `prl` and by the TUI.

Every action works on files alone, so it works with the daemons down; doing it twice does no more than doing it once;
each is appended to `logs/audit.jsonl`. A run is checked with the trainer's own rules (`configs.validate`). Failure is
an `ActionError` of one line. Actions start and end no process: the supervisor does that.
"""

from __future__ import annotations

import os
from pathlib import Path

from daemons import audit
from daemons.adding import add_run, check_file, trainer_limits, validate_file
from daemons.endings import ends_again, is_ended
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
from daemons.workspace import RunView
from daemons.workspace_reader import WorkspaceReader
from prime_rl.contract.files import remove, write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import DaemonStatus, RunState, RunStatus, read_status

__all__ = [
    "DELETED_NOTE",
    "ActionError",
    "WrongUseError",
    "add_run",
    "check_file",
    "continue_run",
    "delete_run",
    "evict_run",
    "list_trash",
    "pause_run",
    "purge_trash",
    "readmit_run",
    "trainer_limits",
    "undelete_run",
    "users_of_run",
    "validate_file",
    "view_of_run",
]

# Why a run in this state cannot be paused, and what to do.
_REFUSALS = {
    RunState.INVALID: "it is invalid and has no slot: fix its orch.toml instead",
    RunState.FINISHED: "it is finished",
    RunState.EVICTED: "it is evicted and has no slot: prl runs readmit continues it",
    RunState.FAILED: "it has failed and has no slot: prl runs readmit continues it",
}


def evict_run(output_dir: Path, run_id: str, reason: str, *, actor: str | None = None) -> bool:
    """Evict a run from training; false when it is already evicted (its first reason stays). Default: a person acts."""
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"evicting {run_id}"):
        run = existing_run(output, run_id)
        if run.evicted.exists():
            return False
        write_atomic(run.evicted, printable(reason).strip() or "no reason was given")
        audit.record(output, "evict", run_id, reason=reason, actor=actor)
        return True


def readmit_run(output_dir: Path, run_id: str, *, reason: str = "") -> bool:
    """Continue a run that is evicted, has failed or was ended early; false when it is none of these.

    One that would end again at once, by its budget or its stop rule, is refused.
    """
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"readmitting {run_id}"):
        run = existing_run(output, run_id)
        view = view_of_run(output, run_id)
        if view.state is RunState.INVALID:
            raise ActionError(in_one_line(f"{run_id} is invalid: fix its orch.toml instead ({view.reason})"))
        ended = is_ended(run)
        if view.state not in (RunState.EVICTED, RunState.FAILED) and not ended:
            return False
        if ended and (why := ends_again(output, run)):
            raise ActionError(in_one_line(f"{run_id} would end again at once: {why}"))
        remove(run.evicted)
        remove(run.finished)
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


def pause_run(output_dir: Path, run_id: str, *, reason: str = "") -> bool:
    """Pause a run that trains or waits; false when it is paused already (its first reason stays).

    The trainer saves the run and frees its slot, the orchestrator unloads its adapters and ends, and the supervisor
    starts none until the run has a slot again.
    """
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"pausing {run_id}"):
        run = existing_run(output, run_id)
        view = view_of_run(output, run_id)
        if why := _REFUSALS.get(view.state):
            raise ActionError(in_one_line(f"{run_id} cannot be paused: {why}"))
        if os.path.lexists(run.paused):
            return False
        write_atomic(run.paused, printable(reason).strip())
        audit.record(output, "pause", run_id, reason=reason)
        return True


def continue_run(output_dir: Path, run_id: str, *, reason: str = "") -> bool:
    """Let a paused run go on when a slot is free; false when it is not paused."""
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"continuing {run_id}"):
        run = existing_run(output, run_id)
        if not os.path.lexists(run.paused):
            return False
        remove(run.paused)
        audit.record(output, "continue", run_id, reason=reason)
        return True


def view_of_run(output: OutputDir, run_id: str) -> RunView:
    """What is known of one run. Raises ActionError when it is not a run."""
    workspace = WorkspaceReader(output.path).read()
    if (view := workspace.run(run_id)) is not None:
        return view
    reason = next((each.reason for each in workspace.refused if each.name == run_id), "its folder is gone")
    raise ActionError(in_one_line(f"{run_id} is not a run: {reason}"))
