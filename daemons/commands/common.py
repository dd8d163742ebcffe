"""Parts that all commands share: options, the choice of the output directory, JSON, tables, a watch loop.

What is printed goes through `say`, `complain` or `cell`: clean, and never read as markup.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from daemons.errors import ActionError, WrongUseError
from prime_rl.contract.layout import OutputDir, scan_runs
from prime_rl.utils import runtime
from prime_rl.utils.process import StopFlag
from prime_rl.utils.runtime import parse_duration_s
from prime_rl.utils.text import clean_text, one_line

JSON_VERSION = 1
DEFAULT_OUTPUT_DIR = Path("outputs")
WATCH_EVERY_S = 1.0
MIN_LAST_COLUMN_CHARS = 16
# Of a flag and its misspelling; `--kind` and `--help` have less, and `--inference.engine` and `--engine`.
MIN_LIKENESS = 0.8
# Wider than any row: no text of a view is longer than a tenth of it.
UNCUT_CHARS = 100_000
# What a command takes that is `Passing`, in its usage line.
FILE_AND_OPTIONS = "[@ FILE] [OPTIONS] [--KEY VALUE ...]"

OutputDirOption = Annotated[
    Path | None,
    typer.Option(
        "--output-dir",
        metavar="DIR",
        help="The workspace. Default: PRL_OUTPUT_DIR, else output_dir of the system file, else outputs.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table; its format is stable.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Check only; add nothing.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
WatchOption = Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")]


_NO_DIGITS = str.maketrans("", "", "0123456789")
_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_CENTURY_S = 36525 * 86400.0


class Passing(TyperCommand):
    """Lets `@ file.toml` and `--a.b value` through to a config parser, but no misspelt flag of its own."""

    allow_extra_args = ignore_unknown_options = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The words of the command; of a flag that is nearly one of its own, click's complaint about unknown ones."""
        flags = [flag for each in self.get_params(ctx) for flag in each.opts]
        for word in [word.partition("=")[0].replace("_", "-") for word in args if word.startswith("-")]:
            near = difflib.get_close_matches(word, flags, 1, MIN_LIKENESS)
            if near and word not in near and not ctx.resilient_parsing:
                ctx.fail(f"No such option: {word} (Possible options: {near[0]})")
        return super().parse_args(ctx, args)


def choose_output_dir(option: Path | None) -> Path:
    """--output-dir, else PRL_OUTPUT_DIR, else "outputs"."""
    return option or Path(os.environ.get("PRL_OUTPUT_DIR") or DEFAULT_OUTPUT_DIR)


def no_workspace(path: Path) -> str | None:
    """The message about a folder that is not there, or has nothing of a workspace; None for one that has."""
    if not path.is_dir():
        meant = f"did you mean {near}?" if (near := near_workspace(path)) else "start one with prl up, or name another"
        return f"no workspace at {path}: {meant}"
    output = OutputDir(path)  # where a daemon, a node of a group or a run, though deleted, may have left something
    marks = (output.supervisor_lock, output.trainer_status, output.inference_status, output.multinode, output.trash)
    is_one = any(map(os.path.lexists, marks)) or any(scan_runs(path))
    return None if is_one else f"no workspace in {path}: prl up --output-dir {path} makes one"


def near_workspace(path: Path) -> Path | None:
    """The workspace beside `path` whose name is most like it; those that differ in digits alone are a series."""
    names = [each.name for each in path.parent.glob("*") if each.is_dir() and os.access(each, os.R_OK | os.X_OK)]
    near = (path.with_name(name) for name in difflib.get_close_matches(path.name, names, cutoff=0.75))
    series = path.name.translate(_NO_DIGITS)
    return next((each for each in near if each.name.translate(_NO_DIGITS) != series and not no_workspace(each)), None)


@contextlib.contextmanager
def told_if_made(place: Path, yes: bool) -> Iterator[None]:
    """Add runs in here. Asks before a workspace is made beside one whose name is like its own; tells of a new one."""
    none = no_workspace(place) if os.access(place, os.R_OK | os.X_OK) or not place.exists() else None
    if none and not place.exists() and near_workspace(place):
        confirm(f"{none} make a new workspace?", yes)
    yield
    if none and not no_workspace(place):
        complain(f"made a new workspace at {place.absolute()}: prl up starts it; --output-dir names another")


def confirm(question: str, yes: bool) -> None:
    """Ask on a terminal; elsewhere `--yes` is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise WrongUseError(f"{question} cannot ask without a terminal: add --yes")
    typer.confirm(question, abort=True)


def existing_output(option: Path | None, *, may_miss: bool = False, may_be_empty: bool = True) -> OutputDir:
    """The workspace that is meant. It must be there unless it `may_miss`: then a missing one counts as empty.

    Raises WrongUseError when it is missing, or holds nothing and may not, ActionError when it cannot be read.
    """
    output = OutputDir(choose_output_dir(option))
    try:
        with os.scandir(output.path):
            none = None if may_be_empty else no_workspace(output.path)
    except FileNotFoundError:
        none = no_workspace(output.path)
    except OSError as error:
        raise ActionError(
            f"cannot read workspace {output.path}: {error.strerror}; choose another with --output-dir"
        ) from error
    if none and not may_miss:
        raise WrongUseError(none)
    return output


def say(message: str) -> None:
    """Print one line of plain text, without control characters."""
    print(clean_text(message), flush=True)


@contextlib.contextmanager
def stop_without_output(stop: StopFlag) -> Iterator[None]:
    """Print in here: when the terminal, or who reads a pipe, is gone, `stop` is set and what follows goes nowhere."""
    try:
        yield
    except OSError:
        stop.set()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say_or_stop(stop: StopFlag) -> Callable[[str], None]:
    """`say` for a command that cleans up when nothing can be printed any more."""

    def tell(message: str) -> None:
        with stop_without_output(stop):
            say(message)

    return tell


def complain(message: str) -> None:
    """Print one line to standard error, as "prl: message"."""
    runtime.complain("prl", message)


def print_json(payload: dict[str, Any]) -> None:
    """Print the answer to --json: `payload` below the version of its format."""
    print(json.dumps({"version": JSON_VERSION, **payload}, indent=2, default=str), flush=True)


def _uncut_chars() -> int | None:
    """The width of a file or pipe, so wide that nothing is cut or folded: grep finds whole cells; None: a terminal."""
    return None if sys.stdout.isatty() else UNCUT_CHARS


def console() -> Console:
    """A console for the terminal, or for a file or pipe."""
    return Console(highlight=False, markup=False, emoji=False, width=_uncut_chars())


def cell(value: object, limit: int = 160) -> Text:
    """A table cell of untrusted text, on a terminal cut after `limit` characters; empty for None."""
    return Text("" if value is None else one_line(str(value), _uncut_chars() or limit))


def make_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table of `rows`; the last column is folded to fit, the others are cut.

    A value that is not Text goes through `cell`. Without any column name there is no heading.
    """
    table = Table(box=None, header_style="bold", pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(
            column, no_wrap=column != columns[-1], overflow="fold" if column == columns[-1] else "ellipsis"
        )
    for row in rows:
        table.add_row(*[value if isinstance(value, Text) else cell(value) for value in row])
    return table


class FittingTable:
    """A table that leaves out columns, the first of `droppable` first, until the terminal is wide enough for the rest.

    The last column may always be folded into what is left.
    """

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[object]], droppable: Sequence[str]) -> None:
        self._columns = list(columns)
        self._rows = [[value if isinstance(value, Text) else cell(value) for value in row] for row in rows]
        self._droppable = droppable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = list(enumerate(self._columns))
        for name in self._droppable:
            if self._width(columns) <= options.max_width:
                break
            columns = [(place, each) for place, each in columns if each != name]
        places = [place for place, _ in columns]
        yield make_table([each for _, each in columns], [[row[place] for place in places] for row in self._rows])

    def _width(self, columns: Sequence[tuple[int, str]]) -> int:
        """With two blanks after each column, and at least a few words in the last."""
        widths = [max([len(name), *(row[place].cell_len for row in self._rows)]) + 2 for place, name in columns]
        return sum(widths[:-1]) + min(widths[-1], MIN_LAST_COLUMN_CHARS)


def number(value: float | None, digits: int = 3) -> str:
    """`value` with `digits` decimal places; empty for None."""
    return "" if value is None else f"{value:.{digits}f}"


def parse_duration(text: str) -> float:
    """As `parse_duration_s`. Raises WrongUseError."""
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise WrongUseError(str(error)) from error


def short_time(seconds: float | None) -> str:
    """45 s -> "45s", 4000 -> "1h", 10**6 -> "11d"; empty for None, and "long" beyond a century."""
    if seconds is None:
        return ""
    if not seconds < _CENTURY_S:
        return "long"
    unit = max((each for each in "smhd" if seconds >= _UNIT_S[each]), key=_UNIT_S.__getitem__, default="s")
    return f"{max(seconds, 0.0) / _UNIT_S[unit]:.0f}{unit}"


def watch(render: Callable[[], Any]) -> None:
    """Show `render()` every second until Ctrl-C: in place on a terminal, one after another elsewhere."""
    screen, stop = console(), StopFlag()

    def end_after_this(*_: object) -> None:  # else the next picture stands below half of it; a second one ends at once
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end_after_this)
    with Live(console=screen, auto_refresh=False) if screen.is_terminal else contextlib.nullcontext() as live:
        while not stop():
            live.update(render(), refresh=True) if live else screen.print(render())
            sys.stdout.flush()
            stop.wait(WATCH_EVERY_S)


def flags_help(what: str, example: str, parser: argparse.ArgumentParser) -> str:
    """Help of a command whose flags another process reads: all of them, from its own parser."""
    flags = parser.format_help().partition("options:\n")[2].rstrip()
    kept = "\n".join(line for line in flags.splitlines() if "-h, --help" not in line)
    # Lines after \b are kept as they are.
    paragraphs = kept.replace("\n\n", "\n\n\b\n")
    return f"{what}\n\nExample: {example}\n\n\b\n{paragraphs}"
