"""Pause runs, change their weight and their budget: the acts that decide how runs share the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from textual.app import ComposeResult
from textual.widgets.button import ButtonVariant

from tui.actions.jobs import Job, Perform, name_runs
from tui.actions.run_jobs import check_budget, check_live, pause_job, set_job
from tui.dialogs.form import FormDialog
from tui.model.snapshot import RunRow

ValueT = TypeVar("ValueT")


class RunsForm(FormDialog):
    """A form about several runs."""

    def __init__(self, output_dir: Path, rows: Sequence[RunRow], perform: Perform) -> None:
        self._output_dir = output_dir
        self._rows = list(rows)
        self._run_ids = [row.run_id for row in rows]
        super().__init__(name_runs(self._run_ids), perform)


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
        weight = _common([row.view.weight for row in self._rows])
        yield from self.field(
            "weight", "weight", "" if weight is None else f"{weight:g}", "1 is usual; 2 is twice that"
        )

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
    """What a run may use. An empty field is no limit."""

    head = "budget of"
    verb = "Set"
    _tokens = ""
    _hours = ""

    def compose_fields(self) -> ComposeResult:
        """Yield both limits, each filled in when all runs have the same."""
        tokens = _common([row.view.max_tokens for row in self._rows])
        hours = _common([row.view.max_hours for row in self._rows])
        yield from self.field("tokens", "max_tokens", "" if tokens is None else str(tokens), "no limit; such as 2e6")
        yield from self.field("hours", "max_hours", "" if hours is None else f"{hours:g}", "no limit; such as 1.5")

    def take(self) -> None:
        """Read both limits."""
        self._tokens, self._hours = self.value("tokens"), self.value("hours")

    def check(self) -> str:
        """Returns what the runs have used, and which would end at once. Raises FieldError."""
        return check_budget(self._output_dir, self._run_ids, self._tokens, self._hours)

    def job(self) -> Job:
        """The job that sets both limits in the config of each run; an empty field removes its limit."""
        values = (("max_tokens", self._tokens), ("max_hours", self._hours))
        items = [f"budget.{key}={value or 'null'}" for key, value in values]
        return set_job(self._output_dir, self._run_ids, items)


def _common(values: Sequence[ValueT]) -> ValueT | None:
    """The value of all runs, when they have the same."""
    return values[0] if len(set(values)) == 1 else None
