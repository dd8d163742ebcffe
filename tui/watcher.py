"""The two reading threads: one looks at the workspace, one at the run that is open. They post messages and never draw.

Events of the file system are hints (`utils.watch`); between them a slow look finds what no event reported. Both loops
end within one wait after `stop`.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from textual.message import Message

from daemons.client import RunView, Workspace, WorkspaceReader
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import LOST_AFTER_S, RunState
from prime_rl.utils.node_watch import NodeReader
from prime_rl.utils.watch import Watcher
from tui.messages import RunChanged, WorkspaceChanged
from tui.nodes import make_group, node_problems
from tui.signs import Signs
from tui.snapshot import Disk, Snapshot, make_snapshot
from tui.workspace_metrics import WorkspaceMetrics

if TYPE_CHECKING:
    from tui.run_reader import RunReader

Post = Callable[[Message], object]
ReadDisk = Callable[[Path], Disk | None]
# Two looks are at least this far apart: status files change at most twice a second each, a person reads no faster.
MIN_INTERVAL_S = 0.5
# Without a hint the workspace is looked at again after so long, a workspace of a thousand runs after the longer time.
RESCAN_S, RESCAN_MOST_S = 3.0, 5.0
CLOSE_LOOK_S = 0.4
RUN_INTERVAL_S = 0.4
# Files of one beat are written one after another: what is hinted at is looked at together.
SETTLE_S = 0.02
# Runs at which nothing works are looked at this seldom, unless trainer or supervisor report something new; and all
# of them together take at most this share of a core.
REST_S, REST_MOST_S = 2.0, 20.0
REST_SHARE = 1 / 400
# The first screenful of figures is on the screen after the first slice; a person who acts meanwhile waits for no more.
FIRST_SLICE_S = 0.08
SLICE_S = 0.3


def disk_of(path: Path) -> Disk | None:
    """Free space at `path`; None when unknown."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Disk(usage.free, usage.total)


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


class Rest:
    """When runs at which nothing works are looked at again: the seldomer, the more a look at all of them takes."""

    def __init__(self) -> None:
        self._until: float | None = None
        self.look_s = RESCAN_S
        """How long the others wait for a look without a hint."""

    @property
    def is_over(self) -> bool:
        return self._until is None or time.monotonic() >= self._until

    def begin(self, took_s: float) -> float:
        """After a look that took `took_s`; returns for how long. The first one reads all configs: no measure."""
        rest_s = REST_S if self._until is None else min(max(took_s / REST_SHARE, REST_S), REST_MOST_S)
        self._until = time.monotonic() + rest_s
        self.look_s = min(max(rest_s, RESCAN_S), RESCAN_MOST_S)
        return rest_s


class WorkspaceWatcher:
    """Posts a `WorkspaceChanged` at every change, and every few seconds without one."""

    def __init__(
        self,
        output_dir: Path,
        post: Post,
        clock: Callable[[], float],
        read_disk: ReadDisk | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._output = OutputDir(output_dir)
        self._post = post
        self._read_disk = read_disk or disk_of
        self._reader = WorkspaceReader(output_dir, clock=clock)
        self._metrics = WorkspaceMetrics(output_dir)
        self._nodes = NodeReader(output_dir, monotonic)
        # Set by a screen on which things move fast, while a person looks at it.
        self.is_watched_closely = False
        self._shown: Snapshot | None = None
        self._signs = Signs()
        self._since = StateTimes(self._output)
        self._rest = Rest()
        self._metrics_folders: dict[str, Path] = {}
        self._stopped = threading.Event()
        self._woken = threading.Event()
        self._watcher: Watcher | None = None

    def run(self) -> None:
        with Watcher(self._folders(()), rescan_s=RESCAN_MOST_S) as watcher:
            self._watcher = watcher
            # In this order: names and states, the first screenful of figures, then what takes longer.
            workspace = self._look(with_configs=False)
            self._metrics.read_slice(workspace, self._stopped.is_set, FIRST_SLICE_S)
            self._show(workspace)
            while not self._stopped.is_set():
                workspace = self._look(at_rest=self._take_wake() or self._rest.is_over)
                while self._metrics.read_slice(workspace, self._stopped.is_set, SLICE_S):
                    self._show(workspace)
                self._show(workspace)
                watcher.watch(self._folders(run.run_id for run in workspace.runs if run.state is RunState.ACTIVE))
                self._stopped.wait(MIN_INTERVAL_S)
                if watcher.wait(self._pause_s(workspace)) and not self._woken.is_set():
                    self._stopped.wait(SETTLE_S)
                    watcher.wait(0.0)

    def _take_wake(self) -> bool:
        """Whether it was woken. Cleared only where it was set, and before the look: a wake that comes later stays."""
        woken = self._woken.is_set()
        if woken:
            self._woken.clear()
        return woken

    def _pause_s(self, workspace: Workspace) -> float:
        """How long to wait for a hint. A run that is silent is looked at again in the moment in which it is lost."""
        if self.is_watched_closely:
            return CLOSE_LOOK_S
        times = (run.updated_at for run in workspace.runs if run.state is RunState.ACTIVE)
        left = [LOST_AFTER_S - (workspace.read_at - said) for said in times if said is not None]
        until_loss_s = min((each for each in left if each > 0.0), default=RESCAN_MOST_S)
        return min(self._rest.look_s, until_loss_s + SETTLE_S)

    def _look(self, *, with_configs: bool = True, at_rest: bool = True) -> Workspace:
        began_s = time.thread_time()
        workspace = self._reader.read(with_configs=with_configs, at_rest=at_rest)
        if not with_configs:
            self._show(workspace)
        elif at_rest:
            self._metrics.rest_s = self._rest.begin(time.thread_time() - began_s)
        return workspace

    def _show(self, workspace: Workspace) -> None:
        disk = self._read_disk(self._output.path)
        since = self._since.read(workspace)
        group = make_group(self._nodes.read())
        self._shown = make_snapshot(
            workspace,
            self._metrics.tails,
            workspace.read_at,
            disk=disk,
            since=since,
            before=self._shown,
            alive_at=self._signs.times(((run.run_id, run.updated_at) for run in workspace.runs), workspace.read_at),
            group=group,
            group_problems=node_problems(group, workspace.read_at),
        )
        self._post(WorkspaceChanged(self._shown))

    def wake(self) -> None:
        """Look again now, at everything."""
        self._woken.set()
        if self._watcher is not None:
            self._watcher.wake()

    def stop(self) -> None:
        self._stopped.set()
        self.wake()

    def _folders(self, working: Iterable[str]) -> list[Path]:
        """The status of trainer, inference and daemons changes whenever anything does; a step is seen at once."""
        output = self._output
        known = self._metrics_folders
        self._metrics_folders = {
            run_id: known.get(run_id) or RunDir(output.path / run_id).metrics for run_id in working
        }
        steps = self._metrics_folders.values()
        return [output.path, output.trainer_status.parent, output.inference_status.parent, output.daemons, *steps]


class RunWatcher:
    """Posts a `RunChanged` whenever what the open tab shows of one run changed."""

    def __init__(self, reader: RunReader, post: Post) -> None:
        self.reader = reader
        self._post = post
        self._stopped = threading.Event()
        self._woken = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            data, more = self.reader.read()
            if data is not None:
                self._post(RunChanged(data))
            if not more:
                self._woken.wait(RUN_INTERVAL_S)
                self._woken.clear()

    def wake(self) -> None:
        """Look now: the request changed."""
        self._woken.set()

    def stop(self) -> None:
        self._stopped.set()
        self.reader.stop()
        self._woken.set()
