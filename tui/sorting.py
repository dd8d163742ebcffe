"""The orders of the runs table: by every column, both ways, pinned runs on top. Pure.

Runs without a value come last both ways, and equals keep the workspace's own order (slots, then waiting runs as
they will be admitted, then the others), so that a sort never flickers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from tui.snapshot import STATES, RunRow

_STATE_ORDER = {state: order for order, state in enumerate(STATES)}


def progress(row: RunRow) -> float | None:
    """Share of its steps that are done."""
    return row.step / row.max_steps if row.max_steps else None


def age_s(row: RunRow, now: float) -> float | None:
    """Since its config landed."""
    return None if row.view.added_at is None else max(now - row.view.added_at, 0.0)


Key = Callable[[RunRow], float | str | None]


@dataclass(frozen=True)
class Sort:
    """A column to sort by. `descending` is its default: the best, the fastest, the newest on top."""

    title: str
    key: Key
    descending: bool = False


# Column key -> how to sort by it; "slot" is the workspace's own order.
SORTS: dict[str, Sort] = {
    "slot": Sort("slot", lambda row: 0),
    "state": Sort("state", lambda row: _STATE_ORDER[row.state]),
    "run": Sort("name", lambda row: row.run_id.lower()),
    "progress": Sort("progress", progress, True),
    "reward": Sort("reward", lambda row: row.reward, True),
    "change": Sort("change of reward", lambda row: row.reward_change, True),
    "loss": Sort("loss", lambda row: row.loss),
    "tokens": Sort("tokens/s", lambda row: row.tokens_per_s, True),
    "lag": Sort("lag", lambda row: row.lag, True),
    "version": Sort("version", lambda row: row.view.policy_version, True),
    "lr": Sort("learning rate", lambda row: row.view.lr, True),
    "note": Sort("note", lambda row: row.note.lower() or None),
    "problems": Sort("problems", lambda row: float(row.level), True),
    "seen": Sort("last sign of life", lambda row: row.updated_at, True),
    "age": Sort("age", lambda row: row.view.added_at, True),
}
DEFAULT_SORT = "slot"


def sort_rows(rows: Iterable[RunRow], sort: str, descending: bool, pins: Collection[str] = ()) -> list[RunRow]:
    """`rows` by that column; pinned ones first, in the same order among themselves."""
    key = SORTS[sort].key
    # Twice: sorting is stable, so the workspace's order stays among equals whichever way the column goes.
    ordered = sorted(rows, key=lambda row: row.order)
    valued = [(value, row) for row in ordered if (value := key(row)) is not None]
    valued.sort(key=lambda pair: pair[0], reverse=descending)
    without = [row for row in ordered if key(row) is None]
    found = [row for _, row in valued] + without
    return [row for row in found if row.run_id in pins] + [row for row in found if row.run_id not in pins]
