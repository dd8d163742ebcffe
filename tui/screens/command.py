"""`:` opens this line at the bottom of any screen; enter runs the command, and an error is shown beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.screen import ModalScreen
from textual.suggester import Suggester
from textual.widgets import Input, Static

from prime_rl.utils.text import one_line
from tui.keys import Command, CommandError, complete, parse
from tui.widgets.filter_bar import FilterInput


class _Completer(Suggester):
    def __init__(self, commands: Mapping[str, Command]) -> None:
        super().__init__(use_cache=False, case_sensitive=True)
        self._commands = commands

    async def get_suggestion(self, value: str) -> str | None:
        return complete(value, self._commands)


class LineScreen(ModalScreen[None]):
    """A screen with one line to type in: what is typed before the line has the focus is typed into it then."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead: list[events.Key] = []

    def on_key(self, event: events.Key) -> None:
        """Keep a key that comes before the line has the focus; escape is never kept."""
        if event.key != "escape" and not self._line_has_focus():
            event.stop()
            self._ahead.append(event)

    def on_descendant_focus(self) -> None:
        """Type the kept keys into the line as soon as it has the focus."""
        if self._line_has_focus():
            ahead, self._ahead = self._ahead, []
            for event in ahead:
                self.query_one(Input).post_message(events.Key(event.key, event.character))

    def _line_has_focus(self) -> bool:
        return any(line.has_focus for line in self.query(Input))


class CommandScreen(LineScreen):
    """Opens over any screen, which defines its commands."""

    DEFAULT_CSS = """
    CommandScreen {
        background: transparent;
        align: left bottom;
        & > Horizontal { height: 1; background: $panel; padding: 0 1; }
        & #colon { width: 2; color: $accent; }
        & Input { width: 1fr; padding: 0; background: $panel; }
        & #said { width: auto; max-width: 70%; color: $foreground 60%; padding-left: 2; }
        & #said.-wrong { color: $text-error; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Close")]

    def __init__(self, commands: Mapping[str, Command]) -> None:
        super().__init__()
        self._commands = commands

    def compose(self) -> ComposeResult:
        """Yield the input, and beside it what the command does or what is wrong."""
        with Horizontal():
            yield Static(":", id="colon", markup=False)
            yield FilterInput(
                placeholder="runs, sort reward, theme prl-light ...",
                id="command",
                compact=True,
                suggester=_Completer(self._commands),
            )
            yield Static(id="said", markup=False)

    def on_mount(self) -> None:
        """Give the input the focus."""
        self.query_one(Input).focus()

    @on(Input.Changed)
    def _changed(self, event: Input.Changed) -> None:
        self._say("")
        name = event.value.partition(" ")[0]
        if name in self._commands:
            command = self._commands[name]
            self._say(f"{command.usage}: {command.help}")

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        if not event.value.strip():
            self.dismiss()
            return
        try:
            command, words = parse(event.value, self._commands)
        except CommandError as error:
            self._say(one_line(str(error)), wrong=True)
            return
        self.dismiss()
        self.app.call_later(self._run, command, words)

    def _run(self, command: Command, words: str) -> None:
        """After this screen is gone, for the command may open another."""
        try:
            command.run(words)
        except CommandError as error:
            self.app.notify(one_line(str(error)), severity="error", markup=False)

    def _say(self, text: str, *, wrong: bool = False) -> None:
        said = self.query_one("#said", Static)
        said.set_class(wrong, "-wrong")
        said.update(Content(text))
