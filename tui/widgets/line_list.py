"""A list of any length of which only the visible lines are made: rollouts, checkpoints, daemons, nodes, problems.

Below it, a box of text over a screen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.events import Click
from textual.geometry import Region, Size
from textual.message import Message
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static

KeyT = TypeVar("KeyT")
WidgetT = TypeVar("WidgetT", bound=Widget)


def joined(lines: Sequence[Text]) -> Text:
    """`lines` one below the other, for a `Static`."""
    return Text("\n").join(lines)


class Clipped(Static):
    """Text on as many lines as its style allows; what is cut off below them shows as `…`."""

    def on_mount(self) -> None:
        """Draw the text again whenever the theme changes."""
        self.app.theme_changed_signal.subscribe(self, lambda _: self.update(self.content, layout=False))

    def render_line(self, y: int) -> Strip:
        """Return line `y`, the last one with `…` where there are more."""
        strip, (width, height), style = super().render_line(y), self.size, self.visual_style.rich_style
        if y + 1 < height or self.visual.get_height(self.styles.get_rules(), width) <= height:
            return strip
        end = min(cell_len(strip.text.rstrip(" …")), width - 1)
        return Strip([*strip.crop(0, end), Segment("…", style)]).adjust_cell_length(width, style)


class LineList(ScrollView, Generic[KeyT], can_focus=True):
    """`show` hands it the keys of its lines and how to make one. The cursor stays on its key, whatever moves around it.

    Args:
        empty: what stands there without lines; before the first `show` it tells that they are read.
        opens: whether enter posts `Opened`; a double click posts it in every list.
    """

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
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("g,home", "end(-1)", "First", show=False),
        Binding("G,end", "end(1)", "Last", show=False),
    ]

    class Moved(Message):
        """Another line is under the cursor."""

    class Opened(Message):
        """Enter, or a double click, on the line under the cursor."""

    def __init__(self, empty: str = "", *, id: str | None = None, opens: bool = False) -> None:
        super().__init__(id=id)
        self.cursor = 0
        self._empty, self._is_filled = empty, False
        self._opens = opens
        self.keys: Sequence[KeyT] = ()
        self._make: Callable[[int], Text] = lambda index: Text()
        self._heading: Sequence[Text] = ()

    @property
    def selected(self) -> KeyT | None:
        """The key under the cursor."""
        return self.keys[self.cursor] if self.cursor < len(self.keys) else None

    def show(
        self,
        keys: Sequence[KeyT],
        make: Callable[[int], Text],
        heading: Sequence[Text] = (),
        *,
        cursor: int | None = None,
    ) -> None:
        """A line for each of `keys`, made by `make(index)` when it is seen, under `heading`, which does not scroll.

        `cursor`: the index to go to, where that is not the key under the cursor.
        """
        selected, before = self.selected, (len(self.keys), len(self._heading), self.cursor)
        self.keys, self._make, self._heading, self._is_filled = keys, make, heading, True
        if cursor is None:
            cursor = keys.index(selected) if selected in keys else self.cursor if self.cursor < len(keys) else 0
        self.cursor = min(max(cursor, 0), max(len(keys) - 1, 0))
        after = (len(self.keys), len(self._heading), self.cursor)
        if before[:2] != after[:2]:
            self._fit()
        if before != after:
            self._keep_in_sight()
        self.refresh(layout=before[:2] != after[:2])

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return the number of lines, heading included; the text of an empty list does not count."""
        return len(self.keys) + len(self._heading)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Allow `open` only in a list with `opens`; elsewhere Textual hides its key."""
        return action != "open" or self._opens

    def action_move(self, num: int) -> None:
        """Move the cursor by `num` lines, as far as there are lines; post `Moved` if it moved."""
        index = min(max(self.cursor + num, 0), max(len(self.keys) - 1, 0))
        if index != self.cursor:
            before, self.cursor = self.cursor, index
            self._keep_in_sight()
            for line in (before, index):
                self.refresh_line(len(self._heading) + line)
            self.post_message(self.Moved())

    def action_page(self, direction: int) -> None:
        """Move the cursor by the lines that are visible at one time, less one."""
        self.action_move(direction * max(self.size.height - len(self._heading) - 1, 1))

    def action_end(self, direction: int) -> None:
        """Move the cursor to the last line, or for -1 to the first."""
        self.action_move(direction * len(self.keys))

    def action_open(self) -> None:
        """Post `Opened`; an empty list posts nothing."""
        if self.keys:
            self.post_message(self.Opened())

    def on_click(self, event: Click) -> None:
        """Move the cursor to the clicked line; a double click posts `Opened`, also where enter opens nothing."""
        index = event.y - len(self._heading) + self.scroll_offset.y
        if event.y >= len(self._heading) and 0 <= index < len(self.keys):
            self.action_move(index - self.cursor)
            if event.chain == 2:
                self.action_open()

    def on_resize(self) -> None:
        """Set the width of what scrolls, and keep the cursor visible."""
        self._fit()
        self._keep_in_sight()

    def _fit(self) -> None:
        self.virtual_size = Size(self.size.width, len(self.keys) + len(self._heading))

    def _keep_in_sight(self) -> None:
        self.scroll_to_region(Region(0, self.cursor, 1, len(self._heading) + 1), animate=False, force=True)

    def render_line(self, y: int) -> Strip:
        """Return a line of the heading, a line of the list, which is made here, or the text of an empty list."""
        width, base = self.size.width, self.rich_style
        quiet = base + self.get_component_rich_style("lines--heading")
        if y < len(self._heading):
            return self._strip(self._heading[y], quiet, width)
        index = y - len(self._heading) + self.scroll_offset.y
        if not self.keys and index == 0:
            return self._strip(Text(f" {self._empty if self._is_filled else 'reading …'}"), quiet, width)
        if index >= len(self.keys):
            return Strip.blank(width, base)
        text = self._make(index)
        if index == self.cursor:
            # A mark too: without colour the cursor must be seen as well.
            text = Text.assemble(("▌", base), text[1:] if text.plain.startswith(" ") else text)
            base += Style(bgcolor=self.get_component_rich_style("lines--cursor").bgcolor)
        return self._strip(text, base, width)

    def _strip(self, text: Text, base: Style, width: int) -> Strip:
        line = text.copy()
        line.no_wrap, line.end = True, ""
        line.truncate(width, overflow="ellipsis")
        return Strip(line.render(self.app.console)).adjust_cell_length(width).apply_style(base)


def titled(box: WidgetT, title: str, subtitle: str) -> WidgetT:
    """`box` with words in the upper and the lower edge of its frame, as plain text."""
    box.border_title, box.border_subtitle = Content(title), Content(subtitle)
    return box


class TextScreen(ModalScreen[None]):
    """A box over the screen on which it was opened, with text that scrolls."""

    DEFAULT_CSS = """
    TextScreen {
        align: center middle;
        & > Vertical, & > VerticalScroll {
            height: auto; max-height: 95%; padding: 0 2; background: $surface; scrollbar-size-vertical: 1;
            border: round $primary; border-title-color: $primary; border-subtitle-color: $foreground 50%;
        }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark", "dismiss", "Close"),
        Binding("j", "scroll(1)", "Down", show=False),
        Binding("k", "scroll(-1)", "Up", show=False),
    ]

    def action_scroll(self, num: int) -> None:
        """Scroll by `num` lines, up for a negative number."""
        self.query_one(VerticalScroll).scroll_relative(y=num, animate=False)
