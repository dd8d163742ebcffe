"""An action of the run screen: resume the run from one of its checkpoints. Not imported when read-only."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from prime_rl.utils.text import one_line
from tui.acting import ActsOnRuns
from tui.checkpoints import Checkpoint
from tui.jobs import Job, Progress, prl_command
from tui.screens.run import RunScreen
from tui.tabs import CHECKPOINTS


class ActsOnOneRun(ActsOnRuns):
    """The keys of all runs, and of the checkpoint that is chosen. Stands after `RunScreen` among the bases."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "resume", "Resume from here", tooltip="on a checkpoint of a run: resume from it")
    ]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action != "resume":
            return super().check_action(action, parameters)
        if not isinstance(self, RunScreen) or self.tab != CHECKPOINTS:
            return False
        return True if self._chosen_checkpoint() else None

    def action_resume(self) -> None:
        from tui.dialogs.choose import Choice, ChooseDialog

        chosen = self._chosen_checkpoint()
        if chosen is None or not isinstance(self, RunScreen):
            return
        step, run_id = chosen.step, self.run_id
        words = f"{run_id} goes back to step {step}. Everything it made after that is removed; this cannot be undone."
        choice = Choice(one_line(f"resume from step {step}"), lambda: self._resume_job(run_id, step))
        self.app.push_screen(ChooseDialog(f"resume {run_id}", words, [choice], self.perform))

    def _resume_job(self, run_id: str, step: int) -> Job:
        from daemons.resume import resume_run

        output_dir = self.output_dir

        def work(progress: Progress) -> str:
            resume_run(output_dir, run_id, step, on_progress=progress)
            return f"{run_id}: resumes from step {step}"

        return Job(prl_command(output_dir, "runs", "resume", run_id, "--step", str(step)), work)

    def _chosen_checkpoint(self) -> Checkpoint | None:
        """The one under the cursor, when it is complete."""
        if not isinstance(self, RunScreen):
            return None
        chosen = self.checkpoints.selected
        return chosen if chosen is not None and chosen.is_stable else None
