"""The threads that look: at the workspace, at the run that is open, at the machine. They post messages and never draw.

Events of the file system are hints (`utils.watch`); between them a slow look finds what no event reported. All end
within one wait after `stop`.

A run's machine may have its clock ahead or behind: `Signs` keeps the last sign of life of each run on our own clock.
The time that a run writes counts until it is seen to change; from then on the moment when we saw the change counts. A
time from the future counts as the moment when we saw it first.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from textual.message import Message

from daemons.workspace import RunView, Workspace
from daemons.workspace_reader import WorkspaceReader
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.nodes import NodeReader
from prime_rl.contract.status import LOST_AFTER_S, RunState
from prime_rl.utils.watch import Watcher
from tui.messages import ReadFailed, RunChanged, SystemChanged, WorkspaceChanged
from tui.model.nodes import make_group, node_problems
from tui.model.snapshot import Disk, Snapshot, make_snapshot
from tui.readers.machine import INTERVAL_S, Probe, read_alerts
from tui.readers.workspace_metrics import WorkspaceMetrics

if TYPE_CHECKING:
    from tui.readers.tabs import TabData

RequestT = TypeVar("RequestT")
RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
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
# A first screenful: more rows than a terminal has lines.
FIRST_RUNS = 80
# It is drawn before more is read, since both need the interpreter; without a terminal that draws, so late.
FIRST_DRAWN_S = 0.5
# The figures of the first screenful; a person who acts while figures are read waits for no more than a slice.
FIRST_SLICE_S = 0.08
SLICE_S = 0.3


def disk_of(path: Path) -> Disk | None:
    """Free space at `path`; None when unknown."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Disk(usage.free, usage.total)


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


class Rest:
    """When runs at which nothing works are looked at again: the seldomer, the more a look at all of them takes."""

    def __init__(self) -> None:
        self._until: float | None = None
        self.look_s = RESCAN_S
        """How long the others wait for a look without a hint."""

    @property
    def is_over(self) -> bool:
        """True when these runs are due for a look; true before the first one."""
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
        self._closely = False
        self._shown: Snapshot | None = None
        self._signs = Signs()
        self._since = StateTimes(self._output)
        self._rest = Rest()
        self._metrics_folders: dict[Path, str] = {}
        self._looked_at = 0.0
        self._stopped = threading.Event()
        self._woken = threading.Event()
        self._drawn = threading.Event()
        self._watcher: Watcher | None = None
        self.is_caught_up = False
        """Whether all that there was at the start has been read and posted."""

    def run(self) -> None:
        """Look and post until `stop`. For a thread; the first look posts a screenful, the next ones all runs."""
        with Watcher(self._folders(()), rescan_s=RESCAN_MOST_S) as watcher:
            self._watcher = watcher
            # In this order: the first screenful, names and states of all, then what takes longer.
            workspace = self._reader.read(with_configs=False, most=FIRST_RUNS)
            self._metrics.read_slice(workspace, self._stopped.is_set, FIRST_SLICE_S)
            self._show(workspace)
            self._drawn.wait(FIRST_DRAWN_S)
            if workspace.num_unread:
                self._show(self._reader.read(with_configs=False))
            while not self._stopped.is_set():
                if is_woken := self._woken.is_set():
                    self._woken.clear()  # only then, and before the look: a wake that comes later stays
                at_rest = is_woken or self._rest.is_over
                working = None if at_rest else self._hinted(watcher)
                workspace = self._look(at_rest=at_rest, working=working)
                while self._metrics.read_slice(workspace, self._stopped.is_set, SLICE_S, working):
                    self._show(workspace)
                self._show(workspace)
                self.is_caught_up = True
                watcher.watch(self._folders(run.run_id for run in workspace.runs if run.state is RunState.ACTIVE))
                self._stopped.wait(MIN_INTERVAL_S)
                if watcher.wait(self._pause_s(workspace)) and not self._woken.is_set():
                    self._stopped.wait(SETTLE_S)
                    watcher.wait(0.0)

    def _pause_s(self, workspace: Workspace) -> float:
        """The seconds to wait for a hint. A silent run is looked at again in the moment in which it is lost."""
        if self._closely:
            return CLOSE_LOOK_S
        times = (run.updated_at for run in workspace.runs if run.state is RunState.ACTIVE)
        left = [LOST_AFTER_S - (workspace.read_at - said) for said in times if said is not None]
        until_loss_s = min((each for each in left if each > 0.0), default=RESCAN_MOST_S)
        return min(self._rest.look_s, until_loss_s + SETTLE_S)

    def _look(self, *, at_rest: bool, working: set[str] | None) -> Workspace:
        if working is None:
            self._looked_at = time.monotonic()
        began_s = time.thread_time()
        workspace = self._reader.read(at_rest=at_rest, working=working)
        if at_rest:
            self._metrics.rest_s = self._rest.begin(time.thread_time() - began_s)
        return workspace

    def _hinted(self, watcher: Watcher) -> set[str] | None:
        """The runs with a new step, for a look at them alone; None: all are looked at.

        That is so at any other hint (of a daemon, of a run that came), without one, and every few seconds.
        """
        changed = watcher.take_changed()
        is_due = time.monotonic() - self._looked_at >= self._rest.look_s
        if is_due or not changed or not changed <= self._metrics_folders.keys():
            return None
        return {self._metrics_folders[folder] for folder in changed}

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
            alerts=read_alerts(self._output, workspace.read_at),
        )
        self._post(WorkspaceChanged(self._shown))

    def look_closely(self, closely: bool) -> None:
        """Look more often while a person is on a screen on which things move fast. From any thread."""
        self._closely = closely
        self.wake()

    def wake(self) -> None:
        """Look again now, at everything. From any thread."""
        self._woken.set()
        if self._watcher is not None:
            self._watcher.wake()

    def drawn(self) -> None:
        """Note that what was posted first is on the screen. From any thread."""
        self._drawn.set()

    def stop(self) -> None:
        """Let `run` return within one wait. From any thread."""
        self._stopped.set()
        self._drawn.set()
        self.wake()

    def _folders(self, working: Iterable[str]) -> list[Path]:
        """The status of trainer, inference and daemons changes whenever anything does; a step is seen at once."""
        output = self._output
        known = {run_id: folder for folder, run_id in self._metrics_folders.items()}
        self._metrics_folders = {
            known.get(run_id) or RunDir(output.path / run_id).metrics: run_id for run_id in working
        }
        inference = [path.parent for path in output.inference_statuses().values()]
        return [output.path, output.trainer_status.parent, *inference, output.daemons, *self._metrics_folders]


class RequestReader(Protocol[RequestT_contra]):
    """`RunReader` and others: what has changed of what the request asks for, and whether to look again at once."""

    def read(self, request: RequestT_contra, is_wanted: Callable[[], bool]) -> tuple[TabData | None, bool]:
        """(what changed, or None; whether to look again at once). Long work ends when `is_wanted` gives False."""


class RunWatcher(Generic[RequestT]):
    """Posts a `RunChanged` whenever what is shown of the open run, or of those that are compared, changed.

    `interval_s` is the time between two looks at what is asked for; None: it is looked at once.
    """

    def __init__(
        self,
        reader: RequestReader[RequestT],
        request: RequestT,
        post: Post,
        *,
        interval_s: float | None = RUN_INTERVAL_S,
    ) -> None:
        self._reader = reader
        self._request = request
        self._answered: RequestT | None = None
        self._complained = ""
        self._post = post
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._woken = threading.Event()

    @property
    def is_caught_up(self) -> bool:
        """True when all of what is asked for now was read and posted."""
        return self._answered == self._request

    def run(self) -> None:
        """Read and post until `stop`. For a thread; without `interval_s` it reads again only after `ask`."""
        while not self._stopped.is_set():
            request = self._request
            try:
                data, more = self._reader.read(request, functools.partial(self._is_wanted, request))
            except Exception as error:  # the boundary of what is in the files of one run
                data, more = None, False
                self._complain(f"{type(error).__name__}: {error}")
            else:
                self._complained = ""
            if data is not None:
                self._post(RunChanged(data))
            if not more:
                self._answered = request
                self._woken.wait(self._interval_s)
                self._woken.clear()

    def _complain(self, why: str) -> None:
        if why != self._complained:
            self._complained = why
            self._post(ReadFailed(why))

    def _is_wanted(self, request: RequestT) -> bool:
        return self._request == request and not self._stopped.is_set()

    def ask(self, request: RequestT) -> None:
        """Look at this from now on. From any thread."""
        self._request = request
        self._woken.set()

    def stop(self) -> None:
        """Let `run` return; the read that is under way is not wanted any more. From any thread."""
        self._stopped.set()
        self._woken.set()


class SystemWatcher:
    """Posts a `SystemChanged` every INTERVAL_S, from the first look at the workspace on."""

    def __init__(self, probe: Probe, post: Callable[[Message], object]) -> None:
        self._workspace: Workspace | None = None
        self._probe = probe
        self._post = post
        self._woken = threading.Event()
        self._stopped = threading.Event()

    def run(self) -> None:
        """Measure and post until `stop`. For a thread; nothing is measured before the first `take`."""
        num_looks = 0
        while not self._stopped.is_set():
            workspace = self._workspace
            if workspace is not None:
                self._post(SystemChanged(self._probe.read(workspace)))
                num_looks += 1
            # The second look follows soon: it is the first with shares.
            self._woken.wait(0.5 if num_looks < 2 else INTERVAL_S)
            self._woken.clear()

    def take(self, workspace: Workspace) -> None:
        """The newest look at the workspace. From any thread."""
        is_first = self._workspace is None
        self._workspace = workspace
        if is_first:
            self._woken.set()

    def stop(self) -> None:
        """Let `run` return after the measurement that is under way. From any thread."""
        self._stopped.set()
        self._woken.set()
