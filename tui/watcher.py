"""The two reading threads: one looks at the house, one at the run that is open. They post messages and never draw.

Events of the file system are hints (`utils.watch`); between them a slow look finds what no event told. Both loops end
within one wait after `stop`.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import statistics
import threading
from collections.abc import Callable
from pathlib import Path

from textual.message import Message

from daemons.client import House, HouseReader
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import RunState
from prime_rl.utils.watch import Watcher
from tui.messages import HouseChanged, RunChanged
from tui.readers import MetricsReader
from tui.run_detail import RunDetailReader
from tui.series import downsample
from tui.snapshot import Disk, RunTail, Snapshot, make_snapshot

Post = Callable[[Message], object]
ReadDisk = Callable[[Path], Disk | None]
# Two looks are at least this far apart: status files change at most twice a second each, a person reads no faster.
MIN_INTERVAL_S = 0.3
RESCAN_S = 2.0
RUN_INTERVAL_S = 0.4
# The home screen draws at most this many points of a curve.
HOME_POINTS = 240
HOME_KEYS = ("reward/mean", "loss", "time")
HOME_CAPACITY = 512
# Of each metrics file the home screen reads this much from the end, about 200 steps: a house of 200 long runs is then
# listed at once. The run screen reads all.
HOME_TAIL_BYTES = 1 << 15


class HouseMetrics:
    """The newest rewards and losses of every run of a house."""

    def __init__(self, output_dir: Path) -> None:
        self._output = OutputDir(output_dir)
        self._readers: dict[str, MetricsReader] = {}
        self._tails: dict[str, RunTail] = {}

    def update(self, house: House, stop: Callable[[], bool] = lambda: False) -> dict[str, RunTail]:
        """Read what is new. Ends early, with what it has, when `stop()`."""
        run_ids = {run.run_id for run in house.runs}
        self._readers = {run_id: reader for run_id, reader in self._readers.items() if run_id in run_ids}
        self._tails = {run_id: tail for run_id, tail in self._tails.items() if run_id in run_ids}
        for run_id in run_ids:
            if stop():
                break
            if self._update_one(run_id, stop):
                self._tails[run_id] = _tail(self._readers[run_id])
        return dict(self._tails)

    def _update_one(self, run_id: str, stop: Callable[[], bool]) -> bool:
        if run_id not in self._readers:
            run = RunDir(self._output.path / run_id)
            paths = [run.orchestrator_metrics, run.trainer_metrics]
            self._readers[run_id] = MetricsReader(paths, HOME_KEYS, capacity=HOME_CAPACITY, start_bytes=HOME_TAIL_BYTES)
        changed, more = self._readers[run_id].update()
        while more and not stop():
            _, more = self._readers[run_id].update()
        return changed


def _tail(reader: MetricsReader) -> RunTail:
    rewards, losses = reader.series("reward/mean"), reader.series("loss")

    def curve(key: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        series = reader.series(key)
        steps, values = downsample(*series.points(), HOME_POINTS) if series else ([], [])
        return tuple(steps), tuple(values)

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


def disk_of(path: Path) -> Disk | None:
    """Room where `path` lies; None when the system does not say."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Disk(usage.free, usage.total)


def state_times(output: OutputDir, house: House) -> dict[str, float]:
    """When evicted and invalid runs became so: the time of the file that says it."""
    found = {}
    for view in house.runs:
        if view.state in (RunState.EVICTED, RunState.INVALID):
            run = RunDir(output.path / view.run_id)
            path = run.evicted if view.state is RunState.EVICTED else run.config_error
            with contextlib.suppress(OSError):
                found[view.run_id] = path.stat().st_mtime
    return found


class HouseWatcher:
    """Posts a `HouseChanged` at every change, and once every RESCAN_S."""

    def __init__(
        self, output_dir: Path, post: Post, clock: Callable[[], float], read_disk: ReadDisk | None = None
    ) -> None:
        self._output = OutputDir(output_dir)
        self._post = post
        self._clock = clock
        self._read_disk = read_disk or disk_of
        self._stopped = threading.Event()
        self._watcher: Watcher | None = None

    def run(self) -> None:
        reader = HouseReader(self._output.path, clock=self._clock)
        metrics = HouseMetrics(self._output.path)
        with Watcher(self._folders(), rescan_s=RESCAN_S) as watcher:
            self._watcher = watcher
            # Names and states at once, curves when they are read.
            house = reader.read()
            self._post(HouseChanged(self._snapshot(house, {})))
            while not self._stopped.is_set():
                house = reader.read()
                tails = metrics.update(house, self._stopped.is_set)
                self._post(HouseChanged(self._snapshot(house, tails)))
                self._stopped.wait(MIN_INTERVAL_S)
                watcher.watch(self._folders())
                watcher.wait()

    def _snapshot(self, house: House, tails: dict[str, RunTail]) -> Snapshot:
        disk = self._read_disk(self._output.path)
        return make_snapshot(house, tails, house.read_at, disk=disk, since=state_times(self._output, house))

    def wake(self) -> None:
        """Look again now."""
        if self._watcher is not None:
            self._watcher.wake()

    def stop(self) -> None:
        self._stopped.set()
        self.wake()

    def _folders(self) -> list[Path]:
        """Few folders: the status of trainer, inference and daemons changes whenever anything does."""
        output = self._output
        return [output.path, output.trainer_status.parent, output.inference_status.parent, output.daemons]


class RunWatcher:
    """Posts a `RunChanged` whenever the files of one run changed."""

    def __init__(self, reader: RunDetailReader, post: Post) -> None:
        self.reader = reader
        self._post = post
        self._stopped = threading.Event()
        self._woken = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            detail, more = self.reader.read()
            if detail is not None:
                self._post(RunChanged(detail))
            if not more:
                self._woken.wait(RUN_INTERVAL_S)
                self._woken.clear()

    def wake(self) -> None:
        self._woken.set()

    def stop(self) -> None:
        self._stopped.set()
        self._woken.set()
