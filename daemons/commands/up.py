"""`prl up`: choose the workspace, make its base model if needed, start it and wait until everything answers.

Without `@ FILE` it starts the workspace with its last settings (kept in `daemons/configs/up.toml`), else a small one as
in `configs/demo/system.toml`, whose base model is made when it is missing. `up_and_down` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
from rich.text import Text

from daemons import starting, up_and_down
from daemons.commands.common import (
    EXTRA,
    FILE_AND_OPTIONS,
    OutputDirOption,
    UsageError,
    choose_output_dir,
    console,
    print_json,
    say,
)
from daemons.submit import is_for_a_job
from daemons.workspace import Workspace
from prime_rl.contract.layout import OutputDir


def up(
    context: typer.Context,
    output_dir: OutputDirOption = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in the foreground until Ctrl-C, for systemd and containers.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run where, with the exact commands; start nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON; its format is stable.")] = False,
) -> None:
    """Start a workspace's daemons in the background.

    Starts a supervisor, which starts the trainer, the inference server and the orchestrators of all runs, and restarts
    those that fail. Returns when trainer and inference are ready.

    @ FILE is the system file (TOML): base model, slots, engine. --key.subkey VALUE overrides one field. Without @ FILE
    the workspace starts with its last settings; a new one starts small, on this machine's CPU, and builds its base
    model.

    With deployment.engine = "slurm" outside an allocation it submits a job, which does this on its first node.

    Example: prl up @ configs/demo/system.toml --inference.port 8001
    """
    if as_json and not dry_run:
        raise UsageError("--json is for prl up --dry-run")
    if dry_run:
        _show_plan(choose_system(context.args, output_dir, say=ignore), as_json)
        return
    from daemons import supervisor
    from prime_rl.utils.signals import StopFlag

    stop = StopFlag().install()
    wanted = choose_system(context.args, output_dir)
    output = OutputDir(wanted.system.output_dir)
    if foreground and is_for_a_job(wanted.system):
        raise UsageError(
            '--foreground with deployment.engine = "slurm" outside an allocation: leave it out to submit a job'
        )
    if foreground:
        ready = up_and_down.make_ready(wanted, output, stop=stop, say=say, is_quiet=False)
        if ready is None:
            raise typer.Exit(130)
        raise typer.Exit(supervisor.supervise(output, up_and_down.take_workspace(ready, output, say), stop))
    with Progress() as look:
        workspace = up_and_down.start_workspace(wanted, stop=stop, say=say, on_look=look)
    if workspace is None:
        raise typer.Exit(130)
    url = workspace.inference.base_url if workspace.inference else ""
    same = output.path == choose_output_dir(output_dir)
    where = "" if same else f" --output-dir {output.path}"
    say(
        f"up: {output.path}, {workspace.max_runs} slots, inference at {url}; "
        f"prl status{where} shows it, prl down{where} stops it"
    )


def choose_system(args: Sequence[str], output_dir: Path | None, say: starting.Say = say) -> up_and_down.Wanted:
    """The system config that the command line describes. Raises ConfigError."""
    return up_and_down.choose_system(args, output_dir, say=say, default=lambda: choose_output_dir(None))


def ignore(line: str) -> None:
    """What is said on the way is no part of what was asked for."""


def _show_plan(wanted: up_and_down.Wanted, as_json: bool) -> None:
    from daemons.dry_run import plan_of

    plan = plan_of(wanted.system, OutputDir(wanted.system.output_dir))
    if as_json:
        return print_json(plan.as_json())
    for line in plan.lines():
        say(line)
    return None


class Progress:
    """Shows the wait for readiness: one live line a daemon on a terminal, a line at each change elsewhere."""

    def __enter__(self) -> Callable[[Workspace], None]:
        screen = console()
        self._live = Live(console=screen, auto_refresh=False) if screen.is_terminal else None
        self._said: list[str] = []
        return self._look

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _look(self, workspace: Workspace) -> None:
        lines = starting.waits(workspace)
        if self._live is not None:
            self._live.start()  # only now, so that earlier messages stand above it
            self._live.update(Text("\n".join(lines)), refresh=True)
        else:
            for line in lines:
                if line not in self._said:
                    say(line)
            self._said = lines


def register(app: typer.Typer) -> None:
    """Add `prl up`."""
    app.command(context_settings=EXTRA, options_metavar=FILE_AND_OPTIONS)(up)
