"""How a screen acts: a job in a thread of the app, after a look at the disk or a question where that is needed.

Not imported when the app is read-only. Every action runs through a function of `daemons`, the code of `prl`, and is
shown together with the shell command that does the same. What an action needs is imported when its key is pressed, so
that the app starts fast.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from prime_rl.utils.text import one_line
from tui.actions.jobs import Job, JobWorker
from tui.model.snapshot import RunRow
from tui.screens.base import WorkspaceScreen

LookT = TypeVar("LookT")

_serials = itertools.count(1)


class Performs(WorkspaceScreen):
    """Base of the screens that act."""

    @property
    def output_dir(self) -> Path:
        """The folder of the workspace."""
        return self.setting.output_dir

    def perform(self, job: Job) -> int:
        """Start `job` in a thread of the app, so that it continues on any screen; returns its serial."""
        serial = next(_serials)
        worker = JobWorker(serial, job, self.app.post_message, self.setting.clock)
        self.app.run_worker(worker.run, thread=True, name=job.command)
        return serial

    def _after_look(
        self, look: Callable[[], LookT], then: Callable[[LookT], None], *, needs_screen: bool = False
    ) -> None:
        """`look` at the disk in a thread, `then` go on here; with `needs_screen` only if this screen is still open."""
        app = self.app  # once the console has ended, a screen does not find it any more

        def go_on(found: LookT) -> None:
            if self.is_current or not needs_screen:
                then(found)

        def work() -> None:
            try:
                found = look()
            except (RuntimeError, OSError, ValueError) as error:
                words = one_line(str(error), 400)
                app.call_later(lambda: self.notify(words, severity="error", markup=False))
            else:
                app.call_later(go_on, found)

        app.run_worker(work, thread=True, name="look at the disk")

    def _ask_for_many(self, title: str, run_ids: Sequence[str], words: str, verb: str, job: Job) -> None:
        """Confirm once for several runs; a single run needs no confirmation, since the action can be undone."""
        if len(run_ids) == 1:
            self.perform(job)
            return
        from tui.dialogs.job import ConfirmDialog

        lines = [f"· {run_id}" for run_id in run_ids]
        self.app.push_screen(ConfirmDialog(title, lines, words, verb, job, self.perform))


def ids_of(rows: Sequence[RunRow]) -> list[str]:
    """The ids of runs, in the order of their rows."""
    return [row.run_id for row in rows]
