"""`prl eval` and `prl serve`: versions of runs at the running inference, measured and kept there.

An evaluation is of versions of runs, adapters and the base model. The adapters are copied into its folder first, so a
run that goes on may remove its version meanwhile. `prime_rl.orchestrator.eval_job` does the work, in a process of its
own.

Versions of runs that do not train are kept at inference under their names: `control/served.txt` names the version.
Inference loads it when it is asked for and a slot is free, also after a restart; it gives way to a run that trains.
That needs no process: this one only asks for the first load.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from daemons.actions import view_of_run
from daemons.adding import copy_start, find_start
from daemons.chat import BASE, Refused, Server, connect, living_inference
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
from daemons.details import find_version, parse_version
from daemons.errors import ActionError, WrongUseError, need_cpu, one_line_errors, record_act
from daemons.process import python_module
from daemons.specs import saved_folder
from daemons.start import end_as_interrupted
from daemons.trash import existing_run
from prime_rl.configs.admitted import read_effect
from prime_rl.configs.base import build, load_toml, merge
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.files import UNDECODABLE, locked, make_folder, remove, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir, scan_runs
from prime_rl.contract.samples import JOB_FILE, SAMPLES_FILE, EvalJob, EvalProgress, EvalResult
from prime_rl.contract.served import kept_name
from prime_rl.contract.status import RunState
from prime_rl.utils.text import one_line

MODULE = "prime_rl.orchestrator.eval_job"
NUM_EXAMPLES = 100
# None are trained on.
ALL_ROWS = 2**31 - 1
# Keys of a run's config that say how it is asked; what it trains with has no effect here.
_KEPT = ("seed", "seq_len", "sampling", "client", "max_env_failure_share")


@dataclass(frozen=True)
class Evaluated:
    """The figures of all targets. `samples` has every rollout; `interrupted`: they are of what was done until then."""

    results: tuple[EvalResult, ...]
    samples: Path
    interrupted: bool


@dataclass(frozen=True)
class Source:
    """The config whose environments are asked, and its file: what the environments name is beside that."""

    config: Mapping[str, Any]
    file: Path


def load_source(
    output_dir: Path, targets: Sequence[str], env: str | None, data: Path | None, scorer: str | None = None
) -> Source:
    """The config of a TOML file, of a run, or of the first run evaluated; with `data` its rows are asked instead.

    Raises ActionError, ConfigError.
    """
    if env is not None and data is not None:
        raise WrongUseError("--env and --data: only one of them")
    runs = [parsed[0] for each in ([env] if env else targets) if (parsed := parse_version(each))]
    if env is not None and not runs:
        file = Path(env).absolute()
        source = Source(load_toml(Path(env)), file)
    elif runs:
        with one_line_errors(f"reading {runs[0]}"):
            run = existing_run(OutputDir(output_dir), runs[0])
            source = Source(read_effect(run).data, run.orch_toml.absolute())
    elif data is not None:
        source = Source({}, data.absolute())
    else:
        raise WrongUseError("no environment: name a TOML file with an [[env]] or a run with --env, or rows with --data")
    if data is None:
        return source
    if not data.is_file():
        raise ActionError(f"--data: {data} not found")
    args = {"path": str(data.resolve()), "num_eval_examples": ALL_ROWS, **({"scorer": scorer} if scorer else {})}
    return Source(
        merge(source.config, {"env": [{"id": "jsonl", "args": args}], "eval": {"env": None}}), data.absolute()
    )


def eval_config(source: Mapping[str, Any], model: str, num_examples: int | None, k: int | None) -> dict[str, Any]:
    """The config of an evaluation out of a run's, or of one with an `[[env]]` alone. Raises ConfigError."""
    own: dict[str, Any] = dict(source.get("eval") or {})
    envs = own.pop("env", None) or source.get("env", [])
    own["num_examples"] = num_examples or own.get("num_examples", NUM_EXAMPLES)
    own["rollouts_per_example"] = k or own.get("rollouts_per_example", 1)
    config = {
        **{key: source[key] for key in _KEPT if key in source},
        **{"batch_size": 1, "rollouts_per_example": 1, "model": {"name": model}, "env": envs, "eval": own},
    }
    build(OrchestratorConfig, config, "the evaluation's config")
    return config


def evaluate(
    output_dir: Path,
    targets: Sequence[str],
    source: Source,
    *,
    num_examples: int | None = None,
    k: int | None = None,
    changes: Mapping[str, Any] | None = None,
    on_progress: Callable[[EvalProgress], None] = lambda progress: None,
) -> Evaluated:
    """Evaluate `targets`, each a run (its newest version), RUN@vN, "base", or an adapter's folder.

    All on the same examples with the same seeds. Raises ActionError, and ConfigError for a `source` that is invalid.
    """
    need_cpu()
    output = OutputDir(Path(output_dir))
    with one_line_errors("evaluating"):
        given = merge(source.config, changes or {})
        elsewhere = (given.get("client") or {}).get("base_url")
        model = (given.get("model") or {}).get("name", "") if elsewhere else living_inference(output)[0].model
        config = eval_config(given, model, num_examples, k)
        make_folder(output.evaluations)
        _remove_leftovers(output)
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
        folder = output.evaluations / name
        folder.mkdir(0o700)  # not for others before it is locked: whoever may read it may lock it
        try:
            with locked(folder):
                folder.chmod(stat.S_IMODE(output.evaluations.stat().st_mode))
                found = dict(_target(output, each, folder / str(number)) for number, each in enumerate(targets))
                write_atomic(folder / JOB_FILE, msgspec.json.encode(EvalJob(found, config, str(source.file))))
                results, interrupted = _run(folder, saved_folder(output), on_progress)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            for copy in folder.glob("[0-9]*"):
                shutil.rmtree(copy, ignore_errors=True)
    return Evaluated(tuple(results), folder / SAMPLES_FILE, interrupted)


def _remove_leftovers(output: OutputDir) -> None:
    """Remove the adapters that a killed evaluation copied; one at work holds the lock of its folder."""
    for copy in output.evaluations.glob("*/[0-9]*"):
        with contextlib.suppress(OSError), locked(copy.parent):
            shutil.rmtree(copy)


def _target(output: OutputDir, text: str, folder: Path) -> tuple[str, str | None]:
    """The name of what `text` names, and its adapter, copied to `folder`."""
    parsed = parse_version(text)
    untouched = parsed and parsed[1] == 0 and not os.path.lexists(existing_run(output, parsed[0]).broadcast_dir(0))
    if text == BASE or untouched:
        return text, None
    start = find_start(output, text)
    assert start is not None  # downloads are allowed
    copy_start(start, folder)
    return start.version.name if start.version else text, str(folder.relative_to(output.evaluations))


def _run(folder: Path, cwd: Path | None, on_progress: Callable[[EvalProgress], None]) -> tuple[list[EvalResult], bool]:
    """The results of the process that evaluates. Ctrl-C ends it early, a second one at once. Raises ActionError."""
    results: list[EvalResult] = []
    interrupted = False
    # It inherits the block, and ends it when it can be stopped.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        argv = python_module(MODULE, str(folder.absolute()))
        with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=cwd) as process:
            assert process.stdout is not None
            try:
                while True:
                    try:
                        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
                        for line in process.stdout:
                            with contextlib.suppress(*UNDECODABLE):  # an environment may print too
                                event = msgspec.json.decode(line, type=EvalProgress | EvalResult)
                                results.append(event) if isinstance(event, EvalResult) else on_progress(event)
                        break
                    except KeyboardInterrupt:
                        if interrupted:
                            raise
                        interrupted = True
                        process.send_signal(signal.SIGINT)
                code = process.wait()
            finally:
                process.kill()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if not results and not interrupted:
        raise ActionError(f"the evaluation failed with exit code {code}; its error is above")
    return results, interrupted


def served_names(output_dir: Path) -> list[str]:
    """The names of all versions that are kept, ascending."""
    return sorted(name for run in scan_runs(output_dir)[0] if (name := kept_name(run)))


def serve_run(output_dir: Path, target: str) -> tuple[str, list[str]]:
    """Keep a version served: its name, and the addresses that have it; none while inference is down.

    `target` is a run (its newest version) or RUN@vN; another version of it is kept no more. Raises ActionError.
    """
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"serving {target}"):
        run, wanted = _run_of(output, target)
        if (view := view_of_run(output, run.run_id)).state in (RunState.ACTIVE, RunState.WAITING):
            served = "while it trains its newest version is served under its name"
            why = "pause it, or wait for its end" if view.kind == "sft" else served
            raise ActionError(f"{run.run_id} is {view.state}: {why}")
        version = find_version(run, wanted)
        if version.adapter is None:
            raise ActionError(f"{version.name} is a version of a whole model: only adapters are served beside others")
        stop_serving(output_dir, run.run_id)
        servers = _servers(output)
        for _, server in servers:
            models = [str(model.get("id")) for model in server.get("/v1/models").get("data", [])]
            if version.name not in models:
                body = {"lora_name": version.name, "lora_path": str(version.adapter.resolve())}
                server.post("/v1/load_lora_adapter", body)
        write_atomic(run.served, version.name)
        record_act(output, "serve", run.run_id, detail=f"version {version.step}")
        return version.name, [url for url, _ in servers]


def stop_serving(output_dir: Path, target: str) -> str | None:
    """Keep the run's version no more, and unload it; returns its name, None when none is kept. Raises ActionError."""
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"unloading {target}"):
        run, _ = _run_of(output, target)
        name = kept_name(run)
        remove(run.served)
        if name is None:
            return None
        for _, server in _servers(output):
            with contextlib.suppress(Refused):  # it gave way, or inference was restarted
                server.post("/v1/unload_lora_adapter", {"lora_name": name})
        record_act(output, "serve --stop", run.run_id, detail=name)
        return name


def _run_of(output: OutputDir, target: str) -> tuple[RunDir, int | None]:
    parsed = parse_version(target)
    if parsed is None:
        raise WrongUseError(f"invalid version {target!r}: expected a run or RUN@vN")
    return existing_run(output, parsed[0]), parsed[1]


def _servers(output: OutputDir) -> list[tuple[str, Server]]:
    """The living servers by address; [] while inference is down."""
    try:
        living = living_inference(output)
    except ActionError:
        return []
    return [(status.base_url, connect(output, status)) for status in living]


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
    end_as_interrupted()
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
            f"{name}: served at {', '.join(urls)}"
            if urls
            else f"{name}: is loaded when it is asked for, once inference runs"
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
    ks = {name for result in done for name in result.figures if name.startswith("pass@") and name[5:].isdigit()}
    by_k = ["reward", *sorted(ks, key=lambda name: int(name[5:]))]
    names = [name for name in by_k if any(name in result.figures for result in done)]
    if done:
        columns = ["target", "env", "examples", "rollouts", "failed", *names]
        rows = [_row(result, names) for result in done]
        table, screen = make_table(columns, rows), console()
        whole = screen.measure(table, options=screen.options.update(max_width=10 * screen.width))
        if whole.maximum > screen.width:  # no figure is cut: a line for each
            lines = [[*row[:2], *pair] for row in rows for pair in zip(columns[2:], row[2:], strict=True)]
            table = make_table([*columns[:2], "figure", "value"], lines)
        screen.print(table)
        say(f"{'interrupted; ' if found.interrupted else ''}± is the standard error; rollouts: {found.samples}")
    elif found.interrupted:
        complain("interrupted before the first rollout")
    for result in found.results:
        if result.problem:
            what = f"{result.num_failed} failed, first " if result.num_rollouts else ""
            complain(one_line(f"{result.target} {result.env}: {what}{result.problem}", 500))


def _row(result: EvalResult, names: list[str]) -> list[object]:
    def cell(name: str) -> str:
        value = result.figures.get(name)
        error = f" ± {result.figures.get(f'{name}_se', 0.0):.3f}" * (result.num_examples > 1)  # one example has none
        return "-" if value is None else f"{value:.3f}{error}"

    counts = (result.num_examples, result.num_rollouts, result.num_failed)
    return [one_line(result.target), one_line(result.env), *counts, *map(cell, names)]
