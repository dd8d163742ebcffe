"""A growing log: only new lines are written, its end is followed until you scroll up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.widgets import RichLog

from tui.log_reader import LogPart
from tui.palette import Palette, make_palette
from tui.readers import MAX_LOG_LINES

_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|Traceback|[A-Z]\w*(?:Error|Exception))\b")
_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z?")


def paint(line: str, palette: Palette) -> Text:
    """One cleaned log line with its time dimmed and its level coloured."""
    text = Text(line, no_wrap=False)
    if stamp := _STAMP.match(line):
        text.stylize(palette.muted, 0, stamp.end())
    if level := _LEVEL.search(line, 0, 200):
        word = level[1]
        quiet = word in ("DEBUG", "INFO")
        warns = word in ("WARNING", "WARN")
        colour = palette.muted if quiet else palette.warning if warns else palette.error
        text.stylize(colour, level.start(), level.end() if quiet else len(line))
    return text


class LogView(RichLog):
    """The tail of one log."""

    DEFAULT_CSS = """
    LogView { background: $surface; padding: 0 1; scrollbar-size-vertical: 1; overflow-x: hidden; }
    LogView:focus { background-tint: transparent 0%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", "Down", show=False),
        Binding("k", "scroll_up", "Up", show=False),
        Binding("g", "scroll_home", "Start of the log", show=False),
        Binding("G", "scroll_end", "End of the log", show=False),
        Binding("f", "follow", "Follow"),
    ]

    def __init__(self) -> None:
        super().__init__(max_lines=MAX_LOG_LINES, wrap=True, markup=False, highlight=False, auto_scroll=True, id="log")
        self._num_written = 0
        self._generation = -1
        self._width = 0
        self._last: tuple[Sequence[str], int, int] | None = None

    def show(self, part: LogPart) -> None:
        self._show(part.lines, part.num_read, part.generation)

    def _show(self, lines: Sequence[str], num_read: int, generation: int) -> None:
        """`lines` are the newest of `num_read` since `generation` began; only new ones are written."""
        self._last = (lines, num_read, generation)
        width = self.scrollable_content_region.width
        if width <= 0:  # on a tab that was not opened yet
            return
        if generation != self._generation:
            self.clear()
            self._num_written, self._generation = 0, generation
        num_new = min(num_read - self._num_written, len(lines))
        palette = make_palette(self.app.theme_variables)
        follows = self.auto_scroll and self.is_vertical_scroll_end
        for line in lines[len(lines) - num_new :]:
            self.write(paint(line, palette), width=width, scroll_end=follows)
        self._num_written = num_read

    def on_resize(self, event: Resize) -> None:
        width = self.scrollable_content_region.width
        if width != self._width:
            self._width = width
            self.redraw()

    def redraw(self) -> None:
        """Write everything again: the theme or the width changed."""
        if self._last is not None:
            self._generation = -1
            self._show(*self._last)

    def action_follow(self) -> None:
        self.scroll_end(animate=False)
