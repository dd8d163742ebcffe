"""The table of runs: stable keys, changed cells only, and a cursor that stays on its run whatever moves around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import DataTable

from tui.palette import make_palette
from tui.snapshot import STATES, RunRow
from tui.widgets.columns import PADDING, Column, choose_columns, make_cells

_STATE_ORDER = {state: order for order, state in enumerate(STATES)}
_LAST = float("inf")
# Name -> key. Ties are broken by the house's own order, so that a sort never flickers.
SORTS: dict[str, Callable[[RunRow], object]] = {
    "slot": lambda row: 0,
    "name": lambda row: row.run_id,
    "reward": lambda row: _LAST if row.reward is None else -row.reward,
    "progress": lambda row: -(row.step / row.max_steps) if row.max_steps else _LAST,
    "problems": lambda row: (-int(row.level), _STATE_ORDER[row.state]),
}


def select_rows(rows: Sequence[RunRow], needle: str, sort: str) -> list[RunRow]:
    """The rows in which every word of `needle` occurs (id, state or note), in the order of `sort`."""
    words = needle.lower().split()
    shown = [row for row in rows if all(word in f"{row.run_id} {row.state} {row.note}".lower() for word in words)]
    return sorted(shown, key=lambda row: (SORTS[sort](row), row.order))


class RunsTable(DataTable[Text]):
    """Shows rows in the order it is given them."""

    DEFAULT_CSS = """
    RunsTable {
        height: 1fr;
        background: $background;
        scrollbar-size-vertical: 1;
        overflow-x: hidden;
        &:focus { background-tint: transparent 0%; }
        & > .datatable--header { background: $background; color: $foreground 45%; text-style: none; }
        & > .datatable--header-hover { background: $background; }
        & > .datatable--cursor { background: $primary 18%; color: $foreground; text-style: none; }
        & > .datatable--hover { background: $primary 8%; }
        &:focus > .datatable--cursor { background: $primary 26%; color: $foreground; text-style: none; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "Open", key_display="⏎"),
        Binding("j", "cursor_down", "Down", show=False),
        Binding("k", "cursor_up", "Up", show=False),
        Binding("g,home", "scroll_top", "First run", show=False),
        Binding("G,end", "scroll_bottom", "Last run", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(
            cursor_type="row",
            cursor_foreground_priority="renderable",
            cell_padding=PADDING,
            zebra_stripes=False,
            id="runs",
        )
        self._rows: list[RunRow] = []
        self._layout: tuple[Column, ...] = ()
        self._cells: dict[str, dict[str, Text]] = {}
        self._now = 0.0

    @property
    def selected_id(self) -> str | None:
        """The run under the cursor."""
        if not 0 <= self.cursor_row < len(self._rows):
            return None
        return str(self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value)

    def show(self, rows: Sequence[RunRow], now: float) -> None:
        """Show exactly `rows`, in this order; the cursor stays on its run."""
        selected = self.selected_id
        self._now = now
        self._fit(rows)
        cells = self._make(rows)
        for run_id in [run_id for run_id in self._cells if run_id not in cells]:
            self.remove_row(run_id)
            del self._cells[run_id]
        for run_id, row_cells in cells.items():
            self._put(run_id, row_cells)
        if [row.run_id for row in rows] != [row.run_id for row in self._rows]:
            self._reorder([row.run_id for row in rows])
        self._rows = list(rows)
        if selected in cells and selected != self.selected_id:
            self.move_cursor(row=self.get_row_index(selected))

    def redraw(self) -> None:
        """Make everything anew: the theme or the width changed."""
        selected, rows = self.selected_id, self._rows
        self._layout = ()
        self.show(rows, self._now)
        if selected in self._cells:
            self.move_cursor(row=self.get_row_index(selected))

    def on_resize(self) -> None:
        self.redraw()

    def _make(self, rows: Sequence[RunRow]) -> dict[str, dict[str, Text]]:
        palette = make_palette(self.app.theme_variables)
        return {row.run_id: make_cells(row, self._layout, palette, self._now) for row in rows}

    def _fit(self, rows: Sequence[RunRow]) -> None:
        """Choose the columns anew when the width or the longest id calls for others."""
        width = self.size.width - self.styles.scrollbar_size_vertical
        layout = choose_columns(width, max((len(row.run_id) for row in rows), default=0))
        if layout == self._layout:
            return
        self.clear(columns=True)
        self._cells, self._rows, self._layout = {}, [], layout
        for column in layout:
            self.add_column(
                Text(column.label, justify="right" if column.is_figure else "left"), key=column.key, width=column.width
            )

    def _put(self, run_id: str, cells: dict[str, Text]) -> None:
        known = self._cells.get(run_id)
        if known is None:
            self.add_row(*cells.values(), key=run_id)
        else:
            for key, cell in cells.items():
                if known[key] != cell or known[key].style != cell.style:
                    self.update_cell(run_id, key, cell)
        self._cells[run_id] = cells

    def _reorder(self, run_ids: list[str]) -> None:
        # `sort` hands over cells only; the cell of the first column leads back to its run.
        stored = {run_id: self.get_cell(run_id, self._layout[0].key) for run_id in run_ids}
        owner = {id(cell): run_id for run_id, cell in stored.items()}
        place = {run_id: index for index, run_id in enumerate(run_ids)}
        self.sort(self._layout[0].key, key=lambda cell: place[owner[id(cell)]])
