"""The home screen without runs."""

from __future__ import annotations

from rich.text import Text
from textual.app import RenderResult
from textual.widget import Widget

from tui.palette import Palette, make_palette


def describe(*, needle: str, trainer_lives: bool, read_only: bool, palette: Palette) -> Text:
    """What to do next, in the order in which to do it."""
    key = f"bold {palette.accent}"
    if needle:
        return Text.assemble(
            ("no runs match ", palette.muted),
            (needle, "bold"),
            "\n\n",
            ("esc", key),
            (" shows all runs", palette.muted),
        )
    text = Text.assemble(("no runs here yet", f"bold {palette.primary}"), "\n\n", justify="left")
    if not trainer_lives:
        text.append("prl up", key).append("                start trainer and inference\n", palette.muted)
    if read_only:
        text.append("prl runs add FILE", key).append("     add a run from a shell", palette.muted)
    else:
        text.append("a", key).append("                     add a run from a TOML file\n", palette.muted)
        text.append("prl runs add FILE", key).append("     the same from a shell", palette.muted)
    return text


class EmptyState(Widget):
    """Takes the table's place."""

    DEFAULT_CSS = """
    EmptyState { height: 1fr; width: 1fr; align: center middle; content-align: center middle; }
    """

    def __init__(self, *, read_only: bool) -> None:
        super().__init__(id="empty")
        self._read_only = read_only
        self._needle = ""
        self._trainer_lives = False

    def show(self, needle: str, trainer_lives: bool) -> None:
        if (needle, trainer_lives) != (self._needle, self._trainer_lives):
            self._needle, self._trainer_lives = needle, trainer_lives
            self.refresh()

    def render(self) -> RenderResult:
        palette = make_palette(self.app.theme_variables)
        return describe(
            needle=self._needle, trainer_lives=self._trainer_lives, read_only=self._read_only, palette=palette
        )
