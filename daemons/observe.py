"""The supervisor's observations: the status files of the daemons, the state of the runs, the requests of people.

A file is parsed again only when its stamp (time, size, inode) has changed, so that looking at hundreds of idle runs
costs a few `stat` each. It judges nothing (`decide` does) and changes nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from daemons.decide import Daemon, Seen
from daemons.launchers.base import Alive, Ended
from daemons.specs import GATEWAY, INFERENCE, MONITORS, OPTIONAL, TRAINER, DaemonSpec, RunNow, has_all_steps
from daemons.workspace_reader import Stamp, StatusFiles, stamp_of
from prime_rl.configs.admitted import config_in_effect, read_effect
from prime_rl.configs.base import ConfigError
from prime_rl.configs.envs import GATEWAY_PROVIDERS
from prime_rl.contract.layout import LayoutError, OutputDir, RunDir, scan_runs
from prime_rl.contract.notes import Work, read_work
from prime_rl.contract.status import (
    GatewayStatus,
    InferenceStatus,
    RunStatus,
    Status,
    TrainerStatus,
    is_there,
    stalled_since,
)
from prime_rl.utils.process import ProcessId, is_below

_READY = {TRAINER: ("waiting", "training"), INFERENCE: ("serving",)}
_FINAL_STATES = ("finished", "evicted", "paused", "failed")


@dataclass(frozen=True)
class _Folder:
    """A run's folder as it was when it was checked, with its paths."""

    checked: tuple[int, ...]
    run: RunDir
    path: str
    control: str
    status: Path
    evicted: str
    finished: str
    pauses: tuple[str, str]

    @classmethod
    def of(cls, checked: tuple[int, ...], run: RunDir) -> _Folder:
        marks = str(run.evicted), str(run.finished), (str(run.paused), str(run.preempted))
        return cls(checked, run, str(run.path), str(run.control), run.status, *marks)


class Observer:
    """Watches one workspace.

    Args:
        complain: called once with the reason why a run in a slot cannot have an orchestrator.
    """

    def __init__(self, output: OutputDir, complain: Callable[[str], None] = lambda why: None) -> None:
        self.output = output
        self._complain = complain
        self._statuses = StatusFiles()
        self._runs: dict[str, _Folder] = {}
        self._needs: dict[str, tuple[tuple[Stamp, ...], frozenset[str]]] = {}
        self._unchanged: dict[tuple[str, str], tuple[object, float]] = {}
        self._refused: dict[str, str] = {}
        self._held: frozenset[str] = frozenset()
        self._sampling = ""

    def has_changes(self) -> bool:
        """True when runs got or lost a slot, or a person requested something. Costs two `stat` calls."""
        return bool(self.requests()) or self._trainer_runs() != self._held

    def requests(self) -> frozenset[str]:
        """Names of daemons whose restart was requested."""
        try:
            with os.scandir(self.output.start_request("x").parent) as entries:
                return frozenset(each.name for each in entries if each.is_file() and not each.name.startswith("."))
        except FileNotFoundError:
            return frozenset()

    def runs(self, known: Iterable[str]) -> dict[str, RunNow]:
        """Runs that hold a slot of a living trainer, and the `known` ones."""
        trainer = self._statuses.read(self.output.trainer_status, TrainerStatus)
        self._held = self._trainer_runs()
        held = self._held if trainer is not None and is_there(trainer) else frozenset()
        found = {run_id: self._guarded(run_id, run_id in held) for run_id in sorted(held | set(known))}
        return {run_id: run for run_id, run in found.items() if run is not None}

    def needs_inference(self) -> bool:
        """True unless there are runs and none of them samples: it looks at each only until it has found one."""
        if self._sampling and INFERENCE in self._needed(RunDir(self.output.path / self._sampling)):
            return True
        self._sampling, runs = "", [run for run in scan_runs(self.output.path)[0] if os.path.lexists(run.orch_toml)]
        self._needs = {run.run_id: self._needs[run.run_id] for run in runs if run.run_id in self._needs}
        for run in runs:
            if INFERENCE in self._needed(run):
                self._sampling = run.run_id
                return True
        return not runs

    def see(self, daemon: Daemon, look: Alive | Ended, run: RunNow | None, now: float) -> Seen:
        """Return `daemon` as it is now: by its launcher, its run, and the status that its own process wrote.

        `now` is in seconds that never jump: how long something stands still is counted from the call that first saw it.
        """
        own = self._own_status(daemon, run)
        status = run.status if run and run.status and daemon.process and _wrote(daemon.process, run.status) else None
        last = status.state if status and status.state in _FINAL_STATES else None
        end = look if isinstance(look, Ended) else None
        return Seen(
            lives=end is None,
            exit_code=end.exit_code if end else None,
            end_reason=end.reason if end else None,
            ready=own is not None and own.state in _READY.get(daemon.spec.kind, ("running", *_FINAL_STATES)),
            waiting_on=own.waiting_on if own else None,
            heartbeat_age_s=self._unchanged_s(daemon.spec.name, "beat", (own.pid, own.updated_at), now)
            if own
            else None,
            still_s=self._still_s(daemon.spec.name, own, now),
            loop_still_s=own.loop_still_s if own and stalled_since(own) is not None else None,
            final_state=last,
            last_reason=status.reason if status and last else None,
            evicted=run.evicted if run else False,
            ended=run.ended if run else False,
            has_all_steps=has_all_steps(run) if run else False,
            paused=run.paused if run else False,
            gone=run.gone if run else False,
            left=end.left if end else frozenset(),
            # What its engine ended, or a node that was lost, is the fault of no run.
            work=self._work(daemon) if end and end.reason is None else None,
        )

    def excuse(self) -> None:
        """Count nothing that a daemon has shown up to now as standing still: none can write its status file."""
        self._unchanged.clear()

    def forget(self, name: str) -> None:
        """Drop what is kept about a daemon and its run."""
        self._runs.pop(name, None)
        self._refused.pop(name, None)
        self._needs.pop(name, None)
        for what in ("beat", "progress"):
            self._unchanged.pop((name, what), None)
        self._statuses.forget(RunDir(self.output.path / name).status)

    def _still_s(self, name: str, own: Status | None, now: float) -> float | None:
        if own is None or own.progress is None or not has_work(own):
            self._unchanged.pop((name, "progress"), None)
            return None
        return self._unchanged_s(name, "progress", (own.pid, own.progress), now)

    def _unchanged_s(self, name: str, what: str, value: object, now: float) -> float:
        """The time for which a daemon has shown the same, by our own clock: others are set, and differ from ours."""
        last = self._unchanged.get((name, what))
        if last is None or last[0] != value:
            last = self._unchanged[name, what] = (value, now)
        return now - last[1]

    def _own_status(self, daemon: Daemon, run: RunNow | None) -> Status | None:
        """The daemon's own status file, if its current process wrote it."""
        status: Status | None
        if daemon.spec.name == TRAINER:
            status = self._statuses.read(self.output.trainer_status, TrainerStatus)
        elif daemon.spec.kind == INFERENCE:
            number = daemon.spec.replica
            path = self.output.replica_status(number) if number else self.output.inference_status
            status = self._statuses.read(path, InferenceStatus)
        elif daemon.spec.name == GATEWAY:
            status = self._statuses.read(self.output.gateway_status, GatewayStatus)
        elif daemon.spec.name in OPTIONAL:
            status = self._statuses.read(self.output.own_status(daemon.spec.name), Status)
        else:
            status = run.status if run else None
        return status if status and daemon.process and _wrote(daemon.process, status) else None

    def _work(self, daemon: Daemon) -> Work | None:
        """The last note of work of the process that has ended; None for nothing. Its suspects can be evicted."""
        if daemon.process is None or daemon.spec.kind not in _READY:
            return None
        work = read_work(work_file(self.output, daemon.spec))
        # The first rank is below the process that was started.
        if work is None or not (work.writer.is_same(daemon.process) or work.writer.is_started_after(daemon.process)):
            return None
        runs = {run_id: RunDir(self.output.path / run_id) for run_id in work.suspects}
        can_go = {each for each, run in runs.items() if os.path.isdir(run.control) and not os.path.lexists(run.evicted)}
        work.suspects = {run_id: deaths for run_id, deaths in work.suspects.items() if run_id in can_go}
        return work

    def _trainer_runs(self) -> frozenset[str]:
        trainer = self._statuses.read(self.output.trainer_status, TrainerStatus)
        return frozenset(trainer.runs) if trainer is not None else frozenset()

    def _guarded(self, run_id: str, in_slot: bool) -> RunNow | None:
        """The run's state; an invalid folder must not keep other runs from their orchestrators."""
        try:
            run = self._run(run_id, in_slot)
        except Exception as error:  # the boundary of a run
            why = str(error) if isinstance(error, LayoutError) else f"{type(error).__name__}: {error}"
            if self._refused.get(run_id) != why:
                self._refused[run_id] = why
                self._complain(f"no orchestrator for {run_id}: {why}")
            return None
        self._refused.pop(run_id, None)
        return run

    def _run(self, run_id: str, in_slot: bool) -> RunNow | None:
        folder = self._checked(run_id)
        if folder is None:
            return RunNow(run_id, in_slot, evicted=False, gone=True, status=None, max_steps=None)
        status = self._statuses.read(folder.status, RunStatus)
        max_steps = _max_steps(folder.run) if in_slot and status is not None and status.state == "finished" else None
        evicted, ended = os.path.lexists(folder.evicted), os.path.lexists(folder.finished)
        paused = any(map(os.path.lexists, folder.pauses))
        needs = self._needed(folder.run)
        return RunNow(
            run_id, in_slot, evicted, False, status, max_steps, MONITORS in needs, ended, paused, GATEWAY in needs
        )

    def _needed(self, run: RunDir) -> frozenset[str]:
        """Those of WHERE_NEEDED that its config asks for, and inference."""
        now = tuple(map(stamp_of, (run.orch_toml, run.admitted, run.served)))
        known = self._needs.get(run.run_id)
        if known is None or known[0] != now:
            known = self._needs[run.run_id] = now, _asks_for(run)
        return known[1]

    def _checked(self, run_id: str) -> _Folder | None:
        """The folder of a run, checked again when it or its `control/` was replaced; None when it is gone."""
        known = self._runs.pop(run_id, None)
        if known is None or known.checked != _what(known.path) + _what(known.control):
            run = self.output.run(run_id)
            known = _Folder.of(_what(str(run.path)) + _what(str(run.control)), run)
            if not run.path.is_dir():
                return None
        self._runs[run_id] = known
        return known


def work_file(output: OutputDir, spec: DaemonSpec) -> Path:
    """Where the trainer or a server notes what it works on."""
    return output.trainer_work if spec.name == TRAINER else output.replica_work(spec.replica or 0)


def has_work(status: Status) -> bool:
    """True when the daemon that wrote `status` has something to get done."""
    if isinstance(status, TrainerStatus):
        return bool(status.runs)
    if isinstance(status, InferenceStatus):
        return status.num_running + status.num_waiting > 0
    return status.state not in _FINAL_STATES


def held_runs(daemons: Mapping[str, Daemon]) -> set[str]:
    """The runs whose orchestrators are known."""
    return {name for name, daemon in daemons.items() if daemon.spec.run_id}


def _what(path: str) -> tuple[int, ...]:
    """The identity of a folder, links not followed; zeros when it does not exist."""
    try:
        info = os.lstat(path)
    except OSError:
        return 0, 0
    return info.st_ino, stat.S_IFMT(info.st_mode)


def _wrote(process: ProcessId, status: Status) -> bool:
    """True when `status` was written by `process`, a process of its session, or one that it started.

    Each of torchrun's ranks has its own session. On another machine: by one that was started there after it.
    """
    if process.is_of_another_boot():
        return status.writer.is_started_after(process)
    if status.pid == process.pid:
        return status.writer.is_same(process)
    try:
        return os.getsid(status.pid) == process.pid or is_below(status.pid, process.pid)
    except (OSError, OverflowError):
        return False


def _asks_for(run: RunDir) -> frozenset[str]:
    """Monitors when a run's config has a table below [monitor], the gateway when it has an environment of agents.

    Inference, unless it learns texts alone, has no [eval], and no version of it is kept served. A config that is
    invalid otherwise is not used by any daemon.
    """
    try:
        data = read_effect(run).data
    except ConfigError:
        return frozenset([INFERENCE] * os.path.lexists(run.orch_toml))
    table, own = data.get("monitor"), data.get("eval")
    has_monitors = isinstance(table, dict) and any(isinstance(each, dict) for each in table.values())
    tables = [data.get("env"), own.get("env") if isinstance(own, dict) else None]
    envs = [env for each in tables if isinstance(each, list) for env in each if isinstance(env, dict)]
    has_agents = any(str(env.get("id")).partition(":")[0] in GATEWAY_PROVIDERS for env in envs)
    samples = data.get("kind") != "sft" or isinstance(own, dict) or os.path.lexists(run.served)
    return frozenset([MONITORS] * has_monitors + [GATEWAY] * has_agents + [INFERENCE] * samples)


def _max_steps(run: RunDir) -> int | None:
    try:
        return config_in_effect(run).max_steps
    except ConfigError:
        return None
