"""`prl runs ...`: what people do to runs. Works with the daemons down."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from daemons import actions
from daemons.client import HouseReader, RunView
from daemons.commands.common import (
    JsonOption,
    OutputDirOption,
    UsageError,
    WatchOption,
    choose_output_dir,
    console,
    print_json,
    say,
    watch,
)
from daemons.commands.views import run_details, run_json, runs_table, sample_view
from prime_rl.configs.base import ConfigError, parse_set
from prime_rl.contract.layout import LayoutError, OutputDir, check_run_id
from prime_rl.contract.samples import read_samples
from prime_rl.contract.status import RunState

runs_app = typer.Typer(no_args_is_help=True, help="Add, list, evict, delete runs.", rich_markup_mode=None)

RunIdArgument = Annotated[str, typer.Argument(help="Such as run_reverse.")]
FileArgument = Annotated[Path, typer.Argument(help="The run's TOML file.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Change a value: --set optim.lr=1e-3. May be repeated.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@runs_app.command("list")
def list_runs(
    output_dir: OutputDirOption = None,
    as_json: JsonOption = False,
    state: Annotated[list[RunState] | None, typer.Option(help="Only runs in this state. May be repeated.")] = None,
    watching: WatchOption = False,
) -> None:
    """List the runs: active ones by slot, waiting ones in the order of admission, then all others.

    Example: prl runs list --state active --state waiting
    """
    reader = HouseReader(choose_output_dir(output_dir))

    def chosen() -> list[RunView]:
        return [run for run in reader.read().runs if not state or run.state in state]

    if as_json:
        print_json({"runs": [run_json(run) for run in chosen()]})
    elif watching:
        watch(lambda: runs_table(chosen()))
    else:
        console().print(runs_table(chosen()))


@runs_app.command()
def show(run_id: RunIdArgument, output_dir: OutputDirOption = None, as_json: JsonOption = False) -> None:
    """Show all that is known about one run.

    Example: prl runs show run_reverse --json
    """
    try:
        check_run_id(run_id)
    except LayoutError as error:
        raise UsageError(str(error)) from error
    house = HouseReader(choose_output_dir(output_dir)).read()
    run = house.run(run_id)
    if run is None:
        reason = next((each.reason for each in house.refused if each.name == run_id), None)
        raise actions.ActionError(
            reason or f"no run {run_id!r} in {house.output_dir}: prl runs list shows what is there"
        )
    daemon = house.daemon(run_id)
    tail = list(daemon.log_tail) if daemon else []
    if as_json:
        print_json({"run": {**run_json(run), "log_tail": tail}})
        return
    console().print(run_details(run))
    for line in tail:
        say(f"  {line}")


@runs_app.command()
def samples(
    run_id: RunIdArgument,
    output_dir: OutputDirOption = None,
    as_json: JsonOption = False,
    number: Annotated[int, typer.Option("-n", min=1, help="How many, the newest last.")] = 4,
) -> None:
    """Show the newest rollouts of a run: prompt, completion, reward, advantage, policy version.

    Example: prl runs samples run_reverse -n 8
    """
    place = choose_output_dir(output_dir)
    try:
        run = OutputDir(place).run(run_id)
    except LayoutError as error:
        raise UsageError(str(error)) from error
    if not run.path.is_dir():
        raise actions.ActionError(f"no run {run_id!r} in {place}: prl runs list shows what is there")
    found = read_samples(run.samples, number)
    if as_json:
        print_json({"samples": msgspec.to_builtins(found)})
        return
    for sample in found:
        say(sample_view(sample))
    if not found:
        say(f"{run_id} has no rollouts yet: each of its batches adds some, unless samples.per_step is 0")


@runs_app.command()
def validate(file: FileArgument, output_dir: OutputDirOption = None, changes: SetOption = None) -> None:
    """Check a run's TOML file as the trainer would.

    Example: prl runs validate configs/demo/reverse.toml
    """
    actions.validate_file(choose_output_dir(output_dir), file, overrides=_overrides(changes))
    say(f"{file}: valid")


@runs_app.command()
def add(
    file: FileArgument,
    output_dir: OutputDirOption = None,
    run_id: Annotated[str | None, typer.Option("--id", help="The run's id; else from the file's name.")] = None,
    changes: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and say what would be done.")] = False,
) -> None:
    """Add a run; the trainer admits it when a slot is free.

    Example: prl runs add configs/demo/reverse.toml --set max_steps=20
    """
    place = choose_output_dir(output_dir)
    added = actions.add_run(place, file, run_id=run_id, overrides=_overrides(changes), dry_run=dry_run)
    say(f"{'would add' if dry_run else 'added'} {added} to {place}")


@runs_app.command()
def evict(
    run_id: RunIdArgument,
    reason: Annotated[str, typer.Option(help="Why; shown wherever the run is.")],
    output_dir: OutputDirOption = None,
) -> None:
    """Take a run out of training. Its files stay; readmit lets it go on.

    Example: prl runs evict run_reverse --reason "reward does not rise"
    """
    new = actions.evict_run(choose_output_dir(output_dir), run_id, reason)
    say(f"{run_id} is evicted" if new else f"{run_id} was evicted already")


@runs_app.command()
def readmit(run_id: RunIdArgument, output_dir: OutputDirOption = None) -> None:
    """Let an evicted or failed run train again, from where it stood.

    Example: prl runs readmit run_reverse
    """
    new = actions.readmit_run(choose_output_dir(output_dir), run_id)
    say(f"{run_id} is readmitted" if new else f"{run_id} is neither evicted nor failed: nothing to do")


@runs_app.command()
def delete(
    run_id: RunIdArgument,
    output_dir: OutputDirOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; a run in use is evicted first.")] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait until a run in use is let go.")] = 60.0,
) -> None:
    """Move a run to the trash. A run in use is refused without --yes.

    Example: prl runs delete run_reverse --yes
    """
    place = choose_output_dir(output_dir)
    if not actions.users_of_run(place, run_id):
        _confirm(f"move {run_id} to the trash?", yes)
    said: set[str] = set()

    def progress(message: str) -> None:
        if message not in said:
            said.add(message)
            say(message)

    lies = actions.delete_run(place, run_id, force=yes, wait_s=wait, on_progress=progress)
    say(f"{run_id} lies in {lies}; prl runs undelete {run_id} brings it back")


@runs_app.command()
def undelete(run_id: RunIdArgument, output_dir: OutputDirOption = None) -> None:
    """Bring back a deleted run.

    Example: prl runs undelete run_reverse
    """
    new = actions.undelete_run(choose_output_dir(output_dir), run_id)
    say(f"{run_id} is back" if new else f"{run_id} is there already")


@runs_app.command()
def purge(output_dir: OutputDirOption = None, yes: YesOption = False) -> None:
    """Remove the deleted runs for good.

    Example: prl runs purge --yes
    """
    place = choose_output_dir(output_dir)
    trash = actions.list_trash(place)
    if trash:
        _confirm(
            f"remove {len(trash)} deleted runs for good ({', '.join(run_id for run_id, _ in trash[:5])} ...)?", yes
        )
    say(f"{actions.purge_trash(place)} removed")


def _overrides(changes: list[str] | None) -> dict[str, object] | None:
    try:
        return parse_set(changes) if changes else None
    except ConfigError as error:
        raise UsageError(str(error)) from error


def _confirm(question: str, yes: bool) -> None:
    """Ask on a terminal; elsewhere nobody can answer, so `--yes` is needed."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{question} Nobody can answer here: add --yes")
    typer.confirm(question, abort=True)
