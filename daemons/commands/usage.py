"""`prl usage`: what the runs have used. It works with the daemons down."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from daemons.commands.common import (
    FittingTable,
    JsonOption,
    OutputDirOption,
    check_readable,
    choose_output_dir,
    complain,
    console,
    print_json,
    say,
)
from daemons.usage import By, Use, read_workspace_usage

_COLUMNS = ("trainer", "sampled", "trained", "inference", "hours")


def usage(
    output_dir: OutputDirOption = None,
    as_json: JsonOption = False,
    by: Annotated[By, typer.Option(help="What to add up by.")] = By.RUN,
) -> None:
    """Show what runs have used: trainer seconds, tokens sampled and trained, inference seconds, hours at work.

    Deleted runs are included. A run counts for each of its tags, and once in the total.

    Example: prl usage --by tag
    """
    place = check_readable(choose_output_dir(output_dir))
    found = read_workspace_usage(place, by)
    for problem in found.unread:
        complain(f"not counted: {problem}")
    if as_json:
        print_json({"by": str(by), "rows": [asdict(row) for row in found.rows], "total": asdict(found.total)})
    elif not found.rows:
        say(f"{place}: no usage yet")
    else:
        rows = [_cells(row) for row in [*found.rows, found.total]]
        console().print(FittingTable([str(by), *_COLUMNS], rows, ("hours", "inference", "trained", "sampled")))


def _cells(use: Use) -> list[object]:
    return [
        use.name,
        f"{use.trainer_s:,.1f} s",
        f"{use.tokens_sampled:,}",
        f"{use.tokens_trained:,}",
        f"{use.inference_s:,.1f} s",
        f"{use.hours:,.2f}",
    ]


def register(app: typer.Typer) -> None:
    """Add `prl usage`."""
    app.command()(usage)
