"""`prl runs evict|readmit|rollback|delete|undelete|purge|pause|continue|set|apply|restore|fork|sweep`.

These commands change runs. They work with the daemons down.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from daemons import actions
from daemons.actions import parse_changes, rollback_run, set_run_keys
from daemons.adding import fork_run
from daemons.commands import complete
from daemons.commands.common import (
    DryRunOption,
    JsonOption,
    OutputDirOption,
    YesOption,
    choose_output_dir,
    complain,
    confirm,
    existing_output,
    parse_duration,
    print_json,
    say,
    told_if_made,
)
from daemons.commands.runs import RunIdArgument, parse_overrides, warn
from daemons.sweeps import sweep_runs
from daemons.trash import purge_trash, users_of_run
from prime_rl.configs.orchestrator import KINDS, LIVE_KEYS
from prime_rl.contract.status import RunState
from prime_rl.utils.text import one_line

RunIdsArgument = Annotated[
    list[str],
    typer.Argument(metavar="ID...", help="One or more runs, such as run_reverse.", autocompletion=complete.run_ids),
]
DeletedIdsArgument = Annotated[
    list[str], typer.Argument(metavar="ID...", help="One or more deleted runs.", autocompletion=complete.deleted_ids)
]
WaitOption = Annotated[
    float, typer.Option(min=0, help="Seconds to wait until trainer and orchestrator release the run.")
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
    each(run_ids, partial(actions.EVICT, existing_output(output_dir).path, reason=reason))


def readmit(run_ids: RunIdsArgument, output_dir: OutputDirOption = None, reason: ReasonOption = "") -> None:
    """Continue runs that are evicted, have failed, or were ended early by a budget, a stop rule or a sweep.

    Each continues from its newest complete checkpoint or published version, when a slot is free.

    Example: prl runs readmit run_reverse
    """
    each(run_ids, partial(actions.READMIT, existing_output(output_dir).path, reason=reason))


def rollback(
    run_id: RunIdArgument,
    step: Annotated[int, typer.Option(min=0, help="Step of the checkpoint; 0 starts over.")],
    output_dir: OutputDirOption = None,
    wait: WaitOption = 60.0,
    reason: ReasonOption = "",
) -> None:
    """Go back to a checkpoint of a run.

    Everything that the run made after that step is removed. prl runs show ID lists its checkpoints. To keep all, fork
    the run instead.

    Example: prl runs rollback run_reverse --step 40
    """
    place = existing_output(output_dir).path
    rollback_run(place, run_id, step, wait_s=wait, on_progress=_say_once(), reason=reason)
    say(f"{run_id}: rolled back to step {step}")


def delete(
    run_ids: RunIdsArgument,
    output_dir: OutputDirOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; evict a run in use first.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also a run that only its own status file shows as in use; asks.")
    ] = False,
    wait: WaitOption = 60.0,
    reason: ReasonOption = "",
) -> None:
    """Move runs to the workspace's trash.

    prl runs undelete restores them; prl runs purge removes them for good. A run in use is refused without --yes.

    Example: prl runs delete run_reverse --yes
    """
    place = existing_output(output_dir).path
    progress = _say_once()

    def act(run_id: str) -> str:
        in_use_by = users_of_run(place, run_id)
        if force and in_use_by:
            confirm(f"{run_id}: {' and '.join(in_use_by)} uses it; do not wait for what only it says itself?", yes)
        elif not in_use_by:
            confirm(f"move {run_id} to the trash?", yes)
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
    each(run_ids, partial(actions.UNDELETE, existing_output(output_dir).path))


def purge(
    output_dir: OutputDirOption = None,
    yes: YesOption = False,
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="Only runs deleted longer ago than this: 7d, 12h, 30m, 45s.")
    ] = "0",
    reason: ReasonOption = "",
) -> None:
    """Remove deleted runs for good; this frees their disk space.

    Example: prl runs purge --older-than 7d --yes
    """
    place = existing_output(output_dir).path
    older_than_s = parse_duration(older_than)
    doomed = actions.list_trash(place, older_than_s=older_than_s)
    if doomed:
        names = ", ".join(run_id for run_id, _ in doomed[:5]) + (", ..." if len(doomed) > 5 else "")
        confirm(f"remove {len(doomed)} deleted runs for good ({names})?", yes)
    say(f"deleted runs removed: {purge_trash(place, older_than_s=older_than_s, reason=reason)}")


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


def pause(run_ids: RunIdsArgument, output_dir: OutputDirOption = None, reason: ReasonOption = "") -> None:
    """Save runs and free their slots until they are continued.

    The trainer saves each after its last update; its adapters leave inference. prl runs continue lets it go on.

    Example: prl runs pause run_reverse --reason "others first"
    """
    each(run_ids, partial(actions.PAUSE, existing_output(output_dir).path, reason=reason))


def go_on(run_ids: RunIdsArgument, output_dir: OutputDirOption = None, reason: ReasonOption = "") -> None:
    """Let paused runs go on where they were, as soon as a slot is free.

    Example: prl runs continue run_reverse
    """
    each(run_ids, partial(actions.CONTINUE, existing_output(output_dir).path, reason=reason))


def set_keys(
    run_id: RunIdArgument,
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE...",
            help=f"While the run is in its slot: {', '.join(LIVE_KEYS)}; else any key. null removes one.",
            autocompletion=complete.live_keys,
        ),
    ],
    output_dir: OutputDirOption = None,
    reason: ReasonOption = "",
) -> None:
    """Change keys of a run's orch.toml; its share, priority, budget and tags also while it trains.

    A larger max_steps continues a run that has finished: prl runs set run_reverse max_steps=200.

    Example: prl runs set run_reverse weight=2 priority=5 preempt=true budget.max_tokens=1e6 tags=a,b
    """
    output = existing_output(output_dir)
    new = set_run_keys(output.path, run_id, parse_changes(changes), reason=reason)
    say(f"{run_id}: {'set ' + ' '.join(changes) if new else 'has these values already'}")
    view = actions.view_of_run(output, run_id)
    if "max_steps" not in parse_changes(changes) or view.max_steps is None or view.step >= view.max_steps:
        return
    if view.state is RunState.FINISHED:
        say(one_line(f"{run_id} stays finished ({view.reason}): prl runs readmit {run_id} continues it", 500))
    elif view.state in (RunState.WAITING, RunState.STOPPED):
        later = " after prl up" if view.state is RunState.STOPPED else ""
        say(f"{run_id} continues from step {view.step}{later}, as soon as a slot is free")


def apply(run_ids: RunIdsArgument, output_dir: OutputDirOption = None, reason: ReasonOption = "") -> None:
    """Put what was edited in the orch.toml of runs into effect.

    A run keeps the config that it was admitted with; prl runs list names an edit that is not in effect. What cannot
    change now is refused by its key. A run in its slot is paused first. prl runs restore takes the edit back.

    Example: prl runs apply run_reverse --reason "a smaller learning rate"
    """
    place = existing_output(output_dir).path
    each(run_ids, lambda run_id: actions.apply_edit(place, run_id, reason=reason))


def restore(run_ids: RunIdsArgument, output_dir: OutputDirOption = None, reason: ReasonOption = "") -> None:
    """Write the config that is in effect back into the orch.toml of runs.

    Example: prl runs restore run_reverse
    """
    place = existing_output(output_dir).path
    each(run_ids, lambda run_id: actions.restore_config(place, run_id, reason=reason))


def fork(
    run_id: Annotated[
        str, typer.Argument(metavar="ID", help="The run to fork, such as run_reverse.", autocompletion=complete.run_ids)
    ],
    output_dir: OutputDirOption = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="The version to start from. Default: the newest.", show_default=False)
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a field, such as optim.lr=3e-5. May be repeated."),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(metavar="KIND", help=f"What it learns from: {', '.join(KINDS)}. Default: as the run."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A TOML file whose tables are laid over the run's config.")
    ] = None,
    new_id: Annotated[
        str | None, typer.Option("--id", metavar="NEW", help="The new run's id. Default: ID and -fork.")
    ] = None,
    with_optimizer: Annotated[
        bool, typer.Option("--with-optimizer", help="Take the optimizer's moments too, from a checkpoint.")
    ] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    reason: ReasonOption = "",
) -> None:
    """Start a new run from a version of a run.

    It has the run's config with your changes, and counts its steps from 0. The other run goes on, and may be deleted.
    With another --kind what only the old kind has is left out of the config, and the optimizer starts anew.

    Example: prl runs fork run_reverse --step 40 --set optim.lr=3e-5 --id run_slower
    """
    made = fork_run(
        existing_output(output_dir).path,
        run_id,
        step=step,
        new_id=new_id,
        kind=kind,
        over=config,
        overrides=parse_overrides(changes),
        with_optimizer=with_optimizer,
        dry_run=dry_run,
        reason=reason,
    )
    if as_json:
        print_json({"fork": msgspec.to_builtins(made), "dry_run": dry_run})
    else:
        optimizer = " with its optimizer" if with_optimizer else ""
        done = "would add" if dry_run else "added" if made.added else "already there:"
        left_out = f"; left out of its config: {', '.join(made.left_out)}" if made.left_out else ""
        say(f"{done} {made.run_id}, which starts from {made.source}{optimizer}{left_out}")


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The config of all runs, a TOML file.")],
    axes: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE,...", help="Values of one key: seed=1,2,3. May be repeated."),
    ],
    output_dir: OutputDirOption = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The sweep's name. Default: that of the file.")
    ] = None,
    halving: Annotated[
        int | None,
        typer.Option(min=2, help="Successive halving: of so many runs one goes on at each rung.", show_default=False),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What halving compares. Default: stop.metric, else reward or held-out loss."),
    ] = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
    reason: ReasonOption = "",
) -> None:
    """Add one run for each combination of values.

    All are checked before the first is added. They are named by what differs and tagged with the sweep's name; the plan
    is in sweeps/NAME.json. The same sweep a second time adds nothing.

    Example: prl runs sweep configs/demo/reverse.toml --set optim.lr=1e-4,3e-4 --set seed=1,2,3 --dry-run
    """
    place = choose_output_dir(output_dir)
    with told_if_made(place, yes or dry_run):
        made = sweep_runs(place, file, axes, name=name, halving=halving, metric=metric, dry_run=dry_run, reason=reason)
    if as_json:
        payload = {"plan": msgspec.to_builtins(made.plan), "added": made.added, "dry_run": dry_run}
        print_json(payload)
        return
    warn(file, made.doubts)
    for run in made.plan.runs:
        values = ", ".join(f"{key}={value}" for key, value in run.set.items())
        done = ("would add" if dry_run else "added") if run.run_id in made.added else "already there:"
        say(f"{done} {run.run_id} ({values})")
