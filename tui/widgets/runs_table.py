"""The table of runs: draws only the lines that are on the screen, so a thousand runs cost what fifty do.

`show` hands it rows in the order in which they stand; the cursor stays on its run whatever moves around it. It holds
marks (the runs that actions are about) and posts what a person did. The screen sorts, filters and acts. The columns
stand before it: which fit into a width, what each shows of a run, and a line made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from prime_rl.contract.status import LOST, RunState
from tui import fmt
from tui.model.query import age_s
from tui.model.snapshot import RunRow, standing_words

HEADER = 1  # lines above the rows that do not scroll
LINES_AT_ONCE = 12  # new lines of one picture, so that the cursor does not wait for a screenful of them

_FIRST = ("state", "run", "progress", "reward", "change", "loss", "tokens", "lag", "version", "lr", "note")
ORDER = (*_FIRST, "seen", "age")
GUTTER = 2  # cells before the first column: whether the run is marked, whether it is pinned
PADDING = 1  # cells on each side of a column
MARK, PIN = "✓", "★"
MIN_NOTE = 12
SEEN = 4
MIN_ID = 10
SHORT_ID = 11
MAX_ID = 28

# Pieces of text with their styles, not a `Text`: a screenful of these is made at each sign of life of its runs.
Cell = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Column:
    """One column. `width` is without the padding; figures are right-aligned; `names` are shown in place of run ids."""

    key: str
    label: str
    width: int
    is_figure: bool = False
    names: Mapping[str, str] = field(default_factory=dict)


def choose_columns(width: int, run_ids: Sequence[str]) -> tuple[Column, ...]:
    """The columns that fit into `width` cells: the essential ones always, others as there is room, in fixed order."""
    longest = max(map(len, run_ids), default=0)
    id_width = min(max(longest, MIN_ID), 16 if width < 100 else MAX_ID)
    bar = 14 if width < 100 else 18 if width < 160 else 26
    spark = 8 if width < 100 else 12 if width < 160 else 24
    if width < 100 and id_width > SHORT_ID:
        id_width, bar, spark = min(id_width, 15), 12, 6
    # All but the id, which leaves room for the age of the last sign of life.
    others = (10, bar, 6 + spark, SEEN, MIN_NOTE)
    id_width = max(min(id_width, width - sum(others) - 2 * PADDING * (len(others) + 1)), MIN_ID)
    names = fmt.short_names(tuple(run_ids), id_width)
    wanted = {
        "state": Column("state", "STATE", 10),
        "run": Column("run", "RUN", id_width, names=names),
        "progress": Column("progress", "PROGRESS", bar),
        "reward": Column("reward", "REWARD", 6 + spark),
    }
    room = width - sum(column.width + 2 * PADDING for column in wanted.values()) - (MIN_NOTE + 2 * PADDING)
    extras = [
        Column("seen", "SEEN", SEEN, True),
        Column("change", "CHANGE", 7, True),
        Column("loss", "LOSS", 8, True),
        Column("tokens", "TOK/S", 5, True),
        Column("lag", "LAG", 3, True),
        Column("version", "VERSION", 7, True),
        Column("lr", "LR", 7, True),
        Column("age", "AGE", 4, True),
    ]
    for column in extras:
        # The note is what people read most, so further columns come only when it has more than its least.
        reserve = 0 if column.key == "seen" else 12
        if room - reserve >= column.width + 2 * PADDING:
            wanted[column.key] = column
            room -= column.width + 2 * PADDING
    wanted["note"] = Column("note", "NOTE", MIN_NOTE + max(room, 0))
    return tuple(wanted[key] for key in ORDER if key in wanted)


def plain(cell: Cell) -> str:
    """The text of a cell without colours."""
    return "".join(text for text, _ in cell)


def make_cell(column: Column, row: RunRow, now: float) -> Cell:
    """The cell of one column of one run, exactly as wide as the column. `now` in Unix seconds."""
    width = column.width
    match column.key:
        case "state":
            return ((fit(f"{row.symbol} {row.state}", width), row.level.style),)
        case "run":
            return ((fit(column.names.get(row.run_id, row.run_id), width), "bold"),)
        case "progress":
            return _progress(row, width)
        case "reward":
            return _reward(row, width)
        case "change":
            return _change(row, width)
        case "note":
            # Of a run that trains, what it waits for just now counts less.
            words = [row.note, standing_words(row)]
            said = " · ".join(filter(None, reversed(words) if row.state == RunState.ACTIVE else words))
            if cell_len(said) > width:
                said = said.removeprefix("waits for ").removeprefix("bottleneck: ")
            return ((fit(said, width), row.level.style if row.is_bad else "muted"),)
        case "seen":
            return _right(seen_age(row, now), width, "error" if row.state == LOST else "muted")
        case "age":
            return _right(fmt.age(age_s(row, now)), width, "muted")
    figures = {
        "loss": fmt.number(row.loss),
        "tokens": fmt.count(row.tokens_per_s),
        "lag": fmt.DASH if row.lag is None else str(row.lag),
        "version": fmt.DASH if row.view.policy_version is None else f"v{row.view.policy_version}",
        "lr": fmt.number(row.view.lr),
    }
    text = figures[column.key]
    return _right(text, width, "faint" if text == fmt.DASH else "text")


def line_segments(
    columns: Sequence[Column],
    row: RunRow,
    now: float,
    gutter: Cell,
    base: Style,
    get_style: Callable[[str], Style],
) -> list[Segment]:
    """The line of one run. Plain segments: a line is drawn at each sign of life of its run."""
    segments = [Segment(text, base + get_style(style)) for text, style in gutter]
    segments.append(Segment(" " * PADDING, base))
    between = Segment(" " * 2 * PADDING, base)
    for column in columns:
        segments += [Segment(text, base + get_style(style)) for text, style in make_cell(column, row, now)]
        segments.append(between)
    return segments


def head_segments(columns: Sequence[Column], sort: tuple[str, bool], usual: Style, chosen: Style) -> list[Segment]:
    """The labels of the columns; that of `sort`, (column, descending), has an arrow and the style `chosen`."""
    segments = [Segment(" " * GUTTER, usual)]
    pad = " " * PADDING
    for column in columns:
        is_sorted = column.key == sort[0]
        arrow = ("▼" if sort[1] else "▲") if is_sorted else ""
        label = column.label[: column.width - len(arrow)] + arrow
        label = label.rjust(column.width) if column.is_figure else label.ljust(column.width)
        segments.append(Segment(f"{pad}{label}{pad}", chosen if is_sorted else usual))
    return segments


def column_at(columns: Sequence[Column], x: int) -> Column | None:
    """The column that is drawn at cell `x` of a line; None before the first and after the last."""
    left = GUTTER
    for column in columns:
        if left <= x < left + column.width + 2 * PADDING:
            return column
        left += column.width + 2 * PADDING
    return None


def fit(text: str, width: int) -> str:
    """`text` on exactly `width` cells: cut off with `…`, or filled up with blanks."""
    if cell_len(text) <= width:
        return text + " " * (width - cell_len(text))
    return set_cell_size(text, width - 1) + "…"


def seen_age(row: RunRow, now: float) -> str:
    """Since the last sign of life."""
    return fmt.seen(now - row.updated_at) if row.updated_at is not None else fmt.DASH


def _progress(row: RunRow, width: int) -> Cell:
    digits = len(str(row.max_steps or "?"))
    figures = f"{row.step:>{digits}}/{row.max_steps or '?'}"
    filled, empty = fmt.bar(row.step, row.max_steps, max(width - len(figures) - 1, 3))
    room = width - len(filled) - len(empty)
    return (filled, "primary"), (empty, "faint"), (fit(f" {figures}", room), "text")


def _reward(row: RunRow, width: int) -> Cell:
    if row.reward is None:
        return ((fit(f"{fmt.DASH:>5}", width), "faint"),)
    figure = f"{fmt.reward(row.reward):>5} "
    curve = fmt.sparkline(row.tail.rewards, width - len(figure))
    return (figure, "bold"), (fit(curve, width - len(figure)), "secondary")


def _change(row: RunRow, width: int) -> Cell:
    text = fmt.gain(row.reward_change)
    colours = {"+": "success", "-": "error", "±": "muted"}
    return _right(text, width, colours.get(text[0], "faint"))


def _right(text: str, width: int, style: str) -> Cell:
    return ((text.rjust(width), style),)


class RunsTable(ScrollView, can_focus=True):
    """`selected_id` is the run under the cursor, `marks` the runs that are chosen for an action."""

    DEFAULT_CSS = """
    RunsTable {
        height: 1fr;
        background: $background;
        scrollbar-size-vertical: 1;
        overflow-x: hidden;
        & > .runs--header { color: $foreground 60%; }
        & > .runs--sorted { color: $primary; }
        & > .runs--cursor { background: $row-blurred; }
        & > .runs--hover { background: $row-hover; }
        & > .runs--marked { background: $row-marked; }
        &:focus > .runs--cursor { background: $row-cursor; }
    }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "runs--header",
        "runs--sorted",
        "runs--cursor",
        "runs--hover",
        "runs--marked",
    }
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "Open", key_display="⏎", tooltip="open the run; marked runs are drawn beside it"),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("pagedown,ctrl+f", "page(1)", "Page down", show=False),
        Binding("pageup,ctrl+b", "page(-1)", "Page up", show=False),
        Binding("g,home", "end(-1)", "First run", show=False),
        Binding("G,end", "end(1)", "Last run", show=False),
        Binding("space", "mark", "Mark", key_display="␣"),
        Binding("shift+down,J", "extend(1)", "Mark downwards", show=False),
        Binding("shift+up,K", "extend(-1)", "Mark upwards", show=False),
        Binding("v", "mark_range", "Mark up to here", show=False),
        Binding("asterisk,ctrl+a", "mark_all", "Mark all", show=False, key_display="*"),
        Binding("i", "invert_marks", "Invert the marks", show=False),
    ]
    cursor: reactive[int] = reactive(0, repaint=False)
    hover: reactive[int | None] = reactive(None, repaint=False)

    class Opened(Message):
        """The user opens the run under the cursor."""

        def __init__(self, run_id: str) -> None:
            super().__init__()
            self.run_id = run_id

    class Moved(Message):
        """Another run is under the cursor, or other runs are marked."""

    class SortAsked(Message):
        """The head of a column was clicked."""

        def __init__(self, column: str) -> None:
            super().__init__()
            self.column = column

    def __init__(self) -> None:
        super().__init__(id="runs")
        self.marks: set[str] = set()
        self._rows: list[RunRow] = []
        self._index: dict[str, int] = {}
        self._layout: tuple[Column, ...] = ()
        # By run: all that its line was last drawn from, and the line.
        self._drawn: dict[str, tuple[tuple[object, ...], Strip]] = {}
        self._pins: frozenset[str] = frozenset()
        self._sort: tuple[str, bool] = ("", False)
        self._anchor: str | None = None
        # The lines of the screen as they were drawn last, by their place on it.
        self._seen: dict[int, Strip] = {}
        # Places of lines that may look otherwise by now, the first one last.
        self._unsure: list[int] = []
        self._is_drawing = False
        self._blank = Strip.blank(0)
        self._now = 0.0

    @property
    def selected_id(self) -> str | None:
        """The run under the cursor."""
        return self._rows[self.cursor].run_id if 0 <= self.cursor < len(self._rows) else None

    @property
    def run_ids(self) -> list[str]:
        """The runs that are shown, in their order."""
        return [row.run_id for row in self._rows]

    def show(
        self,
        rows: Sequence[RunRow],
        now: float,
        *,
        pins: frozenset[str] = frozenset(),
        sort: tuple[str, bool] = ("", False),
    ) -> None:
        """Show exactly `rows`, in this order; `sort` is (column, descending) for the head."""
        selected, before = self.selected_id, self._frame()
        self._rows, self._now, self._pins, self._sort = list(rows), now, pins, sort
        self._index = {row.run_id: index for index, row in enumerate(rows)}
        self._drawn = {run_id: line for run_id, line in self._drawn.items() if run_id in self._index}
        self._fit()
        self.virtual_size = Size(self.size.width, len(rows) + HEADER)
        place = self._index.get(selected) if selected else None
        self.cursor = place if place is not None else max(min(self.cursor, len(rows) - 1), 0)
        if before == self._frame():
            self._unsure = sorted(self._seen, reverse=True)
            self._refresh_some()
        else:
            self._unsure = []
            self.refresh()

    def _frame(self) -> tuple[object, ...]:
        """All but the lines themselves. As long as it stays, some lines can be drawn before others."""
        top = self.scroll_offset.y
        shown = [row.run_id for row in self._rows[top : top + self.size.height]]
        return self._sort, self._layout, self.virtual_size, shown

    def _refresh_some(self) -> None:
        """Draw again the lines that look otherwise than they did, a few at a time: a key comes before the others."""
        num_drawn = 0
        while self._unsure and num_drawn < LINES_AT_ONCE:
            y = self._unsure.pop()
            if self._line_at(y) is not self._seen.get(y):
                self.refresh_line(y + self.scroll_offset.y)
                num_drawn += 1
        if self._unsure and not self._is_drawing:
            self._is_drawing = True
            self.call_after_refresh(self._refresh_more)

    def _refresh_more(self) -> None:
        self._is_drawing = False
        self._refresh_some()

    def forget_marks(self, run_ids: set[str]) -> None:
        """Marks of runs that are gone from the workspace go too."""
        if gone := self.marks - run_ids:
            self.marks -= gone
            self.refresh()

    def move_cursor(self, *, row: int) -> None:
        """Move the cursor to `row`, or to the first or last run beyond them, and scroll to it."""
        self.cursor = max(min(row, len(self._rows) - 1), 0)
        self.scroll_to_region(Region(0, self.cursor, 1, HEADER + 1), animate=False, force=True)

    def redraw(self) -> None:
        """Redraw everything: the theme changed."""
        self._drawn, self._blank = {}, Strip.blank(0)
        self.refresh()

    def on_resize(self) -> None:
        """Choose the columns for the width and draw everything again."""
        self.show(self._rows, self._now, pins=self._pins, sort=self._sort)
        self._seen = {}
        self.refresh()

    def _fit(self) -> None:
        """Choose other columns when the width or the ids require it."""
        width = self.size.width - self.styles.scrollbar_size_vertical - GUTTER
        layout = choose_columns(width, sorted(self._index))
        if layout != self._layout:
            self._layout, self._drawn = layout, {}

    # Drawing

    def render_line(self, y: int) -> Strip:
        """Return the head of the columns, or the line at `y`; the table keeps it to compare later ones with."""
        width = self.size.width
        if y < HEADER:
            usual, chosen = self.get_component_rich_style("runs--header"), self.get_component_rich_style("runs--sorted")
            return Strip(head_segments(self._layout, self._sort, usual, chosen)).adjust_cell_length(width, usual)
        strip = self._seen[y] = self._line_at(y)
        return strip

    def _line_at(self, y: int) -> Strip:
        """The line `y` of the screen; the same object as long as it looks the same."""
        index, width = y - HEADER + self.scroll_offset.y, self.size.width
        if not 0 <= index < len(self._rows):
            if self._blank.cell_length != width:
                self._blank = Strip.blank(width, self.rich_style)
            return self._blank
        return self._line(index, width)

    def _line(self, index: int, width: int) -> Strip:
        row = self._rows[index]
        is_marked, is_pinned = row.run_id in self.marks, row.run_id in self._pins
        kind = "cursor" if index == self.cursor else "marked" if is_marked else "hover" if index == self.hover else ""
        seen, age = seen_age(row, self._now), fmt.age(age_s(row, self._now))  # all that changes by itself
        look = (row, kind, is_marked, is_pinned, width, seen, age, self.has_focus)
        known_look, known = self._drawn.get(row.run_id, (None, None))
        if known is not None and known_look == look:
            return known
        strip = self._draw(row, is_marked, is_pinned, width, self._background(kind))
        if known == strip:
            strip = known  # other facts that look the same: nothing to repaint
        self._drawn[row.run_id] = look, strip
        return strip

    def _background(self, kind: str) -> Style:
        style = self.get_component_rich_style(f"runs--{kind}") if kind else self.rich_style
        # Without colours this alone marks a line.
        return Style(bgcolor=style.bgcolor, reverse=(kind == "cursor" and self.app.no_color) or None)

    def _draw(self, row: RunRow, is_marked: bool, is_pinned: bool, width: int, background: Style) -> Strip:
        base = self.rich_style + background
        gutter = (MARK if is_marked else " ", "bold accent"), (PIN if is_pinned else " ", "warning")
        segments = line_segments(self._layout, row, self._now, gutter, base, self.app.console.get_style)
        return Strip(segments).adjust_cell_length(width, base)

    # What a person does

    def watch_cursor(self, before: int, now: int) -> None:
        """Draw both lines again and post `Moved`."""
        for index in (before, now):
            self.refresh_line(index + HEADER)
        self.post_message(self.Moved())

    def watch_hover(self, before: int | None, now: int | None) -> None:
        """Draw again the line that the mouse left and the one that it is over."""
        for index in (before, now):
            if index is not None:
                self.refresh_line(index + HEADER)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Highlight the line under the mouse, if a run is there."""
        self.hover = self._row_at(event.y)

    def on_leave(self) -> None:
        """End the highlight of the line that the mouse was over."""
        self.hover = None

    def on_click(self, event: events.Click) -> None:
        """Post `SortAsked` for a click on the head of a column; on a run choose, open or mark it."""
        index = self._row_at(event.y)
        if event.y < HEADER:
            column = column_at(self._layout, event.x)
            if column is not None:
                self.post_message(self.SortAsked(column.key))
        elif index is not None:
            self._clicked(index, event)

    def _clicked(self, index: int, event: events.Click) -> None:
        """A click chooses, on the chosen one it opens; with ctrl or at the edge it marks, with shift up to here."""
        was = self.cursor
        self.move_cursor(row=index)
        if event.shift:
            self.action_mark_range()
        elif event.ctrl or event.x < GUTTER:
            self._toggle(self._rows[index].run_id)
        elif index == was:
            self.action_open()

    def _row_at(self, y: int) -> int | None:
        index = y - HEADER + self.scroll_offset.y
        return index if y >= HEADER and index < len(self._rows) else None

    def action_open(self) -> None:
        """Post `Opened` with the run under the cursor; an empty table posts nothing."""
        if self.selected_id is not None:
            self.post_message(self.Opened(self.selected_id))

    def action_move(self, by: int) -> None:
        """Move the cursor by `by` lines, as far as there are runs."""
        self.move_cursor(row=self.cursor + by)

    def action_page(self, direction: int) -> None:
        """Move the cursor by the runs that are visible at one time, less one."""
        self.move_cursor(row=self.cursor + direction * max(self.size.height - HEADER - 1, 1))

    def action_end(self, direction: int) -> None:
        """Move the cursor to the last run, or for -1 to the first."""
        self.move_cursor(row=0 if direction < 0 else len(self._rows) - 1)

    def action_mark(self) -> None:
        """Mark or unmark the run under the cursor, and go to the next one."""
        if self.selected_id is not None:
            self._toggle(self.selected_id)
            self.action_move(1)

    def action_extend(self, by: int) -> None:
        """Mark this run and the next one in that direction."""
        if self.selected_id is not None:
            self.marks.add(self.selected_id)
            self.action_move(by)
            self._mark({self.selected_id or ""} & set(self._index))

    def action_mark_range(self) -> None:
        """Mark everything between the run that was marked last and this one."""
        if self.selected_id is None:
            return
        start = self._index.get(self._anchor, self.cursor) if self._anchor else self.cursor
        low, high = sorted((start, self.cursor))
        self._mark({row.run_id for row in self._rows[low : high + 1]})

    def action_mark_all(self) -> None:
        """Mark all runs that are shown; marks of others stay."""
        self._mark(set(self._index))

    def action_invert_marks(self) -> None:
        """Mark the shown runs that are not marked, unmark the others of them; marks of runs that are not shown stay."""
        self.marks ^= set(self._index)
        self._marks_changed()

    def clear_marks(self) -> None:
        """Unmark all runs, also those that are not shown, and post `Moved`."""
        self.marks.clear()
        self._marks_changed()

    def _toggle(self, run_id: str) -> None:
        self.marks ^= {run_id}
        self._anchor = run_id
        self._marks_changed()

    def _mark(self, run_ids: set[str]) -> None:
        self.marks |= run_ids
        self._anchor = self.selected_id
        self._marks_changed()

    def _marks_changed(self) -> None:
        self.refresh()
        self.post_message(self.Moved())
