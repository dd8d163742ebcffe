"""One line with the outcome of the last action."""

from __future__ import annotations

from rich.text import Text
from textual.app import RenderResult
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget

from tui.messages import ActionEntry
from tui.palette import make_palette
from tui.widgets.header import spread

SYMBOLS = {"running": "◌", "done": "✔", "failed": "✖"}


class CommandLine(Widget):
    """Hidden until the first action."""

    DEFAULT_CSS = """
    CommandLine { height: 1; display: none; background: $panel; padding: 0 1; }
    CommandLine.-used { display: block; }
    """
    entry: reactive[ActionEntry | None] = reactive(None)

    def watch_entry(self, entry: ActionEntry | None) -> None:
        self.set_class(entry is not None, "-used")

    class Asked(Message):
        """The line was clicked."""

    def on_click(self) -> None:
        self.post_message(self.Asked())

    def render(self) -> RenderResult:
        entry, palette = self.entry, make_palette(self.app.theme_variables)
        if entry is None:
            return Text()
        colour = {"running": palette.secondary, "done": palette.success, "failed": palette.error}[entry.state]
        outcome = Text.assemble((f"{SYMBOLS[entry.state]} {entry.text}", colour), no_wrap=True, end="")
        outcome.truncate(max(self.size.width * 2 // 3, 10), overflow="ellipsis")
        return spread(Text.assemble(("$ ", palette.muted), entry.command, no_wrap=True), outcome, self.size.width)
