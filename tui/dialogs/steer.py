"""Forms for how runs share the trainer, and for what is made from runs that are there.

Pause, weight and budget; fork, sweep, export; and the difference of two runs, as `prl runs diff` tells it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static, TextArea
from textual.widgets.button import ButtonVariant

from daemons.details import Difference, RunDifference
from daemons.errors import ActionError
from prime_rl.configs.orchestrator import KINDS
from prime_rl.utils.text import CleanText
from tui import fmt
from tui.actions import (
    ExportForm,
    ForkForm,
    Job,
    Perform,
    SweepForm,
    check_budget,
    check_live,
    export_name,
    name_runs,
    pause_job,
    set_job,
)
from tui.dialogs.form import FormDialog, Tick
from tui.model.snapshot import RunRow
from tui.widgets.config_view import value_text
from tui.widgets.line_list import Clipped, TextScreen, titled

FormT = TypeVar("FormT", ForkForm, ExportForm, SweepForm)


class RunsForm(FormDialog):
    """A form about several runs."""

    def __init__(self, output_dir: Path, rows: Sequence[RunRow], perform: Perform) -> None:
        self._output_dir = output_dir
        self._rows = list(rows)
        self._run_ids = [row.run_id for row in rows]
        self._before: dict[str, str] = {}
        super().__init__(name_runs(self._run_ids), perform)

    def common_field(self, name: str, label: str, values: Sequence[float | None], placeholder: str) -> ComposeResult:
        """A field with the value of all runs, every digit of it; empty where they differ. `_before` keeps its text."""
        differs = len(set(values)) > 1
        text = "" if differs or values[0] is None else repr(values[0]).removesuffix(".0")
        self._before[name] = text
        yield from self.field(name, label, text, "differs between the runs" if differs else placeholder)


class PauseDialog(RunsForm):
    """Enter pauses, with a reason or without."""

    verb = "Pause"
    variant: ClassVar[ButtonVariant] = "warning"

    def compose_fields(self) -> ComposeResult:
        """Yield the field of the reason, which may stay empty."""
        yield from self.field("reason", "reason", placeholder="optional; shown with the run")

    def check(self) -> str:
        """Returns what a pause does; the reason is not checked."""
        first = "It is saved and leaves its" if len(self._run_ids) == 1 else "They are saved and leave their"
        return f"{first} slot; z continues {'it' if len(self._run_ids) == 1 else 'them'}."

    def job(self) -> Job:
        """The job that pauses the runs."""
        return pause_job(self._output_dir, self._run_ids, self.texts["reason"])


class WeightDialog(RunsForm):
    """The share of the trainer's tokens, relative to that of other runs."""

    head = "weight of"
    verb = "Set"

    def compose_fields(self) -> ComposeResult:
        """Yield the weight, filled in when all runs have the same."""
        weights = [row.view.weight for row in self._rows]
        yield from self.common_field("weight", "weight", weights, "1 is usual; 2 is twice that")

    def check(self) -> str:
        """Returns what a weight does. Raises FieldError for an invalid one."""
        check_live([f"weight={self.texts['weight']}"], "weight")
        return "Its share of the trainer's tokens, relative to that of other runs with work. Works at once."

    def job(self) -> Job:
        """The job that sets the weight in the config of each run; it refuses an invalid one."""
        return set_job(self._output_dir, self._run_ids, [f"weight={self.texts['weight']}"])


class BudgetDialog(RunsForm):
    """The budgets of runs. An empty field is no limit; where the runs differ, it leaves each its own."""

    head = "budget of"
    verb = "Set"

    def compose_fields(self) -> ComposeResult:
        """Yield both limits, each filled in when all runs have the same."""
        tokens, hours = [row.view.max_tokens for row in self._rows], [row.view.max_hours for row in self._rows]
        yield from self.common_field("tokens", "max_tokens", tokens, "no limit; such as 2e6")
        yield from self.common_field("hours", "max_hours", hours, "no limit; such as 1.5")

    def check(self) -> str:
        """Returns what the runs have used, and which would end at once. Raises FieldError."""
        return check_budget(self._output_dir, self._run_ids, self.texts["tokens"], self.texts["hours"])

    def job(self) -> Job:
        """The job that sets the limits that were changed; a field that was emptied removes its limit.

        Raises ActionError when both are as before.
        """
        changed = [(name, value) for name, value in self.texts.items() if value != self._before[name]]
        items = [f"budget.max_{name}={value or 'null'}" for name, value in changed]
        if not items:
            raise ActionError("no limit was changed: type one, or empty a field to remove its limit")
        return set_job(self._output_dir, self._run_ids, items)


MAX_VALUE = 40  # cells of a value; the config tab has all of it


class DiffDialog(TextScreen):
    """Two parts: config, result."""

    DEFAULT_CSS = """
    DiffDialog {
        & .box { width: auto; min-width: 40; max-width: 98%; }
        & VerticalScroll { width: auto; max-width: 100%; height: auto; max-height: 40; scrollbar-size-vertical: 1; }
        & VerticalScroll Static { width: auto; }
        & .command { color: $foreground 60%; margin-top: 1; width: auto; }
    }
    """

    def __init__(self, difference: RunDifference, command: CleanText) -> None:
        super().__init__()
        self._difference, self._command = difference, command

    def compose(self) -> ComposeResult:
        """Yield the table, and the shell command that prints the same."""
        with titled(Vertical(classes="box"), "differences", "esc closes"):
            with VerticalScroll():
                yield Static(describe(self._difference), markup=False)
            yield Clipped(Content(f"$ {self._command}"), classes="command", markup=False)


def describe(difference: RunDifference) -> Text:
    """Three columns: key, and the value of each run."""
    rows = [_cells(each) for each in (*difference.config, *difference.result)]
    heads = ("", *(fmt.shorten_middle(run_id, MAX_VALUE) for run_id in difference.run_ids))
    widths = [max(len(row[at]) for row in [heads, *rows]) for at in range(3)]
    text = Text(no_wrap=True)

    def line(cells: tuple[str, ...], style: str) -> None:
        text.append("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip(), style)
        text.append("\n")

    line(heads, "bold")
    for title, part in (("config", difference.config), ("result", difference.result)):
        text.append(f"{title}{'' if part else ': no difference'}\n", "muted")
        for each in part:
            line(_cells(each), "text")
    text.rstrip()
    return text


def _cells(difference: Difference) -> tuple[str, ...]:
    return (difference.name, *(fmt.shorten(value_text(value), MAX_VALUE) for value in difference.values))


class MakesForm(FormDialog, Generic[FormT]):
    """A dialog whose fields are a form of `actions`; `first` is what they begin with."""

    def __init__(self, output_dir: Path, subject: str, first: FormT, perform: Perform) -> None:
        super().__init__(subject, perform)
        self._output_dir = output_dir
        self._first: FormT = first

    def form(self) -> FormT:
        """A subclass makes it of `texts` and `ticks`."""
        raise NotImplementedError

    def check(self) -> str:
        """Returns what would be made, one a line. Raises FieldError."""
        return self.form().check(self._output_dir)

    def job(self) -> Job:
        """The job that makes it."""
        return self.form().job(self._output_dir)


class ForkDialog(MakesForm[ForkForm]):
    """A new run that starts from one version of another; of several runs, one for each."""

    verb = "Fork"

    def __init__(self, output_dir: Path, run_ids: Sequence[str], perform: Perform, *, version: str) -> None:
        super().__init__(output_dir, name_runs(run_ids), ForkForm(tuple(run_ids), version), perform)
        self._is_one = len(run_ids) == 1

    def compose_fields(self) -> ComposeResult:
        """Yield the fields; a new id can be given only for a single run."""
        newest = "the newest" if self._is_one else "the newest of each"
        yield from self.field("version", "version", self._first.version, newest)
        if self._is_one:
            yield from self.field("new-id", "new id", placeholder=f"{self._first.run_ids[0]}-fork")
        yield from self.field("settings", "settings", placeholder="optim.lr=3e-5 seed=2")
        yield from self.field("kind", "kind", placeholder=f"as before, or another: {', '.join(KINDS)}")
        yield from self.field("config", "config", placeholder="a TOML file with what another kind needs")
        yield Tick("with the moments of its optimizer", id="optimizer", compact=True)
        yield self.problem("optimizer")

    def form(self) -> ForkForm:
        """The version may begin with "v"."""
        texts, version = self.texts, self.texts["version"].removeprefix("v")
        given = (texts["settings"], self.ticks["optimizer"], texts["kind"], texts["config"])
        return ForkForm(self._first.run_ids, version, texts.get("new-id", ""), *given)


class ExportDialog(MakesForm[ExportForm]):
    """A version as a folder: an adapter, or merged into the base model. Of several runs, a folder for each in one.

    The dialog shows how far the job is.
    """

    verb = "Export"

    def __init__(self, output_dir: Path, run_ids: Sequence[str], perform: Perform, *, version: str, out: str) -> None:
        usual = export_name(run_ids[0]) if len(run_ids) == 1 else "."
        first = ExportForm(tuple(run_ids), out or usual, version)
        super().__init__(output_dir, name_runs(run_ids), first, perform)

    def compose_fields(self) -> ComposeResult:
        """Yield the fields; the folder is the usual one, unless the dialog was opened with another."""
        one = len(self._first.run_ids) == 1
        yield from self.field("version", "version", self._first.version, "the newest" if one else "the newest of each")
        place = "a new one, outside of the workspace" if one else "for a new one of each run, outside of the workspace"
        yield from self.field("out", "folder", self._first.out, place)
        yield Tick("merge the adapter into the base model", id="merge", compact=True)

    def form(self) -> ExportForm:
        """The version may begin with "v"."""
        version = self.texts["version"].removeprefix("v")
        return ExportForm(self._first.run_ids, self.texts["out"], version, self.ticks["merge"])


class SweepDialog(MakesForm[SweepForm]):
    """One run for each combination of values; the grid is shown as it would be added."""

    DEFAULT_CSS = """
    SweepDialog {
        & .box { width: 110; height: 94%; max-height: 34; }
        & .field.-tall { height: 4; }
        & TextArea { height: 4; width: 1fr; }
        & #check-box { height: 1fr; max-height: 100%; margin-top: 0; }
        & .buttons, & .command { margin-top: 0; }
    }
    """
    verb = "Sweep"

    def __init__(self, output_dir: Path, perform: Perform, *, file: str, name: str) -> None:
        super().__init__(output_dir, "over a config", SweepForm(file, "", name), perform)

    def compose_fields(self) -> ComposeResult:
        """Yield the fields; that of the values has several lines, one key each."""
        yield from self.field("file", "config", self._first.file, "path of a TOML file")
        yield from self.field("name", "name", self._first.name, "from the file's name")
        with Horizontal(classes="field -tall"):
            yield Static("values", markup=False)
            yield TextArea(id="axes", placeholder="optim.lr=1e-4,3e-4\nseed=1,2,3", tab_behavior="focus", compact=True)
        yield self.problem("axes")
        yield from self.field("halving", "halving", placeholder="off; 3: of three runs one goes on at each rung")

    def form(self) -> SweepForm:
        """The form as it is filled in."""
        texts = self.texts
        return SweepForm(texts["file"], texts["axes"], texts["name"], texts["halving"])
