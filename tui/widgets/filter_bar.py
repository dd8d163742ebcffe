"""The filter line: an input that completes fields and marks invalid terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.highlighter import Highlighter
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.suggester import Suggester
from textual.widgets import Input, Static

from tui.model.query import Query, complete, parse


class _Painter(Highlighter):
    """Underlines the terms that are wrong."""

    def highlight(self, text: Text) -> None:
        for error in parse(text.plain).errors:
            text.stylize("bold red underline", error.start, error.end)


class _Completer(Suggester):
    def __init__(self, run_ids: Callable[[], Sequence[str]]) -> None:
        super().__init__(use_cache=False, case_sensitive=True)
        self._run_ids = run_ids

    async def get_suggestion(self, value: str) -> str | None:
        return complete(value, self._run_ids())


class FilterInput(Input):
    """Tab takes the suggestion, as in a shell."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("tab", "cursor_right_all", "Complete", show=False)]

    def action_cursor_right_all(self) -> None:
        """Go to the end of the text and take the suggestion, if there is one."""
        self.cursor_position = len(self.value)
        self.action_cursor_right()


class FilterBar(Horizontal):
    """Hidden while there is no filter. `parsed` is what the text means."""

    DEFAULT_CSS = """
    FilterBar {
        height: 1; display: none; background: $panel; padding: 0 1;
        &.-open { display: block; }
        & > #slash { width: 2; color: $accent; }
        & > Input { width: 1fr; padding: 0; background: $panel; }
        & > #said { width: auto; max-width: 60%; color: $foreground 60%; padding-left: 2; }
        &.-wrong > #said { color: $text-error; }
    }
    """

    def __init__(self, run_ids: Callable[[], Sequence[str]]) -> None:
        super().__init__(id="filter-bar")
        self.input = FilterInput(
            placeholder="words, or state:active reward>0.5 name~math",
            id="filter",
            select_on_focus=False,
            compact=True,
            highlighter=_Painter(),
            suggester=_Completer(run_ids),
        )
        self.parsed = Query()
        self._said = Static(id="said", markup=False)
        self._said_now = ""

    def compose(self) -> ComposeResult:
        """Yield the slash, the input and the text of `say_count`."""
        yield Static("/", id="slash", markup=False)
        yield self.input
        yield self._said

    def on_mount(self) -> None:
        """Keep the input from taking the focus before `open`."""
        self.input.can_focus = False  # or it takes the keys when the table of an empty workspace cannot

    def take(self, text: str) -> None:
        """`text` is the filter now."""
        self.parsed = parse(text)
        self.set_class(bool(self.parsed.errors), "-wrong")

    def put(self, text: str) -> None:
        """Write `text` into the input; an empty one hides the bar."""
        self.input.value = text
        if text:
            self.add_class("-open")
        else:
            self.close()

    def say_count(self, num_shown: int, num_all: int) -> None:
        """Say what is wrong, else how much is left."""
        errors = self.parsed.errors
        said = errors[0].message if errors else f"{num_shown} of {num_all}"
        if said != self._said_now:
            self._said_now = said
            self._said.update(Content(said))

    def open(self) -> None:
        """Show the bar, empty, and focus its input."""
        self.input.value = ""
        self.add_class("-open")
        self.input.can_focus = True
        self.input.focus()

    def close(self) -> None:
        """Hide the bar; its text stays, its input cannot take the focus before `open`."""
        self.remove_class("-open")
        self.input.can_focus = False
