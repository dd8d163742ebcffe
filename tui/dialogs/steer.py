"""Pause runs, change their weight and their budget: the acts that decide how runs share the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.widgets.button import ButtonVariant

from daemons.errors import ActionError
from tui.actions.jobs import Job, Perform, name_runs
from tui.actions.run_jobs import check_budget, check_live, pause_job, set_job
from tui.dialogs.form import FormDialog
from tui.model.snapshot import RunRow


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
    _reason = ""

    def compose_fields(self) -> ComposeResult:
        """Yield the field of the reason, which may stay empty."""
        yield from self.field("reason", "reason", placeholder="optional; shown with the run")

    def take(self) -> None:
        """Read the reason."""
        self._reason = self.value("reason")

    def check(self) -> str:
        """Returns what a pause does; the reason is not checked."""
        first = "It is saved and leaves its" if len(self._run_ids) == 1 else "They are saved and leave their"
        return f"{first} slot; z continues {'it' if len(self._run_ids) == 1 else 'them'}."

    def job(self) -> Job:
        """The job that pauses the runs."""
        return pause_job(self._output_dir, self._run_ids, self._reason)


class WeightDialog(RunsForm):
    """The share of the trainer's tokens, relative to that of other runs."""

    head = "weight of"
    verb = "Set"
    _weight = ""

    def compose_fields(self) -> ComposeResult:
        """Yield the weight, filled in when all runs have the same."""
        weights = [row.view.weight for row in self._rows]
        yield from self.common_field("weight", "weight", weights, "1 is usual; 2 is twice that")

    def take(self) -> None:
        """Read the weight."""
        self._weight = self.value("weight")

    def check(self) -> str:
        """Returns what a weight does. Raises FieldError for an invalid one."""
        check_live([f"weight={self._weight}"], "weight")
        return "Its share of the trainer's tokens, relative to that of other runs with work. Works at once."

    def job(self) -> Job:
        """The job that sets the weight in the config of each run; it refuses an invalid one."""
        return set_job(self._output_dir, self._run_ids, [f"weight={self._weight}"])


class BudgetDialog(RunsForm):
    """What a run may use. An empty field is no limit; where the runs differ, it leaves each its own."""

    head = "budget of"
    verb = "Set"
    _tokens = ""
    _hours = ""

    def compose_fields(self) -> ComposeResult:
        """Yield both limits, each filled in when all runs have the same."""
        tokens, hours = [row.view.max_tokens for row in self._rows], [row.view.max_hours for row in self._rows]
        yield from self.common_field("tokens", "max_tokens", tokens, "no limit; such as 2e6")
        yield from self.common_field("hours", "max_hours", hours, "no limit; such as 1.5")

    def take(self) -> None:
        """Read both limits."""
        self._tokens, self._hours = self.value("tokens"), self.value("hours")

    def check(self) -> str:
        """Returns what the runs have used, and which would end at once. Raises FieldError."""
        return check_budget(self._output_dir, self._run_ids, self._tokens, self._hours)

    def job(self) -> Job:
        """The job that sets the limits that were changed; a field that was emptied removes its limit.

        Raises ActionError when both are as before.
        """
        values = (("tokens", self._tokens), ("hours", self._hours))
        items = [f"budget.max_{name}={value or 'null'}" for name, value in values if value != self._before[name]]
        if not items:
            raise ActionError("no limit was changed: type one, or empty a field to remove its limit")
        return set_job(self._output_dir, self._run_ids, items)
