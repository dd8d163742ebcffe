"""What a run gets beside its slot: its weight and priority where they are not the usual ones, and its budget. Pure."""

from __future__ import annotations

from tui import fmt
from tui.model.snapshot import RunRow


def budget_share(row: RunRow) -> float | None:
    """How much of its budget a run has used, of tokens and hours what is further; None without one, or while unread."""
    used, view = row.tail.used, row.view
    if used is None:
        return None
    limits = (view.max_tokens, view.max_hours)
    shares = [done / most for done, most in zip(used, limits, strict=True) if most]
    return max(shares, default=None)


def standing(row: RunRow) -> list[tuple[str, str]]:
    """(name, value) of weight and priority where they are not the usual ones."""
    view = row.view
    found = [("weight", f"{view.weight:g}")] if view.weight not in (None, 1.0) else []
    return [*found, ("priority", str(view.priority))] if view.priority else found


def standing_words(row: RunRow) -> str:
    """`weight 2 · priority 5 · budget 40 %`, or "" for a run like all others."""
    words = [f"{name} {value}" for name, value in standing(row)]
    share = budget_share(row)
    return " · ".join(words if share is None else [*words, f"budget {fmt.percent(share)}"])


def budget_words(row: RunRow) -> str:
    """`1.2M of 2.0M tokens · 0.5 of 3 hours`: what has been used of what is limited."""
    (tokens, hours), view = row.tail.used or (0, 0.0), row.view
    words = [f"{fmt.count(tokens)} of {fmt.count(view.max_tokens)} tokens"] if view.max_tokens else []
    return " · ".join([*words, f"{hours:.2f} of {view.max_hours:g} hours"] if view.max_hours else words)
