"""Home: all runs of the house, the selected one in short, and the keys to everything else."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.widgets import DataTable, Input

from tui.screens.base import PlaceScreen, Setting
from tui.screens.parts import PartsScreen
from tui.snapshot import RunRow, Snapshot
from tui.widgets.empty import EmptyState
from tui.widgets.preview import Preview
from tui.widgets.runs_table import SORTS, RunsTable, select_rows

# From this height on the selected run's curves have room under the table.
TALL = 38


class RunsScreen(PlaceScreen):
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
    AUTO_FOCUS = "RunsTable"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.needle = ""
        self.sort = next(iter(SORTS))
        self.filter = Input(placeholder="filter by id, state or note", id="filter", select_on_focus=False, compact=True)
        self.table = RunsTable()
        self.empty = EmptyState(read_only=setting.read_only)
        self.preview = Preview()

    def compose_body(self) -> ComposeResult:
        yield self.filter
        yield self.table
        yield self.empty
        yield self.preview

    def on_mount(self) -> None:
        super().on_mount()
        self.preview.display = False
        self.filter.can_focus = False  # or it takes the keys when the table of an empty house cannot
        self.table.focus()
        self.app.theme_changed_signal.subscribe(self, lambda _: self.call_after_refresh(self._recolour))

    def on_resize(self, event: Resize) -> None:
        self.preview.set_class(event.size.height >= TALL, "-tall")

    def target_row(self) -> RunRow | None:
        run_id = self.table.selected_id
        return self.snapshot.row(run_id) if self.snapshot and run_id else None

    def refill(self, snapshot: Snapshot) -> None:
        rows = select_rows(snapshot.rows, self.needle, self.sort)
        self.set_class(not rows, "-empty")
        if rows and self.focused is None:
            self.table.focus()
        self.empty.show(self.needle, snapshot.house.trainer is not None)
        self.table.show(rows, self.setting.clock())
        self._show_selected()

    def action_open(self) -> None:
        row = self.target_row()
        if row is not None:
            self.guide.open_run(row.run_id)

    def action_filter(self) -> None:
        self.add_class("-filtering")
        self.filter.can_focus = True
        self.filter.focus()

    def action_clear_filter(self) -> None:
        self.filter.value = ""
        self._close_filter()
        self.table.focus()

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
        self.table.focus()
        if not self.needle:
            self._close_filter()

    @on(DataTable.RowSelected)
    def _row_selected(self, event: DataTable.RowSelected) -> None:
        event.stop()
        self.action_open()

    @on(DataTable.RowHighlighted)
    def _row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        event.stop()
        self._show_selected()

    def _close_filter(self) -> None:
        self.remove_class("-filtering")
        self.filter.can_focus = False

    def _refill(self) -> None:
        if self.snapshot is not None and self.can_show:
            self.refill(self.snapshot)

    def _show_selected(self) -> None:
        if not self.can_show:
            return
        row = self.target_row()
        self.preview.show(row, self.setting.clock())
        self.show_keys()

    def _recolour(self) -> None:
        self.table.redraw()
        self._show_selected()
