"""What happened to a run, newest last: what people did and why, admission, restarts, evictions. Plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from tui import fmt
from tui.readers.run_events import Event, EventsData

_INDENT = 32
MAX_LINES_EACH = 40


def describe(events: Sequence[Event], width: int) -> Text:
    """One event a paragraph: time (UTC), kind, text, person; wrapped under the text, at most MAX_LINES_EACH lines."""
    if not events:
        return Text.styled("no events yet: actions, admission, restarts and evictions appear here", "muted")
    text = Text()
    room = max(width - _INDENT, 20)
    for event in events:
        text.append(f"{fmt.stamp(event.time)}Z ", "muted")
        text.append(f"{event.kind:<10} ", f"bold {_colour(event)}")
        pieces = [piece for line in event.text.splitlines() for piece in textwrap.wrap(line, room) or [""]]
        if (num_more := len(pieces) - MAX_LINES_EACH) > 0:
            pieces[MAX_LINES_EACH:] = [f"… {fmt.counted(num_more, 'more line')}"]
        by = f"by {event.who}" if event.who else ""
        if pieces and len(pieces[-1]) + len(by) + 2 <= room:
            text.append(f"\n{' ' * _INDENT}".join(pieces)).append(f"  {by}\n", "muted")
        else:
            text.append("".join(f"{piece}\n{' ' * _INDENT}" for piece in pieces))
            text.append(f"{by}\n", "muted")
    text.rstrip()
    return text


def _colour(event: Event) -> str:
    colours = {
        **dict.fromkeys(("invalid", "failed", "error"), "error"),
        **dict.fromkeys(("evict", "evicted", "restart", "stalled", "warning", "left", "delete"), "warning"),
        **dict.fromkeys(("add", "admitted", "readmit", "finished", "done"), "success"),
    }
    return colours.get(event.kind, "secondary")


class EventsView(VerticalScroll):
    """Scrolls; shows text only. Stays at the newest event unless scrolled away."""

    DEFAULT_CSS = """
    EventsView { background: $surface; scrollbar-size-vertical: 1; & > Static { padding: 0 1; height: auto; } }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", "Down", show=False),
        Binding("k", "scroll_up", "Up", show=False),
        Binding("g", "scroll_home", "Oldest", show=False),
        Binding("G", "scroll_end", "Newest", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(id="events")
        self._text = Static(markup=False)
        self._data: EventsData | None = None

    def compose(self) -> ComposeResult:
        """Yield the text."""
        yield self._text

    def on_mount(self) -> None:
        """Draw the text again whenever the theme changes."""
        self.app.theme_changed_signal.subscribe(self, lambda _: self._draw())

    def on_resize(self) -> None:
        """Wrap the text for the width."""
        self._draw()

    def show(self, data: EventsData) -> None:
        """Show the events of `data`; scroll to the newest the first time, and later if the end was visible."""
        follows = self._data is None or self.is_vertical_scroll_end
        self._data = data
        self._draw()
        if follows:
            self.call_after_refresh(self.scroll_end, animate=False)

    def _draw(self) -> None:
        if self._data is not None:
            self._text.update(describe(self._data.events, max(self.size.width - 3, 40)))
