"""`prl usage`: what the runs have used, added up by run, tag or day; also what deleted runs have used.

It reads `usage/` only, so it works with the daemons down.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from daemons.commands.common import (
    FittingTable,
    JsonOption,
    OutputDirOption,
    check_readable,
    choose_output_dir,
    complain,
    console,
    print_json,
    say,
)
from prime_rl.contract.layout import LayoutError, OutputDir, check_run_id
from prime_rl.contract.usage import UsageLine, read_usage
from prime_rl.utils.text import one_line

_COLUMNS = ("trainer", "sampled", "trained", "inference", "hours")
TRAINER = "trainer"
NO_TAG = "(no tag)"


class By(enum.StrEnum):
    """What usage is added up by."""

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
    inference_s: float = 0.0
    hours: float = 0.0

    def plus(self, line: UsageLine) -> Use:
        """This row with the numbers of `line` added; its seconds at work are added as hours."""
        return replace(
            self,
            trainer_s=self.trainer_s + line.trainer_s,
            tokens_sampled=self.tokens_sampled + line.tokens,
            tokens_trained=self.tokens_trained + line.trained_tokens,
            inference_s=self.inference_s + line.inference_s,
            hours=self.hours + line.work_s / 3600,
        )


@dataclass(frozen=True)
class Usage:
    """`total` counts a run once, however many tags it has. `unread`: files that cannot be read, with the reason."""

    rows: tuple[Use, ...]
    total: Use
    unread: tuple[str, ...]


def read_workspace_usage(output_dir: Path, by: By = By.RUN) -> Usage:
    """Days ascending, all others by the trainer's seconds, most first."""
    lines, unread = _lines(OutputDir(Path(output_dir)))
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


def _lines(output: OutputDir) -> tuple[list[UsageLine], list[str]]:
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
    """Whether a line has a run's name, that of its own file, and numbers that can be added up."""
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
    place = check_readable(choose_output_dir(output_dir))
    found = read_workspace_usage(place, by)
    for problem in found.unread:
        complain(f"not counted: {problem}")
    if as_json:
        print_json({"by": str(by), "rows": [asdict(row) for row in found.rows], "total": asdict(found.total)})
    elif not found.rows:
        say(f"{place}: no usage yet")
    else:
        rows = [_cells(row) for row in [*found.rows, found.total]]
        console().print(FittingTable([str(by), *_COLUMNS], rows, ("hours", "inference", "trained", "sampled")))


def _cells(use: Use) -> list[object]:
    return [
        use.name,
        f"{use.trainer_s:,.1f} s",
        f"{use.tokens_sampled:,}",
        f"{use.tokens_trained:,}",
        f"{use.inference_s:,.1f} s",
        f"{use.hours:,.2f}",
    ]


def register(app: typer.Typer) -> None:
    """Add `prl usage`."""
    app.command()(usage)
