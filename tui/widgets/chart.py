"""One chart: curves over steps, its newest values or those under the cursor in its frame.

Drawn by hand on a canvas of braille dots (two wide and four high a character) and of filled cells, because a screen of
twelve charts is drawn again at every key; a plotting library took 80 to 350 ms.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.content import Content
from textual.events import Click, Leave, MouseMove
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from tui import fmt
from tui.readers.charts import ChartData, Curve

# Bit of each dot of a braille character, by [row][column].
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
# Bits of all dots of one side from a row to another: [side][from][to].
_SPANS = [
    [[sum(_DOTS[row][side] for row in range(top, bottom + 1)) for bottom in range(4)] for top in range(4)]
    for side in range(2)
]
_BRAILLE = 0x2800
# Bands of a stack differ in shade too, so that they need no colour.
SHADES = "█▓▒░"
NOTHING = -1
# Added to the colour of a curve that is drawn faint, and of one before a filled cell; the colour of labels.
_FAINT, _SHADED, _LABEL = 100, 1000, -2

Cell = tuple[str, int]


class Canvas:
    """`width` x `height` characters. Dot rows count from the top."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._bits = [[0] * width for _ in range(height)]
        self._colours = [[NOTHING] * width for _ in range(height)]
        self._filled: dict[tuple[int, int], str] = {}

    @property
    def num_dots(self) -> tuple[int, int]:
        """Dots across and down: two and four for each character."""
        return self.width * 2, self.height * 4

    def bar(self, x: int, top: int, bottom: int, colour: int) -> None:
        """Dots of column `x` from `top` to `bottom`, both included, in any order."""
        if not 0 <= x < self.width * 2:
            return
        column, spans = x // 2, _SPANS[x % 2]
        first, last = max(min(top, bottom), 0), min(max(top, bottom), self.height * 4 - 1)
        first_row, last_row = first // 4, last // 4
        for row in range(first_row, last_row + 1):
            start, end = first % 4 if row == first_row else 0, last % 4 if row == last_row else 3
            self._bits[row][column] |= spans[start][end]
            was_filled = self._filled.pop((row, column), None) or self._colours[row][column] >= _SHADED
            self._colours[row][column] = colour + _SHADED * bool(was_filled)

    def connect(self, start: tuple[int, int], end: tuple[int, int], colour: int) -> None:
        """A line from dot `start` to dot `end`, left to right; each column covers its share of the height."""
        (x0, y0), (x1, y1) = start, end
        last = y0
        for x in range(x0, x1 + 1):
            y = y0 + round((y1 - y0) * (x - x0) / max(x1 - x0, 1))
            self.bar(x, last, y, colour)
            last = y

    def fill(self, column: int, row: int, shade: str, colour: int) -> None:
        """Fill the character at `column` and `row` with `shade`, which then hides the dots there."""
        self._filled[row, column] = shade
        self._colours[row][column] = colour

    def rows(self) -> list[list[Cell]]:
        """Characters with their colour (NOTHING where empty), row by row."""
        return [
            [
                (self._filled.get((y, x)) or (chr(_BRAILLE + bits) if bits else " "), colour)
                for x, (bits, colour) in enumerate(zip(row, colours, strict=True))
            ]
            for y, (row, colours) in enumerate(zip(self._bits, self._colours, strict=True))
        ]


def _dot_of(value: float, low: float, high: float, num_dots: int) -> int:
    share = (value - low) / (high - low)
    return round((1 - min(max(share, 0.0), 1.0)) * (num_dots - 1))


def row_of(value: float, low: float, high: float, height: int) -> int:
    """The row of `height` in which the dot of `value` is, between `low` (bottom) and `high` (top)."""
    return _dot_of(value, low, high, height * 4) // 4


def draw_curve(canvas: Canvas, curve: Curve, num_columns: int, low: float, high: float) -> None:
    """One line with its spikes, between the values `low` (bottom) and `high` (top)."""
    width, height = canvas.num_dots
    scale = (width - 1) / max(num_columns - 1, 1)
    place = functools.partial(_dot_of, low=low, high=high, num_dots=height)
    before: tuple[int, int] | None = None
    for x, value, least, greatest in zip(curve.xs, curve.values, curve.lows, curve.highs, strict=True):
        dot = round(x * scale), place(value)
        if before is not None:
            canvas.connect(before, dot, curve.colour)
        canvas.bar(dot[0], place(least), place(greatest), curve.colour)
        before = dot


def draw_band(canvas: Canvas, curve: Curve, num_columns: int, low: float, high: float) -> None:
    """The area from its least to its greatest values, lightly filled: characters of which it takes half, or one."""
    scale = (canvas.width - 1) / max(num_columns - 1, 1)
    place = functools.partial(_dot_of, low=low, high=high, num_dots=canvas.num_dots[1])
    ends = {round(x * scale): dots for x, *dots in zip(curve.xs, curve.highs, curve.lows, curve.values, strict=True)}
    top = bottom = middle = 0
    for column in range(min(ends, default=0), max(ends, default=-1) + 1):
        if column in ends:
            top, bottom, middle = map(place, ends[column])
        rows = [row for row in range(top // 4, bottom // 4 + 1) if min(bottom, row * 4 + 3) > max(top, row * 4)]
        for row in rows or [middle // 4]:
            canvas.fill(column, row, SHADES[-1], curve.colour)


def draw_stack(canvas: Canvas, curves: Sequence[Curve], num_columns: int, high: float) -> None:
    """Bands on top of each other from 0 to `high`, the first at the bottom."""
    scale = (canvas.width - 1) / max(num_columns - 1, 1)
    by_column: dict[int, dict[int, float]] = {}
    for index, curve in enumerate(curves):
        for x, value in zip(curve.xs, curve.values, strict=True):
            by_column.setdefault(round(x * scale), {})[index] = value
    known: dict[int, float] | None = None
    for column in range(canvas.width):
        known = by_column.get(column, known)
        if known is None or column > max(by_column):
            continue
        for row in range(canvas.height):
            level = high * (canvas.height - row - 0.5) / canvas.height
            band = _band(known, level)
            if band is not None:
                canvas.fill(column, row, SHADES[band % len(SHADES)], curves[band].colour)


def _band(values: dict[int, float], level: float) -> int | None:
    total = 0.0
    for index in sorted(values):
        total += max(values[index], 0.0)
        if level < total:
            return index
    return None


LABEL_WIDTH = 8
# A step has this many cells of the axis.
STEP_WIDTH = 14
# The shortest name of a curve, in characters.
MIN_LETTERS = 4
LEGEND_GAPS = 3
COLOURS = ("secondary", "accent", "success", "warning", "error", "primary", "muted", "text")


def name_letters(names: Sequence[str], room: int) -> int:
    """The width of each name, with the `…` of what is cut off, so that all fit into `room`; 0 where they look alike."""
    for num in range(max(map(len, names), default=0), MIN_LETTERS - 1, -1):
        if sum(min(len(name), num) + 1 for name in names) <= room:
            return num if len({fmt.shorten(name, num) for name in names}) == len(names) else 0
    return 0


class Chart(Widget):
    """Empty until `show`. Posts where the mouse is."""

    DEFAULT_CSS = """
    Chart {
        border: round $border;
        border-title-color: $foreground;
        border-subtitle-color: $foreground 60%;
        border-subtitle-align: left;
        width: 1fr;
        height: 1fr;
        background: $surface;
    }
    Chart.-chosen { border: round $primary; }
    """

    class Pointed(Message):
        """The mouse is over `step`, or clicked there `num_clicks` times in a row; None: it left, or is off the plot."""

        def __init__(self, chart: Chart, step: float | None, num_clicks: int = 0) -> None:
            super().__init__()
            self.chart = chart
            self.step = step
            self.num_clicks = num_clicks

    def __init__(self, title: str, *, colour: str = "secondary", is_reward: bool = False) -> None:
        super().__init__()
        self._title = title
        self._figure, self._change = (fmt.reward, fmt.gain) if is_reward else (fmt.number, fmt.signed)
        self._first_colour = COLOURS.index(colour)
        self.data, self._is_read = ChartData(), False
        self._cursor: float | None = None
        self._rows: list[list[Cell]] | None = None
        self._drawn_for = Size(0, 0)
        self._ticks: list[str] = []
        self._styles: dict[int, Style] = {}
        self.border_title = Content(title)

    def on_mount(self) -> None:
        """Have all drawn again whenever the theme changes: its colours are cached."""
        self.app.theme_changed_signal.subscribe(self, lambda _: self._redraw())

    def rename(self, title: str) -> None:
        """Set the title in the frame, without drawing the curves again."""
        if title != self._title:
            self._title = title
            self._head()

    def show(self, data: ChartData, *, is_read: bool = True) -> None:
        """Draw `data`, of which more is to come unless it `is_read`; nothing is drawn again when it equals the last."""
        if (data, is_read) != (self.data, self._is_read):
            self.data, self._is_read = data, is_read
            self._redraw()

    def point_at(self, step: float | None) -> None:
        """Show the values at `step`; None: the newest."""
        if step != self._cursor:
            self._cursor = step
            self._head()
            self.refresh()

    def on_resize(self) -> None:
        """Draw the curves, the axis and the frame again for the size."""
        self._redraw()

    def on_mouse_move(self, event: MouseMove) -> None:
        """Post `Pointed` with the step under the mouse; with None outside the plot or without values."""
        self.post_message(self.Pointed(self, self._step_at(event.get_content_offset_capture(self).x)))

    def on_leave(self, event: Leave) -> None:
        """Post `Pointed` with None, because the mouse left the chart."""
        self.post_message(self.Pointed(self, None))

    def on_click(self, event: Click) -> None:
        """Post `Pointed` with the clicked step and the number of clicks in a row."""
        step = self._step_at(event.get_content_offset_capture(self).x)
        self.post_message(self.Pointed(self, step, num_clicks=event.chain))

    def render_line(self, y: int) -> Strip:
        """Return line `y` of the plot, or the axis below it; without values, words in the middle line."""
        # A larger widget may be asked for its lines before it is told that it has grown.
        if self._rows is None or self._drawn_for != self.size:
            self._rows, self._drawn_for = self._draw(), self.size
        width = self.size.width
        base = self.rich_style
        if not self.data.has_values:
            words = "no values yet" if self._is_read else "reading …"
            words = words if y == self.size.height // 2 else ""
            return Strip([Segment(words.center(width), base + self._style(_LABEL))], width)
        if y >= len(self._rows):
            return Strip([Segment(self._axis(width), base + self._style(_LABEL))], width)
        cells, cursor = self._rows[y], self._cursor_column()
        if cursor is not None and cells[cursor][1] == NOTHING:
            cells = [*cells[:cursor], ("│", _LABEL), *cells[cursor + 1 :]]
        segments = [Segment(self._ticks[y], base + self._style(_LABEL))]
        for colour, piece in itertools.groupby(cells, key=operator.itemgetter(1)):
            text = "".join(char for char, _ in piece)
            segments.append(Segment(text, base if colour == NOTHING else base + self._style(colour)))
        return Strip(segments).adjust_cell_length(width, base)

    def _redraw(self) -> None:
        self._rows = None
        self._styles.clear()
        self._head()
        self.refresh()

    def _plot_size(self) -> Size:
        return Size(max(self.size.width - LABEL_WIDTH, 1), max(self.size.height - 1, 1))

    def _draw(self) -> list[list[Cell]]:
        size, data = self._plot_size(), self.data
        canvas = Canvas(size.width, size.height)
        self._ticks = [" " * LABEL_WIDTH] * size.height
        if not data.has_values:
            return canvas.rows()
        curves = [_logarithm(curve) for curve in data.curves] if data.is_log else list(data.curves)
        low, high = (0.0, _stack_height(data)) if data.is_stacked else _range(curves)
        if data.is_stacked:
            draw_stack(canvas, curves, data.num_columns, high)
        else:
            for curve in sorted(curves, key=lambda each: not each.is_faint):
                shade = replace(curve, colour=curve.colour + _FAINT * curve.is_faint)
                (draw_band if curve.is_band else draw_curve)(canvas, shade, data.num_columns, low, high)
        self._mark_ticks(low, high)
        return canvas.rows()

    def _mark_ticks(self, low: float, high: float) -> None:
        """Label the rows of round values; those of both ends where there are too few."""
        height = len(self._ticks)
        most = max(min(height // 2 + 1, 8), 2)
        ticks = (fmt.log_ticks if self.data.is_log else fmt.ticks)(low, high, most)
        if len(ticks) < 2:
            ticks = [(end, fmt.number(10.0**end if self.data.is_log else end)) for end in (low, high)]
        for value, text in ticks:
            self._ticks[row_of(value, low, high, height)] = f"{text:>{LABEL_WIDTH - 1}} "

    def _axis(self, width: int) -> str:
        """The first and the last step at the ends, round ones between them where there is room."""
        first, last = self.data.window
        left, right = f"step {first:.0f}", f"{last:.0f}"
        line = " " * LABEL_WIDTH + left + right.rjust(max(width - LABEL_WIDTH - len(left), 0))
        for step, text in fmt.ticks(first, last, max(width // STEP_WIDTH, 1)):
            start = LABEL_WIDTH + self._column_of(step) - len(text) // 2
            around = slice(start - 2, start + len(text) + 2)
            if not line[around].strip():
                line = line[:start] + text + line[start + len(text) :]
        return line

    def _step_at(self, x: int) -> float | None:
        """The step under column `x` of the widget."""
        width, column = self._plot_size().width, x - LABEL_WIDTH
        if not self.data.has_values or not 0 <= column < width:
            return None
        first, last = self.data.window
        return first + (last - first) * (column + 0.5) / width

    def _cursor_column(self) -> int | None:
        if self._cursor is None:
            return None
        first, last = self.data.window
        return self._column_of(self._cursor) if first <= self._cursor <= last else None

    def _column_of(self, step: float) -> int:
        """As the dots are placed: the first step on the first dot, the last on the last."""
        first, last = self.data.window
        return round((step - first) / max(last - first, 1e-9) * (self._plot_size().width * 2 - 1)) // 2

    def _head(self) -> None:
        """The frame: title with the value, and the names of several curves below."""
        curves = [curve for curve in self.data.curves if not curve.is_faint]
        title: list[str | tuple[str, str]] = [(self._title, "bold")]
        if len(curves) == 1 and not curves[0].name:
            title += ["  ", (self._figure(self._value(curves[0])), self._colour(curves[0].colour))]
        if self._cursor is not None and (step := self._step_of(curves)) is not None:
            title.append((f"  at {step:.0f}", "muted"))
        elif self.data.change is not None:
            title += ["  ", (self._change(self.data.change), "muted")]
        self.border_title = Content.from_rich_text(Text.assemble(*title), self.app.console)
        bare = self._legend(curves, 0)
        if is_wide := bare.cell_length > self.size.width - 4:
            bare = self._legend(curves, 0, is_close=True)
        room = self.size.width - 4 - bare.cell_length
        names = tuple(curve.name for curve in curves)
        letters = name_letters(names, room)
        if letters or self._cursor is not None or self.data.is_stacked:
            self.border_subtitle = self._legend(curves, letters, is_close=is_wide) if letters else bare
            return
        # Without values there is room for names that differ late, as those of a sweep do.
        width = (self.size.width - 4) // max(len(curves), 1) - LEGEND_GAPS
        short = fmt.short_names(names, width)
        is_told = width >= MIN_LETTERS and len(set(short.values())) == len(names)
        self.border_subtitle = self._legend(curves, 0, short) if is_told else bare

    def _legend(
        self, curves: list[Curve], num_letters: int, names: Mapping[str, str] | None = None, is_close: bool = False
    ) -> Content:
        """Mark, name (its beginning) and value of several curves, with deviations unless close; or `names`."""
        if len(curves) == 1 and not curves[0].name:
            return Content("")
        parts: list[str | tuple[str, str]] = []
        for index, curve in enumerate(curves):
            colour = self._colour(curve.colour)
            mark = SHADES[index % len(SHADES)] if self.data.is_stacked else "━"
            if names is not None:
                parts += [" " if index else "", (f"{mark} ", colour), names[curve.name]]
                continue
            name = f"{fmt.shorten(curve.name, num_letters)} " if num_letters else ""
            gap, value = " " if is_close else "  ", self._figure(self._value(curve))
            if curve.spread is not None and self._cursor is None and not is_close:
                value += f" ± {self._figure(curve.spread)}"
            parts += [gap if index else "", (f"{mark} ", colour), name, (value, colour)]
        return Content.from_rich_text(Text.assemble(*parts), self.app.console)

    def _value(self, curve: Curve) -> float | None:
        if self._cursor is None:
            return curve.last
        index = curve.at(self._cursor)
        return None if index is None else curve.values[index]

    def _step_of(self, curves: list[Curve]) -> float | None:
        cursor = self._cursor or 0.0
        found = [curve.steps[index] for curve in curves if (index := curve.at(cursor)) is not None]
        return min(found, key=lambda step: abs(step - cursor), default=None)

    def _colour(self, colour: int) -> str:
        return COLOURS[(colour + self._first_colour) % len(COLOURS)]

    def _style(self, colour: int) -> Style:
        if colour not in self._styles:
            bare = colour % _SHADED
            word = "muted" if colour < 0 else "faint" if bare >= _FAINT else self._colour(bare)
            behind = Style(bgcolor=self.app.theme_variables["panel"]) if colour >= _SHADED else Style()
            self._styles[colour] = self.app.console.get_style(word) + behind
        return self._styles[colour]


def _range(curves: list[Curve]) -> tuple[float, float]:
    """The range of the height: from the least to the greatest value, never nothing."""
    low = min((min(curve.lows) for curve in curves if curve.lows), default=0.0)
    high = max((max(curve.highs) for curve in curves if curve.highs), default=1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = abs(low) * 0.1 or 0.1
        return low - pad, high + pad
    return low, high


def _stack_height(data: ChartData) -> float:
    totals: dict[int, float] = {}
    for curve in data.curves:
        for x, value in zip(curve.xs, curve.values, strict=True):
            totals[x] = totals.get(x, 0.0) + max(value, 0.0)
    return max(totals.values(), default=0.0) or 1.0


def _logarithm(curve: Curve) -> Curve:
    """Without what has no logarithm; the least of a column is then that of its positive values, or its newest."""
    kept = [index for index, value in enumerate(curve.values) if value > 0]
    log = math.log10

    def pick(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(log(values[index] if values[index] > 0 else curve.values[index]) for index in kept)

    return replace(
        curve,
        xs=tuple(curve.xs[index] for index in kept),
        steps=tuple(curve.steps[index] for index in kept),
        values=pick(curve.values),
        lows=pick(curve.lows),
        highs=pick(curve.highs),
    )
