"""`prl trainer|orchestrator|inference @ FILE` and `prl make-base`: one component in the foreground, in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from daemons.commands.common import EXTRA, FILE_AND_OPTIONS
from daemons.specs import FIT_MODULE, INFERENCE, MAKE_BASE_MODULE, ORCHESTRATOR, TRAINER, module_of


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


def fit(context: typer.Context) -> None:
    """Show what a pass of the trainer needs in GPU memory, and what fits.

    Needs no GPU and no download: the real pass runs on tensors without memory. Prints also the largest micro-batch, the
    most runs, and how to divide one GPU between trainer and vLLM.

    @ FILE is the system file (TOML). --model takes a model folder or a shape: qwen3-0.6b, qwen3-1.7b, qwen3-4b,
    qwen3-8b, llama3.2-1b, llama3.2-3b, smollm2-135m.

    Example: prl fit --model qwen3-8b --seq-len 16384 --runs 8 --gpu-memory 80

    \b
    --model NAME         base model
    --seq-len N          longest sample, in tokens
    --tokens N           tokens of a pass (default: max_tokens_per_micro_batch)
    --runs N             slots (default: max_concurrent_runs)
    --rank R             largest rank of the adapters
    --gpu-memory GB      memory of a GPU (default: this machine's, else 80)
    --gpus N             GPUs that the trainer shards the model over (default 1)
    --json               print JSON
    """
    _become(FIT_MODULE, context.args)


def register(app: typer.Typer) -> None:
    app.command(context_settings=EXTRA, options_metavar=FILE_AND_OPTIONS)(fit)
    for command in (trainer, orchestrator, inference):
        app.command(context_settings=EXTRA, options_metavar=FILE_AND_OPTIONS)(command)
    app.command("make-base", context_settings=EXTRA)(make_base)
