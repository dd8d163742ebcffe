"""The screens that act: what `screens` shows, with the keys that add, evict, readmit, delete and undelete runs.

Not imported when the app is read-only. Every action runs in a thread through `daemons.actions`, the very code of `prl`,
and is shown together with the command that does the same in a shell. What an action needs is imported with its key.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from textual.binding import Binding, BindingType

from prime_rl.contract.status import RunState
from prime_rl.utils.text import one_line
from tui.dialogs.job import Job, prl_command
from tui.messages import ActionChanged, ActionEntry, ActionState
from tui.screens.base import HouseScreen
from tui.screens.runs import RunsScreen

ScreenT = TypeVar("ScreenT", bound=HouseScreen)

_serials = itertools.count(1)
_CAN_READMIT = (RunState.EVICTED, RunState.FAILED)
_CANNOT_EVICT = (RunState.EVICTED,)


class ActsOnRuns(HouseScreen):
    """The keys that act on `target_row()`. Stands second among the bases: Textual takes the CSS along the first."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e", "evict", "Evict"),
        Binding("r", "readmit", "Readmit"),
        Binding("d", "delete", "Delete"),
        Binding("u", "undo_delete", "Undo delete", show=False),
    ]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Grey out what would do nothing for the run in question."""
        row = self.target_row()
        if action == "readmit":
            return True if row and row.state in _CAN_READMIT else None
        if action == "evict":
            return True if row and row.state not in _CANNOT_EVICT else None
        if action == "delete":
            return True if row else None
        return True

    def action_evict(self) -> None:
        from tui.dialogs.evict import EvictDialog

        row = self.target_row()
        if row is not None:
            self.app.push_screen(EvictDialog(self.setting.output_dir, row.run_id, self.perform))

    def action_readmit(self) -> None:
        from daemons import actions

        row = self.target_row()
        if row is None:
            return
        run_id, output_dir = row.run_id, self.setting.output_dir

        def work(progress: Callable[[str], None]) -> str:
            done = actions.readmit_run(output_dir, run_id)
            return f"{run_id} is readmitted" if done else f"{run_id} was neither evicted nor failed"

        self.perform(Job(prl_command(output_dir, "runs", "readmit", run_id), work))

    def action_delete(self) -> None:
        from tui.dialogs.delete import DeleteDialog

        row = self.target_row()
        if row is not None:
            self.app.push_screen(
                DeleteDialog(
                    self.setting.output_dir, row.run_id, step=row.step, is_live=row.is_live, perform=self.perform
                )
            )

    def action_undo_delete(self) -> None:
        from daemons import actions

        trash = actions.list_trash(self.setting.output_dir)
        if not trash:
            self.notify("the trash is empty: nothing to bring back", markup=False)
            return
        run_id, output_dir = trash[-1][0], self.setting.output_dir

        def work(progress: Callable[[str], None]) -> str:
            done = actions.undelete_run(output_dir, run_id)
            return f"{run_id} is back" if done else f"{run_id} was there already"

        self.perform(Job(prl_command(output_dir, "runs", "undelete", run_id), work))

    def perform(self, job: Job) -> int:
        """Start `job` in a thread of the app, so that it goes on whatever screen is open; returns its serial."""
        serial = next(_serials)
        worker = _Worker(serial, job, self.app.post_message)
        self.app.run_worker(worker.run, thread=True, name=job.command)
        return serial


@dataclass
class _Worker:
    serial: int
    job: Job
    post: Callable[[ActionChanged], object]

    def run(self) -> None:
        from daemons.actions import ActionError

        self._say("running", "...")
        try:
            text = self.job.work(lambda progress: self._say("running", progress))
        except (ActionError, OSError, ValueError) as error:
            self._say("failed", str(error))
        else:
            self._say("done", text)

    def _say(self, state: ActionState, text: str) -> None:
        self.post(ActionChanged(ActionEntry(self.serial, self.job.command, state, one_line(text, 400))))


class ActsOnHouse(ActsOnRuns):
    """The keys of home."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("a", "add", "Add")]

    def action_add(self) -> None:
        from tui.dialogs.add import AddDialog

        run_ids = [row.run_id for row in self.snapshot.rows] if self.snapshot else []
        self.app.push_screen(AddDialog(self.setting.output_dir, run_ids, self.perform))


@functools.cache
def acting(screen: type[ScreenT]) -> type[ScreenT]:
    """`screen` with the keys that act; home has more of them."""
    mixin = ActsOnHouse if issubclass(screen, RunsScreen) else ActsOnRuns
    return type(f"Acting{screen.__name__}", (screen, mixin), {})
