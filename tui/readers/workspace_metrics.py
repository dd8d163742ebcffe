"""The newest rewards and losses of all runs of a workspace, read a slice at a time: the first screenful comes first.

`WorkspaceMetrics` is called by the watcher's thread only and reads idle runs rarely. The curves of the one run that is
selected are read by `CurvesReader`, in a thread of its own: of thousands of runs they would be most of the memory.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from daemons.workspace import RunView, Workspace
from daemons.workspace_reader import Stamp, stamp_of
from prime_rl.contract.files import read_text
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import RunState
from prime_rl.contract.usage import used_in_life
from tui.readers.charts import ChartData, HistoryReader, RunMetrics, change, simple_chart
from tui.readers.tabs import TabData

HOME_KEYS = ("reward/mean", "loss", "time")
# Of each metrics file the home screen reads this much from the end: 60 steps of long lines, 200 of short ones. The run
# screen reads all.
HOME_TAIL_BYTES = 1 << 16
# The newest rewards that a row shows; so many more are kept for a run that is rolled back. Of the trainer's file a row
# shows only the newest value.
NUM_REWARDS = 64
ORCHESTRATOR_LINES, TRAINER_LINES = 2 * NUM_REWARDS, 16
CURVE_POINTS = 512
# Below the folder of a run, as text: joining paths would cost more than the system calls.
_FILES = [str(path)[1:] for run in [RunDir(Path("_"))] for path in (run.trainer_metrics, run.orchestrator_metrics)]


@dataclass(frozen=True, slots=True)
class RunTail:
    """The newest metrics of one run: `rewards` as they came, newest last.

    `last_step_at` is when the newest step ended, on the clock of the run's machine (Unix seconds); `step_s` the usual
    time between steps. `used` (tokens, hours) is read of runs with a budget only.
    """

    rewards: Sequence[float] = ()
    loss: float | None = None
    last_step_at: float | None = None
    step_s: float | None = None
    used: tuple[int, float] | None = None


_NO_TAIL = RunTail()


@dataclass(slots=True)
class _Known:
    """One run's two files, how they were when they were read last, and when that was."""

    readers: tuple[HistoryReader, HistoryReader] | None = None
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

    def read_slice(
        self,
        workspace: Workspace,
        stop: Callable[[], bool],
        slice_s: float | None,
        working: Collection[str] | None = None,
    ) -> bool:
        """Read in the order of the workspace, of the runs at work `working` alone (None: all of them).

        True when time was up before the end.
        """
        run_ids = {run.run_id for run in workspace.runs}
        for run_id in self._known.keys() - run_ids:
            del self._known[run_id]
            self.tails.pop(run_id, None)
        now = self._clock()
        for run in workspace.runs:
            known = self._known.get(run.run_id) or self._known.setdefault(run.run_id, _Known())
            if not self._is_due(run, known, now, working):
                continue
            if stop() or (slice_s is not None and self._clock() - now > slice_s):
                return not stop()
            self._read_run(run, known, stop)
        return False

    def _is_due(self, run: RunView, known: _Known, now: float, working: Collection[str] | None) -> bool:
        if known.view is not run:
            return True
        if run.state is RunState.ACTIVE:
            return working is None or run.run_id in working
        return now - known.read_at >= self.rest_s

    def _read_run(self, run: RunView, known: _Known, stop: Callable[[], bool]) -> None:
        folder = f"{self._output.path}/{run.run_id}"
        stamps = stamp_of(folder + _FILES[0]), stamp_of(folder + _FILES[1])
        if stamps != known.stamps:
            readers = known.readers = known.readers or _open(RunDir(self._output.path / run.run_id))
            changed = False
            for reader in readers:
                has_read, more = reader.update()
                while more and not stop():
                    _, more = reader.update()
                changed |= has_read
            if changed:
                before = self.tails.get(run.run_id, _NO_TAIL)
                self.tails[run.run_id] = replace(_tail(readers), used=before.used)
        if run.max_tokens is not None or run.max_hours is not None:
            self._read_use(run.run_id, known)
        if run.state is not RunState.ACTIVE:
            known.readers = None  # what they have read is most of what this program holds
        known.stamps, known.view, known.read_at = stamps, run, self._clock()

    def _read_use(self, run_id: str, known: _Known) -> None:
        """The usage of this life of the run; while that cannot be read it is not known, and `prl usage` tells why."""
        path = self._output.run_usage(run_id)
        if (stamp := stamp_of(path)) == known.usage:
            return
        try:
            used = used_in_life(path, read_text(RunDir(self._output.path / run_id).life) or "")
        except OSError:
            used = None
        known.usage = stamp
        self.tails[run_id] = replace(self.tails.get(run_id, _NO_TAIL), used=used)


def _open(run: RunDir) -> tuple[HistoryReader, HistoryReader]:
    files = (run.trainer_metrics, TRAINER_LINES), (run.orchestrator_metrics, ORCHESTRATOR_LINES)
    trainer, orchestrator = (HistoryReader(path, HOME_KEYS, num, newest_bytes=HOME_TAIL_BYTES) for path, num in files)
    return trainer, orchestrator


def _tail(readers: Iterable[HistoryReader]) -> RunTail:
    """Of a metric that both files have the orchestrator's counts."""
    histories = {key: history for reader in readers for key, history in reader.histories.items()}
    rewards, losses, times = (histories.get(key) for key in HOME_KEYS)
    ended = times.values[-12:] if times else ()
    steps_s = [later - sooner for sooner, later in itertools.pairwise(ended)]
    return RunTail(
        last_step_at=ended[-1] if ended else None,
        step_s=statistics.median(steps_s) if steps_s else None,
        rewards=rewards.values[-NUM_REWARDS:] if rewards else (),
        loss=losses.values[-1] if losses else None,
    )


@dataclass(frozen=True)
class CurvesRequest:
    """The run that is selected, and what the table shows of it: when that is new, so are its curves."""

    run_id: str = ""
    tail: RunTail = _NO_TAIL


@dataclass(frozen=True)
class CurvesData(TabData):
    """The newest rewards and losses of one run as pictures."""

    tab = "curves"
    reward: ChartData = field(default_factory=ChartData)
    loss: ChartData = field(default_factory=ChartData)


class CurvesReader:
    """Reads the end of the metrics of the selected run, and while it stays selected what is new."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._answered, self._data = CurvesRequest(), CurvesData("")
        self._metrics: RunMetrics | None = None

    def read(self, request: CurvesRequest, is_wanted: Callable[[], bool]) -> tuple[CurvesData, bool]:
        """The curves, as they were for the same request; and whether to look again at once."""
        if request == self._answered:
            return self._data, False
        if self._metrics is None or request.run_id != self._answered.run_id:
            run = RunDir(self._output_dir / request.run_id)
            self._metrics = RunMetrics(run, HOME_KEYS[:2], CURVE_POINTS, newest_bytes=HOME_TAIL_BYTES)
        more = True
        while more and is_wanted():
            _, more = self._metrics.update()
        self._answered = CurvesRequest(request.run_id) if more else request
        histories = self._metrics.histories()
        known = (histories.get(key) for key in HOME_KEYS[:2])
        reward, loss = (simple_chart(each.steps, each.values) if each else ChartData() for each in known)
        gain = change(request.tail.rewards)
        self._data = CurvesData(request.run_id, replace(reward, change=gain), loss)
        return self._data, False
