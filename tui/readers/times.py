"""Since when: the last sign of life of each run on our own clock, and when evicted and invalid runs became so.

A run's machine may have its clock ahead or behind. The time that a run writes counts until it is seen to change; from
then on the moment when we saw the change counts. A time from the future counts as the moment when we saw it first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from daemons.workspace import RunView, Workspace
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import RunState


@dataclass(frozen=True, slots=True)
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


class StateTimes:
    """When evicted and invalid runs became so: the time of the file with the reason."""

    def __init__(self, output: OutputDir) -> None:
        self._output = output
        self._known: dict[str, tuple[RunView, float]] = {}

    def read(self, workspace: Workspace) -> dict[str, float]:
        """Of all that are so now. A run of which nothing changed is not looked at again."""
        known, self._known = self._known, {}
        for view in workspace.runs:
            if view.state in (RunState.EVICTED, RunState.INVALID):
                before = known.get(view.run_id)
                if before is not None and before[0] is view:
                    self._known[view.run_id] = before
                    continue
                run = RunDir(self._output.path / view.run_id)
                path = run.evicted if view.state is RunState.EVICTED else run.config_error
                with contextlib.suppress(OSError):
                    self._known[view.run_id] = (view, path.stat().st_mtime)
        return {run_id: at for run_id, (_, at) in self._known.items()}
