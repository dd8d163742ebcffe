"""The runs of one confirmation, one per line, scrolled when they are many."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static


class Listing(VerticalScroll):
    DEFAULT_CSS = """
    Listing {
        height: auto; max-height: 9; margin-bottom: 1; scrollbar-size-vertical: 1;
        & > Static { height: auto; color: $foreground 80%; }
    }
    """

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__(can_focus=len(lines) > 9)
        self._text = Static(Content("\n".join(lines)), markup=False)

    def compose(self) -> ComposeResult:
        yield self._text

    def show(self, lines: Sequence[str]) -> None:
        self._text.update(Content("\n".join(lines)))


def listing(run_ids: Sequence[str]) -> Listing:
    return Listing([f"· {run_id}" for run_id in run_ids])
