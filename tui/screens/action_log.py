"""The actions of this session: each with its outcome and the shell command that does the same, to copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from tui import fmt
from tui.messages import ActionEntry
from tui.widgets.foot import SYMBOLS


def describe(entry: ActionEntry, width: int) -> Text:
    """One line: when, how it went, the command."""
    colour = {"running": "secondary", "done": "success", "failed": "error"}[entry.state]
    when = time.strftime("%H:%M:%S", time.localtime(entry.at))
    command = fmt.shorten(entry.command, width - len(when) - 3)
    return Text.assemble((f"{when} ", "muted"), (f"{SYMBOLS[entry.state]} ", colour), command)


class ActionLogScreen(ModalScreen[None]):
    """Over any screen. The newest action is on top."""

    DEFAULT_CSS = """
    ActionLogScreen {
        align: center middle;
        & > Vertical {
            width: 94%; max-width: 150; height: auto; max-height: 90%;
            border: round $primary; border-title-color: $primary; border-subtitle-color: $foreground 50%;
            background: $surface; padding: 0 1;
        }
        & OptionList { height: auto; max-height: 16; background: $surface; }
        & VerticalScroll { height: auto; max-height: 12; border-top: solid $border; padding: 0 1; }
        & Static { height: auto; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,L", "dismiss", "Close"),
        Binding("y", "copy", "Copy the command"),
        Binding("j", "move(1)", "Down", show=False),
        Binding("k", "move(-1)", "Up", show=False),
    ]

    def __init__(self, entries: Callable[[], Sequence[ActionEntry]]) -> None:
        super().__init__()
        self._entries = entries
        self._shown: list[ActionEntry] = []
        self._options = OptionList(markup=False, compact=True)
        self._detail = Static(markup=False)

    def compose(self) -> ComposeResult:
        """Yield the list of actions, and below it all about the one under the cursor."""
        with Vertical() as box:
            box.border_title = "actions of this session"
            box.border_subtitle = "y copies the command · esc closes"
            yield self._options
            with VerticalScroll(can_focus=False):
                yield self._detail

    def on_mount(self) -> None:
        """Fill the list; the cursor stands on the newest action."""
        self._refill()
        self._options.focus()

    def show_action(self, entry: ActionEntry) -> None:
        """Fill the list again when the app reports an action; the cursor keeps its line."""
        if self.is_mounted:
            self._refill()

    def _refill(self) -> None:
        place = self._options.highlighted
        self._shown = list(reversed(self._entries()))
        width = max(min(self.app.size.width * 94 // 100, 150) - 8, 20)
        self._options.clear_options()
        self._options.add_options([Option(describe(entry, width)) for entry in self._shown])
        if self._shown:
            self._options.highlighted = min(place or 0, len(self._shown) - 1)
        self._tell()

    @on(OptionList.OptionHighlighted)
    def _tell(self) -> None:
        place = self._options.highlighted
        entry = self._shown[place] if place is not None and place < len(self._shown) else None
        words = f"{entry.state}: {entry.detail or entry.text}\n\n$ {entry.command}" if entry else "no actions yet"
        self._detail.update(Content(words))

    @on(OptionList.OptionSelected)
    def action_copy(self) -> None:
        """Copy the command under the cursor to the clipboard; enter and a click do it too."""
        place = self._options.highlighted
        if place is not None and place < len(self._shown):
            command = self._shown[place].command
            self.app.copy_to_clipboard(command)
            self.notify(f"copied: {command}", timeout=3, markup=False)

    def action_move(self, by: int) -> None:
        """Move the cursor one line: down for a positive `by`, else up."""
        if by > 0:
            self._options.action_cursor_down()
        else:
            self._options.action_cursor_up()
