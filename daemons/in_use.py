"""Which processes use a run, and waiting until they release it: for `trash` and `rollback`.

It evicts no run and ends no process: trainer and orchestrator leave by themselves when their run is evicted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from daemons.errors import ActionError, one_line_errors
from prime_rl.contract.files import WaitTimeout, wait_for
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import DaemonStatus, RunStatus, TrainerStatus, is_elsewhere, is_there, read_status

Progress = Callable[[str], None]


def users_of_run(output_dir: Path, run_id: str) -> list[str]:
    """What uses a run now, such as "the trainer (slot 1)"; while anything does, deleting it needs `force`."""
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"looking at {run_id}"):
        return users(output, output.run(run_id))


def users(output: OutputDir, run: RunDir, *, claimed: bool = True) -> list[str]:
    """What must release a run before its folder may move; without `claimed`, only what others than the run report.

    The owner of a run may write anything into its status file, so what it claims must not keep the run for ever.
    """
    found = []
    trainer = read_status(output.trainer_status, TrainerStatus)
    if trainer is not None and is_there(trainer):
        if run.run_id in trainer.runs:
            found.append(f"the trainer (slot {trainer.runs[run.run_id].run_idx})")
        elif run.run_id in trainer.waiting and run.evicted.exists():
            found.append("the trainer (its queue)")
    status = read_status(run.status, RunStatus) if claimed else None
    daemon = read_status(output.daemon_status(run.run_id), DaemonStatus)
    if status is not None and is_elsewhere(status) and is_there(status):
        return [*found, f"its orchestrator (pid {status.pid} on {status.host})"]
    for process in (status.writer if status else None, daemon.child if daemon else None):
        if process is not None and process.is_running():
            found.append(f"its orchestrator (pid {process.pid})")
            break
    return found


def wait_until_released(
    output: OutputDir, run: RunDir, not_done: str, wait_s: float, on_progress: Progress, *, claimed: bool = True
) -> None:
    """Wait until an evicted run is released. Raises ActionError; `not_done` is its text, such as "was not deleted".

    `claimed`: as in `users`.
    """
    said: list[str] = []

    def free() -> bool:
        said[:] = users(output, run, claimed=claimed)
        if said:
            on_progress(f"waiting for {' and '.join(said)} to release {run.run_id}")
        return not said

    try:
        wait_for(free, f"{run.run_id} to be released", timeout_s=wait_s, poll_s=0.2)
    except WaitTimeout as error:
        raise ActionError(
            f"{run.run_id} {not_done}: {' and '.join(said)} did not release it within {wait_s:g} s; "
            "it stays evicted: try again"
        ) from error
