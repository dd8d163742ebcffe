"""`prl runs fork|sweep`: new runs from what is there: from a version of a run, and from a grid over a config file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from daemons.commands import complete
from daemons.commands.common import JsonOption, OutputDirOption, UsageError, choose_output_dir, print_json, say
from daemons.forks import fork_run
from daemons.sweeps import sweep_runs
from prime_rl.configs.base import ConfigError, parse_set

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Check only; add nothing.")]
ReasonOption = Annotated[str, typer.Option(metavar="TEXT", help="Why; recorded in logs/audit.jsonl.")]


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

    Example: prl runs fork run_reverse --step 40 --set optim.lr=3e-5 --id run_slower
    """
    try:
        changed = parse_set(changes) if changes else None
    except ConfigError as error:
        raise UsageError(str(error)) from error
    made = fork_run(
        choose_output_dir(output_dir),
        run_id,
        step=step,
        new_id=new_id,
        overrides=changed,
        with_optimizer=with_optimizer,
        dry_run=dry_run,
        reason=reason,
    )
    if as_json:
        print_json({"fork": msgspec.to_builtins(made), "dry_run": dry_run})
    else:
        optimizer = " with its optimizer" if with_optimizer else ""
        done = "would add" if dry_run else "added" if made.added else "already there:"
        say(f"{done} {made.run_id}, which starts from {made.source}{optimizer}")


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
        str | None, typer.Option(metavar="NAME", help="What halving compares. Default: stop.metric, else reward/mean.")
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    reason: ReasonOption = "",
) -> None:
    """Add one run for each combination of values.

    All are checked before the first is added. They are named by what differs and tagged with the sweep's name; the plan
    is in sweeps/NAME.json. The same sweep a second time adds nothing.

    Example: prl runs sweep configs/demo/reverse.toml --set optim.lr=1e-4,3e-4 --set seed=1,2,3 --dry-run
    """
    place = choose_output_dir(output_dir)
    made = sweep_runs(place, file, axes, name=name, halving=halving, metric=metric, dry_run=dry_run, reason=reason)
    if as_json:
        payload = {"plan": msgspec.to_builtins(made.plan), "added": made.added, "dry_run": dry_run}
        print_json(payload)
        return
    for run in made.plan.runs:
        values = ", ".join(f"{key}={value}" for key, value in run.set.items())
        done = ("would add" if dry_run else "added") if run.run_id in made.added else "already there:"
        say(f"{done} {run.run_id} ({values})")


def register(app: typer.Typer) -> None:
    """Add the commands to `prl runs`."""
    app.command()(fork)
    app.command()(sweep)
