"""The keys that decide how runs share the trainer, and those that make something from a run. Not for read-only.

They act on all of `target_rows()`; a sweep and a comparison start from one run and refuse several.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual.binding import Binding, BindingType

from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import RunState
from tui.actions.jobs import name_runs, prl_command
from tui.commands import Command, CommandError
from tui.model.snapshot import RunRow
from tui.screens.base import take_words
from tui.screens.performing import Performs, ids_of

# A run in one of these has no slot to leave, and waits for none.
_NO_PAUSE = (RunState.INVALID, RunState.FINISHED, RunState.EVICTED, RunState.FAILED)


class SteersRuns(Performs):
    """`w` compares in two tabs of a run, so the weight has a second key."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("z", "pause", "Pause", id="pause", tooltip="pause: save and free the slot; continue a paused run"),
        Binding(
            "w,percent_sign", "weight", "Weight", id="weight", show=False, tooltip="weight: its share of the trainer"
        ),
        Binding("B", "budget", "Budget", id="budget", show=False, tooltip="budget: tokens and hours it may use"),
        Binding("F", "fork", "Fork", id="fork", show=False, tooltip="fork: a new run from one of its versions"),
        Binding("W", "sweep", "Sweep", id="sweep", show=False, tooltip="sweep: a run for each combination of values"),
        Binding("E", "export", "Export", id="export", show=False, tooltip="export a version: adapter, or merged model"),
    ]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide the keys that need a target run; grey out pause when no target can be paused or continued."""
        rows = self.target_rows()
        if action in ("pause", "weight", "budget", "fork", "export") and not rows:
            return False
        if action == "pause":
            return True if any(row.state not in _NO_PAUSE for row in rows) else None
        return super().check_action(action, parameters)

    def commands(self) -> dict[str, Command]:
        """The commands of the keys, most of which take words too; and `continue`, `set` and `diff`."""
        found = super().commands()
        paused = [row for row in self.target_rows() if row.state == RunState.PAUSED]
        go_on = (lambda: self._continue(paused)) if paused else None
        found["continue"] = Command("continue", "let paused runs go on", go_on, "Continue", "z" if paused else "")
        take_words(found, "pause", "pause runs", "[REASON]", self._command_pause)
        take_words(found, "weight", "set the share of the trainer", "[NUMBER]", self._command_weight)
        keys, runs = self._live_keys, self._other_runs
        take_words(found, "set", "set keys of runs", "KEY=VALUE ...", self._command_set, keys, repeats=True)
        take_words(found, "fork", "fork a run", "[VERSION]", self._open_fork)
        take_words(found, "sweep", "sweep over a config", "[FILE]", lambda words: self._open_sweep(words, ""))
        take_words(found, "export", "export a version", "[FOLDER]", self._open_export)
        take_words(found, "diff", "what differs from another run", "RUN", self._command_diff, runs)
        return found

    def target_version(self) -> str:
        """The version that is chosen here, "" for the newest."""
        return ""

    def action_pause(self) -> None:
        """Ask for a reason and pause the target runs; when all of them are paused already, continue them."""
        rows = self._steerable()
        if running := [row for row in rows if row.state != RunState.PAUSED]:
            from tui.dialogs.steer import PauseDialog

            self.app.push_screen(PauseDialog(self.output_dir, running, self.perform))
        elif rows:
            self._continue(rows)

    def action_weight(self) -> None:
        """Open the dialog that sets one weight for the target runs."""
        from tui.dialogs.steer import WeightDialog

        self.app.push_screen(WeightDialog(self.output_dir, self.target_rows(), self.perform))

    def action_budget(self) -> None:
        """Open the dialog that sets the budget of the target runs, the same for each."""
        from tui.dialogs.steer import BudgetDialog

        self.app.push_screen(BudgetDialog(self.output_dir, self.target_rows(), self.perform))

    def action_fork(self) -> None:
        """Open the dialog that forks the target runs, at the version that is chosen here."""
        self._open_fork(self.target_version())

    def action_export(self) -> None:
        """Open the dialog that exports a version of the target runs."""
        self._open_export("")

    def action_sweep(self) -> None:
        """Open the dialog of a sweep, with the config of the target run if there is one.

        Several target runs are refused with a message.
        """
        if not self.target_rows():
            self._open_sweep("", "")
        elif (row := self._only("a sweep")) is not None:
            file = OutputDir(self.output_dir).run(row.run_id).orch_toml
            self._open_sweep(str(file), row.run_id.removeprefix("run_")[:40])

    def _steerable(self) -> list[RunRow]:
        return [row for row in self.target_rows() if row.state not in _NO_PAUSE]

    def _some(self) -> list[RunRow]:
        """The target runs. Raises CommandError without one."""
        if rows := self.target_rows():
            return rows
        raise CommandError("this command needs a run: move the cursor to one; :runs lists them")

    def _only(self, what: str) -> RunRow | None:
        """The one run that `what` starts from. None of several, and why is shown."""
        rows = self.target_rows()
        if len(rows) > 1:
            words = f"{what} starts from one run, and {len(rows)} are marked: clear the marks with esc"
            self.notify(words, severity="warning", markup=False)
            return None
        return rows[0] if rows else None

    def _continue(self, rows: list[RunRow]) -> None:
        from tui.actions.run_jobs import continue_job

        run_ids = ids_of(rows)
        words = "They go on where they were, as soon as slots are free."
        job = continue_job(self.output_dir, run_ids)
        self._ask_for_many(f"continue {name_runs(run_ids)}", run_ids, words, "Continue", job)

    def _open_fork(self, version: str) -> None:
        from tui.dialogs.steer import ForkDialog

        run_ids = ids_of(self._some())
        self.app.push_screen(ForkDialog(self.output_dir, run_ids, self.perform, version=version))

    def _open_export(self, folder: str) -> None:
        from tui.dialogs.steer import ExportDialog

        run_ids, version = ids_of(self._some()), self.target_version()
        self.app.push_screen(ExportDialog(self.output_dir, run_ids, self.perform, version=version, out=folder))

    def _open_sweep(self, file: str, name: str) -> None:
        from tui.dialogs.steer import SweepDialog

        self.app.push_screen(SweepDialog(self.output_dir, self.perform, file=file, name=name))

    def _command_pause(self, reason: str) -> None:
        from tui.actions.run_jobs import pause_job

        self._some()
        if not (rows := self._steerable()):
            raise CommandError("none of these runs can be paused: they have no slot and wait for none")
        self.perform(pause_job(self.output_dir, ids_of(rows), reason))

    def _command_weight(self, words: str) -> None:
        self._set([f"weight={words}"])

    def _command_set(self, words: str) -> None:
        self._set(words.split())

    def _set(self, items: list[str]) -> None:
        from daemons.errors import ActionError
        from tui.actions.run_jobs import set_job

        try:
            self.perform(set_job(self.output_dir, ids_of(self._some()), items))
        except ActionError as error:
            raise CommandError(str(error)) from error

    def _command_diff(self, words: str) -> None:
        self._some()
        if words not in self.run_ids():
            raise CommandError(f"run {words!r} not found in this workspace; :runs lists them")
        if (row := self._only("a comparison")) is None:
            return
        run_id = row.run_id
        from daemons.details import RunDifference, diff_runs
        from tui.dialogs.steer import DiffDialog

        command = prl_command(self.output_dir, "runs", "diff", run_id, words)

        def show(difference: RunDifference) -> None:
            self.app.push_screen(DiffDialog(difference, command))

        self._after_look(lambda: diff_runs(self.output_dir, run_id, words), show, needs_screen=True)

    def _other_runs(self) -> Mapping[str, str]:
        own = self.target_row()
        return {run_id: "" for run_id in self.run_ids() if own is None or run_id != own.run_id}

    def _live_keys(self) -> Mapping[str, str]:
        from prime_rl.configs.lifetime import LIVE_KEYS, BudgetConfig

        names = [key for key in LIVE_KEYS if key != "budget"] + [f"budget.{name}" for name in BudgetConfig.model_fields]
        return {f"{name}=": "" for name in names}
