"""`prl usage`, `prl runs export|export-metrics|best|diff` and `prl chat`: what runs have used, and what came of them.

Usage is added up by run, tag or day, also that of deleted runs. It reads `usage/` only.
"""

from __future__ import annotations

import contextlib
import csv
import enum
import io
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from daemons.chat import BASE, DEFAULT_MAX_TOKENS, Chat, ChatSettings
from daemons.commands import complete
from daemons.commands.common import (
    FittingTable,
    JsonOption,
    OutputDirOption,
    complain,
    console,
    existing_output,
    make_table,
    number,
    print_json,
    say,
)
from daemons.commands.runs import NO_RUNS, RunIdArgument
from daemons.details import Difference, diff_runs
from daemons.errors import ActionError, WrongUseError, one_line_errors
from daemons.exports import export_run
from daemons.ranking import RUN, TAG, RunValues, Standing, notes, num_last, rank, read_contestants, read_usual
from daemons.start import EXIT_INTERRUPTED, end_as_interrupted
from daemons.workspace_reader import read_workspace
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import LayoutError, OutputDir, check_run_id
from prime_rl.contract.metrics import REWARD
from prime_rl.contract.usage import UsageLine, read_usage
from prime_rl.results import Workspace, columns_of
from prime_rl.utils.text import one_line, size_text

_COLUMNS = ("trainer", "sampled", "trained", "computed", "inference", "hours", "judge", "teacher")
TRAINER = "trainer"
NO_TAG = "(no tag)"

QUIT, RESET = "/quit", "/reset"


class By(enum.StrEnum):
    """The keys that usage is added up by."""

    RUN = "run"
    TAG = "tag"
    DAY = "day"


@dataclass(frozen=True)
class Use:
    """One row. `name` is a run, a tag or a day; `hours` are those of orchestrators at work."""

    name: str
    trainer_s: float = 0.0
    tokens_sampled: int = 0
    tokens_trained: int = 0
    tokens_computed: int = 0
    inference_s: float = 0.0
    hours: float = 0.0
    judge_prompt_tokens: int = 0
    judge_completion_tokens: int = 0
    teacher_tokens: int = 0

    def plus(self, line: UsageLine) -> Use:
        """This row with the numbers of `line` added; its seconds at work are added as hours."""
        return replace(
            self,
            trainer_s=self.trainer_s + line.trainer_s,
            tokens_sampled=self.tokens_sampled + line.tokens,
            tokens_trained=self.tokens_trained + line.trained_tokens,
            tokens_computed=self.tokens_computed + line.computed_tokens,
            inference_s=self.inference_s + line.inference_s,
            hours=self.hours + line.work_s / 3600,
            judge_prompt_tokens=self.judge_prompt_tokens + line.judge_prompt_tokens,
            judge_completion_tokens=self.judge_completion_tokens + line.judge_completion_tokens,
            teacher_tokens=self.teacher_tokens + line.teacher_tokens,
        )


@dataclass(frozen=True)
class Usage:
    """`total` counts a run once, however many tags it has. `unread`: files that cannot be read, with the reason."""

    rows: tuple[Use, ...]
    total: Use
    unread: tuple[str, ...]


def read_workspace_usage(output_dir: Path, by: By = By.RUN) -> Usage:
    """Days ascending, all others by the trainer's seconds, most first."""
    lines, unread = _usage_lines(OutputDir(Path(output_dir)))
    names = _names(by, lines)
    rows: dict[str, Use] = {}
    total = Use("total")
    for line in lines:
        total = total.plus(line)
        for name in names(line):
            rows[name] = rows.get(name, Use(name)).plus(line)
    ordered = sorted(rows.values(), key=lambda row: row.name)
    if by is not By.DAY:
        ordered.sort(key=lambda row: (-row.trainer_s, -row.tokens_sampled))
    return Usage(tuple(ordered), total, tuple(unread))


def _usage_lines(output: OutputDir) -> tuple[list[UsageLine], list[str]]:
    lines: list[UsageLine] = []
    unread: list[str] = []
    for path in sorted(output.usage.glob("*.jsonl")):
        try:
            found: Iterable[UsageLine] = read_usage(path).values()
        except OSError as error:
            unread.append(one_line(str(error)))
            continue
        lines += [line for line in found if _is_sound(line, path.stem)]
    return lines, unread


def _is_sound(line: UsageLine, stem: str) -> bool:
    """True when a line has a run's name, that of its own file, and numbers that can be added up."""
    try:
        check_run_id(line.run_id)
    except LayoutError:
        return False
    numbers = (line.trainer_s, line.inference_s, line.work_s)
    return stem in (TRAINER, line.run_id) and all(math.isfinite(number) for number in numbers)


def _names(by: By, lines: list[UsageLine]) -> Callable[[UsageLine], Iterable[str]]:
    if by is By.RUN:
        return lambda line: [line.run_id]
    if by is By.DAY:
        return lambda line: [one_line(line.day, 10)]
    # The trainer's lines have no tags: those of the run's newest line hold for all of its lines.
    newest: dict[str, UsageLine] = {}
    for line in lines:
        known = newest.get(line.run_id)
        if line.work_s and (known is None or line.time >= known.time):
            newest[line.run_id] = line
    tags = {run_id: [one_line(tag, 64) for tag in line.tags] for run_id, line in newest.items()}
    return lambda line: tags.get(line.run_id) or [NO_TAG]


def usage(
    output_dir: OutputDirOption = None,
    as_json: JsonOption = False,
    by: Annotated[By, typer.Option(help="What to add up by.")] = By.RUN,
) -> None:
    """Show what runs have used: trainer seconds, tokens sampled and trained, inference seconds, hours at work.

    Deleted runs are included. A run counts for each of its tags, and once in the total.

    Example: prl usage --by tag
    """
    place = existing_output(output_dir, may_miss=as_json).path
    found = read_workspace_usage(place, by)
    for problem in found.unread:
        complain(f"not counted: {problem}")
    if as_json:
        print_json({"by": str(by), "rows": [asdict(row) for row in found.rows], "total": asdict(found.total)})
    elif not found.rows:
        say(f"{place}: no usage yet")
    else:
        without = {"judge": not found.total.judge_prompt_tokens, "teacher": not found.total.teacher_tokens}  # most runs
        columns = [str(by), *_COLUMNS]
        shown = [at for at, name in enumerate(columns) if at == 0 or not without.get(name)]
        rows = [[_cells(row)[at] for at in shown] for row in [*found.rows, found.total]]
        first_left_out = ("hours", "inference", "computed", "trained", "judge", "teacher", "sampled")
        console().print(FittingTable([columns[at] for at in shown], rows, first_left_out))


def _cells(use: Use) -> list[object]:
    return [
        use.name,
        f"{use.trainer_s:,.1f} s",
        f"{use.tokens_sampled:,}",
        f"{use.tokens_trained:,}",
        f"{use.tokens_computed:,}",
        f"{use.inference_s:,.1f} s",
        f"{use.hours:,.2f}",
        f"{use.judge_prompt_tokens:,} + {use.judge_completion_tokens:,}",
        f"{use.teacher_tokens:,}",
    ]


def export(
    run_id: RunIdArgument,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The new folder; its parent must exist.")],
    output_dir: OutputDirOption = None,
    step: Annotated[int | None, typer.Option(min=0, help="The version. Default: the newest on disk.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into the base model.")] = False,
    push: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="Push it to the Hugging Face hub too; a new repository is private."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check only; write nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a version of a run as a PEFT adapter, or with --merge as a whole model, with a model card.

    The folder appears complete or not at all. prl runs show ID lists checkpoints; the newest versions are there too.

    Example: prl runs export run_reverse --merge --out reverse-model
    """
    progress = (lambda message: None) if as_json else say
    done = export_run(
        existing_output(output_dir).path,
        run_id,
        out,
        step=step,
        merge=merge,
        push=push,
        dry_run=dry_run,
        on_progress=progress,
    )
    if as_json:
        print_json({"export": {**asdict(done), "out": str(done.out), "dry_run": dry_run}})
    elif dry_run:
        say(f"would write version {done.step} of {run_id} ({done.kind}) to {done.out}")
    else:
        say(
            f"wrote {done.out} ({done.kind}, {size_text(done.num_bytes)})"
            + (f"; pushed to {done.url}" if done.url else "")
        )


def export_metrics(
    run_ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID...", help="The runs. Default: all.", autocompletion=complete.run_ids),
    ] = None,
    output_dir: OutputDirOption = None,
    csv_file: Annotated[
        str, typer.Option("--csv", metavar="FILE|-", help="Where to; - is standard output.", show_default=False)
    ] = "-",
) -> None:
    """Write the metrics of runs as CSV: one row for each step of each run, one column for each figure.

    A figure that a step does not have is empty. In Python: prime_rl.results.

    Example: prl runs export-metrics run_reverse --csv metrics.csv
    """
    place = existing_output(output_dir).path
    rows = Workspace(place).metrics(*run_ids or ())
    if not rows:
        raise ActionError(
            f"{place} has no metrics of {', '.join(run_ids or ['any run'])} yet: a run writes some a step"
        )
    text = _csv_text(rows)
    if csv_file == "-":
        print(text, end="", flush=True)
        return
    file = Path(csv_file)
    with one_line_errors(f"writing {file}"):
        write_atomic(file, text)
    say(f"wrote {file}: {len(rows)} rows of {len({row['run_id'] for row in rows})} runs")


def _csv_text(rows: list[dict[str, Any]]) -> str:
    columns, text = columns_of(rows), io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    # A spreadsheet would compute what begins so, and names come from files of runs.
    writer.writerow([f"'{name}" if name.startswith(("=", "+", "-", "@")) else name for name in columns])
    writer.writerows([row.get(name) for name in columns] for row in rows)
    return text.getvalue()


def best(
    output_dir: OutputDirOption = None,
    by: Annotated[
        str, typer.Option(metavar="run|tag|KEY", help="What is ranked: runs, tags, or the values of a config key.")
    ] = RUN,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A metric, such as eval/pass@1 or loss. Default: reward/mean; of runs that learn texts held_out/loss, "
            "else supervised/loss.",
        ),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(min=1, help="So many of the newest values count. Default: 10, of an evaluation 1."),
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="Compare here the runs that are there. Default: as far as all are.")
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="Only runs with this tag. Repeated: with all of them.")
    ] = None,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, with a line for each run or group.")] = False,
) -> None:
    """Rank runs by a metric at equal steps.

    A group of runs, such as the seeds of one setting, has its mean, the standard error of that, and the number of
    runs. Runs with different environments are ranked apart.

    Example: prl runs best --by optim.lr --tag sort
    """
    if as_json and as_csv:
        raise WrongUseError("--json and --csv: choose one")
    place, tags = existing_output(output_dir, may_miss=as_json).path, set(tag or ())
    views = [run for run in read_workspace(place).runs if tags <= set(run.tags)]
    metric = REWARD if metric == "reward" else metric
    by_metric = {metric: read_contestants(place, views, metric)} if metric else read_usual(place, views)
    runs = [run for each in by_metric.values() for run in each]
    if runs and by not in (RUN, TAG) and not any(by in run.config for run in runs):
        expected = "expected run, tag, or a key such as optim.lr"
        raise WrongUseError(f"--by {by}: no run has this key in its config; {expected}")
    if runs and not as_json and not any(run.steps for run in runs):
        named = f"prl runs show {runs[0].run_id} --json has the names of its metrics"
        raise ActionError(f"no run has a value of {' or '.join(by_metric)} yet: {named}")
    ranked = {name: rank(each, name, by=by, last=last, step=step) for name, each in by_metric.items()}
    # In the order of the ranking also for people who read CSV, which has no room for notes.
    found = [each for standings in ranked.values() for each in standings]
    told = [note for name, standings in ranked.items() for note in notes(standings, name)]
    if len(ranked) > 1:
        told.insert(0, one_line("runs that learn texts are ranked by their loss, apart from those with rewards"))
    if as_json:
        standings = [{**_standing_json(each), "metric": name} for name, own in ranked.items() for each in own]
        print_json({"metric": next(iter(ranked)), "by": by, "standings": standings, "notes": told})
    elif as_csv and len(ranked) > 1:
        raise WrongUseError(f"--csv: runs of two kinds: choose --tag, or --metric {' or '.join(ranked)}")
    elif as_csv:
        [metric] = ranked
        rows = csv.writer(sys.stdout, lineterminator="\n")
        rows.writerow(["environment", "step", "place", by, metric, "standard_error", "num_runs", "runs"])
        for each in found:
            names = " ".join(run.run_id for run in each.runs)
            rows.writerow([each.environment, each.step, each.place, each.name, each.value, each.se, each.num, names])
    elif not found:
        say(f"no run has the tag {' and '.join(sorted(tags))}" if tags else NO_RUNS)
    else:
        each_own = [(name, env) for name, own in ranked.items() for env in dict.fromkeys(e.environment for e in own)]
        for name, environment in each_own:
            own = [each for each in ranked[name] if each.environment == environment]
            say(f"{environment}, at step {own[0].step}, mean of the last {last or num_last(name)}:")
            columns = ["", by, name, *(["± (s.e.)", "runs", "best run"] * (by != RUN))]
            console().print(make_table(columns, _places(own, by)))
    if not as_json:
        for note in told:
            complain(note)


def _places(standings: list[Standing[RunValues]], by: str) -> list[list[object]]:
    return [
        [
            "★" if each.place == 1 else each.place or "",
            each.name,
            number(each.value, 4),
            *([number(each.se, 4), each.num, each.runs[0].run_id] * (by != RUN)),
        ]
        for each in standings
    ]


def _standing_json(standing: Standing[RunValues]) -> dict[str, Any]:
    runs = zip(standing.runs, standing.results, strict=True)
    return {
        "environment": standing.environment,
        "step": standing.step,
        "place": standing.place,
        "name": one_line(standing.name),
        "value": standing.value,
        "standard_error": standing.se,
        "num_runs": standing.num,
        "runs": [
            {"run_id": run.run_id, "step": int(run.steps[-1]) if run.steps else None, "value": value}
            for run, value in runs
        ],
    }


def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="A run.", autocompletion=complete.run_ids)],
    other: Annotated[str, typer.Argument(metavar="B", help="Another run.", autocompletion=complete.run_ids)],
    output_dir: OutputDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what differs between two runs, in config and in result.

    A default equals the same value in a file. reward is the mean of the last 10 steps, tokens are those trained on,
    hours those between the first and the last step.

    Example: prl runs diff run_a run_b
    """
    found = diff_runs(existing_output(output_dir).path, one, other)
    if as_json:
        print_json({"runs": found.run_ids, "config": _rows_json(found.config), "result": _rows_json(found.result)})
        return
    screen = console()
    for name, rows, digits in (("config", found.config, 6), ("result", found.result, 3)):
        if rows:
            columns = [name, *found.run_ids]
            screen.print(
                make_table(columns, [[row.name, *(_shown(value, digits) for value in row.values)] for row in rows])
            )
        else:
            say(f"{name}: no difference")


def _rows_json(rows: tuple[Difference, ...]) -> list[dict[str, Any]]:
    return [{"name": row.name, "values": row.values} for row in rows]


def _shown(value: Any, digits: int) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and value.is_integer():
        return f"{value:.0f}"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def chat(
    target: Annotated[
        str,
        typer.Argument(
            metavar="ID[@vN]", help=f"A run (its newest version), RUN@vN, or {BASE}.", autocompletion=complete.versions
        ),
    ],
    output_dir: OutputDirOption = None,
    system: Annotated[str, typer.Option(metavar="TEXT", help="A system prompt.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = DEFAULT_MAX_TOKENS,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="0 always takes the likeliest token. Default: the server's.")
    ] = None,
) -> None:
    """Talk to a version of a run through the running inference server.

    /reset begins a new conversation, /quit or Ctrl-D ends the chat, Ctrl-C an answer. From a pipe each line is a
    question, and only answers are printed.

    Example: prl chat run_reverse --temperature 0
    """
    end_as_interrupted()
    settings = ChatSettings(system, max_tokens, temperature)
    with Chat(existing_output(output_dir).path, target, settings) as talk:
        if sys.stdin.isatty():
            _talk(talk)
        else:
            for line in filter(None, map(str.strip, sys.stdin)):
                _answer(talk, line)


def _talk(talk: Chat) -> None:
    """Questions from a terminal. An answer that fails, or is ended by Ctrl-C, does not end the chat."""
    import readline  # noqa: F401  # lines can be edited and repeated

    label = talk.label
    say(f"{label}: {RESET} begins a new conversation, {QUIT} ends")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt) as end:
            with contextlib.suppress(OSError):  # of a terminal that is gone
                print(flush=True)
            raise typer.Exit(EXIT_INTERRUPTED if isinstance(end, KeyboardInterrupt) else 0) from end
        if line == QUIT:
            return
        if line == RESET:
            talk.reset()
        elif line:
            try:
                _answer(talk, line)
                if talk.label != label:  # whole weights, and the run has published newer ones
                    label = talk.label
                    say(f"answered by {label}")
            except KeyboardInterrupt:
                talk.stop()
                print(flush=True)
            except ActionError as error:
                complain(str(error))


def _answer(talk: Chat, question: str) -> None:
    with contextlib.closing(talk.answer(question)) as parts:
        for part in parts:
            print(part, end="", flush=True)
    print(flush=True)
