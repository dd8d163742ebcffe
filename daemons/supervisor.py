"""The supervisor: keeps the parts of one house alive without a terminal, and ends all of them when it is told to stop.

A loop looks at the disk and at its children (`observe`), asks `decide` what to do, and does it. One file a part says
what it knows (`records`), so readers need not ask it. It is started by `launch` with the house's lock in its hands. It
never touches what is inside a run but to read its state.

    python -m daemons.supervisor OUTPUT_DIR LOCK_FD
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from daemons.children import AdoptedChild, Child, OwnChild, any_ended
from daemons.client import SUPERVISOR
from daemons.decide import decide
from daemons.leftovers import Past, adopt
from daemons.observe import Eyes, held_runs
from daemons.parts import LIVE, Action, Do, Part, Snapshot, State
from daemons.pidfile import SupervisorLock
from daemons.process import end_parts, find_members, kill_all, log_tail, spawn
from daemons.records import Records
from daemons.relay import LogRelay
from daemons.rotation import rotate
from daemons.specs import INFERENCE, SYSTEM, TRAINER, wanted
from prime_rl.configs.base import load_config
from prime_rl.configs.system import SupervisorConfig, SystemConfig
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import DaemonStatus, StatusWriter
from prime_rl.utils.clock import SteadyClock
from prime_rl.utils.logger import setup_logger
from prime_rl.utils.process import ProcessId
from prime_rl.utils.signals import StopFlag
from prime_rl.utils.text import one_line
from prime_rl.utils.watch import Watcher

logger = logging.getLogger("supervisor")

# A crash, a new run and a request are seen within this, at the cost of three system calls.
TICK_S = 0.25
# Between two looks at everything while nothing happens. Below a heartbeat, so that every second look renews the parts'
# files, well before a reader takes them for lost. A look costs milliseconds for 200 runs.
IDLE_S = 4.0
LOOK_AT_LOGS_S = 10.0
_TAIL_LINE_CHARS = 500


class Supervisor:
    """Executes what `decide` says for one house.

    Args:
        lock: the house's lock, held until the end of `run`.
        stop: asked at every tick; true ends everything in order: orchestrators, trainer, inference.
        relay: where the parts' logs go besides; with it a service that cannot start ends everything too.
        clock: by which everything is decided, in Unix seconds that never jump.
    """

    def __init__(
        self,
        output: OutputDir,
        config: SupervisorConfig,
        lock: SupervisorLock,
        stop: StopFlag,
        *,
        relay: LogRelay | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.output = output
        self.config = config
        self._lock = lock
        self._stop = stop
        self._clock = clock or SteadyClock()
        self._parts: dict[str, Part] = {}
        self._children: dict[str, Child] = {}
        self._eyes = Eyes(output, logger.error)
        self._records = Records(output, self._clock)
        self._relay = relay
        self._next_look_s = 0.0
        self._next_rotation_s = 0.0
        self._pasts: dict[str, Past] = {}
        self._was_up = False
        self.start_failure: str | None = None

    def run(self) -> set[ProcessId]:
        """Supervise until told to stop, then end everything; returns the processes that could not be ended."""
        status = StatusWriter(
            self.output.daemon_status(SUPERVISOR),
            DaemonStatus(name=SUPERVISOR, state="running", argv=sys.argv, started_at=time.time()),
        )
        logger.info("supervising %s", self.output.path)
        self.adopt()
        said: str | None = None
        hints = Watcher(rescan_s=IDLE_S)
        while not self._stop() and self._lock.is_in_place() and self.start_failure is None:
            try:
                if self.is_due():
                    self.tick()
                self._look_at_logs()
                trouble = None
            except Exception as error:  # one bad tick must not end the parts of everybody
                logger.exception("a look at the house failed; the next is in %g s", TICK_S)
                trouble = one_line(f"a look at the house failed: {error}")
            if trouble != said:
                status.update(reason=trouble)
                said = trouble
            # What the trainer and people write is seen at once; a death, or a stop, at the next tick.
            hints.watch([self.output.trainer_status.parent, self.output.start_request("x").parent])
            hints.wait(TICK_S)
        hints.close()
        logger.info("stopping: %s", self.start_failure or self._stop.signal_name or "the house is gone or another's")
        status.update(waiting_on="its parts to finish what they do, to save and to end")
        left = self._end_all()
        word = f"could not end {sorted(each.pid for each in left)}" if left else None
        status.close(state="stopped", waiting_on=None, reason=word)
        return left

    def adopt(self) -> None:
        """Take over the parts that outlived an earlier supervisor."""
        self._parts, self._pasts = adopt(self.output)
        for name, part in self._parts.items():
            if part.process:
                logger.info("%s: adopted, pid %d", name, part.process.pid)
                self._children[name] = AdoptedChild(part.process)
                self._records.keep_tail(name, self._pasts.pop(name).log_tail)
                self._follow(name, part.spec.log)

    def is_due(self) -> bool:
        """Whether it is time for a look at everything, or something has happened."""
        own = frozenset(part.process.pid for part in self._parts.values() if part.process)
        return time.monotonic() >= self._next_look_s or any_ended(self._children, own) or self._eyes.has_news()

    def tick(self) -> None:
        """Look, decide, act, and say so."""
        now = self._clock()
        requests = self._eyes.requests()
        runs = self._eyes.runs(held_runs(self._parts))
        seen = {
            name: self._eyes.see(part, self._children.get(name), runs.get(name), now)
            for name, part in self._parts.items()
        }
        specs = wanted(self.output, runs.values())
        for action in decide(Snapshot(specs, self._parts, seen, requests, self.config), now):
            self._act(action)
        for name in requests:
            self.output.start_request(name).unlink(missing_ok=True)
        self._records.write(self._parts)
        if self._relay is not None and not self._was_up:
            self._judge_start()
        self._next_look_s = time.monotonic() + self._rest_s(now)

    def _rest_s(self, now: float) -> float:
        """How long nothing is to be done unless something happens."""
        parts = self._parts.values()
        if any(part.state in (State.STARTING, State.STOPPING) for part in parts):
            return 0.0
        retries = [part.retry_at - now for part in parts if part.state is State.BACKOFF]
        return min([IDLE_S, *(wait_s for wait_s in retries if wait_s > 0)])

    def _judge_start(self) -> None:
        """In the foreground nobody else looks whether the services come up."""
        services = [part for name, part in self._parts.items() if name in (TRAINER, INFERENCE)]
        self._was_up = len(services) == 2 and all(part.state is State.RUNNING for part in services)
        for part in services:
            if part.state in (State.BACKOFF, State.FAILED):
                self.start_failure = f"{part.spec.name} did not start: {part.reason}"

    def _look_at_logs(self) -> None:
        """Pass on what was logged; put aside what has become too large."""
        if self._relay is not None:
            self._relay.pump()
        if time.monotonic() < self._next_rotation_s:
            return
        self._next_rotation_s = time.monotonic() + LOOK_AT_LOGS_S
        logs = {part.spec.log for part in self._parts.values() if part.state in LIVE}
        for log in sorted(logs | {self.output.log(SUPERVISOR)}):
            try:
                if rotate(log, self.config.max_log_bytes, self.config.num_old_logs):
                    logger.info("%s was put aside and begun anew", log)
            except OSError as error:  # the run may be on its way into the trash; or the disk is full
                logger.warning("%s cannot be put aside: %s", log, error)

    def _follow(self, name: str, log: Path) -> None:
        if self._relay is not None:
            self._relay.follow(name, log)

    def _act(self, action: Action) -> None:
        part, name = action.part, action.part.spec.name
        if action.do is Do.START:
            part = self._start(part)
        elif action.do is Do.TERM and part.process:
            logger.info("%s: SIGTERM, because %s", name, part.reason)
            part.process.send(signal.SIGTERM)
        elif action.do is Do.KILL and part.process:
            logger.warning("%s: did not end in time: SIGKILL", name)
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
        if past := self._pasts.pop(spec.name, None):
            part = replace(part, crashes=part.crashes or past.crashes)
            self._records.keep_tail(spec.name, past.log_tail)
        self._follow(spec.name, spec.log)
        try:
            child = spawn(spec.argv, spec.log, self.output.path, spec.name)
        except OSError as error:
            retry_at = part.started_at + self.config.max_backoff_s
            return replace(part, state=State.BACKOFF, retry_at=retry_at, reason=f"it cannot be started: {error}")
        self._children[spec.name] = OwnChild(child)
        logger.info("%s: pid %d", spec.name, child.pid)
        return replace(part, process=ProcessId.of(child.pid))

    def _clean(self, part: Part) -> None:
        """Kill what a dead part left behind in its session; keep the last lines of its log."""
        name = part.spec.name
        child = self._children.pop(name, None)
        if child is not None:
            child.close()
        before = self._parts[name].process
        if before is not None:
            own_session = isinstance(child, OwnChild)
            left = kill_all(find_members(self.output.path, [before], {name}, trust_sessions=own_session))
            if left:
                logger.error("%s: could not end %s", name, sorted(each.pid for each in left))
        self._records.keep_tail(name, [one_line(line, _TAIL_LINE_CHARS) for line in log_tail(part.spec.log)])

    def _forget(self, name: str) -> None:
        self._parts.pop(name, None)
        self._children.pop(name, None)
        self._pasts.pop(name, None)
        self._eyes.forget(name)
        self._records.forget(name)

    def _end_all(self) -> set[ProcessId]:
        def tick() -> None:
            self._reap()
            if self._relay is not None:
                self._relay.pump()
            self._try_write_statuses()

        left: set[ProcessId] = set()
        living = [part for part in self._parts.values() if part.process and part.state in LIVE]
        for group in shutdown_order(living):
            left |= self._end_group(group, tick)
        if self._lock.is_in_place():  # else the marks may be those of another house at the same path
            left |= kill_all(find_members(self.output.path, [], None), reap=self._reap)
        self._try_write_statuses(stopped=True)
        return {each for each in left if each.is_running()}

    def _end_group(self, group: list[Part], tick: Callable[[], None]) -> set[ProcessId]:
        """A part that still starts, and inference, have nothing to save."""
        names = [(part.spec.name, part.process) for part in group if part.process]
        works = any(part.state is not State.STARTING and part.spec.name != INFERENCE for part in group)
        is_own = all(isinstance(self._children.get(name), OwnChild) for name, _ in names)
        logger.info("ending %s", ", ".join(name for name, _ in names))
        drain_s = self.config.drain_s if works else self.config.grace_s
        return end_parts(
            self.output.path, names, self.config.grace_s, drain_s=drain_s, tick=tick, trust_sessions=is_own
        )

    def _try_write_statuses(self, *, stopped: bool = False) -> None:
        try:
            self._records.write(self._parts, stopped=stopped)
        except OSError as error:  # a full disk or a removed house must not keep the parts alive
            logger.error("status files cannot be written: %s", error)

    def _reap(self) -> None:
        for child in self._children.values():
            child.lives()


def shutdown_order(parts: Iterable[Part]) -> list[list[Part]]:
    """Groups of parts to end one after another: who uses others ends before them."""
    parts = list(parts)
    groups = [
        [part for part in parts if part.spec.run_id],
        [part for part in parts if part.spec.name == TRAINER],
        [part for part in parts if part.spec.name == INFERENCE],
    ]
    return [group for group in groups if group]


def supervise(output: OutputDir, lock: SupervisorLock, stop: StopFlag, *, foreground: bool = True) -> int:
    """Supervise a house whose lock is held and whose configs are written; returns the exit code.

    In the foreground all logs go to standard output too, and a service that cannot start ends it with 1.
    """
    signal.signal(signal.SIGHUP, lambda signum, frame: stop.set())
    setup_logger("supervisor", stream=sys.stdout if foreground else None)
    try:
        system = load_config(SystemConfig, output.component_config(SYSTEM))
        lock.write_info(time.time())
        relay = LogRelay(sys.stdout) if foreground else None
        supervisor = Supervisor(output, system.supervisor, lock, stop, relay=relay)
        left = supervisor.run()
    finally:
        lock.release()
    if supervisor.start_failure:
        print(f"prl: {supervisor.start_failure}", file=sys.stderr)
    return 1 if left or supervisor.start_failure else 0


def main() -> int:
    stop = StopFlag().install()
    output = OutputDir(Path(sys.argv[1]))
    return supervise(output, SupervisorLock.inherit(output, int(sys.argv[2])), stop, foreground=False)


if __name__ == "__main__":
    sys.exit(main())
