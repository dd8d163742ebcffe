"""`prl scale inference N`: how many inference servers a workspace has.

Only the saved settings are changed: the supervisor starts or ends servers at its next look, or at the next `prl up`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer

from daemons import audit
from daemons.commands.acts import ReasonOption
from daemons.commands.common import JsonOption, OutputDirOption, choose_output_dir, print_json, say
from daemons.errors import ActionError, WrongUseError, in_one_line, one_line_errors
from daemons.specs import SYSTEM, UP
from daemons.workspace_reader import read_workspace
from prime_rl.configs.base import ConfigError, build, load_toml, merge
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir

scale_app = typer.Typer(no_args_is_help=True, help="Change how many of a daemon there are, while they run.")
MAX_PORT = 65_535


def scale_inference(output_dir: Path, replicas: int, *, reason: str = "") -> int:
    """Have so many inference servers; returns how many there were before. Raises ActionError.

    Servers that stay keep their GPUs.
    """
    output = OutputDir(Path(output_dir))
    if replicas < 1:
        raise WrongUseError(f"{replicas} inference servers: must be 1 or more; prl down stops the workspace")
    path = output.component_config(SYSTEM)
    if not path.exists():
        raise ActionError(f"{output.path} has no saved settings: start it with prl up first")
    with one_line_errors("scaling inference"):
        try:
            system = build(SystemConfig, load_toml(path), str(path))
            changed = _changed(system, replicas)
            settings = [(each, merge(load_toml(each), changed)) for each in (path, output.component_config(UP))]
            for each, data in settings:
                build(SystemConfig, data, each.name)
        except ConfigError as error:
            raise ActionError(in_one_line(f"cannot have {replicas} inference servers: {error}")) from error
        before = system.deployment.inference.replicas
        if before != replicas:
            for each, data in settings:
                write_atomic(each, tomli_w.dumps(data))
            audit.record(output, "scale", None, reason=reason, detail=f"{before} -> {replicas} inference servers")
    return before


def _changed(system: SystemConfig, replicas: int) -> dict[str, Any]:
    """The settings that change. Raises ActionError when a port or a GPU is missing."""
    deployed, port = system.deployment.inference, system.inference.port
    if port and port + replicas - 1 > MAX_PORT:
        raise ActionError(f"{replicas} inference servers need ports up to {port + replicas - 1}: at most {MAX_PORT}")
    gpus, each = len(deployed.gpus), deployed.gpus_each
    if gpus and (needed := replicas * each) > gpus:
        raise ActionError(
            f"{replicas} inference servers of {each} GPUs need {needed}: deployment.inference.gpus lists {gpus}"
        )
    table: dict[str, Any] = {"replicas": replicas}
    if gpus:  # else they would be divided again
        table["gpus_per_replica"] = each
    return {"deployment": {"inference": table}}


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
