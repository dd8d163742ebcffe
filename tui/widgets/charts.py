"""The charts of a run in a grid that adapts to the space there is, with one cursor, zoom and scale for all of them.

It posts what it needs (`TabAsked`) and gets the data through `show`; it reads nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.events import MouseScrollDown, MouseScrollUp, Resize
from textual.message import Message

from tui import fmt
from tui.messages import TabAsked
from tui.readers.charts import SMOOTHINGS, ChartsData, ChartSpec, ChartView, window
from tui.readers.tabs import CHARTS
from tui.widgets.chart import COLOURS, LABEL_WIDTH, Chart
from tui.widgets.line_list import Clipped

MIN_CHART_WIDTH = 38
MIN_CHART_HEIGHT = 8
MAX_COLUMNS = 3
MIN_NAME = 8  # letters of a run's name in the line above the charts
ZOOM = 2.0
PAN = 0.25


class ChartGrid(VerticalScroll, can_focus=False):
    """Only the place of the charts. What does not fit in height is scrolled to, a page at a time."""

    DEFAULT_CSS = """
    ChartGrid { layout: grid; grid-gutter: 0 1; scrollbar-size-vertical: 1; height: 1fr; }
    """


class ChartsView(Vertical, can_focus=True):
    """Has the keys. `view` is the requested view."""

    DEFAULT_CSS = """
    ChartsView { background: $surface; }
    ChartsView > #looking { height: 1; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "choose(1)", "Next chart", show=False),
        Binding("k,up", "choose(-1)", "Previous chart", show=False),
        Binding("pagedown,space", "page(1)", "Next charts", show=False),
        Binding("pageup", "page(-1)", "Previous charts", show=False),
        Binding("h,left", "point(-1)", "Cursor left", show=False),
        Binding("l,right", "point(1)", "Step", key_display="← →", tooltip="Cursor right: the values of one step"),
        Binding("shift+left", "point(-10)", "Cursor far left", show=False),
        Binding("shift+right", "point(10)", "Cursor far right", show=False),
        Binding("m,enter", "maximise", "Maximise", key_display="m", tooltip="the chosen chart alone, and all again"),
        Binding("plus,equals_sign", "zoom(1)", "Zoom", key_display="+ -", tooltip="Zoom in, around the cursor"),
        Binding("minus", "zoom(-1)", "Zoom out", show=False),
        Binding("less_than_sign,comma", "pan(-1)", "Earlier steps", show=False),
        Binding("greater_than_sign,full_stop", "pan(1)", "Later steps", show=False),
        Binding("0", "all_steps", "All steps", show=False),
        Binding("y", "log", "Log", id="log-scale", tooltip="logarithmic scale"),
        Binding("s", "smooth", "Smooth", tooltip="smoothing: factors 0.6, 0.9, 0.97"),
        Binding("w", "compare", "Compare", tooltip="other runs in the same charts"),
        Binding("t", "stack", "Stacked or lines", show=False, tooltip="times stacked, or as lines"),
        Binding("escape", "leave", "Back", show=False),
    ]

    class Compare(Message):
        """The user asks to choose the runs to compare with."""

    def __init__(self, specs: Sequence[ChartSpec], compare: tuple[str, ...] = ()) -> None:
        super().__init__(id="charts")
        self.specs = specs
        self.charts = [Chart(spec.title, is_reward=spec.is_reward) for spec in specs]
        self.left_out = frozenset(index for index, spec in enumerate(specs) if spec.of == "texts")
        self.grid = ChartGrid()
        self.view = ChartView(compare=compare)
        self.cursor: float | None = None
        self.chosen = 0
        self.is_maximised = False
        self._looking = Clipped(id="looking", markup=False)
        self._data: ChartsData | None = None

    def compose(self) -> ComposeResult:
        """Yield the line about steps and scale, and the grid with its charts."""
        yield self._looking
        with self.grid:
            yield from self.charts

    def on_mount(self) -> None:
        """Mark the first chart as the chosen one."""
        self._mark()

    def show(self, data: ChartsData) -> None:
        """Pass each chart its part of `data`, in order; ValueError when `data` has another number of charts."""
        self._data = data
        for chart, shown in zip(self.charts, data.charts, strict=True):
            chart.show(shown, is_read=not data.is_reading)
        self._leave_out(data)
        self._say()

    def _leave_out(self, data: ChartsData) -> None:
        """Keep the charts that have values, and those that the run's kind will give some."""
        pairs = zip(self.specs, data.charts, strict=True)
        has_texts = any(spec.of == "texts" and chart.has_any for spec, chart in pairs)
        left_out = frozenset(
            index
            for index, (spec, chart) in enumerate(zip(self.specs, data.charts, strict=True))
            if not chart.has_any and spec.of and (spec.of != "rollouts" or has_texts)
        )
        if left_out != self.left_out:
            self.left_out = left_out
            if self.chosen in left_out:
                self.action_choose(1)
            self._arrange()

    def compare_with(self, run_ids: tuple[str, ...]) -> None:
        """Request the curves of `run_ids` beside those of this run; () ends the comparison."""
        self._want(replace(self.view, compare=run_ids))

    def on_resize(self, event: Resize) -> None:
        """Arrange the charts, and request two points of a curve for each cell of its width."""
        self._arrange()

    def action_choose(self, direction: int) -> None:
        """Choose the chart `direction` places on, after the last the first; scroll to it, or maximise it instead."""
        shown = [index for index in range(len(self.charts)) if index not in self.left_out or index == self.chosen]
        self.chosen = shown[(shown.index(self.chosen) + direction) % len(shown)]
        self._mark()
        if self.is_maximised:
            self._arrange()
        else:
            self.charts[self.chosen].scroll_visible(animate=False)

    def action_page(self, direction: int) -> None:
        """Scroll the grid by its height; while a chart is maximised, choose the next or previous one."""
        if self.is_maximised:
            self.action_choose(direction)
        else:
            self.grid.scroll_relative(y=direction * self.grid.size.height, animate=False)

    def action_maximise(self) -> None:
        """Show the chosen chart alone, or all again, scrolled to the chosen one."""
        self.is_maximised = not self.is_maximised
        self._arrange()
        if not self.is_maximised:
            self.call_after_refresh(self.charts[self.chosen].scroll_visible, animate=False)

    def action_leave(self) -> None:
        """Undo what is in the way, one thing at a time; then leave."""
        if self.cursor is not None:
            self._point(None)
        elif self.is_maximised:
            self.action_maximise()
        else:
            self.app.pop_screen()

    def action_point(self, num: int) -> None:
        """Move the cursor by `num` points of the chosen chart."""
        curve = next((each for each in self.charts[self.chosen].data.curves if each.steps), None)
        if curve is None:
            return
        place = (len(curve.steps) - 1 if num < 0 else 0) if self.cursor is None else (curve.at(self.cursor) or 0) + num
        if self._data is not None and not 0 <= place < len(curve.steps) and self.view.span is not None:
            self.action_pan(1 if num > 0 else -1)
        self._point(curve.steps[min(max(place, 0), len(curve.steps) - 1)])

    def action_zoom(self, direction: int) -> None:
        """Request half as many steps around the cursor, or for -1 twice as many; does nothing before the first data."""
        if self._data is not None:
            factor = 1 / ZOOM if direction > 0 else ZOOM
            self._want(self.view.zoomed(factor, self._data.newest, self.cursor))

    def action_pan(self, direction: int) -> None:
        """Request steps a quarter of the width later, or for -1 earlier; does nothing while all steps are shown."""
        if self._data is not None:
            self._want(self.view.panned(direction * PAN, self._data.newest))

    def action_all_steps(self) -> None:
        """Undo zoom and pan: request all steps, up to the newest."""
        self._want(replace(self.view, span=None, end=None))

    def action_log(self) -> None:
        """Request the other scale: logarithmic or linear."""
        self._want(replace(self.view, is_log=not self.view.is_log))

    def action_smooth(self) -> None:
        """Request the next factor of SMOOTHINGS; 0, which does not smooth, follows the last one."""
        place = (SMOOTHINGS.index(self.view.smoothing) + 1) % len(SMOOTHINGS)
        self._want(replace(self.view, smoothing=SMOOTHINGS[place]))

    def action_stack(self) -> None:
        """Request times as lines, or stacked again."""
        self._want(replace(self.view, is_stacked=not self.view.is_stacked))

    def action_compare(self) -> None:
        """Post `Compare`: the screen lets the user choose the runs."""
        self.post_message(self.Compare())

    @on(Chart.Pointed)
    def _pointed(self, event: Chart.Pointed) -> None:
        event.stop()
        if event.num_clicks:
            self.chosen = self.charts.index(event.chart)
            self._mark()
            if event.num_clicks == 2:
                self.action_maximise()
        self._point(event.step)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """Zoom in while a chart is maximised or ctrl is held; else the event bubbles on."""
        if self.is_maximised or event.ctrl:
            event.stop()
            self.action_zoom(1)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """Zoom out while a chart is maximised or ctrl is held; else the event bubbles on."""
        if self.is_maximised or event.ctrl:
            event.stop()
            self.action_zoom(-1)

    def _want(self, view: ChartView) -> None:
        if view != self.view:
            self.view = view
            self.post_message(TabAsked(CHARTS, view))
            self._say()

    def _point(self, step: float | None) -> None:
        self.cursor = step
        for chart in self.charts:
            chart.point_at(step)
        self._say()

    def _mark(self) -> None:
        for index, chart in enumerate(self.charts):
            chart.set_class(index == self.chosen, "-chosen")

    def _arrange(self) -> None:
        width, height = self.size.width, max(self.size.height - 1, 1)
        shown = 1 if self.is_maximised else len(self.charts) - len(self.left_out)
        for index, chart in enumerate(self.charts):
            chart.display = index == self.chosen if self.is_maximised else index not in self.left_out
        columns = max(min(width // MIN_CHART_WIDTH, MAX_COLUMNS, shown), 1)
        rows = max(min(height // MIN_CHART_HEIGHT, -(-shown // columns)), 1)
        self.grid.styles.grid_size_columns = columns
        # The rows that are seen together fill the height to the last line; the pattern repeats for the others.
        parts = [height // rows + (index < height % rows) for index in range(rows)]
        self.grid.styles.grid_rows = " ".join(str(max(part, 3)) for part in parts)
        # A braille cell is two dots wide; a line through more points than dots looks the same.
        num_columns = 2 * max(width // columns - LABEL_WIDTH - 3, 10)
        self._want(replace(self.view, num_columns=num_columns))

    def _say(self) -> None:
        """The line above the charts: steps and scale."""
        if self._data is None:
            return
        view, data = self.view, self._data
        first, last = window(view, data.newest)
        which = "all steps" if view.span is None else f"steps {first:.0f} to {last:.0f}"
        if view.span is not None and view.end is None:
            which += ", following"
        pieces = [which, "log" if view.is_log else "linear"]
        pieces.append(f"smoothed, EMA {view.smoothing:g}" if view.smoothing else "not smoothed")
        if self.cursor is not None:
            pieces.append(f"at step {self.cursor:.0f}")
        if data.is_reading:
            pieces.append("reading …")
        text = Text(" · ".join(pieces), "muted", no_wrap=True, overflow="ellipsis")
        if len(data.run_ids) > 1:
            mark, room = "   ━ ", self.size.width - 2
            if (room - text.cell_len) // len(data.run_ids) < len(mark) + MIN_NAME:
                text, mark = Text(no_wrap=True, overflow="ellipsis"), " ━ "  # the names count more than the scale
            width = (room - text.cell_len) // len(data.run_ids) - len(mark)
            names = fmt.short_names(tuple(data.run_ids), max(width, 1))
            for index, run_id in enumerate(data.run_ids):
                text.append(mark, COLOURS[index % len(COLOURS)]).append(names[run_id])
        self._looking.update(text)
