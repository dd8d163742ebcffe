"""The state of a workspace: one snapshot, read from disk only.

`WorkspaceReader.read()` returns a `Workspace` of frozen views, for `prl`, the TUI and the supervisor. It only reads, so
it also works with the daemons down and on a copied output directory. A file that is missing, half written, damaged or
huge costs its own facts and nothing else. A run's state comes from `contract.status.run_state`. It changes nothing
(`actions` does). All text in a snapshot is clean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from pathlib import Path
from typing import NamedTuple, TypeVar

from daemons.pidfile import read_info
from daemons.run_files import (
    NO_FILE,
    NOT_PARSED,
    RunFiles,
    RunRecord,
    Stamp,
    read_status_file,
    stamp_of,
)
from daemons.workspace import (
    SUPERVISOR,
    DaemonView,
    RefusedView,
    RunView,
    Workspace,
    by_importance,
    daemon_view,
    failure,
    find_bottleneck,
    shown,
    together,
    waits_for,
)
from prime_rl.contract.condition import STALLED, stall_text, stalled_since
from prime_rl.contract.disk import find_trouble
from prime_rl.contract.files import file_problem
from prime_rl.contract.layout import OutputDir, RefusedRun, scan_runs
from prime_rl.contract.status import (
    DaemonStatus,
    InferenceStatus,
    RunFacts,
    RunState,
    Status,
    TrainerRunStatus,
    TrainerStatus,
    is_alive,
    is_there,
    run_state,
)
from prime_rl.utils.text import one_line

StatusT = TypeVar("StatusT", bound=Status)


def read_workspace(output_dir: Path, *, now: float | None = None) -> Workspace:
    """One look at `output_dir` (`now` in Unix seconds). To look again and again keep a `WorkspaceReader`."""
    return WorkspaceReader(output_dir).read(now=now)


class WorkspaceReader:
    """Reads one workspace again and again; files that did not change are not parsed again."""

    def __init__(self, output_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.output = OutputDir(Path(output_dir))
        self._clock = clock
        self._files: dict[str, RunFiles] = {}
        self._views: dict[str, tuple[_Facts, RunView]] = {}
        self._statuses: dict[Path, tuple[Stamp, Status | None]] = {}
        self._scanned: tuple[Stamp, list[RefusedRun]] = (NO_FILE, [])
        self._runs: tuple[list[RunView], tuple[RunView, ...]] = ([], ())
        self._is_home = False

    def read(
        self,
        *,
        now: float | None = None,
        with_configs: bool = True,
        at_rest: bool = True,
        working: Set[str] | None = None,
        most: int | None = None,
    ) -> Workspace:
        """A new snapshot. Never raises for what is in the folder; an unreadable folder is an empty workspace.

        Args:
            with_configs: false leaves out what only configs contain, for a quick first look.
            at_rest: false leaves idle runs as they were if trainer and supervisor report nothing new about them: most
                of a large workspace.
            working: of the runs in slots read these; the others are left as they were in the same way. None: all.
            most: while there are runs in slots, read at most so many of them and no others.
        """
        now = self._clock() if now is None else now
        info = read_info(self.output)
        self._is_home = info is not None and info.lives_here() and info.output_dir == str(self.output.path.resolve())
        trainer = self._living(self.output.trainer_status, TrainerStatus, now)
        replicas = self._replicas(now)
        inference = together([status for _, status in replicas])
        # Where no supervisor runs nothing is held: it may be a disk that is read-only on purpose.
        disk = (find_trouble(self.output.path) if self._is_home else None) or (trainer.disk if trainer else None)
        daemons = self._daemons(now, disk)
        found, refused = self._scan(at_rest), self._scanned[1]
        reasons = {each.name: each.reason for each in refused} | (trainer.refused if trainer else {})
        places = {run_id: place for place, run_id in enumerate(trainer.waiting if trainer else [], start=1)}
        first = list(trainer.runs)[:most] if trainer and most is not None else []
        wanted = {run_id: found[run_id] for run_id in first if run_id in found} or found
        broken = None if inference else failure(daemons.get("inference"))
        runs = []
        for run_id, files in wanted.items():
            if run_id in reasons:
                continue
            slot = trainer.runs.get(run_id) if trainer else None
            others = (slot, places.get(run_id), daemons.get(run_id), trainer is not None, broken, disk)
            known = self._views.get(run_id)
            if known and known[0][1:-1] == others and _may_stay(known[0], run_id, at_rest, working):
                runs.append(known[1])
                continue
            record = _read_files(files, is_busy=slot is not None, with_config=with_configs)
            if isinstance(record, str):
                reasons[run_id] = record
            else:
                runs.append(self._view(run_id, _Facts(record, *others, is_alive(record.status, now))))
        if runs != self._runs[0]:
            self._runs = runs, tuple(sorted(runs, key=by_importance))
        return Workspace(
            output_dir=self.output.path,
            runs=self._runs[1],
            refused=tuple(RefusedView(one_line(name), one_line(reason)) for name, reason in sorted(reasons.items())),
            daemons=tuple(daemons.values()),
            max_runs=trainer.max_runs if trainer else 0,
            num_used=len(trainer.runs) if trainer else 0,
            trainer=trainer,
            inference=inference,
            replicas=replicas,
            supervisor_alive=self._living(self.output.daemon_status(SUPERVISOR), DaemonStatus, now) is not None,
            bottleneck=shown(disk or find_bottleneck(runs, trainer, inference)),
            read_at=now,
            num_unread=len(found) - len(wanted),
            disk=shown(disk),
        )

    def _scan(self, again: bool) -> dict[str, RunFiles]:
        """The files of all runs, by name. What is kept of runs that are gone is dropped."""
        stamp = stamp_of(self.output.path)
        if again or stamp != self._scanned[0]:
            try:
                runs, refused = scan_runs(self.output.path)
            except OSError:
                runs, refused = [], []
            self._scanned = (stamp, refused)
            self._files = {run.run_id: self._files.get(run.run_id) or RunFiles(run) for run in runs}
            self._views = {run_id: view for run_id, view in self._views.items() if run_id in self._files}
            self._statuses = {path: value for path, value in self._statuses.items() if value[0].readable}
        return self._files

    def _view(self, run_id: str, facts: _Facts) -> RunView:
        """What follows from `facts`; the same object as long as it is equal."""
        known = self._views.get(run_id)
        if known is not None and known[0] == facts:
            return known[1]
        view = _make_view(facts)
        if known is not None and known[1] == view:
            view = known[1]
        self._views[run_id] = (facts, view)
        return view

    def _daemons(self, now: float, disk: str | None) -> dict[str, DaemonView]:
        """Views by name: supervisor, trainer, inference, then the orchestrators."""
        try:
            paths = list(self.output.daemons.glob("*.json"))
        except OSError:
            paths = []
        order = {SUPERVISOR: 0, "trainer": 1, "inference": 2}
        views = {}
        for path in sorted(paths, key=lambda path: (order.get(path.stem, 3), path.name)):
            status = self._status(path, DaemonStatus)
            if status is not None and path.name == f"{status.name}.json":
                views[status.name] = daemon_view(status, now, is_home=self._is_home, disk=disk)
        return views

    def _status(self, path: Path, kind: type[StatusT]) -> StatusT | None:
        stamp = stamp_of(path)
        known = self._statuses.get(path)
        if known and known[0] == stamp:
            return known[1] if isinstance(known[1], kind) else None
        status = read_status_file(path, stamp, kind)
        self._statuses[path] = (stamp, status)
        return status

    def _replicas(self, now: float) -> tuple[tuple[int, InferenceStatus], ...]:
        try:
            paths = self.output.inference_statuses()
        except OSError:
            paths = {}
        found = [(number, self._living(path, InferenceStatus, now)) for number, path in paths.items()]
        return tuple((number, status) for number, status in found if status is not None)

    def _living(self, path: Path, kind: type[StatusT], now: float) -> StatusT | None:
        """The status whose writer runs; also one that does not respond, if it is this workspace's and not of a copy."""
        status = self._status(path, kind)
        is_silent = self._is_home and status is not None and is_there(status)
        return status if is_alive(status, now) or is_silent else None


class _Facts(NamedTuple):
    """All that a run's view is made of. `place` is its place in the trainer's queue, `lives` its orchestrator's.

    `disk` is what holds up all that work.
    """

    record: RunRecord
    slot: TrainerRunStatus | None
    place: int | None
    daemon: DaemonView | None
    trainer_lives: bool
    broken: str | None
    disk: str | None
    lives: bool


def _read_files(files: RunFiles, *, is_busy: bool, with_config: bool) -> RunRecord | str:
    """What the files of a run contain, or why it is refused."""
    try:
        record = files.read(is_busy=is_busy, with_config=with_config)
    except OSError as error:
        return f"cannot read it: {error}"
    if record.added_at is None:
        missing = f"{files.run.control / 'orch.toml'} not found: a run needs this file"
        return file_problem(files.run.orch_toml) or missing
    return record


def _may_stay(facts: _Facts, run_id: str, at_rest: bool, working: Set[str] | None) -> bool:
    """Whether a run is left as it was. One without a slot whose orchestrator lives is read at every look."""
    if facts.slot is None:
        return not (at_rest or facts.lives)
    return working is not None and run_id not in working


def _make_view(facts: _Facts) -> RunView:
    record, slot, daemon, status = facts.record, facts.slot, facts.daemon, facts.record.status
    config, max_steps = record.parsed.config, _max_steps(record)
    state, reason = run_state(
        RunFacts(
            evicted=record.evicted,
            config_error=record.config_error or (None if slot else record.parsed.error),
            max_steps=max_steps,
            published_step=record.published,
            orchestrator=status,
            trainer_alive=facts.trainer_lives,
            in_slot=slot is not None,
            supervisor_gave_up=daemon.reason or "its orchestrator failed"
            if daemon and daemon.state == "failed"
            else None,
            paused=record.paused,
            ended=record.ended,
        )
    )
    position = facts.place if state is RunState.WAITING else None
    if state is RunState.WAITING:
        reason = record.preempted
    is_held = state is RunState.ACTIVE and facts.disk is not None
    since, why = _stall(facts) if state is RunState.ACTIVE and not is_held else (None, None)
    living = status if facts.lives else None
    return RunView(
        run_id=record.run.run_id,
        state=state,
        step=max(slot.step if slot else 0, record.published),
        max_steps=max_steps,
        reward=status.reward if status else None,
        reason=shown(f"its orchestrator is stalled: {why}" if why else reason),
        waiting_on=shown(
            f"the disk ({facts.disk})" if is_held else waits_for(state, living, slot, position, daemon, facts.broken)
        ),
        updated_at=status.updated_at if status else None,
        run_idx=slot.run_idx if slot else None,
        queue_position=position,
        tokens_per_s=living.tokens_per_s if living else None,
        async_level=status.async_level if status else None,
        policy_version=status.policy_version if status else None,
        lr=slot.lr if slot else (config.lr if config else None),
        bottleneck=shown(living.bottleneck) if living else None,
        model=config.model if config else None,
        batch_size=config.batch_size if config else None,
        num_restarts=daemon.num_restarts if daemon else 0,
        added_at=record.added_at,
        stalled_since=since,
        tags=config.tags if config else (),
        weight=config.weight if config else None,
        priority=config.priority if config else None,
        max_tokens=config.max_tokens if config else None,
        max_hours=config.max_hours if config else None,
        problem=shown(living.problem) if living and state is RunState.ACTIVE else None,
        examples_unusable=status.examples_unusable if status else 0,
    )


def _stall(facts: _Facts) -> tuple[float | None, str | None]:
    """Since when the run's orchestrator is stalled, and why: by its own status, or the supervisor's."""
    status, daemon = facts.record.status, facts.daemon
    if status is not None and facts.lives and (since := stalled_since(status)) is not None:
        return since, stall_text(since)
    return (daemon.stalled_since, daemon.reason) if daemon is not None and daemon.state == STALLED else (None, None)


def _max_steps(record: RunRecord) -> int | None:
    """From the config; while that is unread, from the run's own orchestrator."""
    if record.parsed.config is not None:
        return record.parsed.config.max_steps
    return record.status.max_steps or None if record.parsed is NOT_PARSED and record.status else None
