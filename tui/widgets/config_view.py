"""A run's config in effect (its text, all its values, or its differences to another run), and what happened to the run.

The text is highlighted and numbered, with what is wrong on top and at its line; the values have their defaults. Events
are plain text, newest last: what people did and why, admission, restarts, evictions.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.highlight import highlight
from textual.message import Message

from daemons.details import Difference
from prime_rl.utils.text import CleanText, one_line
from tui import fmt
from tui.messages import TabAsked
from tui.readers.run_config import ConfigData, ConfigRequest, Event, EventsData, Value, toml_text
from tui.readers.tabs import CONFIG
from tui.widgets.line_list import Clipped

MAX_LINES = 2_000
MAX_KEY_WIDTH = 36


def describe_file(data: ConfigData) -> Content:
    """Highlighted TOML with line numbers, MAX_LINES at most; lines with errors carry a mark that does not need colour.

    Before it the changes that made it. Without text: what is wrong with the file, and what to do.
    """
    if data.text is None:
        advice = "a run needs it; copy one from another run or from configs/"
        return Content(f"no readable file {data.path}: {advice}")
    if not data.text.strip():
        return Content(f"{data.path} is empty: write the run's config into it; configs/ has examples")
    texts = data.text.splitlines()
    lines = highlight("\n".join(texts[:MAX_LINES]), language="toml").split("\n", allow_blank=True)
    width = len(str(len(lines)))
    marked = set(data.error_lines)
    built = [Content.styled(change, "$foreground 60%") for change in data.changes]
    for number, line in enumerate(lines, start=1):
        if number in marked:
            built.append(Content.assemble((f"▶ {number:>{width}} ", "bold $text-error"), line.stylize("on $error 20%")))
        else:
            built.append(Content.assemble((f"  {number:>{width}} ", "$foreground 35%"), line))
    if (num_more := len(texts) - MAX_LINES) > 0:
        words = f"… {fmt.counted(num_more, 'more line')}: {data.path}"
        has_errors = max(marked, default=0) > MAX_LINES
        built.append(Content.styled(f"▶ {words}", "bold $text-error") if has_errors else Content(f"  {words}"))
    return Content("\n").join(built)


def describe_values(values: Sequence[Value]) -> Text:
    """Every key; defaults are dimmed and marked."""
    width = min(max((len(value.key) for value in values), default=0), MAX_KEY_WIDTH)
    num_said = sum(not value.is_default for value in values)
    text = Text.assemble(
        (f"{num_said} of {len(values)} keys are set in orch.toml (●), the others are defaults\n\n", "muted")
    )
    for value in values:
        text.append("  " if value.is_default else "● ", "success")
        text.append(f"{fmt.shorten_middle(value.key, width):<{width}}  ", "" if not value.is_default else "muted")
        text.append(f"{value.text}\n", "muted" if value.is_default else "accent")
    return text


def value_text(value: object) -> CleanText:
    """A value of a difference: as TOML, but a text as it is and a float with six digits; a dash for none."""
    if value is None or isinstance(value, float):
        return one_line(fmt.DASH if value is None else f"{value:g}")
    return one_line(value) if isinstance(value, str) else toml_text(value)


def describe_differences(mine: str, other: str, differences: Sequence[Difference], width: int) -> Text:
    """Key by key: this run's value, the other's."""
    if not differences:
        return Text.styled(f"{mine} and {other} have equal configs", "muted")
    key_width = min(max(len(each.name) for each in differences), MAX_KEY_WIDTH)
    column = max((width - key_width - 8) // 2, 10)
    cut = fmt.shorten_middle
    text = Text.styled(f"{len(differences)} keys differ (defaults included)\n\n", "muted")
    text.append(f"{'key':<{key_width}}  {cut(mine, column):<{column}}  {cut(other, column)}\n", "bold muted")
    for each in differences:
        text.append(f"{cut(each.name, key_width):<{key_width}}  ", "primary")
        ours, theirs = (fmt.shorten(value_text(value), column) for value in each.values)
        text.append(f"{ours:<{column}}  ", "accent").append(f"{theirs}\n", "secondary")
    return text


class ConfigView(VerticalScroll):
    """Scrolls; shows text only. Asks for another run to compare with by a message."""

    DEFAULT_CSS = """
    ConfigView {
        background: $surface;
        scrollbar-size-vertical: 1;
        & > #config-error {
            display: none; margin: 0 1 1 1; padding: 0 1; color: $text-error; border-left: outer $error; height: auto;
        }
        &.-invalid > #config-error { display: block; }
        & > #config-text { padding: 0 1; height: auto; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", "Down", show=False),
        Binding("k", "scroll_up", "Up", show=False),
        Binding("g", "scroll_home", "Start", show=False),
        Binding("G", "scroll_end", "End", show=False),
        Binding("v", "values", "Defaults", tooltip="all values with their defaults, or the file"),
        Binding("w", "compare", "Compare", tooltip="differences to another run"),
        Binding("escape", "leave", "Back", show=False),
    ]

    class Compare(Message):
        """The user asks to choose the run to compare with."""

    def __init__(self) -> None:
        super().__init__(id="config")
        self._error = Clipped(id="config-error", markup=False)
        self._text = Clipped(id="config-text", markup=False)
        self.data: ConfigData | None = None
        self.request = ConfigRequest()

    def compose(self) -> ComposeResult:
        """Yield what is wrong, hidden until something is, and the text."""
        yield self._error
        yield self._text

    def show(self, data: ConfigData) -> None:
        """Show `data`: the file, its values or the differences, with what is wrong on top."""
        self.data = data
        self._draw()

    def on_resize(self) -> None:
        """Draw differences again: their columns depend on the width."""
        if self.data is not None and self.data.other_id:
            self._draw()

    def action_values(self) -> None:
        """Request all values with their defaults, or the file again."""
        self._want(ConfigRequest(wants_all=not self.request.wants_all))

    def action_compare(self) -> None:
        """End a comparison; without one post `Compare`: the screen lets the user choose the run."""
        if self.request.other is not None:
            self._want(ConfigRequest())
        else:
            self.post_message(self.Compare())

    def action_leave(self) -> None:
        """Go back to the file; from there leave the screen."""
        if self.request != ConfigRequest():
            self._want(ConfigRequest())
        else:
            self.app.pop_screen()

    def compare_with(self, other: str) -> None:
        """Request the differences to the run `other`."""
        self._want(ConfigRequest(other=other))

    def _want(self, request: ConfigRequest) -> None:
        self.request = request
        self.scroll_home(animate=False)
        self.post_message(TabAsked(CONFIG, request))

    def _draw(self) -> None:
        data = self.data
        if data is None:
            return
        error = data.problem or data.error or data.edited
        self.set_class(error is not None, "-invalid")
        self._error.update(Content(error or ""))
        self._text.update(self._content(data))

    def _content(self, data: ConfigData) -> Content | Text:
        if data.other_id is not None and data.problem is None:
            width = max(self.size.width - 3, 40)
            return describe_differences(data.run_id, data.other_id, data.differences, width)
        if data.values is not None:
            return describe_values(data.values)
        return describe_file(data)


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
        self._text = Clipped(markup=False)
        self._data: EventsData | None = None

    def compose(self) -> ComposeResult:
        """Yield the text."""
        yield self._text

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
