"""`prl trainer|orchestrator|inference @ FILE`, `prl make-base` and `prl fit`: one component, in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from daemons.commands.common import EXTRA, FILE_AND_OPTIONS, flags_help
from daemons.errors import need_cpu
from daemons.specs import FIT_MODULE, INFERENCE, MAKE_BASE_MODULE, ORCHESTRATOR, TRAINER, module_of
from prime_rl.configs import fit_flags


def _become(module: str, args: Sequence[str]) -> None:
    """Replace this process, so signals and the exit code are the component's own. Raises ActionError."""
    need_cpu()
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


FIT_HELP = """Show what a pass of the trainer needs in GPU memory, and what fits.

Needs no GPU and no download: the real pass runs on tensors without memory. Prints also the largest micro-batch, the
most runs, and how to divide one GPU between trainer and vLLM."""


def fit(context: typer.Context) -> None:
    """Replace this process with that of `prl fit`. `register` gives the command its help."""
    _become(FIT_MODULE, context.args)


def register(app: typer.Typer) -> None:
    """Add the commands to `prl`."""
    help_text = flags_help(FIT_HELP, f"prl fit {fit_flags.EXAMPLE}", fit_flags.fit_parser())
    app.command(help=help_text, context_settings=EXTRA, options_metavar=FILE_AND_OPTIONS)(fit)
    for command in (trainer, orchestrator, inference):
        app.command(context_settings=EXTRA, options_metavar=FILE_AND_OPTIONS)(command)
    app.command("make-base", context_settings=EXTRA)(make_base)
