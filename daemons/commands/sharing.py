"""`prl runs pause|continue|set`: commands that decide which runs share the trainer, and how."""

from __future__ import annotations

from typing import Annotated

import typer

from daemons.actions import continue_run, pause_run
from daemons.commands import complete
from daemons.commands.acts import ReasonOption, RunIdsArgument, each
from daemons.commands.common import OutputDirOption, choose_output_dir, say
from daemons.commands.runs import RunIdArgument
from daemons.set_keys import parse_changes, set_run_keys
from prime_rl.configs.lifetime import LIVE_KEYS


def pause(run_ids: RunIdsArgument, output_dir: OutputDirOption = None, reason: ReasonOption = "") -> None:
    """Save runs and free their slots until they are continued.

    The trainer saves each after its last update; its adapters leave inference. prl runs continue lets it go on.

    Example: prl runs pause run_reverse --reason "others first"
    """
    place = choose_output_dir(output_dir)

    def act(run_id: str) -> str:
        new = pause_run(place, run_id, reason=reason)
        return f"{run_id}: paused" if new else f"{run_id}: already paused"

    each(run_ids, act)


def go_on(run_ids: RunIdsArgument, output_dir: OutputDirOption = None, reason: ReasonOption = "") -> None:
    """Let paused runs go on where they were, as soon as a slot is free.

    Example: prl runs continue run_reverse
    """
    place = choose_output_dir(output_dir)

    def act(run_id: str) -> str:
        new = continue_run(place, run_id, reason=reason)
        return f"{run_id}: continues" if new else f"{run_id}: not paused, nothing to do"

    each(run_ids, act)


def set_keys(
    run_id: RunIdArgument,
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE...",
            help=f"While the run is in its slot: {', '.join(LIVE_KEYS)}; else any key. null removes one.",
            autocompletion=complete.live_keys,
        ),
    ],
    output_dir: OutputDirOption = None,
    reason: ReasonOption = "",
) -> None:
    """Change keys of a run's orch.toml; its share, priority, budget and tags also while it trains.

    Example: prl runs set run_reverse weight=2 priority=5 preempt=true budget.max_tokens=1e6 tags=a,b
    """
    new = set_run_keys(choose_output_dir(output_dir), run_id, parse_changes(changes), reason=reason)
    say(f"{run_id}: {'set ' + ' '.join(changes) if new else 'has these values already'}")


def register(app: typer.Typer) -> None:
    """Add the commands to `prl runs`."""
    app.command()(pause)
    app.command("continue")(go_on)
    app.command("set")(set_keys)
