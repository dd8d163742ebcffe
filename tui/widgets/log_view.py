"""A log of any size: the lines around one place, its end while it grows, words looked for, levels left out.

It draws the rows that are seen, wrapped and painted; a place in the log is a line and which of its rows is on top. It
asks for other lines when it comes near the edge of those it has (`TabAsked`), and for a search (`Search`). It reads
nothing itself.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rich.cells import chop_cells
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import MouseScrollDown, MouseScrollUp, Resize
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input, Static

from prime_rl.contract.layout import RunDir
from prime_rl.utils.text import size_text
from tui import fmt
from tui.messages import TabAsked
from tui.readers.log_reader import LEVELS, Found, LogData, LogLine, LogRequest
from tui.readers.tabs import LOGS

_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|Traceback|[A-Z]\w*(?:Error|Exception))\b")
_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z?")


def paint(line: str, words: str = "") -> Text:
    """One cleaned log line with its time dimmed, its level coloured and `words` marked."""
    text = Text(line, no_wrap=False)
    if stamp := _STAMP.match(line):
        text.stylize("muted", 0, stamp.end())
    if level := _LEVEL.search(line, 0, 200):
        word = level[1]
        quiet = word in ("DEBUG", "INFO")
        warns = word in ("WARNING", "WARN")
        colour = "muted" if quiet else "warning" if warns else "error"
        text.stylize(colour, level.start(), level.end() if quiet else len(line))
    if words:
        where = line if words != words.lower() else line.lower()
        place = where.find(words)
        while place >= 0:
            text.stylize("reverse bold", place, place + len(words))
            place = where.find(words, place + len(words))
    return text


class LogRows(Widget, can_focus=True):
    """Scrolls by rows, keeps its line when other lines come."""

    DEFAULT_CSS = """
    LogRows { height: 1fr; padding: 0 1; background: $surface; }
    """

    class Moved(Message):
        """Another line is on top."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Sequence[LogLine] = ()
        self.words = ""
        self.top = 0
        self._row = 0
        self._rows: dict[int, list[list[Segment]]] = {}
        self._sticks = False
        self._seen: list[list[Segment]] | None = None

    def show(self, lines: Sequence[LogLine]) -> None:
        """Other lines; the one on top stays there if it is among them."""
        before = self.lines[self.top].start if self.lines else 0
        self.lines = lines
        self.top = min(bisect_left([line.start for line in lines], before), max(len(lines) - 1, 0))
        if not lines or lines[self.top].start != before:
            self._row = 0
        self.redraw()

    def redraw(self) -> None:
        """Wrap and paint the lines again: the lines, the width, the words or the theme changed."""
        self._rows.clear()
        self.refresh_rows()

    def refresh_rows(self) -> None:
        """Draw the visible rows again, without wrapping lines a second time."""
        self._seen = None
        self.refresh()

    def go_to(self, start: int) -> None:
        """Put the line that starts at `start` a few rows below the top."""
        self.top = min(bisect_left([line.start for line in self.lines], start), max(len(self.lines) - 1, 0))
        self._row, self._sticks = 0, False
        self._up(self.size.height // 3)
        self.refresh_rows()

    def go_to_end(self) -> None:
        """Put the last row at the bottom; it stays there when the size changes, until one moves."""
        self._sticks = True
        self.top = max(len(self.lines) - 1, 0)
        self._row = len(self._rows_of(self.top)) - 1 if self.lines else 0
        self._up(self.size.height - 1)
        self.refresh_rows()

    @property
    def is_at_end(self) -> bool:
        """True when the last row is visible."""
        left = self.size.height + self._row
        for index in range(self.top, len(self.lines)):
            left -= len(self._rows_of(index))
            if left < 0:
                return False
        return True

    @property
    def bottom(self) -> int:
        """The index of the last visible line, of which some rows may be below the screen; -1 without lines."""
        left = self.size.height + self._row
        for index in range(self.top, len(self.lines)):
            left -= len(self._rows_of(index))
            if left <= 0:
                return index
        return len(self.lines) - 1

    def scroll_rows(self, num: int) -> None:
        """Scroll by `num` rows, upwards below 0, as far as there are lines; then post `Moved`, even if no row moved."""
        self._sticks = False
        if num < 0:
            self._up(-num)
        else:
            for _ in range(num):
                if self.is_at_end:
                    break
                self._row += 1
                if self._row >= len(self._rows_of(self.top)):
                    self.top, self._row = self.top + 1, 0
        self.refresh_rows()
        self.post_message(self.Moved())

    def on_resize(self, event: Resize) -> None:
        """Wrap for the width; the last row goes back to the bottom if `go_to_end` put it there."""
        self.redraw()
        if self._sticks:
            self.go_to_end()

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """Scroll down by three rows."""
        event.stop()
        self.scroll_rows(3)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """Scroll up by three rows."""
        event.stop()
        self.scroll_rows(-3)

    def _up(self, num: int) -> None:
        for _ in range(num):
            if self._row > 0:
                self._row -= 1
            elif self.top > 0:
                self.top -= 1
                self._row = len(self._rows_of(self.top)) - 1

    def _rows_of(self, index: int) -> list[list[Segment]]:
        line = self.lines[index]
        if line.start not in self._rows:
            self._rows[line.start] = self._wrap(line.text)
        return self._rows[line.start]

    def _wrap(self, line: str) -> list[list[Segment]]:
        text = paint(line, self.words)
        pieces = chop_cells(line, max(self.size.width, 10)) or [""]
        ends, place = [], 0
        for piece in pieces[:-1]:
            place += len(piece)
            ends.append(place)
        return [[*part.render(self.app.console, end="")] for part in text.divide(ends)]

    def render_line(self, y: int) -> Strip:
        """Return row `y` of the visible rows, blank below the last one; the first call wraps their lines."""
        if self._seen is None:
            self._seen = self._visible()
        base = self.rich_style
        found = self._seen[y] if y < len(self._seen) else []
        segments = [Segment(each.text, base + (each.style or Style())) for each in found]
        return Strip(segments).adjust_cell_length(self.size.width, base)

    def _visible(self) -> list[list[Segment]]:
        rows: list[list[Segment]] = []
        for index in range(self.top, self.bottom + 1):
            rows += self._rows_of(index)[self._row if index == self.top else 0 :]
        return rows


# With fewer lines than this to the edge of those it has, it asks for others.
MARGIN = 100


class LogView(Vertical, can_focus=False):
    """The rows, where one is, and the words to look for."""

    DEFAULT_CSS = """
    LogView {
        background: $surface;
        & > #where { height: 1; padding: 0 1; }
        & > Input { display: none; height: 1; padding: 0 1; background: $panel; }
        &.-asking > Input { display: block; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "rows(1)", "Down", show=False),
        Binding("k,up", "rows(-1)", "Up", show=False),
        Binding("space,pagedown", "page(1)", "Page down", show=False),
        Binding("b,pageup", "page(-1)", "Page up", show=False),
        Binding("g,home", "start", "Start of the log", show=False),
        Binding("f,G,end", "follow", "Follow", key_display="f"),
        Binding("slash", "ask", "Search", key_display="/"),
        Binding("n", "again(1)", "Next match", show=False),
        Binding("N", "again(-1)", "Previous match", show=False),
        Binding("v", "level", "Level", tooltip="hide records below a level"),
        Binding("escape", "leave", "Back", show=False),
    ]

    class Search(Message):
        """Search for words from an offset on; no words: stop."""

        def __init__(self, words: str, offset: int, *, forwards: bool, level: int, serial: int) -> None:
            super().__init__()
            self.words, self.offset, self.forwards, self.level, self.serial = words, offset, forwards, level, serial

    def __init__(self) -> None:
        super().__init__(id="log")
        self.rows = LogRows()
        self.input = Input(placeholder="text to search for; case matters if it has capitals", compact=True)
        self.request = LogRequest()
        self.data: LogData | None = None
        self.found = Found(0, 0.0, True)
        self._where = Static(id="where", markup=False)
        self._go_to: int | None = None

    def compose(self) -> ComposeResult:
        """Yield the line above, the rows, and the input for the words, which is hidden before `action_ask`."""
        yield self._where
        yield self.rows
        yield self.input

    def on_mount(self) -> None:
        """Keep the input from taking the focus before `action_ask`; draw again whenever the theme changes."""
        self.input.can_focus = False
        self.app.theme_changed_signal.subscribe(self, lambda _: self._redraw())

    @property
    def follows(self) -> bool:
        """True when the end of the log is requested, also as it grows."""
        return self.request.anchor is None

    def show(self, data: LogData) -> None:
        """Show the lines of `data`; drop the answer to an earlier request, unless it holds the line on top.

        When another file took the place of the log, its lines are shown and its end is requested.
        """
        is_other = self.data is not None and data.generation != self.data.generation
        if is_other and not self.follows:
            self._want(None)
        if data.request != self.request and not is_other and not self._fits(data):
            return  # made for an earlier request
        self.data = data
        self.rows.show(data.slice.lines)
        if self.follows:
            self.rows.go_to_end()
        elif self._go_to is not None:
            self.rows.go_to(self._go_to)
            self._go_to = None
        self._say()

    def _fits(self, data: LogData) -> bool:
        """True when the lines of an earlier request hold the one that is on top now: keys may come fast."""
        lines = data.slice.lines
        if self.follows or self._go_to is not None or data.request.level != self.request.level or not lines:
            return False
        return lines[0].start <= self._top_offset() <= lines[-1].start

    def show_found(self, found: Found) -> None:
        """Show the course of the search."""
        if found.serial != self.found.serial:
            return
        self.found = found
        if found.start is not None:
            self._go(found.start)
        self._say()

    def action_rows(self, num: int) -> None:
        """Scroll by `num` rows; near the edge of the lines it has, others are requested."""
        self.rows.scroll_rows(num)

    def action_page(self, direction: int) -> None:
        """Scroll by the visible rows less one."""
        self.rows.scroll_rows(direction * max(self.rows.size.height - 1, 1))

    def action_start(self) -> None:
        """Go to the start of the log; where its lines are not there yet, `show` goes there with them."""
        self._go(0)
        self._say()

    def action_follow(self) -> None:
        """Go to the last of the lines there are, and request the end of the log from here on."""
        self._want(None)
        self.rows.go_to_end()
        self._say()

    def action_level(self) -> None:
        """Request lines of at least the next of LEVELS, after the last the first, around the same place."""
        anchor = None if self.follows else self._top_offset()
        self._want(anchor, (self.request.level + 1) % len(LEVELS))
        self._say()

    def action_ask(self) -> None:
        """Show the input for the words, empty, and focus it."""
        self.add_class("-asking")
        self.input.value = ""
        self.input.can_focus = True
        self.input.focus()

    def action_again(self, direction: int) -> None:
        """Search for the same words from the last match on, for -1 backwards; does nothing without words."""
        if self.rows.words:
            self._look(forwards=direction > 0)

    def action_leave(self) -> None:
        """Stop the search, close its line, forget its words; then leave."""
        if self.has_class("-asking"):
            self._close_input()
        elif not self.found.is_done or self.rows.words:
            self._search("", 0, forwards=False)
        else:
            self.app.pop_screen()

    @on(Input.Submitted)
    def _asked(self, event: Input.Submitted) -> None:
        event.stop()
        self._close_input()
        self.rows.words = event.value
        self.rows.redraw()
        if event.value:
            self._search(event.value, self._bottom_offset(), forwards=False)
        else:
            self._search("", 0, forwards=False)

    @on(LogRows.Moved)
    def _moved(self, event: LogRows.Moved) -> None:
        event.stop()
        data, rows = self.data, self.rows
        if data is None or not rows.lines:
            return
        if data.slice.is_last and rows.is_at_end:
            if not self.follows:
                self._want(None)
        else:
            near_start = rows.top < MARGIN and not data.slice.is_first
            near_end = len(rows.lines) - rows.top - rows.size.height < MARGIN and not data.slice.is_last
            if self.follows or near_start or near_end:
                self._want(self._top_offset())
        self._say()

    def _look(self, *, forwards: bool) -> None:
        """From the last match on, or from the visible lines."""
        last = self.found.start
        if last is None:
            last = self._bottom_offset() if not forwards else self._top_offset()
        elif forwards:
            last = next((line.end for line in self.rows.lines if line.start == last), last + 1)
        self._search(self.rows.words, last, forwards=forwards)

    def _search(self, words: str, offset: int, *, forwards: bool) -> None:
        serial = self.found.serial + 1
        self.found = Found(serial, 0.0, is_done=not words)
        if not words:
            self.rows.words = ""
            self.rows.redraw()
        self.post_message(self.Search(words, offset, forwards=forwards, level=self.request.level, serial=serial))
        self._say()

    def _go(self, start: int) -> None:
        """Request the lines around the one that starts at `start`; go there at once if it is there, else in `show`."""
        self._want(start)
        if self._holds(start):
            self.rows.go_to(start)
        else:
            self._go_to = start

    def _holds(self, start: int) -> bool:
        """True when the line that starts at `start` is among those here; 0 is the start of the log at any level."""
        data = self.data
        if data is None or data.request.level != self.request.level:
            return False
        lines = data.slice.lines
        return (start == 0 and data.slice.is_first) or (bool(lines) and lines[0].start <= start <= lines[-1].start)

    def _want(self, anchor: int | None, level: int | None = None) -> None:
        self._go_to = None
        self.request = LogRequest(anchor, self.request.level if level is None else level)
        self.post_message(TabAsked(LOGS, self.request))

    def _top_offset(self) -> int:
        return self.rows.lines[self.rows.top].start if self.rows.lines else 0

    def _bottom_offset(self) -> int:
        """After the last visible line."""
        return self.rows.lines[self.rows.bottom].end if self.rows.lines else 0

    def _close_input(self) -> None:
        self.remove_class("-asking")
        self.input.can_focus = False
        self.rows.focus()

    def _redraw(self) -> None:
        self.rows.redraw()
        self._say()

    def _say(self) -> None:
        """The line above: where one is, what is left out, how the search goes."""
        data = self.data
        if data is None:
            return
        if data.request.level != self.request.level:
            some = f"searching for lines of level {LEVELS[self.request.level]} and above …"
            words = some if self.request.level else "reading lines of all levels …"
            self._where.update(Text.styled(words, "secondary"))
            return
        if not self.rows.lines:
            words = f"no log yet: {RunDir(Path(data.run_id)).log}"
            if data.size:
                some = f" of level {LEVELS[self.request.level]} or above" if self.request.level else " in it yet"
                words = f"no lines{some}"
            self._where.update(Text.styled(words, "muted"))
            return
        share = min(self._bottom_offset() / max(data.size, 1), 1.0)
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append("following" if self.follows else fmt.percent(share), "success" if self.follows else "")
        text.append(f" · {size_text(data.size)} · level {LEVELS[self.request.level]}", "muted")
        if self.rows.words:
            text.append(f" · /{self.rows.words}", "accent").append(f"  {self._found_text()}", "muted")
        self._where.update(text)

    def _found_text(self) -> str:
        found = self.found
        if not found.is_done:
            return f"{fmt.percent(found.share)} searched, esc stops"
        if found.start is None:
            return "not found"
        return "found, wrapped around" if found.is_around else "found"
