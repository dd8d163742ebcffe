"""The newest rewards and losses of all runs of a workspace, read a slice at a time: the first screenful comes first.

Called by the watcher's thread only. Idle runs are read rarely.
"""

from __future__ import annotations

import itertools
import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from daemons.client import RunView, Stamp, Workspace, stamp_of
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import RunState
from tui.readers import MetricsReader
from tui.series import downsample
from tui.snapshot import Curve, RunTail

# The home screen draws at most this many points of a curve.
HOME_POINTS = 240
HOME_KEYS = ("reward/mean", "loss", "time")
HOME_CAPACITY = 512
# Of each metrics file the home screen reads this much from the end: 60 steps of long lines, 200 of short ones. The run
# screen reads all.
HOME_TAIL_BYTES = 1 << 16

_Stamps = tuple[Stamp, Stamp]


class WorkspaceMetrics:
    """Keeps up with the metrics of every run. `tails` holds what was read so far."""

    def __init__(self, output_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._output = OutputDir(output_dir)
        self._clock = clock
        self._readers: dict[str, MetricsReader] = {}
        # As text: joining paths would cost more than the system calls.
        self._paths: dict[str, tuple[str, str]] = {}
        self._read_at: dict[str, tuple[RunView, float, _Stamps]] = {}
        self.tails: dict[str, RunTail] = {}
        # At runs at which nothing works figures change only when a person copies files: they are looked at this seldom.
        self.rest_s = 10.0

    def update(
        self, workspace: Workspace, stop: Callable[[], bool] = lambda: False, *, slice_s: float | None = None
    ) -> dict[str, RunTail]:
        """Read all that is new, or what can be read within `slice_s`; ends early when `stop()`."""
        self.read_slice(workspace, stop, slice_s)
        return self.tails

    def read_slice(self, workspace: Workspace, stop: Callable[[], bool], slice_s: float | None) -> bool:
        """Read in the order of the workspace; true when time was up before the end."""
        run_ids = {run.run_id for run in workspace.runs}
        if self._read_at.keys() - run_ids:
            self._readers = {run_id: reader for run_id, reader in self._readers.items() if run_id in run_ids}
            self._paths = {run_id: paths for run_id, paths in self._paths.items() if run_id in run_ids}
            self._read_at = {run_id: known for run_id, known in self._read_at.items() if run_id in run_ids}
            self.tails = {run_id: tail for run_id, tail in self.tails.items() if run_id in run_ids}
        now = self._clock()
        for run in workspace.runs:
            if not self._is_due(run, now):
                continue
            if stop() or (slice_s is not None and self._clock() - now > slice_s):
                return not stop()
            self._read_run(run, stop)
        return False

    def _read_run(self, run: RunView, stop: Callable[[], bool]) -> None:
        run_id, known = run.run_id, self._read_at.get(run.run_id)
        paths = self._paths.get(run_id) or self._paths.setdefault(run_id, _paths(self._output, run_id))
        stamps = (stamp_of(paths[0]), stamp_of(paths[1]))
        if (known is None or stamps != known[2]) and self._update_one(run_id, paths, stop):
            self.tails[run_id] = _tail(self._readers[run_id])
        if run.state is not RunState.ACTIVE:
            self._readers.pop(run_id, None)  # what it has read is most of what this program holds
        self._read_at[run_id] = (run, self._clock(), stamps)

    def _is_due(self, run: RunView, now: float) -> bool:
        known = self._read_at.get(run.run_id)
        return known is None or run.state is RunState.ACTIVE or known[0] is not run or now - known[1] >= self.rest_s

    def _update_one(self, run_id: str, paths: tuple[str, str], stop: Callable[[], bool]) -> bool:
        if run_id not in self._readers:
            files = [Path(path) for path in paths]
            self._readers[run_id] = MetricsReader(files, HOME_KEYS, capacity=HOME_CAPACITY, start_bytes=HOME_TAIL_BYTES)
        changed, more = self._readers[run_id].update()
        while more and not stop():
            _, more = self._readers[run_id].update()
        return changed


def _paths(output: OutputDir, run_id: str) -> tuple[str, str]:
    run = RunDir(output.path / run_id)
    return str(run.orchestrator_metrics), str(run.trainer_metrics)


def _tail(reader: MetricsReader) -> RunTail:
    rewards, losses = reader.series("reward/mean"), reader.series("loss")

    def curve(key: str) -> Curve:
        series = reader.series(key)
        steps, values = downsample(*series.points(), HOME_POINTS) if series else ([], [])
        return array("d", steps), array("d", values)  # a quarter of what lists of floats take, a thousand times

    times = reader.series("time")
    ended = times.recent(12) if times else []
    steps_s = [later - sooner for sooner, later in itertools.pairwise(ended)]
    return RunTail(
        last_step_at=ended[-1] if ended else None,
        step_s=statistics.median(steps_s) if steps_s else None,
        rewards=tuple(rewards.recent(64)) if rewards else (),
        loss=losses.last if losses else None,
        reward_curve=curve("reward/mean"),
        loss_curve=curve("loss"),
    )
