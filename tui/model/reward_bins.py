"""Rewards of a batch as a histogram, and as one row of blocks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"


def reward_range(rewards: Iterable[float]) -> tuple[float, float]:
    """From 0 to 1 where that holds all of them, else from the lowest to the highest; never empty."""
    found = list(rewards)
    low, high = min(found, default=0.0), max(found, default=1.0)
    if low >= 0.0 and high <= 1.0:
        return 0.0, 1.0
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def count_bins(rewards: Iterable[float], low: float, high: float, num_bins: int) -> list[int]:
    """How many rewards are in each of `num_bins` equal parts of `low` to `high`; `high` itself is in the last."""
    counts = [0] * num_bins
    for reward in rewards:
        # Halves, because the difference of two finite numbers may not be finite.
        share = (reward / 2 - low / 2) / (high / 2 - low / 2)
        counts[min(max(int(share * num_bins), 0), num_bins - 1)] += 1
    return counts


def bars(counts: Sequence[int], height: int, cell: int) -> list[str]:
    """`height` lines, the highest first: each count a bar `cell` wide with a gap of one where there is room for it.

    What is not 0 has at least the lowest block.
    """
    most = max(counts, default=0)
    eighths = [_eighths(count, most, 8 * height) for count in counts]
    gap = " " if cell > 1 else ""
    lines = []
    for row in reversed(range(height)):
        parts = (_BLOCKS[min(max(each - 8 * row, 0), 8)] * (cell - len(gap)) + gap for each in eighths)
        lines.append("".join(parts))
    return lines


def _eighths(count: int, most: int, full: int) -> int:
    return max(round(count / most * full), 1) if count else 0
