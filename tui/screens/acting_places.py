"""The screens beside home, and one run, for a person who may act. Not imported when the app is read-only.

A run can be rolled back to one of its checkpoints too, and its versions can be talked to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.binding import Binding, BindingType

from daemons.actions import rollback_run
from prime_rl.contract.layout import RunDir
from prime_rl.utils.text import CleanText, one_line
from tui.actions import Choice, Job, Progress, ack_job, mute_choices, mute_job, prl_command, unmute_job
from tui.keys import Command
from tui.readers.run_config import Checkpoint
from tui.readers.tabs import CHAT, CHECKPOINTS, TABS
from tui.screens.acting import ActsOnRuns, ActsOnWorkspace
from tui.screens.base import Setting, take_words
from tui.screens.compare import CompareScreen, pick_one
from tui.screens.nodes import NodesScreen
from tui.screens.run import RunScreen
from tui.screens.system import ProblemsScreen, SystemScreen
from tui.widgets.chat_view import ChatView


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
        problem = self.selected_problem()
        if problem is not None and problem.alerts:
            self.perform(ack_job(self.output_dir, problem.alerts))

    def action_mute(self) -> None:
        """Open the choice of what of the selected problem to mute and for how long, or which mute to end."""
        from tui.dialogs.form import ChooseDialog

        problem = self.selected_problem()
        if problem is None or not problem.alerts:
            return
        subject, names = problem.name, problem.alerts
        words = "Nothing of it is sent meanwhile; it still shows here. What is still wrong at the end is sent then."

        def show(choices: Sequence[Choice]) -> None:
            self.app.push_screen(ChooseDialog(f"mute {subject}", words, choices, self.perform))

        self._after_look(lambda: mute_choices(self.output_dir, subject, names), show, needs_screen=True)

    def _command_ack(self, words: str) -> None:
        self.perform(ack_job(self.output_dir, [words]))

    def _command_mute(self, words: str) -> None:
        what, _, last = words.rpartition(" ")
        # "node 1" is a name: a time needs its unit here.
        job = (what, last) if what and last[-1:].isalpha() else (words, None)
        self.perform(mute_job(self.output_dir, *job))

    def _command_unmute(self, words: str) -> None:
        self.perform(unmute_job(self.output_dir, words))


class ActingCompareScreen(CompareScreen, ActsOnWorkspace):
    """Acts on the chosen run, or on all of the chosen group, and on the workspace."""


class ActingRunScreen(RunScreen, ActsOnRuns):
    """The keys of all runs, and of the checkpoint that is chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "rollback", "Roll back", tooltip="on a checkpoint of a run: roll the run back to it"),
        Binding(str(len(TABS) + 1), f"tab({len(TABS)})", "Chat", show=False, tooltip="chat"),
    ]

    def __init__(self, setting: Setting, run_id: str, compare: tuple[str, ...] = ()) -> None:
        super().__init__(setting, run_id, compare)
        self.chat = self.views[CHAT] = ChatView(setting.output_dir, run_id)

    def _open_tab(self) -> None:
        if self.tab != CHAT:
            self.chat.talk.leave()
        super()._open_tab()

    @on(ChatView.ChooseVersion)
    def _choose_version(self) -> None:
        def look() -> list[str]:
            from daemons.chat import BASE
            from daemons.details import versions_of

            names = [str(version.name) for version in versions_of(RunDir(self.output_dir / self.run_id))]
            return [self.run_id, *reversed(names), BASE]

        def show(names: list[str]) -> None:
            pick_one(self.app, names, "talk to", self.chat.choose)

        self._after_look(look, show, needs_screen=True)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide the rollback outside the tab of checkpoints."""
        return (action != "rollback" or self.tab == CHECKPOINTS) and super().check_action(action, parameters)

    def why_not(self, action: str) -> str | None:
        """As the base does; and why there is no rollback."""
        if action == "rollback" and self.tab == CHECKPOINTS and self._chosen_checkpoint() is None:
            return "a run is rolled back to a complete checkpoint: move the cursor to one"
        return super().why_not(action)

    def action_rollback(self) -> None:
        """Ask, then roll the run back to the chosen checkpoint; do nothing without a complete one."""
        from tui.dialogs.form import ChooseDialog

        chosen = self._chosen_checkpoint()
        if chosen is None:
            return
        step, run_id = chosen.step, self.run_id
        words = f"{run_id} goes back to step {step}. Everything it made after that is removed; this cannot be undone."
        choice = (one_line(f"to step {step}"), lambda: self._rollback_job(run_id, step))
        self.app.push_screen(ChooseDialog(f"roll back {run_id}", words, [choice], self.perform))

    def _rollback_job(self, run_id: str, step: int) -> Job:
        output_dir = self.output_dir

        def work(progress: Progress) -> str:
            rollback_run(output_dir, run_id, step, on_progress=progress)
            return f"{run_id}: rolled back to step {step}"

        return Job(prl_command(output_dir, "runs", "rollback", run_id, "--step", str(step)), work)

    def target_version(self) -> str:
        """The step of the chosen checkpoint; "" outside that tab, and without a complete one."""
        chosen = self._chosen_checkpoint() if self.tab == CHECKPOINTS else None
        return str(chosen.step) if chosen else ""

    def _chosen_checkpoint(self) -> Checkpoint | None:
        """The one under the cursor, when it is complete."""
        chosen = self.checkpoints.chosen
        return chosen if chosen is not None and chosen.is_stable else None
