"""`prl doctor`: prints one line per check. `daemons.doctor` makes the checks."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from daemons.commands.common import JsonOption, OutputDirOption, choose_output_dir, complain, console, print_json
from daemons.doctor import examine
from prime_rl.utils.text import clean_text

_STYLES = {"ok": "green", "warning": "yellow", "broken": "red"}


def doctor(
    output_dir: OutputDirOption = None,
    as_json: JsonOption = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip importing torch and vLLM, which takes several seconds.")
    ] = False,
) -> None:
    """Check this machine and workspace for problems.

    Each line is ok, or a warning or broken with what to do. The exit code is 1 if something is broken.

    Example: prl doctor --output-dir outputs/demo
    """
    screen, found = console(), []

    def progress(message: str) -> None:
        if sys.stderr.isatty() and not as_json:
            complain(message)

    for check in examine(choose_output_dir(output_dir), say=progress, import_libraries=not quick):
        found.append(check)
        if not as_json:
            advice = f": {check.advice}" if check.advice else ""
            line = Text(f"{check.level:8}", style=_STYLES[check.level])
            screen.print(
                line.append(clean_text(f"{check.name}: {check.message}{advice}"), style="default"), soft_wrap=True
            )
    num_broken = sum(check.level == "broken" for check in found)
    if as_json:
        print_json({"ok": not num_broken, "checks": [asdict(check) for check in found]})
    raise typer.Exit(1 if num_broken else 0)


def register(app: typer.Typer) -> None:
    """Add `prl doctor`."""
    app.command()(doctor)
