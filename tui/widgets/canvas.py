"""A canvas of braille dots (two wide and four high a character) and of filled cells: pure.

Drawn by hand because a screen of twelve charts is drawn again at every key; a plotting library took 80 to 350 ms.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tui.readers.charts import Curve

# Bit of each dot of a braille character, by [row][column].
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
# Bits of all dots of one side from a row to another: [side][from][to].
_SPANS = [
    [[sum(_DOTS[row][side] for row in range(top, bottom + 1)) for bottom in range(4)] for top in range(4)]
    for side in range(2)
]
_BRAILLE = 0x2800
# Bands of a stack differ in shade too, so that they need no colour.
SHADES = "█▓▒░"
NOTHING = -1

Cell = tuple[str, int]


class Canvas:
    """`width` x `height` characters. Dot rows count from the top."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._bits = [[0] * width for _ in range(height)]
        self._colours = [[NOTHING] * width for _ in range(height)]
        self._filled: dict[tuple[int, int], str] = {}

    @property
    def num_dots(self) -> tuple[int, int]:
        """Dots across and down: two and four for each character."""
        return self.width * 2, self.height * 4

    def bar(self, x: int, top: int, bottom: int, colour: int) -> None:
        """Dots of column `x` from `top` to `bottom`, both included, in any order."""
        if not 0 <= x < self.width * 2:
            return
        column, spans = x // 2, _SPANS[x % 2]
        first, last = max(min(top, bottom), 0), min(max(top, bottom), self.height * 4 - 1)
        first_row, last_row = first // 4, last // 4
        for row in range(first_row, last_row + 1):
            start, end = first % 4 if row == first_row else 0, last % 4 if row == last_row else 3
            self._bits[row][column] |= spans[start][end]
            self._colours[row][column] = colour

    def connect(self, start: tuple[int, int], end: tuple[int, int], colour: int) -> None:
        """A line from dot `start` to dot `end`, left to right; each column covers its share of the height."""
        (x0, y0), (x1, y1) = start, end
        last = y0
        for x in range(x0, x1 + 1):
            y = y0 + round((y1 - y0) * (x - x0) / max(x1 - x0, 1))
            self.bar(x, last, y, colour)
            last = y

    def fill(self, column: int, row: int, shade: str, colour: int) -> None:
        """Fill the character at `column` and `row` with `shade`, which then hides the dots there."""
        self._filled[row, column] = shade
        self._colours[row][column] = colour

    def rows(self) -> list[list[Cell]]:
        """Characters with their colour (NOTHING where empty), row by row."""
        return [
            [
                (self._filled.get((y, x)) or (chr(_BRAILLE + bits) if bits else " "), colour)
                for x, (bits, colour) in enumerate(zip(row, colours, strict=True))
            ]
            for y, (row, colours) in enumerate(zip(self._bits, self._colours, strict=True))
        ]


def _dot_of(value: float, low: float, high: float, num_dots: int) -> int:
    share = (value - low) / (high - low)
    return round((1 - min(max(share, 0.0), 1.0)) * (num_dots - 1))


def row_of(value: float, low: float, high: float, height: int) -> int:
    """The row of `height` in which the dot of `value` is, between `low` (bottom) and `high` (top)."""
    return _dot_of(value, low, high, height * 4) // 4


def draw_curve(canvas: Canvas, curve: Curve, num_columns: int, low: float, high: float) -> None:
    """One line with its spikes, between the values `low` (bottom) and `high` (top)."""
    width, height = canvas.num_dots
    scale = (width - 1) / max(num_columns - 1, 1)
    place = functools.partial(_dot_of, low=low, high=high, num_dots=height)
    before: tuple[int, int] | None = None
    for x, value, least, greatest in zip(curve.xs, curve.values, curve.lows, curve.highs, strict=True):
        dot = round(x * scale), place(value)
        if before is not None:
            canvas.connect(before, dot, curve.colour)
        canvas.bar(dot[0], place(least), place(greatest), curve.colour)
        before = dot


def draw_stack(canvas: Canvas, curves: Sequence[Curve], num_columns: int, high: float) -> None:
    """Bands on top of each other from 0 to `high`, the first at the bottom."""
    scale = (canvas.width - 1) / max(num_columns - 1, 1)
    by_column: dict[int, dict[int, float]] = {}
    for index, curve in enumerate(curves):
        for x, value in zip(curve.xs, curve.values, strict=True):
            by_column.setdefault(round(x * scale), {})[index] = value
    known: dict[int, float] | None = None
    for column in range(canvas.width):
        known = by_column.get(column, known)
        if known is None or column > max(by_column):
            continue
        for row in range(canvas.height):
            level = high * (canvas.height - row - 0.5) / canvas.height
            band = _band(known, level)
            if band is not None:
                canvas.fill(column, row, SHADES[band % len(SHADES)], curves[band].colour)


def _band(values: dict[int, float], level: float) -> int | None:
    total = 0.0
    for index in sorted(values):
        total += max(values[index], 0.0)
        if level < total:
            return index
    return None
