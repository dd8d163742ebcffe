"""The newest rewards and losses of all runs of a workspace, read a slice at a time: the first screenful comes first.

Called by the watcher's thread only. Idle runs are read rarely.
"""

from __future__ import annotations

import itertools
import statistics
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from daemons.run_files import Stamp, stamp_of
from daemons.workspace import RunView, Workspace
from prime_rl.contract.files import read_text
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import RunState
from prime_rl.contract.usage import used_in_life
from tui.readers.history import SMALL_POINTS, History, RunMetrics, downsample

HOME_KEYS = ("reward/mean", "loss", "time")
HOME_CAPACITY = 512
# Of each metrics file the home screen reads this much from the end: 60 steps of long lines, 200 of short ones. The run
# screen reads all.
HOME_TAIL_BYTES = 1 << 16

# Steps and values.
Points = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class RunTail:
    """The newest metrics of one run: `rewards` as they came, newest last; the curves of a run at rest are thinned out.

    `last_step_at` is when the newest step ended, on the clock of the run's machine (Unix seconds); `step_s` the usual
    time between steps. `used` (tokens, hours) is read of runs with a budget only.
    """

    rewards: tuple[float, ...] = ()
    loss: float | None = None
    reward_curve: Points = ((), ())
    loss_curve: Points = ((), ())
    last_step_at: float | None = None
    step_s: float | None = None
    used: tuple[int, float] | None = None


_NO_TAIL = RunTail()


@dataclass
class _Known:
    """What is known of one run: its two files, how they were when they were read last, and when that was.

    Their paths are text: joining paths would cost more than the system calls.
    """

    paths: tuple[str, str]
    metrics: RunMetrics | None = None
    stamps: tuple[Stamp, Stamp] | None = None
    view: RunView | None = None
    usage: Stamp | None = None
    read_at: float = 0.0


class WorkspaceMetrics:
    """Keeps up with the metrics of every run. `tails` holds what was read so far."""

    def __init__(self, output_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._output = OutputDir(output_dir)
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self.tails: dict[str, RunTail] = {}
        # At runs at which nothing works figures change only when a person copies files: they are looked at this seldom.
        self.rest_s = 10.0

    def update(self, workspace: Workspace) -> dict[str, RunTail]:
        """Read all that is new."""
        self.read_slice(workspace, lambda: False, None)
        return self.tails

    def read_slice(self, workspace: Workspace, stop: Callable[[], bool], slice_s: float | None) -> bool:
        """Read in the order of the workspace; true when time was up before the end."""
        run_ids = {run.run_id for run in workspace.runs}
        for run_id in self._known.keys() - run_ids:
            del self._known[run_id]
            self.tails.pop(run_id, None)
        now = self._clock()
        for run in workspace.runs:
            known = self._known.get(run.run_id) or self._open(run.run_id)
            if not self._is_due(run, known, now):
                continue
            if stop() or (slice_s is not None and self._clock() - now > slice_s):
                return not stop()
            self._read_run(run, known, stop)
        return False

    def _open(self, run_id: str) -> _Known:
        run = RunDir(self._output.path / run_id)
        return self._known.setdefault(run_id, _Known((str(run.orchestrator_metrics), str(run.trainer_metrics))))

    def _is_due(self, run: RunView, known: _Known, now: float) -> bool:
        return run.state is RunState.ACTIVE or known.view is not run or now - known.read_at >= self.rest_s

    def _read_run(self, run: RunView, known: _Known, stop: Callable[[], bool]) -> None:
        stamps = stamp_of(known.paths[0]), stamp_of(known.paths[1])
        if stamps != known.stamps:
            metrics = known.metrics = known.metrics or RunMetrics(
                RunDir(self._output.path / run.run_id), HOME_KEYS, HOME_CAPACITY, newest_bytes=HOME_TAIL_BYTES
            )
            changed, more = metrics.update()
            while more and not stop():
                _, more = metrics.update()
            if changed:
                before = self.tails.get(run.run_id, _NO_TAIL)
                self.tails[run.run_id] = replace(
                    _tail(metrics.histories(), at_rest=run.state is not RunState.ACTIVE), used=before.used
                )
        if run.max_tokens is not None or run.max_hours is not None:
            self._read_use(run.run_id, known)
        if run.state is not RunState.ACTIVE:
            known.metrics = None  # what it has read is most of what this program holds
        known.stamps, known.view, known.read_at = stamps, run, self._clock()

    def _read_use(self, run_id: str, known: _Known) -> None:
        """What this life of the run has used; while that cannot be read it is not known, and `prl usage` tells why."""
        path = self._output.run_usage(run_id)
        if (stamp := stamp_of(path)) == known.usage:
            return
        try:
            used = used_in_life(path, read_text(RunDir(self._output.path / run_id).life) or "")
        except OSError:
            used = None
        known.usage = stamp
        self.tails[run_id] = replace(self.tails.get(run_id, _NO_TAIL), used=used)


def _tail(histories: Mapping[str, History], *, at_rest: bool) -> RunTail:
    rewards, losses, times = (histories.get(key) for key in HOME_KEYS)

    def curve(history: History | None) -> Points:
        if history is None:
            return (), ()
        if not at_rest:  # it changes at each step, and is thinned out when it is drawn: only the selected run is
            return history.steps[:], history.values[:]
        steps, values = downsample(history.steps, history.values, SMALL_POINTS)
        return array("d", steps), array("d", values)  # a quarter of what lists of floats take, a thousand times

    ended = times.values[-12:] if times else ()
    steps_s = [later - sooner for sooner, later in itertools.pairwise(ended)]
    return RunTail(
        last_step_at=ended[-1] if ended else None,
        step_s=statistics.median(steps_s) if steps_s else None,
        rewards=tuple(rewards.values[-64:]) if rewards else (),
        loss=losses.values[-1] if losses else None,
        reward_curve=curve(rewards),
        loss_curve=curve(losses),
    )
