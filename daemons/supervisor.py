"""The supervisor: keeps the daemons of one workspace alive without a terminal, and ends them when asked to stop.

A loop looks at the disk (`observe`) and, through a launcher, at its daemons, lets `decide` choose what to do, and does
it. It records one file per daemon (`records`) for all readers. `supervisor_process` starts it and hands it the
workspace's lock. It only reads what is inside a run, and handles no process: `launchers` do.

    python -m daemons.supervisor OUTPUT_DIR LOCK_FD
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from daemons.actions import evict_run
from daemons.decide import LIVE, Action, Daemon, Do, Seen, Snapshot, State, decide
from daemons.errors import ActionError
from daemons.halving import Halving
from daemons.launchers import launcher_of
from daemons.launchers.base import Alive, Ended, Launcher, LaunchError, Left
from daemons.logs import JOB_LOG, SRUN_LOG, LogRelay, node_log, rotate
from daemons.observe import Observer, held_runs, work_file
from daemons.pidfile import SupervisorLock
from daemons.process import DEVICES_VARIABLE, log_tail
from daemons.records import Records, adopt
from daemons.specs import (
    ALERTS,
    GATEWAY,
    INFERENCE,
    MONITORS,
    SYSTEM,
    TRAINER,
    DaemonSpec,
    RunNow,
    inference_spec,
    saved_devices,
    saved_system,
    wanted_daemons,
)
from daemons.workspace import NOT_NEEDED, SUPERVISOR
from prime_rl.configs.base import load_config
from prime_rl.configs.system import SupervisorConfig, SystemConfig
from prime_rl.contract.files import disk_trouble, find_trouble
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import DaemonStatus, StatusWriter
from prime_rl.utils.process import StopFlag, inherit_orphans
from prime_rl.utils.runtime import SteadyClock, complain, setup_logger
from prime_rl.utils.secrets import seal
from prime_rl.utils.text import one_line
from prime_rl.utils.watch import Watcher

logger = logging.getLogger("supervisor")

# A crash, a new run and a request are seen within this, at the cost of three system calls.
TICK_S = 0.25
# Between two looks at everything while nothing happens. Below a heartbeat, so that every second look renews the
# daemons' files, well before a reader takes them for lost. A look costs milliseconds for 200 runs.
IDLE_S = 4.0
# A daemon may write 100 MB in a second, and must not fill the disk for all.
LOOK_AT_LOGS_S = 2.0
_TAIL_LINE_CHARS = 500
# For daemons that still start: they have nothing to finish, and look at no signal while they load torch.
START_GRACE_S = 3.0


class Supervisor:
    """Executes the actions of `decide` for one workspace.

    Args:
        launcher: starts and ends the daemons.
        lock: the workspace's lock, held until the end of `run`.
        stop: asked at every tick; true ends everything in order: orchestrators, trainer, monitors, inference.
        relay: where the daemons' logs also go; with it a service that cannot start ends everything too.
        clock: by which everything is decided, in Unix seconds that never jump.
    """

    def __init__(
        self,
        output: OutputDir,
        config: SupervisorConfig,
        launcher: Launcher,
        lock: SupervisorLock,
        stop: StopFlag,
        *,
        relay: LogRelay | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.output = output
        self.config = config
        self._launcher = launcher
        self._lock = lock
        self._stop = stop
        self._clock = clock or SteadyClock()
        self._daemons: dict[str, Daemon] = {}
        self._observer = Observer(output, logger.error)
        self._halving = Halving(output)
        self._records = Records(output, self._clock)
        self._relay = relay
        self._next_look_s = 0.0
        self._rest_until_s = 0.0
        self._next_rotation_s = 0.0
        self._pasts: dict[str, DaemonStatus] = {}
        self._was_up = False
        self.start_failure: str | None = None

    def run(self) -> Left:
        """Supervise until asked to stop, then end everything; returns the processes that could not be ended."""
        status = StatusWriter(
            self.output.daemon_status(SUPERVISOR),
            DaemonStatus(name=SUPERVISOR, state="running", argv=sys.argv, started_at=time.time()),
        )
        logger.info("supervising %s", self.output.path)
        self.adopt()
        said: str | None = None
        hints = Watcher(rescan_s=IDLE_S)
        while not self._stop() and self._lock.is_in_place() and self.start_failure is None:
            status.turn()
            try:
                if self.is_due():
                    self.tick()
                self.look_at_logs()
                trouble = None
            except Exception as error:  # one bad tick must not end all daemons
                trouble = disk_trouble(error, self.output.path, self.output.path)
                if trouble is None:
                    logger.exception("reading the workspace failed; next try in %g s", TICK_S)
                    trouble = one_line(f"reading the workspace failed: {error}")
            if trouble != said:
                status.update(reason=trouble)
                said = trouble
            # What the trainer and people write is seen at once; a death, or a stop, at the next tick.
            hints.watch([self.output.trainer_status.parent, self.output.start_request("x").parent])
            hints.wait(TICK_S)
        hints.close()
        logger.info(
            "stopping: %s",
            self.start_failure or self._stop.signal_name or "the workspace is gone or held by another supervisor",
        )
        status.update(waiting_on="its daemons to finish, save and end")
        left = self._end_all(status.turn)
        word = f"cannot end processes {sorted(each.pid for each in left)}" if left else None
        status.close(state="stopped", waiting_on=None, reason=word)
        return left

    def adopt(self) -> None:
        """Take over the daemons that outlived an earlier supervisor."""
        self._daemons, self._pasts = adopt(self.output, self._launcher)
        for name, daemon in self._daemons.items():
            logger.info("%s: adopted, %s", name, daemon.handle.ref if daemon.handle else "")
            self._records.keep_tail(name, self._pasts.pop(name).log_tail)
            self._follow(daemon.spec)

    def is_due(self) -> bool:
        """True when it is time to look at everything, or something has happened.

        Looking takes half of the time at most: with thousands of daemons a look may take longer than TICK_S.
        """
        now = time.monotonic()
        if now < self._rest_until_s:
            return False
        return now >= self._next_look_s or self._launcher.has_news() or self._observer.has_changes()

    def tick(self) -> None:
        """Look, decide, act, and record it. It waits for nothing.

        An error with one daemon costs the others nothing; the first one is raised at the end.
        """
        began, now = time.monotonic(), self._clock()
        if disk := find_trouble(self.output.path):
            logger.warning("holding all daemons: %s", disk.partition(":")[0])
            self._observer.excuse()
        self._halving.look()
        requests = self._observer.requests()
        # The processes first: one that has ended by now has written before why it did.
        looks = {
            name: self._launcher.look(daemon.handle) if daemon.handle else Ended(None)
            for name, daemon in self._daemons.items()
        }
        runs = self._observer.runs(held_runs(self._daemons))
        seen = {name: self._see(daemon, looks[name], runs.get(name), now) for name, daemon in self._daemons.items()}
        samples = self._observer.needs_inference()
        specs = wanted_daemons(self.output, runs.values(), samples=samples)
        if not samples:  # readers are told why it is not there
            idle = self._daemons.get(INFERENCE)
            idle = idle or Daemon(inference_spec(self.output, saved_system(self.output)), State.DONE)
            if idle.state not in LIVE:
                self._daemons[INFERENCE] = replace(idle, state=State.DONE, reason=NOT_NEEDED)
        troubles: list[Exception] = []
        for action in decide(Snapshot(specs, self._daemons, seen, requests, self.config, disk), now):
            try:
                self._act(action, looks.get(action.daemon.spec.name))
            except Exception as error:  # the boundary of one daemon: it is tried again at the next look
                logger.exception("%s: %s failed", action.daemon.spec.name, action.do)
                troubles.append(error)
        for name in requests:
            self.output.start_request(name).unlink(missing_ok=True)
        self._records.write(self._daemons)
        if self._relay is not None and not self._was_up:  # in the foreground no other process checks that they start
            services = [daemon for name, daemon in self._daemons.items() if name in (TRAINER, INFERENCE)]
            up = (State.RUNNING, State.DONE)
            self._was_up = len(services) == 2 and all(daemon.state in up for daemon in services)
            for daemon in services:
                if daemon.state in (State.BACKOFF, State.FAILED):
                    self.start_failure = f"{daemon.spec.name} did not start: {daemon.reason}"
        ended = time.monotonic()
        self._next_look_s, self._rest_until_s = ended + self._rest_s(now), ended + (ended - began)
        if troubles:
            raise troubles[0]

    def _see(self, daemon: Daemon, look: Alive | Ended, run: RunNow | None, now: float) -> Seen:
        if isinstance(look, Alive) and look.process != daemon.process:
            daemon = self._daemons[daemon.spec.name] = replace(daemon, process=look.process)
        elif isinstance(look, Ended) and daemon.handle and daemon.state not in LIVE and not look.left:
            daemon = self._daemons[daemon.spec.name] = replace(daemon, handle=None)
        return self._observer.see(daemon, look, run, now)

    def _rest_s(self, now: float) -> float:
        """The seconds to wait unless something happens."""
        daemons = self._daemons.values()
        if any(each.state in (State.STARTING, State.STOPPING) for each in daemons):
            return 0.0
        if any(each.handle and each.state not in LIVE for each in daemons):  # something of it may be left
            return 0.0
        retries = [daemon.retry_at - now for daemon in daemons if daemon.state is State.BACKOFF]
        return min([IDLE_S, *(wait_s for wait_s in retries if wait_s > 0)])

    def look_at_logs(self) -> None:
        """Relay new log lines; rotate logs that have become too large, of all nodes."""
        if self._relay is not None:
            self._relay.pump()
        if time.monotonic() < self._next_rotation_s:
            return
        self._next_rotation_s = time.monotonic() + LOOK_AT_LOGS_S
        specs = [daemon.spec for daemon in self._daemons.values() if daemon.state in LIVE]
        logs = {node_log(spec.log, node) for spec in specs for node in range(spec.num_nodes)}
        for log in sorted(logs | {self.output.log(name) for name in (SUPERVISOR, JOB_LOG, SRUN_LOG)}):
            try:
                if rotate(log, self.config.max_log_bytes, self.config.num_old_logs):
                    logger.info("%s: rotated", log)
            except OSError as error:  # the run may be on its way into the trash; or the disk is full
                logger.warning("cannot rotate %s: %s", log, error)

    def _follow(self, spec: DaemonSpec) -> None:
        if self._relay is not None:
            self._relay.follow(spec.name, spec.log, spec.num_nodes)

    def _act(self, action: Action, look: Alive | Ended | None) -> None:
        daemon, name = action.daemon, action.daemon.spec.name
        if action.do is Do.START:
            daemon = self._start(daemon)
        elif action.do is Do.TERM and daemon.handle:
            logger.info("%s: SIGTERM, because %s", name, daemon.reason)
            self._launcher.stop(daemon.handle, math.inf)  # `decide` says when its time is over
        elif action.do is Do.KILL and daemon.handle:
            logger.warning("%s: did not end in time: SIGKILL", name)
            self._launcher.stop(daemon.handle, 0.0)
        elif action.do is Do.CLEAN:
            self._clean(daemon, look if isinstance(look, Ended) else Ended(None))
            if action.evicts:
                self._evict(*action.evicts)
        elif action.do is Do.FORGET:
            self._forget(name)
            return
        if daemon.state is not (self._daemons[name].state if name in self._daemons else None):
            logger.info("%s: %s%s", name, daemon.state, f" ({daemon.reason})" if daemon.reason else "")
        self._daemons[name] = daemon

    def _start(self, daemon: Daemon) -> Daemon:
        spec = daemon.spec
        if past := self._pasts.pop(spec.name, None):
            daemon = replace(daemon, crashes=daemon.crashes or tuple(past.crashes))
            self._records.keep_tail(spec.name, past.log_tail)
        self._follow(spec)
        try:
            handle = self._launcher.start(spec)
        except (OSError, ValueError, LaunchError) as error:
            retry_at = daemon.started_at + self.config.max_backoff_s
            return replace(daemon, state=State.BACKOFF, retry_at=retry_at, reason=f"cannot start: {error}")
        logger.info("%s: %s", spec.name, handle.ref)
        look = self._launcher.look(handle)
        return replace(daemon, handle=handle, process=look.process if isinstance(look, Alive) else None)

    def _clean(self, daemon: Daemon, end: Ended) -> None:
        """Kill what a dead daemon left behind; keep the last lines of its log, of the node that ended it."""
        if daemon.handle:
            self._launcher.stop(daemon.handle, 0.0)
        # No run is suspected of a lost node, or of a disk that takes nothing.
        if daemon.spec.kind in (TRAINER, INFERENCE) and (end.reason or find_trouble(self.output.path)):
            with contextlib.suppress(OSError):
                work_file(self.output, daemon.spec).unlink()
        node = end.node
        log = node_log(daemon.spec.log, node)
        tail: list[str] = [one_line(line, _TAIL_LINE_CHARS) for line in log_tail(log)]
        self._records.keep_tail(daemon.spec.name, [f"==> {log.name} <==", *tail] if node and tail else tail)

    def _evict(self, run_id: str, reason: str) -> None:
        logger.error("evicting %s: %s", run_id, reason)
        try:
            evict_run(self.output.path, run_id, reason, actor=SUPERVISOR)
        except ActionError as error:  # it is gone, or its folder cannot be written: the daemon is started anyway
            logger.error("%s", error)

    def _forget(self, name: str) -> None:
        self._daemons.pop(name, None)
        self._pasts.pop(name, None)
        self._observer.forget(name)
        self._records.forget(name)

    def _end_all(self, turn: Callable[[], None]) -> Left:
        def tick() -> None:
            turn()
            self.look_at_logs()
            self._try_write_statuses()

        left: Left = set()
        living = [daemon for daemon in self._daemons.values() if daemon.handle and daemon.state in LIVE]
        for group in shutdown_order(living):
            left |= self._end_group(group, tick)
        if self._lock.is_in_place():  # else the marks may be those of another workspace at the same path
            left |= self._launcher.kill(self._launcher.strays(), tick)
        self._try_write_statuses(stopped=True)
        return {each for each in left if each.is_of_another_boot() or each.is_running()}

    def _end_group(self, group: list[Daemon], tick: Callable[[], None]) -> Left:
        """A daemon that still starts, and inference, have nothing to save."""
        handles = [daemon.handle for daemon in group if daemon.handle]
        works = any(daemon.state is not State.STARTING and daemon.spec.kind != INFERENCE for daemon in group)
        logger.info("ending %s", ", ".join(handle.name for handle in handles))
        is_new = all(daemon.state is State.STARTING for daemon in group)
        grace_s = min(self.config.grace_s, START_GRACE_S) if is_new else self.config.grace_s
        return self._launcher.end(handles, grace_s, self.config.drain_s if works else grace_s, tick)

    def _try_write_statuses(self, *, stopped: bool = False) -> None:
        try:
            self._records.write(self._daemons, stopped=stopped)
        except OSError as error:  # a full disk or a removed workspace must not keep the daemons alive
            logger.error("cannot write status files: %s", error)


def shutdown_order(daemons: Iterable[Daemon]) -> list[list[Daemon]]:
    """Groups of daemons to end one after another: a daemon ends before those that it uses."""
    daemons = list(daemons)
    groups = [
        [daemon for daemon in daemons if daemon.spec.name == ALERTS],  # or it would report the end of the others
        [daemon for daemon in daemons if daemon.spec.run_id],
        [daemon for daemon in daemons if daemon.spec.name == TRAINER],
        [daemon for daemon in daemons if daemon.spec.name == MONITORS],  # they pass its last lines on
        [daemon for daemon in daemons if daemon.spec.name == GATEWAY],
        [daemon for daemon in daemons if daemon.spec.kind == INFERENCE],
    ]
    return [group for group in groups if group]


def supervise(output: OutputDir, lock: SupervisorLock, stop: StopFlag, *, foreground: bool = True) -> int:
    """Supervise a workspace whose lock is held and whose configs are written; returns the exit code.

    In the foreground all logs go to standard output too, and a service that cannot start ends it with 1.
    """
    signal.signal(signal.SIGHUP, lambda signum, frame: stop.set())
    setup_logger("supervisor", stream=sys.stdout if foreground else None)
    seal()
    try:
        system = load_config(SystemConfig, output.component_config(SYSTEM))
        # What `prl up` decided holds for every daemon that is started from here, whichever shell this was started in.
        if (devices := saved_devices(output)) is not None:
            os.environ[DEVICES_VARIABLE] = devices
        lock.write_info(time.time())
        relay = LogRelay(sys.stdout) if foreground else None
        launcher = launcher_of(system.deployment, output)
        if system.deployment.engine == "local" and os.getpid() != 1:  # 1 inherits what is not its daemons' either
            inherit_orphans()
        supervisor = Supervisor(output, system.supervisor, launcher, lock, stop, relay=relay)
        left = supervisor.run()
    finally:
        lock.release()
    if supervisor.start_failure:
        complain("prl", supervisor.start_failure)
    return 1 if left or supervisor.start_failure else 0


def main() -> int:
    """Supervise OUTPUT_DIR with the lock handed over as LOCK_FD; returns the exit code."""
    stop = StopFlag().install()
    output = OutputDir(Path(sys.argv[1]))
    return supervise(output, SupervisorLock.inherit(output, int(sys.argv[2])), stop, foreground=False)


if __name__ == "__main__":
    sys.exit(main())
