"""A list of lines with a cursor that stays on its line, whatever moves around it: daemons, nodes, problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

Line = tuple[str, Text]


def joined(lines: Sequence[Text]) -> Text:
    """`lines` one below the other, for a `Static`."""
    return Text("\n").join(lines)


class LineList(ScrollView, can_focus=True):
    """`show` hands it lines with their keys, under a heading that does not scroll. A line of key "" is never chosen."""

    DEFAULT_CSS = """
    LineList {
        height: auto; background: $background; scrollbar-size-vertical: 1; overflow-x: hidden;
        & > .lines--cursor { background: $primary 18%; }
        &:focus > .lines--cursor { background: $primary 28%; }
        & > .lines--heading { color: $foreground 45%; }
    }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = {"lines--cursor", "lines--heading"}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "Open", key_display="⏎"),
        Binding("j,down", "move(1)", "Down", show=False),
        Binding("k,up", "move(-1)", "Up", show=False),
        Binding("pagedown", "move(10)", "Page down", show=False),
        Binding("pageup", "move(-10)", "Page up", show=False),
        Binding("g,home", "end(-1)", "First", show=False),
        Binding("G,end", "end(1)", "Last", show=False),
    ]

    class Moved(Message):
        """Another line is under the cursor."""

    class Opened(Message):
        """Enter, or a double click, on a line."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    def __init__(self, *, id: str | None = None, opens: bool = True) -> None:
        super().__init__(id=id)
        self._opens = opens
        self._lines: list[Line] = []
        self._heading: list[Text] = []
        self._cursor = 0

    @property
    def selected(self) -> str | None:
        """The key under the cursor."""
        return self._lines[self._cursor][0] if self._cursor < len(self._lines) else None

    @property
    def keys(self) -> list[str]:
        return [key for key, _ in self._lines if key]

    def show(self, lines: Sequence[Line], heading: Sequence[Text] = ()) -> None:
        selected = self.selected
        self._lines, self._heading = list(lines), list(heading)
        places = [index for index, (key, _) in enumerate(lines) if key and key == selected]
        free = [index for index, (key, _) in enumerate(lines) if key]
        self._cursor = (places or [index for index in free if index >= self._cursor] or free or [0])[0]
        size = Size(self.size.width, len(lines) + len(heading))
        if size != self.virtual_size:
            self.virtual_size = size
        self.refresh(layout=size.height != len(self._lines) + len(self._heading))
        self.refresh()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._lines) + len(self._heading)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "open" or self._opens

    def action_move(self, num: int) -> None:
        free = [index for index, (key, _) in enumerate(self._lines) if key]
        if free:
            at = free.index(self._cursor) if self._cursor in free else 0
            self._go(free[min(max(at + num, 0), len(free) - 1)])

    def action_end(self, direction: int) -> None:
        self.action_move(direction * len(self._lines))

    def action_open(self) -> None:
        if self.selected:
            self.post_message(self.Opened(self.selected))

    def on_click(self, event: Click) -> None:
        index = event.y - len(self._heading) + self.scroll_offset.y
        if event.y >= len(self._heading) and 0 <= index < len(self._lines) and self._lines[index][0]:
            self._go(index)
            if event.chain == 2:
                self.action_open()

    def on_resize(self) -> None:
        self.virtual_size = Size(self.size.width, len(self._lines) + len(self._heading))

    def _go(self, index: int) -> None:
        if index == self._cursor:
            return
        self._cursor = index
        top = len(self._heading)
        self.scroll_to_region(Region(0, index, 1, top + 1), animate=False, force=True)
        self.refresh()
        self.post_message(self.Moved())

    def render_line(self, y: int) -> Strip:
        width, base = self.size.width, self.rich_style
        if y < len(self._heading):
            return self._strip(self._heading[y], base + self.get_component_rich_style("lines--heading"), width)
        index = y - len(self._heading) + self.scroll_offset.y
        if index >= len(self._lines):
            return Strip.blank(width, base)
        key, text = self._lines[index]
        if key and index == self._cursor:
            # A mark too: without colour the cursor must be seen as well.
            text = Text.assemble(("▌", base), text[1:])
            base += Style(bgcolor=self.get_component_rich_style("lines--cursor").bgcolor)
        return self._strip(text, base, width)

    def _strip(self, text: Text, base: Style, width: int) -> Strip:
        line = text.copy()
        line.no_wrap, line.end = True, ""
        line.truncate(width, overflow="ellipsis")
        return Strip(line.render(self.app.console)).adjust_cell_length(width).apply_style(base)
