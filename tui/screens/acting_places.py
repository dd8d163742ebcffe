"""The screens beside home, for a person who may act. Not imported when the app is read-only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from prime_rl.utils.text import CleanText
from tui.actions.jobs import Job
from tui.commands import Command
from tui.screens.acting import ActsOnWorkspace
from tui.screens.base import Setting, take_words
from tui.screens.compare import CompareScreen
from tui.screens.nodes import NodesScreen
from tui.screens.problems import ProblemsScreen
from tui.screens.system import SystemScreen


class ActingSystemScreen(SystemScreen, ActsOnWorkspace):
    """Acts on the run whose orchestrator is chosen, and on the workspace."""


class ActingNodesScreen(NodesScreen, ActsOnWorkspace):
    """Acts on the workspace: no run is chosen here."""


class ActingProblemsScreen(ProblemsScreen, ActsOnWorkspace):
    """Acts on the run that has the problem, on what was reported of it, and on the workspace."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "acknowledge", "Acknowledge", id="ack", tooltip="on an alert: acknowledge it"),
        Binding("M", "mute", "Mute", id="mute", tooltip="on an alert: mute its subject or its kind, or end that"),
    ]

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._alerts: tuple[CleanText, ...] = ()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide acknowledge and mute unless an alert reports the selected problem."""
        if action not in ("acknowledge", "mute"):
            return super().check_action(action, parameters)
        problem = self.selected_problem()
        return problem is not None and bool(problem.alerts)

    def show_keys(self) -> None:
        """As the base does, and also when other alerts are selected."""
        problem = self.selected_problem()
        alerts = problem.alerts if problem else ()
        if alerts != self._alerts:
            self._alerts = alerts
            self.refresh_bindings()
        super().show_keys()

    def commands(self) -> dict[str, Command]:
        """The commands of the keys; `ack` and `mute` take words too, and `unmute` needs some."""
        found = super().commands()
        problems = self.snapshot.problems if self.snapshot else ()
        names: dict[str, str] = {name: problem.text for problem in problems for name in problem.alerts}
        take_words(found, "ack", "acknowledge an alert", "[NAME]", self._command_ack, lambda: names)
        what = "a kind, a run or a daemon, such as run_a 2h"
        take_words(found, "mute", f"mute alerts: {what}", "[WHAT [TIME]]", self._command_mute, lambda: names)
        take_words(found, "unmute", "end a mute", "WHAT", self._command_unmute)
        return found

    def action_acknowledge(self) -> None:
        """Acknowledge all alerts of the selected problem, without a question."""
        from tui.actions.workspace_jobs import ack_job

        problem = self.selected_problem()
        if problem is not None and problem.alerts:
            self.perform(ack_job(self.output_dir, problem.alerts))

    def action_mute(self) -> None:
        """Open the choice of what of the selected problem to mute and for how long, or which mute to end."""
        from tui.actions.workspace_jobs import mute_choices
        from tui.dialogs.job import Choice, ChooseDialog

        problem = self.selected_problem()
        if problem is None or not problem.alerts:
            return
        subject, names = problem.name, problem.alerts
        words = "Nothing of it is sent meanwhile; it still shows here. What is still wrong at the end is sent then."

        def show(ways: Sequence[tuple[CleanText, Callable[[], Job]]]) -> None:
            choices = [Choice(label, job) for label, job in ways]
            self.app.push_screen(ChooseDialog(f"mute {subject}", words, choices, self.perform))

        self._after_look(lambda: mute_choices(self.output_dir, subject, names), show, needs_screen=True)

    def _command_ack(self, words: str) -> None:
        from tui.actions.workspace_jobs import ack_job

        self.perform(ack_job(self.output_dir, [words]))

    def _command_mute(self, words: str) -> None:
        from tui.actions.workspace_jobs import mute_job

        what, _, last = words.rpartition(" ")
        # "node 1" is a name: a time needs its unit here.
        job = (what, last) if what and last[-1:].isalpha() else (words, None)
        self.perform(mute_job(self.output_dir, *job))

    def _command_unmute(self, words: str) -> None:
        from tui.actions.workspace_jobs import unmute_job

        self.perform(unmute_job(self.output_dir, words))


class ActingCompareScreen(CompareScreen, ActsOnWorkspace):
    """Acts on the chosen run, or on all of the chosen group, and on the workspace."""
