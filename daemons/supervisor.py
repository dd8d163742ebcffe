"""The supervisor: keeps the parts of one house alive without a terminal, and ends all of them when it is told to stop.

A loop looks at the disk and at its children, asks `decide` what to do, and does it. One file a part says what it knows
(`daemons/<name>.json`), so readers need not ask it. It is started by `launch` with the house's lock in its hands. It
never touches what is inside a run but to read its state.

    python -m daemons.supervisor OUTPUT_DIR LOCK_FD
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import msgspec

from daemons.decide import LIVE, Action, Do, Part, Seen, Snapshot, State, decide
from daemons.pidfile import SupervisorLock
from daemons.process import Identity, end_parts, find_members, kill_all, log_tail, spawn
from daemons.specs import INFERENCE, SYSTEM, TRAINER, RunNow, wanted
from prime_rl.configs.base import ConfigError, load_config
from prime_rl.configs.system import SupervisorConfig, SystemConfig
from prime_rl.configs.validate import load_run_config
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import LayoutError, OutputDir, RunDir
from prime_rl.contract.status import (
    HEARTBEAT_S,
    DaemonStatus,
    InferenceStatus,
    RunStatus,
    Status,
    StatusWriter,
    TrainerStatus,
    is_alive,
    read_status,
)
from prime_rl.utils.logger import setup_logger
from prime_rl.utils.process import process_create_time
from prime_rl.utils.signals import StopFlag
from prime_rl.utils.text import one_line

logger = logging.getLogger("supervisor")

# A crash is seen within this; a look costs about a millisecond for eight runs.
TICK_S = 0.25
_READY = {TRAINER: ("waiting", "training"), INFERENCE: ("serving",)}
_LAST_WORDS = ("finished", "evicted", "failed")
_TAIL_LINE_CHARS = 500


class Supervisor:
    """Executes what `decide` says for one house.

    Args:
        lock: the house's lock, held until the end of `run`.
        stop: asked at every tick; true ends everything in order: orchestrators, trainer, inference.
    """

    def __init__(
        self,
        output: OutputDir,
        config: SupervisorConfig,
        lock: SupervisorLock,
        stop: StopFlag,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.output = output
        self.config = config
        self._lock = lock
        self._stop = stop
        self._clock = clock
        self._parts: dict[str, Part] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._tails: dict[str, list[str]] = {}
        self._written: dict[str, tuple[float, Part]] = {}

    def run(self) -> set[Identity]:
        """Supervise until told to stop, then end everything; returns the processes that could not be ended."""
        status = StatusWriter(
            self.output.daemon_status("supervisor"),
            DaemonStatus(name="supervisor", state="running", argv=sys.argv, started_at=self._clock()),
        )
        logger.info("supervising %s", self.output.path)
        while not self._stop() and self._lock.is_in_place():
            try:
                self.tick()
                status.update(reason=None)
            except Exception as error:  # one bad tick must not end the parts of everybody
                logger.exception("a look at the house failed; the next is in %g s", TICK_S)
                status.update(reason=one_line(f"a look at the house failed: {error}"))
            self._stop.wait(TICK_S)
        logger.info("stopping: %s", self._stop.signal_name or "the house is gone")
        status.update(waiting_on="its parts to end")
        left = self._end_all()
        word = f"could not end {sorted(each.pid for each in left)}" if left else None
        status.close(state="stopped", waiting_on=None, reason=word)
        return left

    def tick(self) -> None:
        """Look, decide, act, and say so."""
        now = self._clock()
        requests = self._requests()
        runs = self._runs(now)
        seen = {name: self._see(part, runs.get(name), now) for name, part in self._parts.items()}
        specs = wanted(self.output, runs.values())
        for action in decide(Snapshot(specs, self._parts, seen, requests, self.config), now):
            self._act(action)
        for name in requests:
            self.output.start_request(name).unlink(missing_ok=True)
        self._write_statuses()

    def _act(self, action: Action) -> None:
        part, name = action.part, action.part.spec.name
        if action.do is Do.START:
            part = self._start(part)
        elif action.do is Do.TERM and part.process:
            logger.info("%s: SIGTERM, because %s", name, part.reason)
            part.process.send(signal.SIGTERM)
        elif action.do is Do.KILL and part.process:
            logger.warning("%s: did not end within %g s: SIGKILL", name, self.config.grace_s)
            kill_all(find_members(self.output.path, [part.process], {name}), reap=self._reap)
        elif action.do is Do.CLEAN:
            self._clean(part)
        elif action.do is Do.FORGET:
            self._forget(name)
            return
        if part.state is not (self._parts[name].state if name in self._parts else None):
            logger.info("%s: %s%s", name, part.state, f" ({part.reason})" if part.reason else "")
        self._parts[name] = part

    def _start(self, part: Part) -> Part:
        spec = part.spec
        try:
            child = spawn(spec.argv, spec.log, self.output.path, spec.name)
        except OSError as error:
            retry_at = part.started_at + self.config.max_backoff_s
            return replace(part, state=State.BACKOFF, retry_at=retry_at, reason=f"it cannot be started: {error}")
        self._children[spec.name] = child
        logger.info("%s: pid %d", spec.name, child.pid)
        return replace(part, process=Identity.of(child.pid))

    def _clean(self, part: Part) -> None:
        """Kill what a dead part left behind in its session; keep the last lines of its log."""
        name = part.spec.name
        child = self._children.pop(name, None)
        before = self._parts[name].process
        if before is not None:
            own_session = child is not None
            left = kill_all(find_members(self.output.path, [before], {name}, trust_sessions=own_session))
            if left:
                logger.error("%s: could not end %s", name, sorted(each.pid for each in left))
        self._tails[name] = [one_line(line, _TAIL_LINE_CHARS) for line in log_tail(part.spec.log)]

    def _forget(self, name: str) -> None:
        for table in (self._parts, self._children, self._tails, self._written):
            table.pop(name, None)
        self.output.daemon_status(name).unlink(missing_ok=True)

    def _see(self, part: Part, run: RunNow | None, now: float) -> Seen:
        child = self._children.get(part.spec.name)
        code = child.poll() if child else None
        own = self._own_status(part, run)
        word = run.word if run and run.word and run.word.updated_at >= part.started_at else None
        last = word.state if word and word.state in _LAST_WORDS else None
        return Seen(
            lives=child is not None and code is None,
            exit_code=code,
            ready=own is not None and own.state in _READY.get(part.spec.name, ("running", *_LAST_WORDS)),
            waiting_on=own.waiting_on if own else None,
            heartbeat_age_s=now - own.updated_at if own else None,
            last_word=last,
            last_reason=word.reason if word and last else None,
            evicted=run.evicted if run else False,
            gone=run.gone if run else False,
        )

    def _own_status(self, part: Part, run: RunNow | None) -> Status | None:
        """The part's own status file, if this very start of it wrote it."""
        status: Status | None
        if part.spec.name == TRAINER:
            status = read_status(self.output.trainer_status, TrainerStatus)
        elif part.spec.name == INFERENCE:
            status = read_status(self.output.inference_status, InferenceStatus)
        else:
            status = run.word if run else None
        return status if status and part.process and _wrote(part.process, status) else None

    def _runs(self, now: float) -> dict[str, RunNow]:
        """Runs that hold a slot, and runs whose orchestrator is known here."""
        trainer = read_status(self.output.trainer_status, TrainerStatus)
        held = set(trainer.runs) if trainer is not None and is_alive(trainer, now) else set()
        known = {name for name, part in self._parts.items() if part.spec.run_id}
        return {run_id: run for run_id in sorted(held | known) if (run := self._run_now(run_id, run_id in held))}

    def _run_now(self, run_id: str, in_slot: bool) -> RunNow | None:
        try:
            run = self.output.run(run_id)
        except LayoutError as error:
            logger.error("no orchestrator for %s: %s", run_id, error)
            return None
        word = read_status(run.status, RunStatus)
        max_steps = _max_steps(run) if in_slot and word is not None and word.state == "finished" else None
        return RunNow(run_id, in_slot, run.evicted.exists(), not run.path.is_dir(), word, max_steps)

    def _requests(self) -> frozenset[str]:
        try:
            return frozenset(path.name for path in self.output.start_request("x").parent.iterdir() if _plain(path))
        except FileNotFoundError:
            return frozenset()

    def _write_statuses(self, *, stopped: bool = False) -> None:
        """One file a part, at every change and every heartbeat."""
        now = self._clock()
        for name, part in self._parts.items():
            last = self._written.get(name)
            if stopped or last is None or last[1] != part or now - last[0] >= HEARTBEAT_S:
                status = self._status_of(part, now)
                if stopped and (part.state in LIVE or part.state is State.BACKOFF):
                    status.state, status.child_pid, status.waiting_on, status.reason = "stopped", None, None, None
                write_atomic(self.output.daemon_status(name), msgspec.json.encode(status))
                self._written[name] = (now, part)

    def _status_of(self, part: Part, now: float) -> DaemonStatus:
        return DaemonStatus(
            name=part.spec.name,
            state="running" if part.state is State.STOPPING else str(part.state),
            pid=os.getpid(),
            pid_create_time=process_create_time(os.getpid()),
            updated_at=now,
            waiting_on=part.waiting_on,
            child_pid=part.process.pid if part.process else None,
            child_create_time=part.process.create_time if part.process else None,
            argv=list(part.spec.argv),
            num_restarts=part.num_restarts,
            exit_code=part.exit_code,
            reason=part.reason,
            log_tail=self._tails.get(part.spec.name, []),
            started_at=part.started_at,
        )

    def _end_all(self) -> set[Identity]:
        def tick() -> None:
            self._reap()
            self._try_write_statuses()

        left: set[Identity] = set()
        living = [part for part in self._parts.values() if part.process and part.state in LIVE]
        for group in shutdown_order(living):
            names = [(part.spec.name, part.process) for part in group if part.process]
            logger.info("ending %s", ", ".join(name for name, _ in names))
            left |= end_parts(self.output.path, names, self.config.grace_s, tick=tick, trust_sessions=True)
        if self._lock.is_in_place():  # else the marks may be those of another house at the same path
            left |= kill_all(find_members(self.output.path, [], None), reap=self._reap)
        self._try_write_statuses(stopped=True)
        return {each for each in left if each.lives()}

    def _try_write_statuses(self, *, stopped: bool = False) -> None:
        try:
            self._write_statuses(stopped=stopped)
        except OSError as error:  # a full disk or a removed house must not keep the parts alive
            logger.error("status files cannot be written: %s", error)

    def _reap(self) -> None:
        for child in self._children.values():
            child.poll()


def shutdown_order(parts: Iterable[Part]) -> list[list[Part]]:
    """Groups of parts to end one after another: who uses others ends before them."""
    parts = list(parts)
    groups = [
        [part for part in parts if part.spec.run_id],
        [part for part in parts if part.spec.name == TRAINER],
        [part for part in parts if part.spec.name == INFERENCE],
    ]
    return [group for group in groups if group]


def _wrote(process: Identity, status: Status) -> bool:
    """Whether `status` was written by `process` or a process of its session."""
    if status.pid == process.pid:
        return True
    try:
        return os.getsid(status.pid) == process.pid
    except (OSError, OverflowError):
        return False


def _max_steps(run: RunDir) -> int | None:
    try:
        return load_run_config(run.orch_toml).max_steps
    except ConfigError:
        return None


def _plain(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".")


def supervise(output: OutputDir, lock: SupervisorLock, stop: StopFlag) -> int:
    """Supervise a house whose lock is held and whose configs are written; returns the exit code."""
    signal.signal(signal.SIGHUP, lambda signum, frame: stop.set())
    setup_logger("supervisor")
    try:
        system = load_config(SystemConfig, output.component_config(SYSTEM))
        lock.write_info(time.time())
        left = Supervisor(output, system.supervisor, lock, stop).run()
    finally:
        lock.release()
    return 1 if left else 0


def main() -> int:
    stop = StopFlag().install()
    output = OutputDir(Path(sys.argv[1]))
    return supervise(output, SupervisorLock.inherit(output, int(sys.argv[2])), stop)


if __name__ == "__main__":
    sys.exit(main())
