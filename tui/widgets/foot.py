"""The foot of a screen: one line with the outcome of the last action, and as many keys as stand there whole."""

from __future__ import annotations

from rich.text import Text
from textual.app import RenderResult
from textual.events import Resize
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Footer, Label

from tui.messages import ActionEntry
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
        """Show the line while there is an entry."""
        self.set_class(entry is not None, "-used")

    class Asked(Message):
        """The line was clicked."""

    def on_click(self) -> None:
        """Post `Asked`: the screen opens the list of actions."""
        self.post_message(self.Asked())

    def render(self) -> RenderResult:
        """Return the command and, at the right, its outcome, cut to two thirds of the width; empty without an entry."""
        entry = self.entry
        if entry is None:
            return Text()
        colour = {"running": "secondary", "done": "success", "failed": "error"}[entry.state]
        outcome = Text.assemble((f"{SYMBOLS[entry.state]} {entry.text}", colour), no_wrap=True, end="")
        outcome.truncate(max(self.size.width * 2 // 3, 10), overflow="ellipsis")
        return spread(Text.assemble(("$ ", "muted"), entry.command, no_wrap=True), outcome, self.size.width)


class KeyFooter(Footer):
    """The keys of the screen, without those that do not fit into its width."""

    def __init__(self) -> None:
        super().__init__(compact=True, show_command_palette=False)

    async def recompose(self) -> None:
        """Make the keys again, and forget their size, so that `watch_virtual_size` is called for an equal one too."""
        await super().recompose()
        self.set_reactive(Widget.virtual_size, Size(0, 0))  # so the size of what is new is one that has changed

    def on_resize(self, event: Resize) -> None:
        """Hide the keys that do not fit into the width, and show those that do."""
        self._hide_what_is_cut()

    def watch_virtual_size(self) -> None:
        """Keys were laid out. Under a dialog `call_after_refresh` would wait for the dialog, not for them."""
        self.call_next(self._hide_what_is_cut)

    def _hide_what_is_cut(self) -> None:
        """The first key that does not fit and all after it; with a label its keys, which stand before it."""
        shown = list(self.children)
        fits = next((at for at, key in enumerate(shown) if key.region.right > self.region.right), len(shown))
        if fits < len(shown) and isinstance(shown[fits], Label):
            fits -= 1
        for at, key in enumerate(shown):
            key.visible = at < fits
