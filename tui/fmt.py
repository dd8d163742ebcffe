"""Numbers, ages and sizes as short text: pure. Every result has a known greatest width, so that columns line up."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prime_rl.contract.status import HEARTBEAT_S

DASH = "·"
# The status of a live process is never older than this, so a younger age is shown as "now".
FRESH_S = 2 * HEARTBEAT_S


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


def fixed(value: float | None) -> str:
    """Three digits after the point where there is room, for columns: `0.812`, `0.004`, `12.3`."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value:.3f}" if abs(value) < 10 else number(value)


def signed(value: float | None, *, least: float = 0.0) -> str:
    """A change: `+0.120`, `-1.2e-5`; `±0` below `least`."""
    if value is None or not math.isfinite(value):
        return DASH
    if value == 0 or abs(value) < least:
        return "±0"
    return f"{'+' if value > 0 else '-'}{number(abs(value))}"


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


def seen(seconds: float | None) -> str:
    """The age of a heartbeat: `now` as long as the next one is not overdue, so that it does not flicker."""
    return "now" if seconds is not None and seconds < FRESH_S else age(seconds)


def size(num_bytes: int) -> str:
    """`512 B`, `1.4 MiB`."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def bar(done: float, total: float | None, width: int) -> tuple[str, str]:
    """(filled, empty) parts of a bar of `width` cells, in half cells; the two differ in shape, not only in colour."""
    share = min(max(done / total, 0.0), 1.0) if total else 0.0
    full, half = divmod(int(share * width * 2), 2)
    filled = "━" * full + ("╸" if half else "")
    return filled, "─" * (width - len(filled))


def shorten(text: str, width: int) -> str:
    """At most `width` characters; what is cut off shows as `…`."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"[:width]


def shorten_middle(text: str, width: int) -> str:
    """Like `shorten`, but keeps both ends: ids often differ at the end."""
    if len(text) <= width or width < 4:
        return shorten(text, width)
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def first_line(text: str | None) -> str:
    """The first line of `text` that is not empty."""
    lines: Sequence[str] = (text or "").splitlines()
    return next((line.strip() for line in lines if line.strip()), "")
