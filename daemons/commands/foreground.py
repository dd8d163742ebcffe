"""`prl trainer|orchestrator|inference @ FILE` and `prl make-base`: one component in the foreground, in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from daemons.commands.common import EXTRA
from daemons.specs import INFERENCE, MAKE_BASE_MODULE, ORCHESTRATOR, TRAINER, module_of


def _become(module: str, args: Sequence[str]) -> None:
    """Replace this process, so signals and the exit code are the component's own."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *args])


def trainer(context: typer.Context) -> None:
    """Run only the trainer, in the foreground.

    @ FILE is its config (TOML); --key.subkey VALUE overrides one field. Ctrl-C stops it.

    Example: prl trainer @ configs/reverse_text/trainer.toml --max_concurrent_runs 2
    """
    _become(module_of(TRAINER), context.args)


def orchestrator(context: typer.Context) -> None:
    """Run only one run's orchestrator, in the foreground.

    @ FILE is the run's config (TOML). Ends when the run is finished, or with Ctrl-C.

    Example: prl orchestrator @ outputs/run_reverse/control/orch.toml
    """
    _become(module_of(ORCHESTRATOR), context.args)


def inference(context: typer.Context) -> None:
    """Run only the inference server, in the foreground.

    @ FILE is its config (TOML); --key.subkey VALUE overrides one field. Ctrl-C stops it.

    Example: prl inference @ configs/reverse_text/inference.toml --port 8001
    """
    _become(module_of(INFERENCE), context.args)


def make_base(context: typer.Context) -> None:
    """Build a small base model that trains on a CPU.

    It is built from scratch, without a download.

    Example: prl make-base --out models/base --seed 0
    """
    _become(MAKE_BASE_MODULE, context.args)


def register(app: typer.Typer) -> None:
    for command in (trainer, orchestrator, inference):
        app.command(context_settings=EXTRA)(command)
    app.command("make-base", context_settings=EXTRA)(make_base)
