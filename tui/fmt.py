"""Numbers and ages as short text, and plainer characters for terminals that do not have the others. Pure.

Every result has a known greatest width, so that columns line up. Characters are replaced one cell for one cell, as the
last step before a line is drawn: the fonts of the Linux console have frames, half blocks and arrows, but no Braille, no
eighths of blocks and few symbols; without UTF-8 only ASCII is sure.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from prime_rl.contract.status import HEARTBEAT_S, utc
from prime_rl.utils.text import counted as counted

DASH = "·"
_BLOCKS = "▁▂▃▄▅▆▇█"
# The status of a live process is never older than this, so a younger age is shown as "now".
FRESH_S = 2 * HEARTBEAT_S
# Rewards are about one; a smaller change of them is noise.
LEAST_GAIN = 0.0005
# Names with as many first characters in common are alike: "run_" and some of what a person chose.
_FAMILY = 8


def number(value: float | None) -> str:
    """At most 7 characters: `0.812`, `12.3`, `1234`, `1.2e-5`."""
    if value is None or not math.isfinite(value):
        return DASH
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-2 or size >= 1e5:
        digits = 1 if 1e-99 < size < 1e99 else 0
        mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    if size < 10:
        return f"{value:.3f}"
    return f"{value:.1f}" if size < 1000 else f"{value:.0f}"


def signed(value: float | None) -> str:
    """A change of anything: `+0.120`, `-1.2e-5`, `±0`."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{'+' if value > 0 else '-'}{number(abs(value))}" if value else "±0"


def reward(value: float | None) -> str:
    """A reward, everywhere: three digits after the point where there is room: `0.812`, `0.004`, `12.3`."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value:.3f}" if abs(value) < 10 else number(value)


def gain(value: float | None) -> str:
    """An advantage or a change of a reward, everywhere: `+0.120`, `-0.004`, `±0` where nothing of it would be seen."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{'+' if value > 0 else '-'}{reward(abs(value))}" if abs(value) >= LEAST_GAIN else "±0"


def percent(share: float | None) -> str:
    """`7 %`, of a share of 0.07."""
    return DASH if share is None else f"{100 * share:.0f} %"


def count(value: float | None) -> str:
    """At most 5 characters: `987`, `1.2k`, `34k`, `5.6M`."""
    if value is None or not math.isfinite(value):
        return DASH
    for limit, unit in ((1e3, ""), (1e6, "k"), (1e9, "M"), (1e12, "G")):
        if abs(value) < limit * 0.9995:
            scaled = value / (limit / 1e3)
            return f"{scaled:.0f}{unit}" if not unit or abs(scaled) >= 9.95 else f"{scaled:.1f}{unit}"
    return f"{value:.0e}"


def age(seconds: float | None) -> str:
    """At most 4 characters: `now`, `12s`, `5m`, `3h`, `12d`."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    if seconds < 1:
        return "now"
    for size, unit in ((60, "s"), (3600, "m"), (86400, "h")):
        if seconds < size:
            return f"{int(seconds // {'s': 1, 'm': 60, 'h': 3600}[unit])}{unit}"
    return f"{min(int(seconds // 86400), 999)}d"


def duration(seconds: float) -> str:
    """A short time exactly: `0.21s`, `4.2s`, `71s`, `12m`; `·` for next to nothing."""
    if seconds < 0.05:
        return DASH
    if seconds < 10:
        return f"{seconds:.2g}s"
    return f"{seconds:.0f}s" if seconds < 600 else age(seconds)


def stamp(seconds: float | None) -> str:
    """A moment (Unix seconds) in UTC: `2026-01-31 23:59:59`, 19 characters."""
    return "?" * 19 if seconds is None else utc(seconds)[:19]


def seen(seconds: float | None) -> str:
    """The age of a heartbeat: `now` as long as the next one is not overdue, so that it does not flicker."""
    return "now" if seconds is not None and seconds < FRESH_S else age(seconds)


def seen_ago(seconds: float) -> str:
    """`seen` in a sentence: `now`, `12s ago`."""
    text = seen(seconds)
    return text if text == "now" else f"{text} ago"


def bar(done: float, total: float | None, width: int) -> tuple[str, str]:
    """(filled, empty) parts of a bar of `width` cells, in half cells; the two differ in shape, not only in colour."""
    share = min(max(done / total, 0.0), 1.0) if total else 0.0
    full, half = divmod(int(share * width * 2), 2)
    filled = "━" * full + ("╸" if half else "")
    return filled, "─" * (width - len(filled))


def ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """At most `most` round values from `low` to `high`, 1, 2 or 5 times a power of ten apart, each with its text."""
    if not (math.isfinite(low) and math.isfinite(high) and high > low):
        return []
    power = 10.0 ** (math.floor(math.log10((high - low) / most)) - 1)
    for factor in (1, 2, 5, 10, 20, 50, 100):
        step = factor * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            digits = max(-math.floor(math.log10(step) + 1e-9), 0)
            return [(number * step, _tick(number * step, digits)) for number in range(first, last + 1)]
    return []


def log_ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """As `ticks`, from 10 to the power `low` to 10 to the power `high`: powers of ten where there are two of them."""
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    if last > first:
        every = -(-(last - first + 1) // most)
        return [(float(exponent), number(10.0**exponent)) for exponent in range(first, last + 1, every)]
    return [(math.log10(value), text) for value, text in ticks(10.0**low, 10.0**high, most) if value > 0]


def _tick(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}" if digits <= 4 else number(value)
    return "0" if value == 0 else text if len(text) <= 7 else number(value)


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest `width` values as block characters, scaled to their own range. A flat line is drawn in the middle."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-12):
        return _BLOCKS[3] * len(shown)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((value / 2 - low / 2) / (high / 2 - low / 2) * top)] for value in shown)


def shorten(text: str, width: int) -> str:
    """At most `width` characters; what is cut off shows as `…`."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"[:width]


def shorten_middle(text: str, width: int) -> str:
    """Like `shorten`, but keeps both ends: ids often differ at the end."""
    if len(text) <= width or width < 4:
        return shorten(text, width)
    return _cut(text, (width - 1) // 2, width)


def _cut(text: str, head: int, width: int) -> str:
    """The first `head` characters of a longer `text`, and so many of its last that it has `width`."""
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


@functools.lru_cache(maxsize=32)
def short_names(names: tuple[str, ...], width: int) -> Mapping[str, str]:
    """Each of `names` in at most `width` characters; of long ones what those of its family begin with is cut out.

    A family are names that begin with the same few characters, such as the runs of a sweep, which differ by its values.
    """
    ordered = sorted(set(names))
    shared = [len(os.path.commonprefix(pair)) for pair in itertools.pairwise(ordered)]  # noqa: RUF071 - characters
    found: dict[str, str] = {}
    first = 0
    for last, name in enumerate(ordered):
        if last == len(shared) or shared[last] < _FAMILY:
            begins = name[: min(shared[first:last], default=0)]
            common = max(map(begins.rfind, "-_.")) + 1
            found |= _shorten_family(ordered[first : last + 1], common, width)
            first = last + 1
    return found


def _shorten_family(names: Sequence[str], common: int, width: int) -> dict[str, str]:
    """Cut where most of them still differ, as near to the middle as that goes."""
    middle = (width - 1) // 2
    best: dict[str, str] = {}
    for head in sorted(range(max(width, 1)), key=lambda head: abs(head - middle)):
        short = {name: _shorten_common(name, common, head, width) for name in names}
        best = max(best, short, key=lambda each: len(set(each.values())))
        if len(set(best.values())) == len(names):
            break
    return best


def _shorten_common(name: str, common: int, head: int, width: int) -> str:
    own = name[common:]
    if len(name) <= width or width < 4:
        return shorten(name, width)
    if len(own) + 2 <= width:
        return _cut(name, width - 1 - len(own), width)
    return own if len(own) <= width else _cut(own, head, width)


def first_line(text: str | None) -> str:
    """The first line of `text` that is not empty."""
    lines: Sequence[str] = (text or "").splitlines()
    return next((line.strip() for line in lines if line.strip()), "")


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
    """The glyphs that a terminal of this TERM and encoding needs; None where all can be drawn."""
    is_utf8 = encoding.lower().replace("-", "").replace("_", "") in ("utf8", "utf8sig")
    return PlainGlyphs(ascii_only=not is_utf8) if not is_utf8 or term == "linux" else None
