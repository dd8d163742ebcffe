"""Plainer characters for terminals that do not have the others: the Linux console, and locales that are not UTF-8.

The last step before a line is drawn, one cell for one cell. The console's fonts have frames, half blocks and arrows,
but no Braille, no eighths of blocks and few symbols; without UTF-8 only ASCII is sure.
"""

from __future__ import annotations

import functools

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

# Replacements of states, marks and bars; each still differs from the others of its kind.
_SYMBOLS = {
    **dict(zip("●◌✔■▲⊘✖◔‖▶◆✓★▪", "*o+#^0x%H>+v*.", strict=True)),
    **dict(zip("━╸▮▯⏎␣◂◀▼…≤", "=-#.¶_<<v~<", strict=True)),
    **dict(zip("▁▂▃▄▅▆▇", "_..-=+*", strict=True)),
    **dict(zip("▌▎▊▏▕▔╺", "|||||-=", strict=True)),
}
_FRAMES = {
    **dict(zip("╭╮╰╯", "┌┐└┘", strict=True)),
    **dict(zip("┃┏┓┗┛", "│┌┐└┘", strict=True)),
}
_ASCII = {
    **dict(zip("│─┌┐└┘├┤┬┴┼", "|-+++++++++", strict=True)),
    **dict(zip("█▓▒░▀▐", "#%+.^|", strict=True)),
    **dict(zip("→←↑↓·±¶", "><^v.~<", strict=True)),
}
_BRAILLE = range(0x2800, 0x2900)
_UPPER, _LOWER = 0b00011011, 0b11100100


def _braille(code: int) -> str:
    """By where its dots are: above, below, both, many."""
    dots = code - _BRAILLE.start
    if not dots:
        return " "
    if dots.bit_count() >= 6:
        return "#"
    return ":" if dots & _UPPER and dots & _LOWER else "'" if dots & _UPPER else "."


class PlainGlyphs(LineFilter):
    """Replaces what the terminal cannot draw. `ascii_only`: everything that is not ASCII."""

    def __init__(self, *, ascii_only: bool) -> None:
        super().__init__()
        table = {**_SYMBOLS, **_FRAMES, **{chr(code): _braille(code) for code in _BRAILLE}}
        if ascii_only:
            table = {char: _ASCII.get(plain, plain) for char, plain in table.items()} | _ASCII
        self._ascii_only = ascii_only
        self._table = str.maketrans(table)
        self._plain = functools.lru_cache(maxsize=4096)(self._translate)

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Replace what the terminal cannot draw, cell for cell; segments in ASCII are returned as they are."""
        return [
            segment if segment.text.isascii() else Segment(self._plain(segment.text), segment.style, segment.control)
            for segment in segments
        ]

    def _translate(self, text: str) -> str:
        text = text.translate(self._table)
        if self._ascii_only and not text.isascii():
            text = "".join(char if char.isascii() else "?" * cell_len(char) for char in text)
        return text


def plain_glyphs(term: str, encoding: str) -> PlainGlyphs | None:
    """What a terminal of this TERM and encoding needs; None where all can be drawn."""
    is_utf8 = encoding.lower().replace("-", "").replace("_", "") in ("utf8", "utf8sig")
    return PlainGlyphs(ascii_only=not is_utf8) if not is_utf8 or term == "linux" else None
