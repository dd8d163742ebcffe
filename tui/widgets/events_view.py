"""What happened to a run, newest last: actions of people, validation errors, eviction. Plain text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from tui.palette import Palette, make_palette
from tui.run_detail import Event


def describe(events: Sequence[Event], palette: Palette) -> Text:
    if not events:
        return Text("nothing happened to this run yet: actions, evictions and config errors show here", palette.muted)
    lines = []
    for event in events:
        when = "?" * 19 if event.time is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event.time))
        line = Text.assemble((f"{when}Z  ", palette.muted), (f"{event.kind:<9}", f"bold {_colour(event, palette)}"))
        line.append("  ")
        line.append((event.text or "-").replace("\n", "\n" + " " * 33))
        if event.who:
            line.append(f"  ({event.who})", palette.muted)
        lines.append(line)
    return Text("\n").join(lines)


def _colour(event: Event, palette: Palette) -> str:
    colours = {"invalid": palette.error, "evict": palette.warning, "evicted": palette.warning, "add": palette.success}
    return colours.get(event.kind, palette.secondary)


class EventsView(VerticalScroll):
    """Scrolls; shows text only."""

    DEFAULT_CSS = """
    EventsView { background: $surface; scrollbar-size-vertical: 1; & > Static { padding: 0 1; height: auto; } }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", "Down", show=False),
        Binding("k", "scroll_up", "Up", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(id="events")
        self._text = Static(markup=False)

    def compose(self) -> ComposeResult:
        yield self._text

    def show(self, events: Sequence[Event]) -> None:
        self._text.update(describe(events, make_palette(self.app.theme_variables)))
