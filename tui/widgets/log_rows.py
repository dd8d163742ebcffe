"""The rows of a log that are seen, wrapped and painted: a place in it is a line and which of its rows is on top."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence

from rich.cells import chop_cells
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.events import MouseScrollDown, MouseScrollUp, Resize
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from tui.readers.log_file import LogLine

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
        """Whether the last row is visible."""
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
