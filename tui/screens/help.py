"""The keys, read from the bindings, and what the symbols mean, on one page."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from tui.keys import key_rows
from tui.model.levels import STATE_WORDS, STATES

FILTER = (
    ("math", "in the id, state or note"),
    ("state:", "state:active,waiting; is:pinned, marked, problem, live"),
    ("reward>0.5", "> >= < <= = !=, 10k, 50%, seen<5m; !TERM is not"),
    ("name~lr", "contains; also note, reason, model"),
)
ALSO = (
    ("ctrl+p", "all commands by name, themes"),
    ("mouse", "head sorts, edge marks, click chooses, again opens"),
)


def describe(read_only: bool) -> Text:
    """Every key, the filter's terms, the states. What is shortened here stands whole in docs/tui.md."""
    text = Text()
    groups = [(place, [(" ".join(keys), words) for keys, words in rows]) for place, rows in key_rows(read_only).items()]
    groups[0][1].extend(ALSO)
    groups.insert(2, ("Filter", list(FILTER)))
    for title, rows in groups:
        text.append(f"{title}\n", "bold primary")
        for key, words in rows:
            text.append(f"  {key:<13} ", "accent").append(f"{words}\n")
        text.append("\n")
    text.append("States\n", "bold primary")
    for state, (symbol, level) in STATES.items():
        text.append(f"  {symbol} {state:<9}", level.style).append(f" {STATE_WORDS[state]}\n")
    text.rstrip()
    return text


class HelpScreen(ModalScreen[None]):
    """The help, over the screen on which it was opened."""

    DEFAULT_CSS = """
    HelpScreen {
        align: center middle;
        & > VerticalScroll {
            width: 78; height: auto; max-height: 95%;
            border: round $primary; border-title-color: $primary; background: $surface; padding: 0 2;
            scrollbar-size-vertical: 1;
        }
        & Static { height: auto; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark", "dismiss", "Close"),
        Binding("j", "scroll(1)", "Down", show=False),
        Binding("k", "scroll(-1)", "Up", show=False),
    ]

    def __init__(self, read_only: bool) -> None:
        super().__init__()
        self._read_only = read_only

    def compose(self) -> ComposeResult:
        """Yield the whole text in a box that scrolls."""
        with VerticalScroll() as box:
            box.border_title = "help"
            box.border_subtitle = "esc closes"
            yield Static(describe(self._read_only), markup=False)

    def action_scroll(self, direction: int) -> None:
        """Scroll by so many lines, up for a negative number."""
        self.query_one(VerticalScroll).scroll_relative(y=direction, animate=False)
