"""The keys and what the symbols mean, on one page."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from tui.palette import Palette, make_palette
from tui.snapshot import STATE_WORDS, STATES

Keys = tuple[tuple[str, str], ...]
HOME: Keys = (
    ("j k ↓ ↑", "move"),
    ("g G", "first, last run"),
    ("enter", "open the run"),
    ("/", "filter by id, state or note; esc clears"),
    ("s", "sort by slot, name, reward, progress, problems"),
    ("p", "parts and problems"),
)
RUN: Keys = (
    ("1 2 3 4", "charts, config, logs, events"),
    ("h l ← →", "previous, next tab"),
    ("j k", "scroll"),
    ("f", "follow the log"),
    ("esc q", "back"),
)
ACT: Keys = (
    ("a", "add a run"),
    ("e", "evict: out of its slot, with a reason"),
    ("r", "readmit an evicted or failed run"),
    ("d", "delete: into the trash"),
    ("u", "undo the newest delete"),
)
ALWAYS: Keys = (
    ("ctrl+p", "all commands, themes"),
    ("?", "this help"),
    ("q", "quit; the daemons go on"),
)


def describe(read_only: bool, palette: Palette) -> Text:
    text = Text()
    groups = [("Runs", HOME), ("One run", RUN), *([] if read_only else [("Act", ACT)]), ("Always", ALWAYS)]
    for title, keys in groups:
        text.append(f"{title}\n", f"bold {palette.primary}")
        for key, words in keys:
            text.append(f"  {key:<10}", palette.accent).append(f"{words}\n")
        text.append("\n")
    text.append("States\n", f"bold {palette.primary}")
    for state, (symbol, level) in STATES.items():
        text.append(f"  {symbol} {state:<9}", palette.level(level)).append(f" {STATE_WORDS[state]}\n")
    text.rstrip()
    return text


class HelpScreen(ModalScreen[None]):
    """Over any screen."""

    DEFAULT_CSS = """
    HelpScreen {
        align: center middle;
        & > VerticalScroll {
            width: 72; height: auto; max-height: 95%;
            border: round $primary; border-title-color: $primary; background: $surface; padding: 0 2;
            scrollbar-size-vertical: 1;
        }
        & Static { height: auto; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark", "dismiss", "Close"),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
    ]

    def __init__(self, read_only: bool) -> None:
        super().__init__()
        self._read_only = read_only

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = "help"
            box.border_subtitle = "esc closes"
            yield Static(describe(self._read_only, make_palette(self.app.theme_variables)), markup=False)

    def action_scroll(self, direction: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=direction, animate=False)
