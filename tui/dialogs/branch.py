"""Fork runs, sweep over a config, export versions: what is made from what is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Checkbox, Static, TextArea

from daemons.sweeps import Sweep
from tui import fmt
from tui.actions.jobs import Job, Perform, name_runs
from tui.actions.run_jobs import (
    ExportForm,
    ForkForm,
    SweepForm,
    check_export,
    check_fork,
    check_sweep,
    export_job,
    export_name,
    fork_job,
    sweep_job,
)
from tui.dialogs.form import FormDialog

# Of a preview: more does not help to see whether the grid is the one that was meant.
MAX_POINTS = 200


class ForkDialog(FormDialog):
    """A new run that starts from one version of another; of several runs, one for each."""

    verb = "Fork"

    def __init__(self, output_dir: Path, run_ids: Sequence[str], perform: Perform, *, version: str = "") -> None:
        super().__init__(name_runs(run_ids), perform)
        self._output_dir = output_dir
        self._form = ForkForm(tuple(run_ids), version)

    @property
    def _is_one(self) -> bool:
        return len(self._form.run_ids) == 1

    def compose_fields(self) -> ComposeResult:
        """Yield the fields; a new id can be given only for a single run."""
        newest = "the newest" if self._is_one else "the newest of each"
        yield from self.field("version", "version", self._form.version, newest)
        if self._is_one:
            yield from self.field("new-id", "new id", placeholder=f"{self._form.run_ids[0]}-fork")
        yield from self.field("settings", "settings", placeholder="optim.lr=3e-5 seed=2")
        yield Checkbox("with the moments of its optimizer", id="optimizer", compact=True)
        yield self.problem("optimizer")

    def take(self) -> None:
        """Read the fields into the form; the version may begin with "v"."""
        self._form = ForkForm(
            self._form.run_ids,
            self.value("version").removeprefix("v"),
            self.value("new-id") if self._is_one else "",
            self.value("settings"),
            self.ticked("optimizer"),
        )

    def check(self) -> str:
        """Returns what the forks would be, one a line. Raises FieldError."""
        return check_fork(self._output_dir, self._form)

    def job(self) -> Job:
        """The job that forks each run."""
        return fork_job(self._output_dir, self._form)


class ExportDialog(FormDialog):
    """A version as a folder: an adapter, or merged into the base model. Of several runs, a folder for each in one.

    The dialog shows how far the job is.
    """

    verb = "Export"

    def __init__(
        self, output_dir: Path, run_ids: Sequence[str], perform: Perform, *, version: str = "", out: str = ""
    ) -> None:
        super().__init__(name_runs(run_ids), perform)
        self._output_dir = output_dir
        usual = export_name(run_ids[0]) if len(run_ids) == 1 else "."
        self._form = ExportForm(tuple(run_ids), out or usual, version)

    def compose_fields(self) -> ComposeResult:
        """Yield the fields; the folder is the usual one, unless the dialog was opened with another."""
        one = len(self._form.run_ids) == 1
        yield from self.field("version", "version", self._form.version, "the newest" if one else "the newest of each")
        place = "a new one, outside of the workspace" if one else "for a new one of each run, outside of the workspace"
        yield from self.field("out", "folder", self._form.out, place)
        yield Checkbox("merge the adapter into the base model", id="merge", compact=True)

    def take(self) -> None:
        """Read the fields into the form; the version may begin with "v"."""
        version = self.value("version").removeprefix("v")
        self._form = ExportForm(self._form.run_ids, self.value("out"), version, self.ticked("merge"))

    def check(self) -> str:
        """Returns what would be written, one folder a line. Raises FieldError."""
        return check_export(self._output_dir, self._form)

    def job(self) -> Job:
        """The job that exports each run; merges come one after another."""
        return export_job(self._output_dir, self._form)


class SweepDialog(FormDialog):
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

    def __init__(self, output_dir: Path, perform: Perform, *, file: str = "", name: str = "") -> None:
        super().__init__("over a config", perform)
        self._output_dir = output_dir
        self._form = SweepForm(file, "", name)

    def compose_fields(self) -> ComposeResult:
        """Yield the fields; that of the values has several lines, one key each."""
        yield from self.field("file", "config", self._form.file, "path of a TOML file")
        yield from self.field("name", "name", self._form.name, "from the file's name")
        with Horizontal(classes="field -tall"):
            yield Static("values", markup=False)
            yield TextArea(id="axes", placeholder="optim.lr=1e-4,3e-4\nseed=1,2,3", tab_behavior="focus", compact=True)
        yield self.problem("axes")
        yield from self.field("halving", "halving", placeholder="off; 3: of three runs one goes on at each rung")

    def take(self) -> None:
        """Read the fields into the form."""
        axes = self.query_one("#axes", TextArea).text
        self._form = SweepForm(self.value("file"), axes, self.value("name"), self.value("halving"))

    def check(self) -> str:
        """Returns the grid as it would be added, of which at most MAX_POINTS runs are listed. Raises FieldError."""
        return preview(check_sweep(self._output_dir, self._form))

    def job(self) -> Job:
        """The job that adds the runs of the sweep."""
        return sweep_job(self._output_dir, self._form)


def preview(sweep: Sweep) -> str:
    """What a sweep would add, a run a line."""
    plan = sweep.plan
    head = fmt.counted(len(plan.runs), "run")
    if plan.halving:
        head += f", of {plan.halving} one goes on at each rung, by {plan.metric} ({plan.mode})"
    if len(sweep.added) < len(plan.runs):
        head += f"; {len(plan.runs) - len(sweep.added)} there already"
    lines = [
        f"· {run.run_id}  {'  '.join(f'{key}={value}' for key, value in run.set.items())}"
        for run in plan.runs[:MAX_POINTS]
    ]
    return "\n".join([head, *lines])
