"""The keys that change runs, daemons and the workspace, and home with them. Also in `acting_run` and `acting_places`.

Those that share the trainer and make new runs are in `steering`. Not imported when the app is read-only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.binding import Binding, BindingType

from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import RunState
from prime_rl.utils.text import CleanText
from tui.actions.jobs import Job, Progress, each, name_runs, prl_command
from tui.commands import Command, CommandError
from tui.model.snapshot import RunRow
from tui.screens.base import take_words
from tui.screens.performing import ids_of
from tui.screens.runs import RunsScreen
from tui.screens.steering import SteersRuns
from tui.widgets.foot import CommandLine


class ActsOnRuns(SteersRuns):
    """The keys that act on `target_rows()`. Stands second among the bases: Textual takes the CSS along the first."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e", "evict", "Evict", tooltip="evict: out of its slot, with a reason"),
        Binding("r", "readmit", "Readmit", tooltip="readmit runs that are evicted, have failed or were ended early"),
        Binding("d", "delete", "Delete", tooltip="delete: into the trash; a run in use asks for its name"),
        Binding("u", "undo_delete", "Undo delete", id="undo", show=False, tooltip="undo the last delete"),
        Binding("c", "clone", "Clone", show=False, tooltip="clone: the same config under a free name"),
        Binding("x", "restart", "Restart a daemon", id="restart", show=False),
        Binding("L", "action_log", "Actions of this session", id="log", show=False),
    ]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Grey out keys without effect; hide keys without a run to act on."""
        rows = self.target_rows()
        if action in ("evict", "readmit", "delete", "clone") and not rows:
            return False
        if action == "readmit":
            return True if any(map(_can_readmit, rows)) else None
        if action == "evict":
            return True if any(row.state != RunState.EVICTED for row in rows) else None
        if action == "restart":
            return True if self.snapshot and self.snapshot.workspace.supervisor_alive else None
        return super().check_action(action, parameters)

    def commands(self) -> dict[str, Command]:
        """The commands of the keys; `restart` takes the name of a daemon too."""
        found = super().commands()
        daemons = dict.fromkeys(map(str, self._daemon_names()), "")
        take_words(found, "restart", "restart a daemon", "[DAEMON]", self._command_restart, lambda: daemons)
        return found

    def action_evict(self) -> None:
        """Ask for a reason and evict the target runs, except those that are evicted already."""
        from tui.dialogs.evict import EvictDialog, suggest

        rows = [row for row in self.target_rows() if row.state != RunState.EVICTED]
        if rows:
            reasons = suggest(rows, self.snapshot.rows if self.snapshot else ())
            self.app.push_screen(EvictDialog(self.output_dir, ids_of(rows), reasons, self.perform))

    def action_readmit(self) -> None:
        """Readmit those of the target runs that can be readmitted; asks first when they are several."""
        from daemons import actions

        run_ids = ids_of([row for row in self.target_rows() if _can_readmit(row)])
        output_dir = self.output_dir

        def act(run_id: str, progress: Progress) -> str:
            return actions.READMIT(output_dir, run_id)

        if run_ids:
            job = Job(prl_command(output_dir, "runs", "readmit", *run_ids), each(run_ids, "readmitted", act))
            words = "They continue from their newest checkpoints."
            self._ask_for_many(f"readmit {name_runs(run_ids)}", run_ids, words, "Readmit", job)

    def action_delete(self) -> None:
        """Open the dialog that deletes the target runs."""
        from tui.dialogs.delete import DeleteDialog

        rows = self.target_rows()
        if rows:
            self.app.push_screen(DeleteDialog(self.output_dir, rows, self._remember_deleted, self.perform))

    def action_undo_delete(self) -> None:
        """Restore what was deleted here last; else the newest run in the trash."""
        from daemons import actions

        self._after_look(lambda: [run_id for run_id, _ in actions.list_trash(self.output_dir)], self._undelete)

    def _undelete(self, trash: Sequence[str]) -> None:
        from daemons import actions

        if not trash:
            self.notify("the trash is empty: nothing to restore", markup=False)
            return
        output_dir, deleted = self.output_dir, self.setting.deleted
        last = [run_id for run_id in deleted.pop() if run_id in trash] if deleted else []
        run_ids = last or [trash[-1]]

        def act(run_id: str, progress: Progress) -> str:
            return actions.UNDELETE(output_dir, run_id)

        self.perform(Job(prl_command(output_dir, "runs", "undelete", *run_ids), each(run_ids, "restored", act)))

    def action_clone(self) -> None:
        """Open the dialog that adds a run like the target, under the next free id; several targets are refused."""
        from tui.actions.draft import free_id

        row = self._only("a clone")
        if row is None:
            return
        run_id, output = row.run_id, OutputDir(self.output_dir)

        def show(source: Path) -> None:
            self.open_add(source, free_id(run_id, self.run_ids()))

        self._after_look(lambda: output.run(run_id).orch_toml, show, needs_screen=True)

    def open_add(self, source: Path | None = None, run_id: str = "") -> None:
        """Open the dialog that adds a run; `source` and `run_id` are filled in."""
        from tui.dialogs.add import AddDialog

        self.app.push_screen(AddDialog(self.output_dir, self.run_ids(), self.perform, source=source, run_id=run_id))

    def action_restart(self) -> None:
        """Open the choice of the daemon to restart; the cursor begins at the target daemon."""
        names = self._daemon_names()
        if not names:
            self.notify("no daemons are running: nothing to restart", markup=False)
            return
        chosen = self.target_daemon()
        first = next((index for index, name in enumerate(names) if name == chosen), 0)
        from tui.actions.workspace_jobs import restart_job
        from tui.dialogs.job import Choice, ChooseDialog

        choices = [Choice(name, functools.partial(restart_job, self.output_dir, name)) for name in names]
        words = "The daemon is stopped and started again. Its files are kept."
        self.app.push_screen(ChooseDialog("restart a daemon", words, choices, self.perform, first=first))

    @on(CommandLine.Asked)
    def action_action_log(self) -> None:
        """Open the list of this session's actions; a click on the line of the last action does it too."""
        from tui.screens.action_log import ActionLogScreen

        self.app.push_screen(ActionLogScreen(self.guide.entries))

    def _remember_deleted(self, run_ids: Sequence[str]) -> None:
        if run_ids:
            self.setting.deleted.append(tuple(run_ids))

    def _daemon_names(self) -> list[CleanText]:
        daemons = self.snapshot.workspace.daemons if self.snapshot else ()
        return [daemon.name for daemon in daemons if daemon.name != "supervisor" and daemon.state != "done"]

    def _command_restart(self, words: str) -> None:
        if words not in self._daemon_names():
            raise CommandError(f"daemon {words!r} not found; running: {', '.join(self._daemon_names()) or 'none'}")
        from tui.actions.workspace_jobs import restart_job

        self.perform(restart_job(self.output_dir, words))


class ActsOnWorkspace(ActsOnRuns):
    """The keys of home and the screens beside it: the workspace itself too."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "add", "Add", tooltip="add a run: from a template, a file, or an existing run"),
        Binding("U", "up", "Start the workspace", id="up", show=False),
        Binding("D", "down", "Stop the workspace", id="down", show=False),
    ]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Grey out the start of the workspace while its supervisor lives."""
        lives = self.snapshot is not None and self.snapshot.workspace.supervisor_alive
        if action == "up":
            return None if lives else True
        return super().check_action(action, parameters)

    def commands(self) -> dict[str, Command]:
        """The commands of the keys; `add` takes the path of a config too."""
        found = super().commands()
        take_words(found, "add", "add a run", "[FILE]", lambda words: self.open_add(Path(words)))
        return found

    def action_add(self) -> None:
        """Open the dialog that adds a run, with nothing filled in."""
        self.open_add()

    def action_up(self) -> None:
        """Open the choice of how to start the workspace: with its last settings, or by a file in `configs`."""
        from tui.actions.workspace_jobs import up_choices
        from tui.dialogs.job import Choice, ChooseDialog

        words = "Trainer, inference and orchestrators start in the background and keep running when you quit."

        def show(ways: Sequence[tuple[CleanText, Callable[[], Job]]]) -> None:
            choices = [Choice(label, job) for label, job in ways]
            self.app.push_screen(ChooseDialog("start the workspace", words, choices, self.perform))

        self._after_look(lambda: up_choices(self.output_dir), show, needs_screen=True)

    def action_down(self) -> None:
        """List the daemons that live, and stop the workspace once this is confirmed."""
        from tui.actions.workspace_jobs import down_job
        from tui.dialogs.job import ConfirmDialog

        daemons = self.snapshot.workspace.daemons if self.snapshot else ()
        living = [f"· {daemon.name}  {daemon.state}" for daemon in daemons if daemon.pid is not None]
        lines = living or ["· nothing is running"]
        words = "All daemons of this workspace stop. Runs continue from their checkpoints when it is started again."
        job = down_job(self.output_dir)
        self.app.push_screen(ConfirmDialog("stop the workspace", lines, words, "Stop", job, self.perform))


class ActingRunsScreen(RunsScreen, ActsOnWorkspace):
    """Home, for a person who may act."""


def _can_readmit(row: RunRow) -> bool:
    """Whether it is evicted, has failed, or was ended early: by its budget, a stop rule or a sweep."""
    return row.state in (RunState.EVICTED, RunState.FAILED) or (
        row.state == RunState.FINISHED and row.reason is not None
    )
