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
    ("j k ↓ ↑", "move; g G first and last, pgup pgdn a page"),
    ("enter", "open the run; marked runs are drawn beside it"),
    ("space", "mark; v up to here, J K on the way, * all, i invert"),
    ("p", "pin to the top, or let go"),
    ("s S", "sort by the next column, the other way round"),
    ("/", "filter; tab completes"),
    ("esc", "let go of the marks, then of the filter"),
    ("mouse", "head sorts, edge marks, click chooses, again opens"),
)
FILTER: Keys = (
    ("math", "in the id, state or note"),
    ("state:", "state:active,waiting; is:pinned, marked, problem, live"),
    ("reward>0.5", "> >= < <= = !=, 10k, 50%, seen<5m; !TERM is not"),
    ("name~lr", "contains; also note, reason, model"),
)
RUN: Keys = (
    ("1 ... 6", "charts, rollouts, config, log, checkpoints, events"),
    ("tab", "next tab; shift+tab the one before"),
    ("← → j k", "charts: values at a step; choose a chart; m it alone"),
    ("+ - < > 0", "charts: zoom, earlier and later steps, all"),
    ("y s t w", "charts: log, smooth, stacked, with other runs"),
    ("o n N", "rollouts: order, next, previous; space reads on"),
    ("v w", "config: all values, differences to another run"),
    ("f / n N v", "log: follow, search, next, previous, level"),
    ("esc q", "back"),
)
ACT: Keys = (
    ("a c", "add a run, clone this one"),
    ("e", "evict: out of its slot, with a reason"),
    ("r", "readmit evicted or failed runs"),
    ("d u", "delete: into the trash; undo brings it back"),
    ("enter", "on a checkpoint of a run: go on from it"),
    ("x", "start a daemon anew"),
    ("U D", "start the workspace, stop it"),
    ("L", "what was done here, and its commands to copy"),
)
ALWAYS: Keys = (
    ("1 ... 5", "runs, the chosen run, system, nodes, problems"),
    (":", "command line: sort reward, open RUN, theme NAME ..."),
    ("ctrl+p", "all commands, themes"),
    ("?", "this help"),
    ("q", "quit; the daemons go on"),
)


def describe(read_only: bool, palette: Palette) -> Text:
    text = Text()
    groups = [
        ("Runs", HOME),
        ("Filter", FILTER),
        ("One run", RUN),
        *([] if read_only else [("Act", ACT)]),
        ("Always", ALWAYS),
    ]
    for title, keys in groups:
        text.append(f"{title}\n", f"bold {palette.primary}")
        for key, words in keys:
            text.append(f"  {key:<11}", palette.accent).append(f"{words}\n")
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
