"""An editor for TOML: Textual's text area with the colours of the theme, and what is wrong at the end of its line.

It has no parser: its owner checks the text and passes the errors (`show_problems`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.strip import Strip
from textual.widgets import TextArea

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


def paint(line: Text) -> Text:
    """Colour one line in place. Strings over several lines are left plain."""
    colours = {
        "comment": "muted",
        "string": "success",
        "table": "bold accent",
        "key": "primary",
        "number": "warning",
        "bool": "secondary",
    }
    for token in _TOKEN.finditer(line.plain):
        line.stylize(colours[token.lastgroup or "comment"], token.start(), token.end())
    return line


MIN_MESSAGE = 16  # cells that a message needs to be worth reading; on a longer line it covers the line's end


class TomlArea(TextArea):
    """`TextArea` that paints each line as it is drawn. Made with `soft_wrap=False`: a line is a line of the screen."""

    _problems: Mapping[int, str] = {}

    def show_problems(self, problems: Mapping[int, str]) -> None:
        """`problems` by line, from 1."""
        if problems != self._problems:
            self._problems = dict(problems)
            self.refresh()

    def get_line(self, line_index: int) -> Text:
        """Return the line painted as TOML; Textual calls it for each line that it draws."""
        return paint(super().get_line(line_index))

    def render_line(self, y: int) -> Strip:
        """Return row `y`; where its line has a problem, with a mark at the left and the message at its end."""
        strip = super().render_line(y)
        number = self.scroll_offset.y + y + 1
        message = self._problems.get(number)
        if message is None or number > self.document.line_count:
            return strip
        width = self.size.width
        text = self.document.get_line(number - 1).expandtabs(self.indent_width)
        end = self.gutter_width + cell_len(text) - self.scroll_offset.x + 2
        place = max(min(end, width - MIN_MESSAGE), 0)
        error = self.app.console.get_style("error") + Style(bgcolor=self.rich_style.bgcolor)
        style, mark = error + Style(italic=True), Segment("✖", error + Style(bold=True))
        said = Strip([Segment(f"◀ {message}", style)]).adjust_cell_length(width - place, style)
        return Strip.join([Strip([mark]), strip.crop(1, place), said])
