"""`prl runs list|show|samples|validate|add`, and a workspace as it is printed: tables, and plain data for `--json`.

They work with the daemons down.
"""

from __future__ import annotations

import enum
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tomli_w
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from daemons import actions
from daemons.adding import trainer_limits
from daemons.commands import complete
from daemons.commands.common import (
    DryRunOption,
    FittingTable,
    JsonOption,
    OutputDirOption,
    WatchOption,
    YesOption,
    cell,
    choose_output_dir,
    complain,
    console,
    existing_output,
    make_table,
    no_workspace,
    number,
    print_json,
    say,
    short_time,
    told_if_made,
    watch,
)
from daemons.details import RunDetails, read_details
from daemons.errors import ActionError, WrongUseError
from daemons.kept_texts import Wanted, export_texts, in_words
from daemons.machine import DiskView
from daemons.pidfile import SupervisorInfo
from daemons.trash import acting_on, existing_run
from daemons.workspace import RunView, Workspace
from daemons.workspace_reader import WorkspaceReader
from prime_rl.configs.admitted import config_in_effect
from prime_rl.configs.base import NOT_FOUND, ConfigError, ConfigProblem, load_toml, merge, parse_set
from prime_rl.configs.validate import key_of
from prime_rl.contract.layout import OutputDir, check_run_id, scan_runs
from prime_rl.contract.samples import Sample, read_samples
from prime_rl.contract.status import (
    STALLED,
    GatewayStatus,
    InferenceStatus,
    RunState,
    RunStatus,
    is_alive,
    read_status,
    utc,
)
from prime_rl.gateway.keys import run_key, workspace_secret
from prime_rl.utils.text import clean_strings, clean_text, counted, one_line, size_text

_STYLES = {
    RunState.ACTIVE: "green",
    RunState.WAITING: "yellow",
    RunState.FINISHED: "cyan",
    RunState.FAILED: "red",
    RunState.INVALID: "red",
    RunState.EVICTED: "magenta",
    RunState.PAUSED: "blue",
    RunState.STOPPED: "dim",
}
NO_RUNS = "no runs yet: add one with prl runs add FILE.toml"
_DAEMON_STYLES = {"running": "green", "done": "cyan", "failed": "red", "lost": "red", "stalled": "yellow"}

# Shown when present, beside the avg@K of evaluations; all others are in `--json` and in `prl-tui`.
_MAIN_FIGURES = (
    *("step", "reward/mean", "reward/std", "loss", "entropy", "mismatch_kl", "grad_norm", "lr", "tokens_per_s"),
    *("async_level/max", "time/step", "time/wait_for_rollouts", "completion_len/mean"),
)
RUNS_HELP = """List, add, fork, evict and delete runs.

Example: prl runs list --state active,failed --watch
"""
runs_app = typer.Typer(no_args_is_help=True, help=RUNS_HELP, rich_markup_mode=None)
RunIdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="A run, such as run_reverse.", autocompletion=complete.run_ids)
]
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The run's config, a TOML file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a field, such as optim.lr=1e-3. May be repeated."),
]


class SortBy(enum.StrEnum):
    """The columns that `prl runs list` sorts by."""

    SLOT = "slot"
    RUN = "run"
    STEP = "step"
    REWARD = "reward"
    TOKENS = "tokens"
    AGE = "age"


_SORTS: Mapping[SortBy, Callable[[RunView], float | None]] = {
    SortBy.STEP: lambda run: run.step,
    SortBy.REWARD: lambda run: run.reward,
    SortBy.TOKENS: lambda run: run.tokens_per_s,
    SortBy.AGE: lambda run: run.added_at,
}


def sorted_runs(runs: Sequence[RunView], by: SortBy) -> list[RunView]:
    """By name from a to z, by a figure the highest or newest first; runs without it last, equals in their order."""
    if by is SortBy.RUN:
        return sorted(runs, key=lambda run: run.run_id)
    if (value := _SORTS.get(by)) is None:
        return list(runs)
    return sorted(runs, key=lambda run: -math.inf if (found := value(run)) is None else found, reverse=True)


def run_json(run: RunView) -> dict[str, Any]:
    """One run in every --json: all fields of its view, its state as text, and its troubles in words."""
    plain = {"state": str(run.state), "signs": msgspec.to_builtins(run.signs), "troubles": list(run.troubles)}
    return {**asdict(run), **plain}


def problem_json(file: Path, problem: ConfigProblem, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """One problem of a run's config: `found` is the value in the file (with the overrides), null when it is missing."""
    key = key_of(problem)
    try:
        found: Any = merge(load_toml(file), overrides or {})
    except ConfigError:
        found = None
    for part in key.split("."):
        try:
            found = found[int(part)] if isinstance(found, list) else found[part] if isinstance(found, dict) else None
        except (KeyError, IndexError, ValueError):
            found = None
    words = problem.message.removeprefix(f"{key.rpartition('.')[2]}: ").removeprefix(f"{key}: ")
    allowed = re.sub(r"^found .*?[:,] (?=\S)", "", words, count=1) if words.startswith("found ") else words
    return {
        "file": str(file),
        "line": problem.line,
        "key": key or None,
        "found": found if key else None,
        "allowed": allowed,
        "message": str(problem),
    }


def state_text(run: RunView) -> str:
    """The run's state as people read it: one whose orchestrator is stalled is not active."""
    return str(run.state) if run.stalled_since is None else STALLED


def workspace_json(workspace: Workspace, disk: DiskView | None) -> dict[str, Any]:
    """The payload of `prl status --json`."""
    # The names of the previous version.
    old = {"house_bytes": disk.workspace_bytes, "house_complete": disk.workspace_complete} if disk else {}
    return {
        "output_dir": str(workspace.output_dir),
        "supervisor_alive": workspace.supervisor_alive,
        "daemons": [asdict(daemon) for daemon in workspace.daemons],
        "slots": slots(workspace),
        "runs": [run_json(run) for run in workspace.runs],
        "refused": [asdict(each) for each in workspace.refused],
        "disk": {**asdict(disk), **old} if disk else None,
        "bottleneck": workspace.bottleneck,
        "clocks": list(workspace.clocks),
        "inference": [replica_json(number, status) for number, status in workspace.replicas],
    }


def replica_json(number: int, status: InferenceStatus) -> dict[str, Any]:
    """One inference server that lives."""
    return {
        "replica": number,
        "state": one_line(status.state),
        "base_url": one_line(status.base_url),
        "num_running": status.num_running,
        "num_waiting": status.num_waiting,
        "tokens_per_s": status.tokens_per_s,
        "kv_use": status.kv_use,
        "adapters": [one_line(name) for name in status.adapters],
    }


def slots(workspace: Workspace) -> list[dict[str, Any]]:
    """One entry per slot, also for empty ones."""
    held = {slot.run_idx: run_id for run_id, slot in (workspace.trainer.runs if workspace.trainer else {}).items()}
    return [{"run_idx": run_idx, "run_id": held.get(run_idx)} for run_idx in range(workspace.max_runs)]


def runs_table(runs: Sequence[RunView], now: float | None = None, *, none: str = NO_RUNS) -> RenderableType:
    """A line per run; without runs the words `none`. `now` in Unix seconds; None: the time of the call."""
    now = time.time() if now is None else now
    if not runs:
        return cell(none, 1_000)
    rows = [
        [
            cell(run.run_id, 70),
            Text(state_text(run), style=_STYLES[run.state] if run.stalled_since is None else "yellow"),
            _place(run),
            f"{run.step}/{run.max_steps if run.max_steps is not None else '?'}",
            number(run.reward),
            number(run.tokens_per_s, 0),
            "" if run.async_level is None else run.async_level,
            short_time(None if run.added_at is None else now - run.added_at),
            cell(run.why, 300),
        ]
        for run in runs
    ]
    columns = ["run", "state", "slot", "step", "reward", "tokens/s", "lag", "age", "why"]
    return FittingTable(columns, rows, ("lag", "age", "tokens/s", "slot", "reward", "why"))


def _place(run: RunView) -> str:
    if run.run_idx is not None:
        return str(run.run_idx)
    return f"queue {run.queue_position}" if run.queue_position is not None else ""


def daemons_table(workspace: Workspace) -> RenderableType:
    """A line per daemon; the last column has the reason of its state, or what it waits for.

    Of an orchestrator that is done it is the reason of its run, which may have been paused first and ended then.
    """
    is_done = {daemon.name for daemon in workspace.daemons if daemon.state == "done"}
    done = {run.run_id: run.reason for run in workspace.runs if run.run_id in is_done}
    rows = [
        [
            cell(daemon.name, 70),
            Text(daemon.state, style=_DAEMON_STYLES.get(daemon.state, "")),
            daemon.pid or "",
            daemon.num_restarts or "",
            cell(
                done.get(daemon.name)
                or daemon.reason
                or (f"waits for {daemon.waiting_on}" if daemon.waiting_on else None)
            ),
        ]
        for daemon in workspace.daemons
    ]
    return FittingTable(["daemon", "state", "pid", "restarts", "why"], rows, ("restarts", "pid", "why"))


def disk_text(disk: DiskView) -> str:
    """Such as "the workspace takes 1.2 GiB, 30.0 GiB of 80.0 GiB free (ext4)"."""
    least = "" if disk.workspace_complete else "at least "
    free = f"{size_text(disk.free_bytes)} of {size_text(disk.total_bytes)} free"
    words = f"the workspace takes {least}{size_text(disk.workspace_bytes)}, {free}"
    words += f" ({disk.file_system})" if disk.file_system else ""
    return words + (f", full in {short_time(disk.full_in_s)} at this rate" if disk.full_in_s else "")


def workspace_view(workspace: Workspace, disk: DiskView | None, holder: SupervisorInfo | None = None) -> RenderableType:
    """The data that `prl status` prints. `holder`: who has the workspace's lock, by the pid file."""
    parts: list[RenderableType] = []
    if workspace.daemons:
        parts += [daemons_table(workspace), Text("")]
    elif holder is not None and holder.lives_here():
        words = f"prl up is preparing ({holder}): it may have to build a base model, then it starts the daemons"
        parts.append(cell(words, 1_000))
    else:
        parts.append(Text("nothing is running: start the workspace with prl up"))
    used = (
        f"{workspace.num_used} of {workspace.max_runs} slots in use"
        if workspace.max_runs
        else "slots unknown: the trainer is not running"
    )
    parts += [cell(f"{workspace.output_dir}: {used}", 1_000), runs_table(workspace.runs)]
    told = [(run.run_id, trouble) for run in workspace.runs for trouble in run.troubles]
    told += [(each.name, each.crash_loop) for each in workspace.daemons if each.crash_loop]
    parts += [Text(f"problem: {clock}") for clock in workspace.clocks]
    parts += [Text(f"problem: {name}: {trouble}") for name, trouble in dict.fromkeys(told)]
    parts += [Text(f"refused: {each.name}: ").append_text(cell(each.reason, 300)) for each in workspace.refused]
    if disk is not None:
        parts.append(Text(f"disk: {disk_text(disk)}"))
    if workspace.bottleneck:
        parts.append(Text("bottleneck: ").append_text(cell(workspace.bottleneck, 300)))
    return Group(*parts)


@runs_app.command("list")
def list_runs(
    output_dir: OutputDirOption = None,
    as_json: JsonOption = False,
    state: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATE,...",
            help="Only runs in these states: " + ", ".join(RunState) + ".",
            autocompletion=complete.states,
        ),
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="Only runs with this tag. Repeated: with all of them.")
    ] = None,
    sort: Annotated[
        SortBy, typer.Option(help="The order; reward is that of the last batch, prl runs best compares.")
    ] = SortBy.SLOT,
    watching: WatchOption = False,
) -> None:
    """List runs with state, step, reward and reason.

    Active runs come first, by slot; then waiting runs in admission order; then all others.

    Example: prl runs list --state active,waiting --tag lr-sweep --sort reward
    """
    states, tags = _states(state), set(tag or ())
    path = existing_output(output_dir, may_miss=watching or as_json, may_be_empty=False).path
    reader = WorkspaceReader(path)

    def chosen() -> list[RunView]:
        runs = reader.read().runs
        kept = [run for run in runs if (not states or run.state in states) and tags <= set(run.tags)]
        return sorted_runs(kept, sort)

    def table() -> RenderableType:
        asked = [f"is {' or '.join(sorted(states))}"] * bool(states) + [f"has the tag {each}" for each in sorted(tags)]
        none = f"no run {' and '.join(asked)}: prl runs list shows all" if asked else NO_RUNS
        return runs_table(chosen(), none=no_workspace(path) or none)

    if as_json:
        print_json({"runs": [run_json(run) for run in chosen()]})
    elif watching:
        watch(table)
    else:
        console().print(table())


@runs_app.command()
def show(run_id: RunIdArgument, output_dir: OutputDirOption = None, as_json: JsonOption = False) -> None:
    """Show one run: state, config, metrics, errors, checkpoints.

    If a run is stuck, look at state, reason and waiting_on first.

    Example: prl runs show run_reverse --json
    """
    check_run_id(run_id)
    workspace = WorkspaceReader(existing_output(output_dir).path).read()
    run = workspace.run(run_id)
    if run is None:
        reason = next((each.reason for each in workspace.refused if each.name == run_id), None)
        raise actions.ActionError(
            reason or f"run {run_id!r} not found in {workspace.output_dir}: prl runs list shows all runs"
        )
    details = read_details(OutputDir(workspace.output_dir).run(run_id), run, workspace.daemon(run_id))
    if as_json:
        print_json(details_json(details))
    else:
        console().print(details_view(details))


@runs_app.command()
def samples(
    run_id: RunIdArgument,
    output_dir: OutputDirOption = None,
    as_json: JsonOption = False,
    number: Annotated[int, typer.Option("-n", min=1, help="How many rollouts; the newest comes last.")] = 4,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all that are kept as texts that a run can learn.")
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option(metavar="R", help="With --export: only rollouts with at least this reward.")
    ] = None,
    best_of: Annotated[
        bool, typer.Option("--best-of", help="With --export: of each example the rollout with the highest reward.")
    ] = False,
    step: Annotated[str, typer.Option(metavar="A:B", help="With --export: only rollouts of these steps.")] = ":",
    truncated: Annotated[
        bool, typer.Option("--truncated", help="With --export: also those that were cut, or ended by a stop.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="With --export: replace the file.")] = False,
) -> None:
    """Show the newest rollouts of a run, or the texts that it learns; or export rollouts to learn them again.

    Each rollout has its prompt, completion, reward, advantage and policy version.

    Example: prl runs samples run_reverse --export best.jsonl --min-reward 0.9 --best-of
    """
    place, (first, last) = existing_output(output_dir).path, _steps(step)
    if export is not None:
        made = export_texts(place, run_id, export, Wanted(min_reward, first, last, best_of, truncated), force=force)
        if as_json:
            return print_json({"export": asdict(made)})
        rollouts = f"{made.num_rollouts} of {made.num_kept} rollouts"
        examples = f"{made.num_examples} of {made.num_examples_kept} examples"
        left_out = f"; left out: {in_words(made.left_out)}" if made.left_out else ""
        return say(f"{export}: {counted(made.num_texts, 'text')} of {rollouts} and {examples}{left_out}")
    if min_reward is not None or best_of or truncated or force or step != ":":
        raise WrongUseError("--min-reward, --best-of, --step, --truncated and --force belong to --export FILE")
    with acting_on(place, run_id, "reading") as (output, run):
        found = read_samples(run.samples, number)
    if as_json:
        return print_json({"samples": msgspec.to_builtins(found)})
    view = WorkspaceReader(output.path).read().run(run_id)
    is_text = view is not None and view.kind == "sft"
    for sample in found:
        say(sample_view(sample, is_text=is_text))
    if not found:
        told = view and (view.problem or (view.reason if view.state is RunState.FAILED else None))
        if told:
            more = f"prl logs {run_id} --grep dropped names each, prl env try FILE makes one and shows it"
            say(f"{run_id} has no rollouts: {told}; those that are dropped are not kept: {more}")
        else:
            say(f"{run_id} has no rollouts yet: each batch adds some, unless samples.per_step is 0")
    return None


@runs_app.command()
def endpoint(run_id: RunIdArgument, output_dir: OutputDirOption = None, as_json: JsonOption = False) -> None:
    """Print where an application opens sessions of a run, and the key that it needs.

    The run has an environment with id "sessions". The key is good for all sessions of the run, and stays the same.

    Example: prl runs endpoint run_support
    """
    with acting_on(existing_output(output_dir).path, run_id, "reading") as (output, run):
        if not any(env.sessions for env in config_in_effect(run).env):
            raise ActionError(f'{run_id} takes no sessions from outside: it has no [[env]] with id = "sessions"')
        status, key = read_status(output.gateway_status, GatewayStatus), run_key(workspace_secret(output), run_id)
    url = f"{status.base_url}/v1/runs/{run_id}/sessions" if status and status.state == "running" else None
    if as_json:
        print_json({"url": url, "key": key})
        return
    say(f"url  {url or 'the gateway is not running: it starts with the run (prl status)'}")
    say(f"key  {key}")


@runs_app.command()
def sessions(
    run_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="A run. Default: all.", autocompletion=complete.run_ids)
    ] = None,
    output_dir: OutputDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the open sessions of agents and applications: since when, how many calls, and what each waits for.

    Of a run with very many, the oldest are listed.

    Example: prl runs sessions run_support
    """
    output, now = existing_output(output_dir), time.time()
    runs = scan_runs(output.path)[0] if run_id is None else [existing_run(output, run_id)]
    read = {run.run_id: read_status(run.status, RunStatus) for run in runs}
    living = {name: each for name, each in read.items() if each and each.state == "running" and is_alive(each, now)}
    found = [(name, each) for name, status in living.items() for each in map(clean_strings, status.sessions)]
    more = sum(status.num_sessions for status in living.values()) - len(found)
    if as_json:
        listed = [{"run_id": name, **msgspec.to_builtins(each)} for name, each in found]
        return print_json({"sessions": listed, "num_more": max(0, more)})
    rows = [
        [
            *(cell(each.id, 100), cell(each.example, 80), short_time(now - each.since), each.num_calls),
            *(short_time(now - each.used_at), cell(each.waiting_on, 200)),
        ]
        for _, each in found
    ]
    if rows:
        console().print(make_table(["session", "example", "open", "calls", "last call", "waits for"], rows))
    if more > 0 or not rows:
        say(f"and {more} more" if more > 0 else "no session is open")
    return None


@runs_app.command()
def validate(
    file: FileArgument, output_dir: OutputDirOption = None, changes: SetOption = None, as_json: JsonOption = False
) -> None:
    """Check a run's config and print every problem.

    The checks are the trainer's own. If the workspace has run before, its base model and limits are compared too. A
    warning names what is valid and rarely meant.

    Example: prl runs validate configs/demo/reverse.toml
    """
    place = choose_output_dir(output_dir)
    changed = parse_overrides(changes)
    problems = actions.check_file(place, file, overrides=changed)
    limits = trainer_limits(place)
    warnings = [] if problems else actions.check_doubts(place, file, overrides=changed)
    if as_json:
        rows = [problem_json(file, problem, changed) for problem in problems]
        checked = None if limits is None else {"model": limits.model, "seq_len": limits.max_seq_len}
        told = [problem_json(file, each, changed) for each in warnings]
        print_json({"file": str(file), "valid": not problems, "problems": rows, "warnings": told, "trainer": checked})
    else:
        for problem in problems:
            complain(f"not found: {file}" if problem == NOT_FOUND else f"{file}: {one_line(str(problem), 2_000)}")
    if problems:
        raise typer.Exit(2)
    if not as_json:
        warn(file, warnings)
        alone = f"; model and limits not checked: no trainer has run in {place}" if not limits else ""
        say(f"{file}: valid{alone}")


@runs_app.command()
def add(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Configs of runs, TOML files.")],
    output_dir: OutputDirOption = None,
    run_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="The run's id. Default: run_ and the file's name.")
    ] = None,
    changes: SetOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Add runs to the workspace.

    All files are checked before a run is added. Training starts when a slot is free; runs are admitted in the order in
    which they were added.

    Example: prl runs add configs/demo/reverse.toml --set max_steps=20
    """
    if run_id is not None and len(files) > 1:
        raise WrongUseError(f"--id names one run, and there are {len(files)} files: leave it out, or add one at a time")
    place, changed = choose_output_dir(output_dir), parse_overrides(changes)
    if len(files) > 1:
        for file in files:
            actions.add_run(place, file, overrides=changed, dry_run=True)
    for file in files:
        warn(file, actions.check_doubts(place, file, overrides=changed))
        with told_if_made(place, yes or dry_run):
            added = actions.add_run(place, file, run_id=run_id, overrides=changed, dry_run=dry_run)
            say(f"{'would add' if dry_run else 'added'} {added} to {place}")


def warn(file: Path, warnings: Sequence[ConfigProblem]) -> None:
    """Tell what is valid and rarely meant."""
    for each in warnings:
        complain(f"warning: {file}: {one_line(str(each), 2_000)}")


def _steps(words: str) -> tuple[int, float]:
    """The first step and the last of "3:9", "3:", ":9" or "3". Raises WrongUseError."""
    first, colon, last = words.partition(":")
    if not all(part.isdecimal() or (colon and not part) for part in (first, last if colon else first)):
        raise WrongUseError(f"invalid --step {words!r}: expected steps such as 10:40, 10: or :40")
    begin, end = int(first or 0), int(last) if last else math.inf if colon else int(first)
    if end < begin:
        raise WrongUseError(f"invalid --step {words!r}: the last step comes before the first")
    return begin, end


def _states(words: list[str] | None) -> set[RunState]:
    """`--state active,waiting --state failed` -> three states."""
    names = [name.strip() for word in words or [] for name in word.split(",") if name.strip()]
    if odd := [name for name in names if name not in list(RunState)]:
        raise WrongUseError(f"invalid --state {odd[0]!r}: expected one of {', '.join(RunState)}")
    return {RunState(name) for name in names}


def parse_overrides(changes: list[str] | None) -> dict[str, object] | None:
    """The values of `--set`, nested; None without it. Raises ConfigError."""
    return parse_set(changes) if changes else None


def details_json(details: RunDetails) -> dict[str, Any]:
    """The payload of `prl runs show --json`."""
    return {
        "run": {**run_json(details.run), "log_tail": list(details.log_tail)},
        "config": details.config,
        "metrics": details.metrics,
        "errors": list(details.errors),
        "data_changed": list(details.data_changed),
        "changes": list(details.changes),
        "checkpoints": [asdict(each) for each in details.checkpoints],
        "disk": {
            "num_bytes": sum(details.disk.values()),
            "complete": details.disk_complete,
            "folders": details.disk,
        },
    }


def details_view(details: RunDetails) -> RenderableType:
    """The table that `prl runs show` prints; missing facts take no line."""
    run = details.run
    parts: list[RenderableType] = [_facts(details), *_section("problems", run.troubles + details.data_changed)]
    parts += _section("last problem", run.sign_texts[: run.state is not RunState.ACTIVE])
    for name, figures in details.metrics.items():
        evaluated = sorted(key for key in figures if key.startswith("eval/") and "/avg@" in key)
        shown = [f"{key} {figures[key]:.4g}" for key in (*_MAIN_FIGURES, *evaluated) if key in figures]
        more = len(figures) - len(shown)
        parts += _section(f"latest metrics of the {name}", [", ".join(shown) + (f" and {more} more" if more else "")])
    if details.checkpoints:
        now = time.time()
        rows = [
            [
                f"step {each.step}",
                size_text(each.num_bytes),
                "STABLE" if each.stable else "incomplete",
                short_time(now - each.saved_at) if each.saved_at else "",
            ]
            for each in details.checkpoints
        ]
        parts += [Text("\ncheckpoints", style="bold"), make_table(["", "size", "state", "age"], rows)]
    least = "" if details.disk_complete else "at least "
    folders = ", ".join(f"{name} {size_text(used)}" for name, used in details.disk.items() if used)
    parts += _section("disk", [f"{least}{size_text(sum(details.disk.values()))}" + (f": {folders}" if folders else "")])
    parts += _section("latest warnings and errors", details.errors)
    parts += _section("end of the log", details.log_tail if details.run.state in ("failed", "invalid") else ())
    parts += _section("changes of the config", details.changes)
    if details.config is not None:
        parts += _section("config", clean_text(tomli_w.dumps(details.config)).splitlines())
    return Group(*parts)


def _facts(details: RunDetails) -> RenderableType:
    rows = []
    for name, value in run_json(details.run).items():
        shown: object = f"{value:.6g}" if isinstance(value, float) else value
        if isinstance(value, tuple):
            shown = ", ".join(map(str, value)) or None
        if name in ("updated_at", "added_at", "stalled_since", "started_at") and isinstance(value, float):
            shown = utc(value)
        if name == "state":
            shown = state_text(details.run)
        if shown is not None and name not in ("signs", "troubles"):
            rows.append([name, cell(shown, 2_000)])
    return make_table(["", ""], rows)


def _section(title: str, lines: tuple[str, ...] | list[str]) -> list[RenderableType]:
    text = [Text(f"  {line}") for line in lines]
    return [Text(f"\n{title}", style="bold"), *text] if text else []


def sample_view(sample: Sample, *, is_text: bool = False) -> str:
    """The text that `prl runs samples` prints for one rollout, or a text to learn. Its own text is indented."""
    sample = clean_strings(sample)
    versions = ", ".join(map(str, sample.policy_versions))
    branch = f"  branch {sample.branch + 1} of {sample.num_branches}" if sample.num_branches > 1 else ""
    figures = f"reward {sample.reward:.3f}  advantage {sample.advantage:+.3f}  policy version {versions}  "
    size = f"{'' if is_text else figures}{counted(sample.num_completion_tokens, 'token')}{branch}"
    lines = [f"step {sample.step}  {one_line(sample.example_id)}  {size}"]
    if shared := sample.num_shared:
        lines.append(f"  the first {counted(shared, 'token')} as in branch {sample.shared_with + 1}")
    texts = [("prompt", sample.prompt)]
    for turn, reward in sample.said():
        title = "completion" if not sample.turns else "policy" if turn.by_policy else "environment"
        texts.append((title if reward is None else f"{title} (reward {number(reward)})", turn.text))
    for title, text in (*texts, ("output", sample.output)) if sample.output else texts:
        lines += [f"  {title}:", *(f"    {line}" for line in text.splitlines() or [""])]
    return "\n".join(lines)
