"""What differs between two runs, as `prl runs diff` tells it. It acts on nothing."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from daemons.differences import Difference, RunDifference
from prime_rl.utils.text import CleanText, one_line
from tui import fmt

MAX_VALUE = 40  # cells of a value; the config tab has all of it


class DiffDialog(ModalScreen[None]):
    """Two parts: config, result."""

    DEFAULT_CSS = """
    DiffDialog {
        align: center middle;
        & .box {
            width: auto; min-width: 40; max-width: 98%; height: auto; max-height: 98%;
            border: round $primary; border-title-color: $primary; border-subtitle-color: $foreground 50%;
            background: $surface; padding: 0 2;
        }
        & VerticalScroll { width: auto; max-width: 100%; height: auto; max-height: 40; scrollbar-size-vertical: 1; }
        & VerticalScroll Static { width: auto; }
        & .command { color: $foreground 60%; margin-top: 1; width: auto; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close"),
        Binding("j", "scroll(1)", "Down", show=False),
        Binding("k", "scroll(-1)", "Up", show=False),
    ]

    def __init__(self, difference: RunDifference, command: CleanText) -> None:
        super().__init__()
        self._difference, self._command = difference, command

    def compose(self) -> ComposeResult:
        """Yield the table, and the shell command that prints the same."""
        with Vertical(classes="box") as box:
            box.border_title = Content("differences")
            box.border_subtitle = "esc closes"
            with VerticalScroll():
                yield Static(describe(self._difference), markup=False)
            yield Static(Content(f"$ {self._command}"), classes="command", markup=False)

    def action_scroll(self, step: int) -> None:
        """Scroll by `step` lines, up when it is negative."""
        self.query_one(VerticalScroll).scroll_relative(y=step, animate=False)


def describe(difference: RunDifference) -> Text:
    """Three columns: key, and the value of each run."""
    rows = [_cells(each) for each in (*difference.config, *difference.result)]
    heads = ("", *(fmt.shorten_middle(run_id, MAX_VALUE) for run_id in difference.run_ids))
    widths = [max(len(row[at]) for row in [heads, *rows]) for at in range(3)]
    text = Text(no_wrap=True)

    def line(cells: tuple[str, ...], style: str) -> None:
        text.append("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip(), style)
        text.append("\n")

    line(heads, "bold")
    for title, part in (("config", difference.config), ("result", difference.result)):
        text.append(f"{title}{'' if part else ': no difference'}\n", "muted")
        for each in part:
            line(_cells(each), "text")
    text.rstrip()
    return text


def _cells(difference: Difference) -> tuple[str, ...]:
    return (difference.name, *map(_value, difference.values))


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return fmt.DASH if value is None else fmt.shorten(one_line(str(value), 200), MAX_VALUE)
