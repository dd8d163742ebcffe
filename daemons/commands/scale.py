"""`prl scale inference N`."""

from __future__ import annotations

from typing import Annotated

import typer

from daemons.commands.acts import ReasonOption
from daemons.commands.common import JsonOption, OutputDirOption, choose_output_dir, print_json, say
from daemons.scaling import scale_inference
from daemons.workspace_reader import read_workspace

scale_app = typer.Typer(no_args_is_help=True, help="Change how many of a daemon there are, while they run.")


def inference(
    replicas: Annotated[int, typer.Argument(metavar="N", help="Inference servers, 1 or more.")],
    output_dir: OutputDirOption = None,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Change how many inference servers a workspace has.

    The supervisor starts or ends servers at its next look; runs use new ones as soon as these serve, and make again
    elsewhere what one that ends has not answered. With the daemons down it holds for the next prl up.

    Example: prl scale inference 3
    """
    place = choose_output_dir(output_dir)
    before = scale_inference(place, replicas, reason=reason)
    is_up = read_workspace(place).supervisor_alive
    if as_json:
        print_json({"replicas": replicas, "before": before, "supervisor_alive": is_up})
    elif before == replicas:
        say(f"{place}: has {replicas} already")
    else:
        say(f"{place}: {before} -> {replicas} inference servers{'' if is_up else ' at the next prl up'}")


def register(app: typer.Typer) -> None:
    """Add the group `prl scale`."""
    scale_app.command("inference")(inference)
    app.add_typer(scale_app, name="scale")
