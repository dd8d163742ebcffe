"""`prl down`, `status`, `logs`, `restart`: the house as a whole."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from daemons.actions import ActionError
from daemons.client import HouseReader
from daemons.commands import complete
from daemons.commands.common import (
    JsonOption,
    OutputDirOption,
    UsageError,
    WatchOption,
    choose_output,
    console,
    print_json,
    say,
    watch,
)
from daemons.commands.views import house_json, house_view
from prime_rl.contract.files import WaitTimeout, wait_for, write_atomic
from prime_rl.contract.layout import LayoutError, OutputDir

RESTART_WAIT_S = 60.0
FOLLOW_EVERY_S = 0.25
_CHUNK_BYTES = 1_000_000


def down(
    output_dir: OutputDirOption = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds a living supervisor may take before it is killed. Default: what its limits add to."),
    ] = None,
) -> None:
    """Stop everything of a house, and prove that nothing is left.

    Example: prl down --output-dir outputs/demo
    """
    from daemons import launch

    output = choose_output(output_dir)
    was_running = launch.down(output, timeout_s=timeout, say=say)
    say(f"{output.path}: stopped, nothing is left" if was_running else f"{output.path}: nothing is running")


def status(output_dir: OutputDirOption = None, as_json: JsonOption = False, watching: WatchOption = False) -> None:
    """Show the daemons, the slots, the runs, and what holds them up.

    Example: prl status --watch
    """
    reader = HouseReader(choose_output(output_dir).path)
    if as_json:
        print_json(house_json(reader.read()))
    elif watching:
        watch(lambda: house_view(reader.read()))
    else:
        console().print(house_view(reader.read()))


def logs(
    name: Annotated[
        str,
        typer.Argument(help="supervisor, trainer, inference, or a run.", autocompletion=complete.log_names),
    ],
    output_dir: OutputDirOption = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as the log grows, until Ctrl-C.")] = False,
    num_lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="How many of the last lines.")] = 50,
) -> None:
    """Print the log of a daemon or of a run's orchestrator.

    Example: prl logs run_reverse -f
    """
    from daemons.process import log_tail

    path = _log_path(choose_output(output_dir), name)
    if not path.exists() and not follow:
        raise ActionError(f"{path} is not there: {name} has not been started yet")
    size = path.stat().st_size if path.exists() else 0
    for line in log_tail(path, num_lines, limit=max(64_000, num_lines * 1_000), this_start_only=False):
        say(line)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            _follow(path, size)


def _log_path(output: OutputDir, name: str) -> Path:
    if name in ("supervisor", "trainer", "inference"):
        return output.log(name)
    try:
        run = output.run(name)
    except LayoutError as error:
        raise UsageError(f"no daemon or run {name!r}: {error}") from error
    if not run.path.is_dir():
        raise ActionError(f"no run {name!r} in {output.path}: prl runs list shows what is there")
    return run.log


def _follow(path: Path, position: int) -> None:
    rest = b""
    while True:
        try:
            size = path.stat().st_size
        except OSError:
            size = 0
        if size < position:
            position, rest = 0, b""
        if size > position:
            with path.open("rb") as file:
                file.seek(position)
                data = file.read(_CHUNK_BYTES)
            position += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                say(line.decode(errors="replace"))
        else:
            time.sleep(FOLLOW_EVERY_S)


def restart(
    name: Annotated[
        str,
        typer.Argument(help="trainer, inference, or a run (its orchestrator).", autocompletion=complete.part_names),
    ],
    output_dir: OutputDirOption = None,
) -> None:
    """End one part and start it again.

    Example: prl restart inference
    """
    output = choose_output(output_dir)
    reader = HouseReader(output.path)
    house = reader.read()
    part = house.daemon(name)
    if not house.supervisor_alive:
        raise ActionError(f"nothing is running in {output.path}: prl up starts the house")
    if part is None or name == "supervisor":
        known = ", ".join(each.name for each in house.daemons if each.name != "supervisor")
        raise UsageError(f"no part {name!r} to restart; there are: {known}")
    if part.state == "done":
        raise ActionError(f"{name} is done ({part.reason}): prl runs readmit {name} lets it train again")
    write_atomic(output.start_request(name), "restart")

    def new() -> bool:
        now = reader.read().daemon(name)
        return now is not None and now.pid not in (None, part.pid) and now.state in ("starting", "running")

    try:
        wait_for(new, f"{name} to be started again", timeout_s=RESTART_WAIT_S)
    except WaitTimeout as error:
        raise ActionError(f"{name}: {error}; prl status shows what holds it up") from error
    say(f"{name} is started again")


def register(app: typer.Typer) -> None:
    for command in (down, status, logs, restart):
        app.command()(command)
