"""Home: all runs of the house, the selected one in short, and the keys to everything else."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.widgets import DataTable, Footer, Input

from tui.messages import ActionEntry
from tui.screens.base import HouseScreen, Setting
from tui.screens.parts import PartsScreen
from tui.screens.run import RunScreen
from tui.snapshot import RunRow, Snapshot
from tui.widgets.command_line import CommandLine
from tui.widgets.empty import EmptyState
from tui.widgets.header import HouseHeader
from tui.widgets.preview import Preview
from tui.widgets.runs_table import SORTS, RunsTable, select_rows

# From this height on the selected run's curves have room under the table.
TALL = 38


class RunsScreen(HouseScreen):
    """Reads only; `acting.ActingRunsScreen` adds what acts."""

    DEFAULT_CSS = """
    RunsScreen {
        & > #filter { display: none; padding: 0 1; background: $panel; }
        &.-filtering > #filter { display: block; }
        & > #empty { display: none; }
        &.-empty > #empty { display: block; }
        &.-empty > RunsTable { display: none; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("s", "sort", "Sort"),
        Binding("p", "parts", "Parts"),
        Binding("escape", "clear_filter", "Clear the filter", show=False),
        Binding("q", "app.quit", "Quit"),
    ]
    run_screen: ClassVar[type[RunScreen]] = RunScreen

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.needle = ""
        self.sort = next(iter(SORTS))

    def compose(self) -> ComposeResult:
        yield HouseHeader(read_only=self.setting.read_only)
        yield Input(placeholder="filter by id, state or note", id="filter", select_on_focus=False, compact=True)
        yield RunsTable()
        yield EmptyState(read_only=self.setting.read_only)
        yield Preview()
        yield CommandLine()
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one(Preview).display = False
        self.query_one(RunsTable).focus()
        self.app.theme_changed_signal.subscribe(self, lambda _: self.call_after_refresh(self._recolour))

    def on_resize(self, event: Resize) -> None:
        self.query_one(Preview).set_class(event.size.height >= TALL, "-tall")

    def target_row(self) -> RunRow | None:
        run_id = self.query_one(RunsTable).selected_id
        return self.snapshot.row(run_id) if self.snapshot and run_id else None

    def show_house(self, snapshot: Snapshot) -> None:
        super().show_house(snapshot)
        if self.is_mounted:
            self.query_one(HouseHeader).snapshot = snapshot
            self._refill()

    def show_action(self, entry: ActionEntry) -> None:
        super().show_action(entry)
        self.query_one(CommandLine).entry = entry

    def action_open(self) -> None:
        row = self.target_row()
        if row is not None:
            self.open_run(row.run_id)

    def open_run(self, run_id: str) -> None:
        screen = self.run_screen(self.setting, run_id)
        screen.snapshot, screen.entry = self.snapshot, self.entry
        self.app.push_screen(screen)

    def action_filter(self) -> None:
        self.add_class("-filtering")
        self.query_one("#filter", Input).focus()

    def action_clear_filter(self) -> None:
        self.query_one("#filter", Input).value = ""
        self.remove_class("-filtering")
        self.query_one(RunsTable).focus()

    def action_sort(self) -> None:
        names = list(SORTS)
        self.sort = names[(names.index(self.sort) + 1) % len(names)]
        self._refill()
        self.notify(f"sorted by {self.sort}", timeout=2, markup=False)

    def action_parts(self) -> None:
        if self.snapshot is not None:
            self.app.push_screen(PartsScreen(self.snapshot))

    @on(Input.Changed, "#filter")
    def _filter_changed(self, event: Input.Changed) -> None:
        self.needle = event.value
        self._refill()

    @on(Input.Submitted, "#filter")
    def _filter_done(self) -> None:
        self.query_one(RunsTable).focus()
        if not self.needle:
            self.remove_class("-filtering")

    @on(DataTable.RowSelected)
    def _row_selected(self, event: DataTable.RowSelected) -> None:
        event.stop()
        self.action_open()

    @on(DataTable.RowHighlighted)
    def _row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        event.stop()
        self._show_selected()

    def _refill(self) -> None:
        snapshot = self.snapshot
        if snapshot is None:
            return
        rows = select_rows(snapshot.rows, self.needle, self.sort)
        self.set_class(not rows, "-empty")
        self.query_one(EmptyState).show(self.needle, snapshot.house.trainer is not None)
        self.query_one(RunsTable).show(rows, self.setting.clock())
        self._show_selected()

    def _show_selected(self) -> None:
        row = self.target_row()
        self.query_one(Preview).show(row, self.setting.clock())
        self.refresh_bindings()

    def _recolour(self) -> None:
        self.query_one(RunsTable).redraw()
        self._show_selected()
