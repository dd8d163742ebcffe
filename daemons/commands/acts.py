"""`prl runs evict|readmit|rollback|delete|undelete|purge`: commands that change runs.

They work with the daemons down.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from daemons import actions
from daemons.commands import complete
from daemons.commands.common import OutputDirOption, UsageError, choose_output_dir, complain, parse_duration, say
from daemons.rollback import rollback_run

RunIdsArgument = Annotated[
    list[str],
    typer.Argument(metavar="ID...", help="One or more runs, such as run_reverse.", autocompletion=complete.run_ids),
]
DeletedIdsArgument = Annotated[
    list[str], typer.Argument(metavar="ID...", help="One or more deleted runs.", autocompletion=complete.deleted_ids)
]
OneRunArgument = Annotated[
    str, typer.Argument(metavar="ID", help="A run, such as run_reverse.", autocompletion=complete.run_ids)
]
ReasonOption = Annotated[str, typer.Option(metavar="TEXT", help="Why; recorded in logs/audit.jsonl.")]


def evict(
    run_ids: RunIdsArgument,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why; shown with the run everywhere.")],
    output_dir: OutputDirOption = None,
) -> None:
    """Stop runs and free their slots; their files are kept.

    prl runs readmit continues them later.

    Example: prl runs evict run_reverse --reason "reward does not rise"
    """
    place = choose_output_dir(output_dir)

    def act(run_id: str) -> str:
        new = actions.evict_run(place, run_id, reason)
        return f"{run_id}: evicted" if new else f"{run_id}: already evicted"

    each(run_ids, act)


def readmit(run_ids: RunIdsArgument, output_dir: OutputDirOption = None, reason: ReasonOption = "") -> None:
    """Continue runs that are evicted, have failed, or were ended early by a budget, a stop rule or a sweep.

    Each continues from its newest complete checkpoint or published version, when a slot is free.

    Example: prl runs readmit run_reverse
    """
    place = choose_output_dir(output_dir)

    def act(run_id: str) -> str:
        new = actions.readmit_run(place, run_id, reason=reason)
        return (
            f"{run_id}: readmitted" if new else f"{run_id}: neither evicted nor failed nor ended early, nothing to do"
        )

    each(run_ids, act)


def rollback(
    run_id: OneRunArgument,
    step: Annotated[int, typer.Option(min=0, help="Step of the checkpoint; 0 starts over.")],
    output_dir: OutputDirOption = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait until trainer and orchestrator release the run.")
    ] = 60.0,
    reason: ReasonOption = "",
) -> None:
    """Go back to a checkpoint of a run.

    Everything that the run made after that step is removed. prl runs show ID lists its checkpoints. To keep all, fork
    the run instead.

    Example: prl runs rollback run_reverse --step 40
    """
    place = choose_output_dir(output_dir)
    rollback_run(place, run_id, step, wait_s=wait, on_progress=_say_once(), reason=reason)
    say(f"{run_id}: rolled back to step {step}")


def old_rollback(
    run_id: OneRunArgument,
    step: Annotated[int, typer.Option(min=0)],
    output_dir: OutputDirOption = None,
    wait: Annotated[float, typer.Option(min=0)] = 60.0,
    reason: ReasonOption = "",
) -> None:
    """The old name of rollback.

    Example: prl runs resume run_reverse --step 40
    """
    complain("prl runs resume is now prl runs rollback; the old name will go with the next version")
    rollback(run_id, step, output_dir, wait, reason)


def delete(
    run_ids: RunIdsArgument,
    output_dir: OutputDirOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; evict a run in use first.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also a run that only its own status file shows as in use; asks.")
    ] = False,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait until trainer and orchestrator release the run.")
    ] = 60.0,
    reason: ReasonOption = "",
) -> None:
    """Move runs to the workspace's trash.

    prl runs undelete restores them; prl runs purge removes them for good. A run in use is refused without --yes.

    Example: prl runs delete run_reverse --yes
    """
    place = choose_output_dir(output_dir)
    progress = _say_once()

    def act(run_id: str) -> str:
        in_use_by = actions.users_of_run(place, run_id)
        if force and in_use_by:
            _confirm(f"{run_id}: {' and '.join(in_use_by)} uses it; do not wait for what only it says itself?", yes)
        elif not in_use_by:
            _confirm(f"move {run_id} to the trash?", yes)
        try:
            trashed = actions.delete_run(
                *(place, run_id), force=yes, wait_s=wait, on_progress=progress, reason=reason, claimed=not force
            )
        except KeyboardInterrupt:
            complain(f"{run_id} was not deleted and stays evicted: delete it again, or prl runs readmit {run_id}")
            raise
        return f"{run_id}: moved to {trashed}; prl runs undelete {run_id} restores it"

    each(run_ids, act)


def undelete(run_ids: DeletedIdsArgument, output_dir: OutputDirOption = None) -> None:
    """Restore deleted runs from the trash.

    If several deleted runs have the same id, the newest is restored.

    Example: prl runs undelete run_reverse
    """
    place = choose_output_dir(output_dir)

    def act(run_id: str) -> str:
        return f"{run_id}: restored" if actions.undelete_run(place, run_id) else f"{run_id}: not deleted, nothing to do"

    each(run_ids, act)


def purge(
    output_dir: OutputDirOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="Only runs deleted longer ago than this: 7d, 12h, 30m, 45s.")
    ] = "0",
    reason: ReasonOption = "",
) -> None:
    """Remove deleted runs for good; this frees their disk space.

    Example: prl runs purge --older-than 7d --yes
    """
    place = choose_output_dir(output_dir)
    older_than_s = parse_duration(older_than)
    doomed = actions.list_trash(place, older_than_s=older_than_s)
    if doomed:
        names = ", ".join(run_id for run_id, _ in doomed[:5]) + (", ..." if len(doomed) > 5 else "")
        _confirm(f"remove {len(doomed)} deleted runs for good ({names})?", yes)
    say(f"deleted runs removed: {actions.purge_trash(place, older_than_s=older_than_s, reason=reason)}")


def each(run_ids: list[str], act: Callable[[str], str]) -> None:
    """Act on each run, even after one failed, then exit with the worst code. A single run just raises."""
    wanted = list(dict.fromkeys(run_ids))
    if len(wanted) == 1:
        say(act(wanted[0]))
        return
    worst = 0
    for run_id in wanted:
        try:
            say(act(run_id))
        except actions.ActionError as error:
            complain(str(error))
            worst = max(worst, error.exit_code)
    if worst:
        raise typer.Exit(worst)


def _say_once() -> Callable[[str], None]:
    """Print each message once."""
    said: set[str] = set()

    def progress(message: str) -> None:
        if message not in said:
            said.add(message)
            say(message)

    return progress


def _confirm(question: str, yes: bool) -> None:
    """Ask on a terminal; elsewhere `--yes` is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{question} cannot ask without a terminal: add --yes")
    typer.confirm(question, abort=True)


def register(app: typer.Typer) -> None:
    """Add the commands to `prl runs`; `resume`, the old name of `rollback`, is hidden."""
    for command in (evict, readmit, rollback, delete, undelete, purge):
        app.command()(command)
    app.command("resume", hidden=True)(old_rollback)
