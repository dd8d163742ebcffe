"""`prl down`, `status`, `logs`, `restart`: commands for the whole workspace."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from daemons.actions import ActionError
from daemons.commands import complete
from daemons.commands.common import (
    JsonOption,
    OutputDirOption,
    UsageError,
    WatchOption,
    check_readable,
    choose_output,
    console,
    no_workspace,
    print_json,
    say,
    watch,
)
from daemons.commands.views import workspace_json, workspace_view
from daemons.disk import DiskReader
from daemons.logs import JOB_LOG, SRUN_LOG, end_of_lines, last_lines
from daemons.pidfile import read_info
from daemons.specs import INFERENCE, OPTIONAL, TRAINER, kind_of
from daemons.workspace import SUPERVISOR
from daemons.workspace_reader import WorkspaceReader
from prime_rl.contract.layout import LayoutError, OutputDir
from prime_rl.utils.tail import FileTail
from prime_rl.utils.text import clean_text

FOLLOW_EVERY_S = 0.25
# As in `logs.node_log`: the log of a daemon's node after its first.
_NODE = re.compile(r"-node[1-9][0-9]*$")


def down(
    output_dir: OutputDirOption = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds until a supervisor that does not stop is killed. Default: from the system file."),
    ] = None,
) -> None:
    """Stop all daemons of a workspace; runs are kept.

    Orchestrators may finish their batch and the trainer its step and checkpoint. Then checks that no process is left.
    A workspace that is a Slurm job ends with its job. prl up continues later.

    Example: prl down --output-dir outputs/demo
    """
    from daemons import up_and_down

    output = choose_output(output_dir)
    was_running = up_and_down.stop_workspace(output.path, timeout_s=timeout, say=say)
    say(f"{output.path}: stopped, no process is left" if was_running else f"{output.path}: nothing is running")


def status(output_dir: OutputDirOption = None, as_json: JsonOption = False, watching: WatchOption = False) -> None:
    """Show daemons, slots, runs, disk and the bottleneck.

    The last line names the process that the others wait for.

    Example: prl status --watch
    """
    path = check_readable(choose_output(output_dir).path)
    reader, disk = WorkspaceReader(path), DiskReader(path)

    def view() -> RenderableType:
        if none := no_workspace(path):
            return Text(none)
        return workspace_view(reader.read(), disk.read(), read_info(reader.output))

    if as_json:
        print_json(workspace_json(reader.read(), disk.read()))
    elif watching:
        watch(view)
    else:
        console().print(view())


def logs(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="supervisor, trainer, inference, alerts, monitors, or a run's id. trainer-node1 is the trainer on its "
            "second node; with Slurm job is the job's own log, srun what Slurm complains about.",
            autocompletion=complete.log_names,
        ),
    ],
    output_dir: OutputDirOption = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print new lines as they come, until Ctrl-C.")] = False,
    num_lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Print the last N lines.")] = 50,
    grep: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Print only lines that match this regular expression.")
    ] = None,
) -> None:
    """Print the log of a daemon or of a run's orchestrator.

    Reads rotated log files too.

    Example: prl logs run_reverse -f --grep "WARNING|ERROR"
    """
    path = _log_path(choose_output(output_dir), name)
    wanted = _line_filter(grep)
    if not path.exists() and not follow:
        raise ActionError(f"log {path} not found: {name} has not been started yet")
    end = end_of_lines(path) if follow else None
    tail = FileTail(path, position=end or 0)
    begun = tail.read().lines if follow else []  # from here nothing is missed, whatever happens to the file
    for line in last_lines(path, num_lines, wanted, end=end):
        say(line)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            _follow(tail, begun, wanted)


def _follow(tail: FileTail, lines: list[bytes], wanted: Callable[[str], bool]) -> None:
    more = False
    while True:
        for line in filter(wanted, (line.decode(errors="replace") for line in lines)):
            say(line)
        if not lines and not more:
            time.sleep(FOLLOW_EVERY_S)
        found = tail.read()
        lines, more = found.lines, found.more


def _line_filter(pattern: str | None) -> Callable[[str], bool]:
    """A filter of lines as they are shown, without control characters. Raises UsageError."""
    if pattern is None:
        return lambda line: True
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise UsageError(f"invalid regular expression --grep {pattern!r}: {error}") from error
    return lambda line: search(clean_text(line)) is not None


def _log_path(output: OutputDir, name: str) -> Path:
    services = (SUPERVISOR, INFERENCE, TRAINER, *OPTIONAL)
    daemon = _NODE.sub("", name)
    if name in (JOB_LOG, SRUN_LOG) or daemon in services or kind_of(daemon) == INFERENCE:
        return output.log(name)
    try:
        run = output.run(name)
    except LayoutError as error:
        raise UsageError(f"{name!r} not found: expected {', '.join(services)} or a run's id ({error})") from error
    if not run.path.is_dir():
        raise ActionError(f"run {name!r} not found in {output.path}: prl runs list shows all runs")
    return run.log


def restart(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="trainer, inference, alerts, monitors, or a run's id (restarts its orchestrator).",
            autocompletion=complete.daemon_names,
        ),
    ],
    output_dir: OutputDirOption = None,
) -> None:
    """Restart one daemon.

    The daemon may finish its work first. A daemon in state failed is started again too.

    Example: prl restart inference
    """
    from daemons import up_and_down

    up_and_down.restart_daemon(choose_output(output_dir).path, name, say=say)
    say(f"{name}: restarted")


def register(app: typer.Typer) -> None:
    """Add the commands to `prl`."""
    for command in (down, status, logs, restart):
        app.command()(command)
