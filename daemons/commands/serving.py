"""`prl eval` and `prl serve`: versions of runs at the running inference, measured and kept there."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from daemons.chat import BASE
from daemons.commands import complete
from daemons.commands.common import (
    JsonOption,
    OutputDirOption,
    complain,
    console,
    existing_output,
    make_table,
    print_json,
    say,
)
from daemons.commands.runs import SetOption, parse_overrides
from daemons.errors import WrongUseError
from daemons.evaluation import NUM_EXAMPLES, Evaluated, evaluate, load_source
from daemons.serving import serve_run, served_names, stop_serving
from prime_rl.contract.evaluation import EvalProgress, EvalResult
from prime_rl.utils.text import one_line

INTERRUPTED = 130


def eval_targets(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET...",
            help=f"A run (its newest version), RUN@vN, {BASE}, or the folder of an adapter in PEFT format.",
            autocompletion=complete.versions,
        ),
    ],
    output_dir: OutputDirOption = None,
    env: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|RUN",
            help="A TOML file with [[env]] tables, such as a run's, or a run. Default: the first run evaluated.",
            show_default=False,
            autocompletion=complete.config_files,
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rows with prompt and answer, one JSON object a line.")
    ] = None,
    scorer: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --data: how answers are compared, such as contains.")
    ] = None,
    num_examples: Annotated[
        int | None,
        typer.Option(
            "-n", min=1, help=f"Examples. Default: eval.num_examples, else {NUM_EXAMPLES}.", show_default=False
        ),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("-k", min=1, help="Rollouts of each. Default: eval.rollouts_per_example.", show_default=False),
    ] = None,
    changes: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate runs, versions, the base model or adapters on examples of an environment, through the running inference.

    All get the same examples, of the eval split, with the same seeds. Shows the mean reward and pass@k without bias,
    each with its standard error, and keeps every rollout in a file. Ctrl-C shows what is done so far.

    Example: prl eval base run_reverse run_reverse@v20 -n 50 -k 4
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as with Ctrl-C, which unloads the adapter
    place = existing_output(output_dir).path
    source = load_source(place, targets, env, data, scorer)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("evaluating", total=None)

        def show(progress: EvalProgress) -> None:
            waits = f": waits for {progress.waiting_on}" if progress.waiting_on else ""
            text = one_line(f"{progress.target}{waits}", 120)
            bar.update(task, description=text, completed=progress.done, total=progress.total)

        found = evaluate(
            *(place, targets, source),
            num_examples=num_examples,
            k=k,
            changes=parse_overrides(changes),
            on_progress=show,
        )
    _print(found, as_json)
    if found.interrupted or any(not result.num_rollouts for result in found.results):
        raise typer.Exit(INTERRUPTED if found.interrupted else 1)


def serve(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN[@vN]",
            help="Default: show what is served.",
            autocompletion=complete.versions,
            show_default=False,
        ),
    ] = None,
    output_dir: OutputDirOption = None,
    stop: Annotated[bool, typer.Option("--stop", help="Serve the run no more.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Serve a version of a run that does not train, under its name, until --stop.

    It is loaded again when it is asked for after a restart, and gives way where a run that trains needs its slot.

    Example: prl serve run_reverse@v20
    """
    place, urls = existing_output(output_dir, may_miss=as_json).path, list[str]()
    if target is None:
        if stop:
            raise WrongUseError("--stop: name the run, such as prl serve --stop run_reverse")
        text = "\n".join(served_names(place)) or f"{place}: no version is kept served; prl serve RUN[@vN] serves one"
    elif stop:
        name = stop_serving(place, target)
        text = f"{name}: served no more" if name else f"{target}: was not served, nothing to do"
    else:
        name, urls = serve_run(place, target)
        text = (
            f"{name}: served at {', '.join(urls)}" if urls else f"{name}: is loaded when it is asked for, after prl up"
        )
    if as_json:
        print_json({"served": served_names(place), "urls": urls})
    else:
        say(text)


def _print(found: Evaluated, as_json: bool) -> None:
    if as_json:
        results = [msgspec.structs.asdict(result) for result in found.results]
        print_json({"results": results, "samples": str(found.samples), "interrupted": found.interrupted})
        return
    done = [result for result in found.results if result.num_rollouts]
    names = [name for name in _passes(done) if any(name in result.figures for result in done)]
    if done:
        columns = ["target", "env", "examples", "rollouts", "failed", *names]
        console().print(make_table(columns, [_row(result, names) for result in done]))
        say(f"{'interrupted; ' if found.interrupted else ''}± is the standard error; rollouts: {found.samples}")
    elif found.interrupted:
        complain("interrupted before the first rollout")
    for result in found.results:
        if result.problem:
            what = f"{result.num_failed} failed, first " if result.num_rollouts else ""
            complain(one_line(f"{result.target} {result.env}: {what}{result.problem}", 500))


def _passes(results: list[EvalResult]) -> list[str]:
    """The figures of the table: the reward, and pass@k by k."""
    ks = {name for result in results for name in result.figures if name.startswith("pass@") and name[5:].isdigit()}
    return ["reward", *sorted(ks, key=lambda name: int(name[5:]))]


def _row(result: EvalResult, names: list[str]) -> list[object]:
    def cell(name: str) -> str:
        value = result.figures.get(name)
        return "-" if value is None else f"{value:.3f} ± {result.figures.get(f'{name}_se', 0.0):.3f}"

    counts = (result.num_examples, result.num_rollouts, result.num_failed)
    return [one_line(result.target), one_line(result.env), *counts, *map(cell, names)]
