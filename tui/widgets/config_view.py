"""A run's `orch.toml`, highlighted and numbered, with what is wrong with it on top and marked at its line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.highlight import highlight
from textual.widgets import Static

MAX_LINES = 2_000


def numbered(config: str, error_lines: Sequence[int]) -> Content:
    """Highlighted TOML with line numbers; `error_lines` (from 1) carry a mark that does not need colour."""
    lines = highlight("\n".join(config.splitlines()[:MAX_LINES]), language="toml").split("\n", allow_blank=True)
    width = len(str(len(lines)))
    marked = set(error_lines)
    built = []
    for number, line in enumerate(lines, start=1):
        if number in marked:
            built.append(Content.assemble((f"▶ {number:>{width}} ", "bold $text-error"), line.stylize("on $error 20%")))
        else:
            built.append(Content.assemble((f"  {number:>{width}} ", "$foreground 35%"), line))
    return Content("\n").join(built)


class ConfigView(VerticalScroll):
    """Scrolls; shows text only."""

    DEFAULT_CSS = """
    ConfigView {
        background: $surface;
        scrollbar-size-vertical: 1;
        & > #config-error {
            display: none; margin: 0 1 1 1; padding: 0 1; color: $text-error; border-left: outer $error; height: auto;
        }
        &.-invalid > #config-error { display: block; }
        & > #config-text { padding: 0 1; height: auto; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", "Down", show=False),
        Binding("k", "scroll_up", "Up", show=False),
        Binding("g", "scroll_home", "Start", show=False),
        Binding("G", "scroll_end", "End", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(id="config")
        self._error = Static(id="config-error", markup=False)
        self._text = Static(id="config-text", markup=False)
        self._shown: tuple[str, str | None, tuple[int, ...]] | None = None

    def compose(self) -> ComposeResult:
        yield self._error
        yield self._text

    def show(self, config: str, error: str | None, error_lines: tuple[int, ...]) -> None:
        if (config, error, error_lines) == self._shown:
            return
        self._shown = (config, error, error_lines)
        self.set_class(error is not None, "-invalid")
        self._error.update(Content(error or ""))
        text = numbered(config, error_lines) if config.strip() else Content("orch.toml is empty or not there")
        self._text.update(text)
