"""One run, for a person who may act: also to roll it back to one of its checkpoints, and to talk to its versions.

Not imported when read-only.
"""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.widget import Widget

from prime_rl.contract.layout import RunDir
from prime_rl.utils.text import one_line
from tui.actions.jobs import Job, Progress, prl_command
from tui.readers.checkpoints import Checkpoint
from tui.readers.tabs import CHAT, CHECKPOINTS, TABS
from tui.screens.acting import ActsOnRuns
from tui.screens.base import Setting
from tui.screens.pick_runs import PickRuns
from tui.screens.run import RunScreen
from tui.widgets.chat_view import ChatView


class ActingRunScreen(RunScreen, ActsOnRuns):
    """The keys of all runs, and of the checkpoint that is chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "rollback", "Roll back", tooltip="on a checkpoint of a run: roll the run back to it"),
        Binding(str(len(TABS) + 1), f"tab({len(TABS)})", "Chat", show=False, tooltip="chat"),
    ]

    def __init__(self, setting: Setting, run_id: str, compare: tuple[str, ...] = ()) -> None:
        super().__init__(setting, run_id, compare)
        self.chat = ChatView(setting.output_dir, run_id)

    @property
    def tab_names(self) -> tuple[str, ...]:
        """The tabs of the run, and the chat as the last one."""
        return (*super().tab_names, CHAT)

    @property
    def views(self) -> tuple[Widget, ...]:
        """The views of the run, and the chat as the last one."""
        return (*super().views, self.chat)

    def _open_tab(self) -> None:
        if self.tab != CHAT:
            self.chat.talk.leave()
        super()._open_tab()

    @on(ChatView.ChooseVersion)
    def _choose_version(self) -> None:
        def look() -> list[str]:
            from daemons.chat import BASE
            from daemons.versions import versions_of

            names = [str(version.name) for version in versions_of(RunDir(self.output_dir / self.run_id))]
            return [self.run_id, *reversed(names), BASE]

        def take(chosen: tuple[str, ...] | None) -> None:
            if chosen:
                self.chat.choose(chosen[0])

        def show(names: list[str]) -> None:
            self.app.push_screen(PickRuns(names, title="talk to"), take)

        self._after_look(look, show, needs_screen=True)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide the rollback outside the tab of checkpoints; grey it out on a checkpoint that is not complete."""
        if action != "rollback":
            return super().check_action(action, parameters)
        if self.tab != CHECKPOINTS:
            return False
        return True if self._chosen_checkpoint() else None

    def action_rollback(self) -> None:
        """Ask, then roll the run back to the chosen checkpoint; do nothing without a complete one."""
        from tui.dialogs.job import Choice, ChooseDialog

        chosen = self._chosen_checkpoint()
        if chosen is None:
            return
        step, run_id = chosen.step, self.run_id
        words = f"{run_id} goes back to step {step}. Everything it made after that is removed; this cannot be undone."
        choice = Choice(one_line(f"to step {step}"), lambda: self._rollback_job(run_id, step))
        self.app.push_screen(ChooseDialog(f"roll back {run_id}", words, [choice], self.perform))

    def _rollback_job(self, run_id: str, step: int) -> Job:
        from daemons.actions import rollback_run

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
        chosen = self.checkpoints.selected
        return chosen if chosen is not None and chosen.is_stable else None
