"""Pause a run and continue it: `prl runs pause`, `prl runs continue`, and the same in the TUI.

Only `control/paused.txt` is written and removed, so it works with the daemons down. The trainer saves the run and frees
its slot, the orchestrator unloads its adapters and ends, and the supervisor starts none until the run has a slot again.
"""

from __future__ import annotations

import os
from pathlib import Path

from daemons import audit
from daemons.actions import view_of_run
from daemons.errors import ActionError, in_one_line, one_line_errors, printable
from daemons.trash import existing_run
from prime_rl.contract.files import remove, write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import RunState

# Why a run in this state cannot be paused, and what to do.
_REFUSALS = {
    RunState.INVALID: "it is invalid and has no slot: fix its orch.toml instead",
    RunState.FINISHED: "it is finished",
    RunState.EVICTED: "it is evicted and has no slot: prl runs readmit continues it",
    RunState.FAILED: "it has failed and has no slot: prl runs readmit continues it",
}


def pause_run(output_dir: Path, run_id: str, *, reason: str = "") -> bool:
    """Pause a run that trains or waits; false when it is paused already (its first reason stays)."""
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
