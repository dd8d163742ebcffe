"""The keys that change runs, daemons and the workspace, and home with them.

A screen acts by a job in a thread of the app, after a look at the disk or a question where that is needed. Every action
runs through a function of `daemons`, the code of `prl`, and is shown together with the shell command that does the
same; `ActionLogScreen` lists those of this session. Keys act on all of `target_rows()`, a command on the runs that it
names; a sweep and a comparison start from one run and refuse several.

Not imported when the app is read-only. Dialogs are imported when their keys are pressed, so that the app starts fast.
The other screens with these keys are in `acting_places`.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, TypeVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from daemons import actions
from daemons.workspace import IDLE, why_idle
from prime_rl.contract.layout import RUN_PREFIX, OutputDir
from prime_rl.contract.status import RunState
from prime_rl.utils.text import CleanText, one_line
from tui import fmt
from tui.actions import (
    Choice,
    Job,
    carry_out,
    down_job,
    free_id,
    name_runs,
    pause_job,
    prl_command,
    restart_job,
    runs_job,
    set_job,
    settings_of,
    up_choices,
)
from tui.keys import Command, CommandError, parse
from tui.messages import ActionEntry
from tui.model.snapshot import RunRow
from tui.screens.base import WorkspaceScreen, take_words
from tui.screens.runs import RunsScreen
from tui.widgets.header import OUTCOMES, CommandLine
from tui.widgets.line_list import LineList, TextScreen, titled

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
        work = functools.partial(carry_out, serial, job, self.app.post_message, self.setting.clock)
        self.app.run_worker(work, thread=True, name=job.command)
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
        from tui.dialogs.form import ConfirmDialog

        lines = [f"· {run_id}" for run_id in run_ids]
        self.app.push_screen(ConfirmDialog(title, lines, words, verb, job, self.perform))


def ids_of(rows: Sequence[RunRow]) -> list[str]:
    """The ids of runs, in the order of their rows."""
    return [row.run_id for row in rows]


# Commands that take the ids of runs before their own words.
_ON_RUNS = (
    *("pause", "continue", "weight", "budget", "set", "apply", "restore", "fork", "sweep", "export", "diff"),
    *("evict", "readmit", "delete", "clone"),
)
_PATHS = ("[FILE]", "[FOLDER]")
NEEDS_RUN = "this command needs a run: move the cursor to one; :runs lists them"


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
        """Hide the keys that need a target run."""
        if action in _ON_RUNS and action != "sweep" and not self.chosen_rows():
            return False
        return super().check_action(action, parameters)

    def why_not(self, action: str) -> str | None:
        """Why an act does nothing to any of the chosen runs: the words of the first."""
        rows = self.chosen_rows() if action in IDLE else []
        if not rows or not all(why_idle(action, row.view) for row in rows):
            return super().why_not(action)
        more = f"; and {len(rows) - 1} more" if len(rows) > 1 else ""
        return f"{rows[0].run_id}: {why_idle(action, rows[0].view)}{more}"

    def _able(self, act: str) -> list[RunRow]:
        """The chosen runs to which `act` does something."""
        return [row for row in self.chosen_rows() if not why_idle(act, row.view)]

    def commands(self) -> dict[str, Command]:
        """The commands of the keys and of `_on_runs`; each that acts on runs takes their ids first."""
        found = self._on_runs()
        for name in (*_ON_RUNS, *({"pin"} & found.keys())):
            known = found.get(name) or Command(name, f"{name} runs")
            take = functools.partial(self._command_on_runs, name, known.argument)
            words = functools.partial(self._words_on_runs, known.words)
            why = known.why_not or (None if self.chosen_rows() else NEEDS_RUN)
            found[name] = replace(known, take=take, words=words, on_runs=True, why_not=why)
        return found

    def _words_on_runs(self, others: Callable[[], Mapping[str, str]]) -> Mapping[str, str]:
        return {**dict.fromkeys(self.run_ids(), ""), **others()}

    def _command_on_runs(self, name: str, argument: str, words: str) -> None:
        """The first words are the ids of its runs; the last id of `diff` is the other run."""
        rows = {row.run_id: row for row in self.snapshot.rows} if self.snapshot else {}
        named: list[RunRow] = []
        while (parts := words.split(maxsplit=1)) and parts[0] in rows and (len(parts) > 1 or name != "diff"):
            named.append(rows[parts[0]])
            words = "".join(parts[1:])
        if parts and parts[0].startswith(RUN_PREFIX) and parts[0] not in rows and argument not in _PATHS:
            raise CommandError(f"run {parts[0]!r} not found in this workspace; :runs lists them")
        self.named = named
        try:
            command, words = parse(f"{name} {words}", self._on_runs())
            command.run(words)
        finally:
            self.named = []

    def _on_runs(self) -> dict[str, Command]:
        """The commands of the keys, most of which take words too; and `continue`, `set` and `diff`."""
        found = super().commands()
        paused, why, about = self._able("continue"), self.why_not("continue"), "let paused runs go on"
        go_on, key = ((lambda: self._continue(paused)), "z") if paused else (None, "")
        found["continue"] = Command("continue", about, go_on, "Continue", key, why_not=why)
        take_words(found, "pause", "pause runs", "[REASON]", self._command_pause)
        if paused and len(paused) == len(self.chosen_rows()):  # the key continues them
            why = f"{paused[0].run_id}: {IDLE['pause again']}"
            found["pause"] = replace(found["pause"], alone=None, why_not=why)
        about = "set the share of the trainer"
        take_words(found, "weight", about, "[NUMBER]", lambda words: self._set([f"weight={words}"]))
        about, keys = "set keys of runs", self._live_keys
        take_words(found, "set", about, "KEY=VALUE ...", lambda words: self._set(settings_of(words)), keys)
        for name, text in (
            ("apply", "put edits of orch.toml into effect"),
            ("restore", "take edits of orch.toml back"),
        ):
            job = functools.partial(self._change_edits, name) if self.chosen_rows() else None
            found[name] = Command(name, text, job)
        take_words(found, "fork", "fork a run", "[VERSION]", self._open_fork)
        take_words(found, "sweep", "sweep over a config", "[FILE]", lambda words: self._open_sweep(words, ""))
        take_words(found, "export", "export a version", "[FOLDER]", self._open_export)
        take_words(found, "diff", "what differs from another run", "RUN", self._command_diff)
        return found

    def target_version(self) -> str:
        """The version that is chosen here, "" for the newest."""
        return ""

    def action_pause(self) -> None:
        """Ask for a reason and pause the target runs; when all of them are paused already, continue them."""
        rows = self._able("pause")
        if running := [row for row in rows if row.state != RunState.PAUSED]:
            from tui.dialogs.steer import PauseDialog

            self.app.push_screen(PauseDialog(self.output_dir, running, self.perform))
        else:
            self._continue(rows)

    def action_weight(self) -> None:
        """Open the dialog that sets one weight for the target runs."""
        from tui.dialogs.steer import WeightDialog

        self.app.push_screen(WeightDialog(self.output_dir, self.chosen_rows(), self.perform))

    def action_budget(self) -> None:
        """Open the dialog that sets the budget of the target runs, the same for each."""
        from tui.dialogs.steer import BudgetDialog

        self.app.push_screen(BudgetDialog(self.output_dir, self.chosen_rows(), self.perform))

    def action_fork(self) -> None:
        """Open the dialog that forks the target runs, at the version that is chosen here."""
        self._open_fork("" if self.named else self.target_version())

    def action_export(self) -> None:
        """Open the dialog that exports a version of the target runs."""
        self._open_export("")

    def action_sweep(self) -> None:
        """Open the dialog of a sweep, with the config of the target run if there is one.

        Several target runs are refused with a message.
        """
        if not self.chosen_rows():
            self._open_sweep("", "")
        elif (row := self._only("a sweep")) is not None and self._is_unedited(row):
            file = OutputDir(self.output_dir).run(row.run_id).orch_toml
            self._open_sweep(str(file), row.run_id.removeprefix("run_")[:40])

    def _some(self) -> list[RunRow]:
        """The target runs. Raises CommandError without one."""
        if rows := self.chosen_rows():
            return rows
        raise CommandError(NEEDS_RUN)

    def _only(self, what: str) -> RunRow | None:
        """The one run that `what` starts from. None of several, and why is shown."""
        rows = self.chosen_rows()
        if len(rows) > 1:
            words = f"{what} starts from one run, and {len(rows)} are marked: clear the marks with esc"
            self.notify(words, severity="warning", markup=False)
            return None
        return rows[0] if rows else None

    def _continue(self, rows: list[RunRow]) -> None:
        run_ids = ids_of(rows)
        words = "They go on where they were, as soon as slots are free."
        job = runs_job(self.output_dir, "continue", run_ids, "continue", actions.CONTINUE)
        self._ask_for_many(f"continue {name_runs(run_ids)}", run_ids, words, "Continue", job)

    def _open_fork(self, version: str) -> None:
        from tui.dialogs.steer import ForkDialog

        run_ids = ids_of(self._some())
        self.app.push_screen(ForkDialog(self.output_dir, run_ids, self.perform, version=version))

    def _open_export(self, folder: str) -> None:
        from tui.dialogs.steer import ExportDialog

        run_ids, version = ids_of(self._some()), "" if self.named else self.target_version()
        self.app.push_screen(ExportDialog(self.output_dir, run_ids, self.perform, version=version, out=folder))

    def _open_sweep(self, file: str, name: str) -> None:
        from tui.dialogs.steer import SweepDialog

        self.app.push_screen(SweepDialog(self.output_dir, self.perform, file=file, name=name))

    def _command_pause(self, reason: str) -> None:
        self._some()
        if why := self.why_not("pause"):
            raise CommandError(why)
        self.perform(pause_job(self.output_dir, ids_of(self._able("pause")), reason))

    def _set(self, items: list[str]) -> None:
        try:
            self.perform(set_job(self.output_dir, ids_of(self._some()), items))
        except actions.ActionError as error:
            raise CommandError(str(error)) from error

    def _change_edits(self, command: str) -> None:
        act, done = (actions.apply_edit, "applied") if command == "apply" else (actions.restore_config, "restored")
        self.perform(runs_job(self.output_dir, command, ids_of(self._some()), done, act))

    def _is_unedited(self, row: RunRow) -> bool:
        """False, with a message, for a run whose file is not what it trains with."""
        if row.view.edited:
            self.notify(f"{row.run_id}: {row.view.edited} first", severity="warning", markup=False)
        return not row.view.edited

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

    def _live_keys(self) -> Mapping[str, str]:
        from prime_rl.configs.orchestrator import LIVE_KEYS, BudgetConfig

        names = [key for key in LIVE_KEYS if key != "budget"] + [f"budget.{name}" for name in BudgetConfig.model_fields]
        return {f"{name}=": "" for name in names}


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

    def why_not(self, action: str) -> str | None:
        """As the base does; and why a daemon cannot be restarted, or the workspace not be started."""
        lives = self.snapshot is not None and self.snapshot.workspace.supervisor_alive
        if action == "restart" and not lives:
            return "no daemons are running: nothing to restart"
        if action == "up" and lives:
            return "the workspace is running already: nothing to start"
        return super().why_not(action)

    def commands(self) -> dict[str, Command]:
        """The commands of the keys; `restart` takes the name of a daemon too."""
        found = super().commands()
        daemons = dict.fromkeys(map(str, self._daemon_names()), "")
        take_words(found, "restart", "restart a daemon", "[DAEMON]", self._command_restart, lambda: daemons)
        return found

    def action_evict(self) -> None:
        """Ask for a reason and evict the target runs, except those that have no slot to leave for good."""
        from tui.dialogs.delete import EvictDialog, suggest

        rows = self._able("evict")
        reasons = suggest(rows, self.snapshot.rows if self.snapshot else ())
        self.app.push_screen(EvictDialog(self.output_dir, ids_of(rows), reasons, self.perform))

    def action_readmit(self) -> None:
        """Readmit those of the target runs that can be readmitted; asks first when they are several."""
        run_ids = ids_of(self._able("readmit"))
        job = runs_job(self.output_dir, "readmit", run_ids, "readmitted", actions.READMIT)
        words = "They continue from their newest checkpoints."
        self._ask_for_many(f"readmit {name_runs(run_ids)}", run_ids, words, "Readmit", job)

    def action_delete(self) -> None:
        """Open the dialog that deletes the target runs."""
        from tui.dialogs.delete import DeleteDialog

        delete = DeleteDialog(self.output_dir, self.chosen_rows(), self._remember_deleted, self.perform)
        self.app.push_screen(delete)

    def action_undo_delete(self) -> None:
        """Restore what was deleted here last; else the newest run in the trash."""
        self._after_look(lambda: [run_id for run_id, _ in actions.list_trash(self.output_dir)], self._undelete)

    def _undelete(self, trash: Sequence[str]) -> None:
        if not trash:
            self.notify("the trash is empty: nothing to restore", markup=False)
            return
        deleted = self.setting.deleted
        last = [run_id for run_id in deleted.pop() if run_id in trash] if deleted else []
        run_ids = last or [trash[-1]]
        self.perform(runs_job(self.output_dir, "undelete", run_ids, "restored", actions.UNDELETE))

    def action_clone(self) -> None:
        """Open the dialog that adds a run like the target, under the next free id; several targets are refused."""
        row = self._only("a clone")
        if row is None or not self._is_unedited(row):
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
        from tui.dialogs.form import ChooseDialog

        choices = [(name, functools.partial(restart_job, self.output_dir, name)) for name in names]
        words = "The daemon is stopped and started again. Its files are kept."
        self.app.push_screen(ChooseDialog("restart a daemon", words, choices, self.perform, first=first))

    @on(CommandLine.Asked)
    def action_action_log(self) -> None:
        """Open the list of this session's actions; a click on the line of the last action does it too."""
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
        self.perform(restart_job(self.output_dir, words))


class ActsOnWorkspace(ActsOnRuns):
    """The keys of home and the screens beside it: the workspace itself too."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "add", "Add", tooltip="add a run: from a template, a file, or an existing run"),
        Binding("U", "up", "Start the workspace", id="up", show=False),
        Binding("D", "down", "Stop the workspace", id="down", show=False),
    ]

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
        from tui.dialogs.form import ChooseDialog

        words = "Trainer, inference and orchestrators start in the background and keep running when you quit."

        def show(choices: Sequence[Choice]) -> None:
            self.app.push_screen(ChooseDialog("start the workspace", words, choices, self.perform))

        self._after_look(lambda: up_choices(self.output_dir), show, needs_screen=True)

    def action_down(self) -> None:
        """List the daemons that live, and stop the workspace once this is confirmed."""
        from tui.dialogs.form import ConfirmDialog

        daemons = self.snapshot.workspace.daemons if self.snapshot else ()
        living = [f"· {daemon.name}  {daemon.state}" for daemon in daemons if daemon.pid is not None]
        lines = living or ["· nothing is running"]
        words = "All daemons of this workspace stop. Runs continue from their checkpoints when it is started again."
        job = down_job(self.output_dir)
        self.app.push_screen(ConfirmDialog("stop the workspace", lines, words, "Stop", job, self.perform))


class ActingRunsScreen(RunsScreen, ActsOnWorkspace):
    """Home, for a person who may act."""


def describe(entry: ActionEntry, width: int) -> Text:
    """One line: when, how it went, the command."""
    symbol, colour = OUTCOMES[entry.state]
    when = time.strftime("%H:%M:%S", time.localtime(entry.at))
    command = fmt.shorten(entry.command, width - len(when) - 3)
    return Text.assemble((f"{when} ", "muted"), (f"{symbol} ", colour), command)


class ActionLogScreen(TextScreen):
    """Over any screen. The newest action is on top."""

    DEFAULT_CSS = """
    ActionLogScreen {
        & > Vertical { width: 94%; max-width: 150; max-height: 90%; padding: 0 1; }
        & LineList { max-height: 16; background: $surface; }
        & VerticalScroll { height: auto; max-height: 12; border-top: solid $border; padding: 0 1; }
        & Static { height: auto; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,L", "dismiss", "Close"),
        Binding("y", "copy", "Copy the command"),
    ]

    def __init__(self, entries: Callable[[], Sequence[ActionEntry]]) -> None:
        super().__init__()
        self._entries = entries
        self._list = LineList[int](opens=True)
        self._detail = Static(markup=False)

    def compose(self) -> ComposeResult:
        """Yield the list of actions, and below it all about the one under the cursor."""
        with titled(Vertical(), "actions of this session", "y copies the command · esc closes"):
            yield self._list
            with VerticalScroll(can_focus=False):
                yield self._detail

    def on_mount(self) -> None:
        """Fill the list; the cursor stands on the newest action."""
        self._refill()
        self._list.focus()

    def show_action(self, entry: ActionEntry) -> None:
        """Fill the list again when the app reports an action; the cursor stays on its own."""
        if self.is_mounted:
            self._refill()

    def _refill(self) -> None:
        shown = self._entries()[::-1]

        def make(index: int) -> Text:
            return Text(" ").append_text(describe(shown[index], self._list.size.width - 1))

        self._list.show([entry.serial for entry in shown], make)
        self._tell()

    def _chosen(self) -> ActionEntry | None:
        return next((entry for entry in self._entries() if entry.serial == self._list.selected), None)

    @on(LineList.Moved)
    def _tell(self) -> None:
        entry = self._chosen()
        words = f"{entry.state}: {entry.detail or entry.text}\n\n$ {entry.command}" if entry else "no actions yet"
        self._detail.update(Content(words))

    @on(LineList.Opened)
    def action_copy(self) -> None:
        """Copy the command under the cursor to the clipboard; enter and a double click do it too."""
        if (entry := self._chosen()) is not None:
            self.app.copy_to_clipboard(entry.command)
            self.notify(f"copied: {entry.command}", timeout=3, markup=False)
