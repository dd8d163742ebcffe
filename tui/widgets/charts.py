"""Curves: one chart with its title and newest value, and the grid of them that adapts to the space there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.message import Message
from textual.widgets import Static
from textual_plotext import PlotextPlot

from tui import fmt
from tui.palette import make_palette
from tui.run_detail import ChartData, ChartSpec

MIN_CHART_WIDTH = 38
MIN_CHART_HEIGHT = 10
MAX_COLUMNS = 3


class Chart(Vertical):
    """One curve over steps. Empty until `show`."""

    DEFAULT_CSS = """
    Chart {
        border: round $border;
        border-title-color: $foreground;
        padding: 0 1 0 0;
        height: 1fr;
        background: $surface;
        & > PlotextPlot { display: none; background: $surface; }
        & > .none { width: 1fr; height: 1fr; content-align: center middle; color: $foreground 35%; }
        &.-drawn > PlotextPlot { display: block; }
        &.-drawn > .none { display: none; }
    }
    """

    def __init__(self, title: str, *, colour: str = "primary") -> None:
        super().__init__()
        self._title = title
        self._colour = colour
        self._data = ChartData()
        self._plot = PlotextPlot()
        self.border_title = Content(title)

    def compose(self) -> ComposeResult:
        yield self._plot
        yield Static("no values yet", classes="none", markup=False)

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, lambda _: self._draw())

    def show(self, data: ChartData) -> None:
        if data != self._data:
            self._data = data
            self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        data = self._data
        self.set_class(bool(data.steps), "-drawn")
        self.border_title = self._heading(data)
        if not data.steps:
            return
        plt = self._plot.plt
        plt.clear_figure()
        palette = make_palette(self.app.theme_variables)
        plt.plot(
            list(data.steps),
            list(data.values),
            marker="braille" if len(data.steps) > 1 else "dot",
            color=Color.parse(getattr(palette, self._colour)).rgb,
        )
        plt.frame(False)
        plt.xaxes(False, False)
        plt.yaxes(False, False)
        self._ticks(plt, data)
        self._plot.refresh()

    def _ticks(self, plt: object, data: ChartData) -> None:
        height, width = max(self.size.height, 3), max(self.size.width, 20)
        low, high = min(data.values), max(data.values)
        if high <= low:
            pad = abs(low) * 0.1 or 0.1
            low, high = low - pad, high + pad
        num = max(min(height // 3, 6), 2)
        ticks = [low + (high - low) * index / (num - 1) for index in range(num)]
        plt.ylim(low, high)  # type: ignore[attr-defined]
        plt.yticks(ticks, [f"{fmt.number(tick):>7} " for tick in ticks])  # type: ignore[attr-defined]
        first, last = data.steps[0], data.steps[-1]
        marks = sorted({first, last} if width < 50 else {first, (first + last) // 2, last})
        plt.xticks(marks, [f"step {mark:.0f}" if mark == first else f"{mark:.0f}" for mark in marks])  # type: ignore[attr-defined]

    def _heading(self, data: ChartData) -> Content:
        palette = make_palette(self.app.theme_variables)
        parts: list[str | tuple[str, str]] = [(self._title, "bold")]
        if data.last is not None:
            parts += ["  ", (fmt.number(data.last), getattr(palette, self._colour))]
        if data.change is not None:
            parts += ["  ", (fmt.signed(data.change), palette.muted)]
        return Content.assemble(*parts)


class ChartGrid(VerticalScroll):
    """Charts in as many columns as fit; what does not fit in height is scrolled to, a page at a time."""

    DEFAULT_CSS = """
    ChartGrid {
        layout: grid;
        grid-gutter: 0 1;
        scrollbar-size-vertical: 1;
        padding: 0;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down,space", "page(1)", "Next charts", show=False),
        Binding("k,up", "page(-1)", "Previous charts", show=False),
    ]

    class Resized(Message):
        """How many points a chart can show now."""

        def __init__(self, limit: int) -> None:
            super().__init__()
            self.limit = limit

    def __init__(self, specs: Sequence[ChartSpec], colours: Sequence[str]) -> None:
        super().__init__(id="charts")
        self._charts = [Chart(spec.title, colour=colours[index % len(colours)]) for index, spec in enumerate(specs)]

    def compose(self) -> ComposeResult:
        yield from self._charts

    def show(self, charts: Sequence[ChartData]) -> None:
        for chart, data in zip(self._charts, charts, strict=True):
            chart.show(data)

    def on_resize(self, event: Resize) -> None:
        width, height = self.size
        columns, rows = fit_charts(width, height, len(self._charts))
        self.styles.grid_size_columns = columns
        # The rows that are seen together fill the height to the last line; the pattern repeats for the others.
        self.styles.grid_rows = " ".join(str(max(part, 3)) for part in share_out(height, rows))
        # A braille cell is two dots wide; a line through more points than dots looks the same.
        self.post_message(self.Resized(2 * max(width // columns - 10, 10)))

    def action_page(self, direction: int) -> None:
        self.scroll_relative(y=direction * self.size.height, animate=False)


def share_out(total: int, num: int) -> list[int]:
    """`num` whole parts of `total`, as equal as can be, the larger ones first."""
    return [total // num + (index < total % num) for index in range(num)]


def fit_charts(width: int, height: int, num: int) -> tuple[int, int]:
    """(columns, rows that are seen at one time) for `num` charts."""
    columns = max(min(width // MIN_CHART_WIDTH, MAX_COLUMNS, num), 1)
    rows = max(min(height // MIN_CHART_HEIGHT, -(-num // columns)), 1)
    return columns, rows
