"""When each run was last alive, on our own clock: its machine's clock may be ahead or behind.

The time that a run writes counts until it is seen to change; from then on the moment when we saw the change counts. A
time from the future counts as the moment when we saw it first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class _Sign:
    written_at: float
    seen_at: float
    has_moved: bool


class Signs:
    """Keeps one sign a run. All times are Unix seconds."""

    def __init__(self) -> None:
        self._signs: dict[str, _Sign] = {}

    def times(self, written_at: Iterable[tuple[str, float | None]], now: float) -> dict[str, float]:
        """(run id, time in its status file) of all runs -> when each was last alive, never later than `now`."""
        signs = {run_id: self._sign(run_id, time, now) for run_id, time in written_at if time is not None}
        self._signs = signs
        return {run_id: _seen_at(sign, now) for run_id, sign in signs.items()}

    def _sign(self, run_id: str, written_at: float, now: float) -> _Sign:
        known = self._signs.get(run_id)
        if known is None:
            return _Sign(written_at, now, False)
        return known if known.written_at == written_at else _Sign(written_at, now, True)


def _seen_at(sign: _Sign, now: float) -> float:
    if sign.written_at > now:
        return min(sign.seen_at, now)
    return min(max(sign.written_at, sign.seen_at), now) if sign.has_moved else sign.written_at
