"""A list of any length of which only the visible rows are made, with a cursor and a heading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.events import Click, MouseScrollDown, MouseScrollUp
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from tui.palette import make_palette


class RowList(Widget, can_focus=True):
    """`show` sets the number of rows and how to make one."""

    DEFAULT_CSS = """
    RowList { background: $surface; border: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "move(1)", "Down", show=False),
        Binding("k,up", "move(-1)", "Up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("g,home", "go(0)", "First", show=False),
        Binding("G,end", "go(-1)", "Last", show=False),
    ]

    class Moved(Message):
        def __init__(self, row_list: RowList) -> None:
            super().__init__()
            self.row_list = row_list

        @property
        def control(self) -> RowList:
            return self.row_list

    class Chosen(Moved):
        """Enter, or a double click, on the row under the cursor."""

    def __init__(self, empty: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.cursor = 0
        self._empty = empty
        self._num = 0
        self._make: Callable[[int], Text] = lambda index: Text()
        self._heading: Sequence[str] = ()
        self._top = 0

    def show(self, num: int, make: Callable[[int], Text], cursor: int, heading: Sequence[str]) -> None:
        """`num` rows, each made by `make(index)` when it is seen, under the lines of `heading`."""
        self._num, self._make, self._heading = num, make, heading
        self.cursor = min(max(cursor, 0), max(num - 1, 0))
        self._keep_in_sight()
        self.refresh()

    def move(self, num: int) -> None:
        self._go(self.cursor + num)

    def action_move(self, num: int) -> None:
        self._go(self.cursor + num)

    def action_page(self, direction: int) -> None:
        self._go(self.cursor + direction * max(self._height - 1, 1))

    def action_go(self, index: int) -> None:
        self._go(self._num - 1 if index < 0 else index)

    def on_click(self, event: Click) -> None:
        y = event.get_content_offset_capture(self).y
        index = self._top + y - len(self._heading)
        if y >= len(self._heading) and index < self._num:
            self._go(index)
            if event.chain == 2:
                self.post_message(self.Chosen(self))

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        event.stop()
        self.move(3)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        event.stop()
        self.move(-3)

    def on_resize(self) -> None:
        self._keep_in_sight()

    @property
    def _height(self) -> int:
        return max(self.size.height - len(self._heading), 1)

    def _go(self, index: int) -> None:
        index = min(max(index, 0), max(self._num - 1, 0))
        if index != self.cursor:
            self.cursor = index
            self._keep_in_sight()
            self.refresh()
            self.post_message(self.Moved(self))

    def _keep_in_sight(self) -> None:
        self._top = min(max(self._top, self.cursor - self._height + 1), self.cursor)
        self._top = max(min(self._top, self._num - self._height), 0)

    def render_line(self, y: int) -> Strip:
        width, base = self.size.width, self.rich_style
        palette = make_palette(self.app.theme_variables)
        row = y - len(self._heading)
        index = self._top + row
        if row < 0:
            text = Text(self._heading[y], palette.muted)
        elif self._num == 0:
            text = Text(f" {self._empty}" if row == 0 else "", palette.muted)
        elif index < self._num:
            text = self._make(index)
        else:
            return Strip.blank(width, base)
        if self._num and row >= 0 and index == self.cursor:
            # A mark too: without colour the cursor must be seen as well.
            text = Text.assemble("▌", text[1:] if text.plain.startswith(" ") else text)
            # Dim text would be hard to read on it.
            text.spans = [span for span in text.spans if span.style != palette.muted]
            base += Style(bgcolor=palette.faint, bold=self.has_focus)
        text.no_wrap = True
        segments = [Segment(seg.text, base + (seg.style or Style())) for seg in text.render(self.app.console, end="")]
        return Strip(segments).adjust_cell_length(width, base)
