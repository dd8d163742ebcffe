"""The problems of the house in words, and each part with the end of its log: what `prl status` says, always current."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from tui.palette import Palette, make_palette
from tui.snapshot import Level, Part, Snapshot

NUM_LOG_LINES = 6


def describe(snapshot: Snapshot, palette: Palette) -> Text:
    text = Text()
    num = len(snapshot.problems)
    text.append(f"Problems ({num})\n", f"bold {palette.primary}")
    if not num:
        text.append("✔ none\n", palette.success)
    for problem in snapshot.problems:
        text.append("▲ ", palette.error).append(problem.name, "bold").append(f"  {problem.text}\n")
    text.append("\nParts\n", f"bold {palette.primary}")
    for part in snapshot.parts:
        _append_part(text, part, palette)
    text.rstrip()
    return text


def _append_part(text: Text, part: Part, palette: Palette) -> None:
    colour = palette.level(part.level)
    text.append(f"{part.symbol} ", colour).append(f"{part.name:<14}", "bold").append(f" {part.state:<9}", colour)
    facts = [f"pid {part.pid}" if part.pid else "", f"{part.num_restarts} restarts" if part.num_restarts else ""]
    text.append("  " + "  ".join(fact for fact in facts if fact), palette.muted)
    text.append("\n")
    if part.detail:
        text.append(f"    {part.detail}\n", palette.muted if part.level < Level.WARN else palette.text)
    if part.level >= Level.WARN:
        for line in part.log_tail[-NUM_LOG_LINES:]:
            text.append(f"    │ {line}\n", palette.muted)


class PartsScreen(ModalScreen[None]):
    """Over the home screen."""

    DEFAULT_CSS = """
    PartsScreen {
        align: center middle;
        & > VerticalScroll {
            width: 90%; max-width: 120; height: auto; max-height: 90%;
            border: round $primary; border-title-color: $primary; background: $surface; padding: 1 2;
            scrollbar-size-vertical: 1;
        }
        & Static { height: auto; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,P", "dismiss", "Close"),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
    ]

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self._snapshot = snapshot
        self._text = Static(markup=False)

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = "parts and problems"
            box.border_subtitle = "esc closes"
            yield self._text

    def on_mount(self) -> None:
        self.show_house(self._snapshot)

    def show_house(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._text.update(describe(snapshot, make_palette(self.app.theme_variables)))

    def action_scroll(self, direction: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=direction, animate=False)
