"""An editor for TOML: Textual's text area with the colours of the theme, without a parser of its own."""

from __future__ import annotations

import re

from rich.text import Text
from textual.widgets import TextArea

from tui.palette import Palette, make_palette

_TOKEN = re.compile(
    r"""
      (?P<comment>\#.*)
    | (?P<string>"(?:\\.|[^"\\])*"?|'[^']*'?)
    | (?P<table>^\s*\[\[?[^\]]*\]?\]?)
    | (?P<key>^\s*[\w.-]+(?=\s*=))
    | (?P<number>(?<![\w.])[+-]?\d[\d_.eE+-]*(?!\w))
    | (?P<bool>\b(?:true|false)\b)
    """,
    re.VERBOSE,
)


def paint(line: Text, palette: Palette) -> Text:
    """Colour one line in place. Strings over several lines are left plain."""
    colours = {
        "comment": palette.muted,
        "string": palette.success,
        "table": f"bold {palette.accent}",
        "key": palette.primary,
        "number": palette.warning,
        "bool": palette.secondary,
    }
    for token in _TOKEN.finditer(line.plain):
        line.stylize(colours[token.lastgroup or "comment"], token.start(), token.end())
    return line


class TomlArea(TextArea):
    """`TextArea` that paints each line as it is drawn."""

    def get_line(self, line_index: int) -> Text:
        return paint(super().get_line(line_index), make_palette(self.app.theme_variables))
