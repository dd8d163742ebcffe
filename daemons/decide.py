r"""The supervisor's next act: a pure function of a snapshot and the clock.

    start -> starting -> running <-> stalled
                 \-> crash -> backoff -> start ... or failed;  an orchestrator's final state -> done

A process that exits by itself before the daemon is ready counts as a failed start, not as a crash. Either way a daemon
that ends early several times in a row has failed and is left alone until a person restarts it; so is one that refuses
its config (exit code 2). A run that was in work at crash after crash, and alone at the last, is evicted. A daemon that
is alive but makes no progress is stalled: this is reported, and the daemon is ended only where the config asks for it.
It reads no file and sends no signal: `supervisor` does both.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from daemons.process import KILL_WAIT_S
from daemons.specs import TRAINER, DaemonSpec
from prime_rl.configs.system import SupervisorConfig
from prime_rl.contract.notes import Item, Work
from prime_rl.contract.status import LOST_AFTER_S, TAKES_ITS_SHARE, Crash, Handle, stall_text, utc
from prime_rl.utils.process import ProcessId

EXIT_WRONG_USE = 2
# Enough to see a pattern; the log has them all.
MAX_CRASHES_KEPT = 10
# So long an orchestrator that starts takes the cores away from others that start: its imports, several times over.
LOADS_WITHIN_S = 60.0
# Crashes later than the early ones are a loop as well, when they are this many times as many, and each came within so
# many times the longest wait.
LOOP_TIMES = 3
LOOP_WAITS = 10
MAX_ITEMS_SHOWN = 3
NOT_REQUESTED = "no longer requested by the system file or a run"
_UNKILLABLE = "hangs in the kernel, SIGKILL was sent"
_SILENT = "alive, but has not written its status file for more than three heartbeats"


class State(enum.StrEnum):
    """The state of a daemon, as in `daemons/<name>.json` (STOPPING is written as running or stalled)."""

    STARTING = "starting"
    RUNNING = "running"
    STALLED = "stalled"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    FAILED = "failed"
    DONE = "done"


class After(enum.StrEnum):
    """The act that follows once a daemon has stopped as asked."""

    END = "end"
    RESTART = "restart"
    NOT_READY = "not ready"
    STALL = "stall"


LIVE = frozenset({State.STARTING, State.RUNNING, State.STALLED, State.STOPPING})


@dataclass(frozen=True)
class Daemon:
    """The supervisor's memory of one daemon.

    `handle` is its last start, for the launcher, until nothing of that is left; `process` its first process while it
    lives. `num_crashes` counts in a row, for the wait before the next start; `num_early_ends` counts starts in a row
    that ended before the daemon was ready or soon after, `num_looped` those that ended too soon after that; `crashes`
    are the newest, whatever came between. `killed_at`
    is when SIGKILL was last sent to processes of this start; `held_at` since when its run is evicted or paused.
    """

    spec: DaemonSpec
    state: State
    handle: Handle | None = None
    process: ProcessId | None = None
    started_at: float = 0.0
    stop_at: float = 0.0
    killed_at: float | None = None
    retry_at: float = 0.0
    held_at: float | None = None
    stalled_since: float | None = None
    after_stop: After = After.END
    num_restarts: int = 0
    num_crashes: int = 0
    num_early_ends: int = 0
    num_looped: int = 0
    exit_code: int | None = None
    reason: str | None = None
    waiting_on: str | None = None
    crashes: tuple[Crash, ...] = ()


@dataclass(frozen=True)
class Seen:
    """One daemon as the supervisor sees it now.

    `exit_code` is None while it lives, and for a process that is not our child. `still_s`: how long its progress has
    stood still though it had work; None: no work, or it counts none. `loop_still_s`: how long its main loop has not
    turned, once that is longer than the loop may take. `end_reason`: why it ended, where its engine knows more than
    the exit code. `final_state`: written by an orchestrator since this start. `has_all_steps`: its run is done.
    `left` are processes of its last start that still run, though SIGKILL was sent to them. `work`: what a process that
    has ended noted last.
    """

    lives: bool = False
    exit_code: int | None = None
    end_reason: str | None = None
    ready: bool = False
    waiting_on: str | None = None
    heartbeat_age_s: float | None = None
    still_s: float | None = None
    loop_still_s: float | None = None
    final_state: str | None = None
    last_reason: str | None = None
    evicted: bool = False
    ended: bool = False
    has_all_steps: bool = False
    paused: bool = False
    gone: bool = False
    left: frozenset[int] = frozenset()
    work: Work | None = None


@dataclass(frozen=True)
class Snapshot:
    """All input of `decide`. `disk`: what keeps everything from writing to the workspace's file system."""

    wanted: Mapping[str, DaemonSpec]
    daemons: Mapping[str, Daemon]
    seen: Mapping[str, Seen]
    requests: frozenset[str]
    config: SupervisorConfig
    disk: str | None = None


class Do(enum.StrEnum):
    """The act of the executor before it stores the daemon."""

    START = "start"
    TERM = "term"
    KILL = "kill"
    CLEAN = "clean"
    NOTE = "note"
    FORGET = "forget"


@dataclass(frozen=True)
class Action:
    """`daemon` is what the daemon is after the action.

    KILL and CLEAN send SIGKILL and do not wait: KILL to all that belongs to a daemon that does not end, CLEAN to what a
    dead one left behind. `evicts`: a run that ends this daemon again and again, and the reason.
    """

    do: Do
    daemon: Daemon
    evicts: tuple[str, str] | None = None


def decide(snapshot: Snapshot, now: float) -> list[Action]:
    """At most one action for each daemon, in the order of `snapshot.wanted`."""
    names = list(snapshot.wanted) + [name for name in snapshot.daemons if name not in snapshot.wanted]
    room = snapshot.config.max_starting - sum(_starts(daemon, now) for daemon in snapshot.daemons.values())
    actions = []
    for name in names:
        daemon, spec = snapshot.daemons.get(name), snapshot.wanted.get(name)
        seen = snapshot.seen.get(name, Seen())
        judged = daemon
        if snapshot.disk:  # nothing that happens meanwhile counts against it or a run, nor the time that it starts
            seen = replace(seen, work=None)
            if daemon is not None:
                started_at = now if daemon.state is State.STARTING else daemon.started_at
                judged = replace(daemon, num_early_ends=0, num_crashes=0, num_looped=0, started_at=started_at)
        action = _decide_one(judged, spec, seen, name in snapshot.requests, snapshot.config, now)
        if action is None or (action.do is Do.NOTE and action.daemon == daemon):
            continue
        if action.do is Do.START and snapshot.disk:  # it could not write its status
            if daemon is None or name not in snapshot.requests or daemon.state is State.BACKOFF:
                continue
            action = Action(Do.NOTE, _asked(daemon, now))  # the request is taken in only once
        if action.do is Do.START and action.daemon.spec.run_id:
            if room <= 0 and name not in snapshot.requests:
                continue  # a thousand interpreters that start at once would only keep each other waiting
            room -= 1
        actions.append(action)
    return actions


def _starts(daemon: Daemon, now: float) -> bool:
    """True when it takes one of the `max_starting` places; one that hangs in its start gives its place to others."""
    is_new = now - daemon.started_at < LOADS_WITHIN_S
    return daemon.state is State.STARTING and daemon.spec.run_id is not None and is_new


def _decide_one(
    daemon: Daemon | None, spec: DaemonSpec | None, seen: Seen, asked: bool, config: SupervisorConfig, now: float
) -> Action | None:
    if daemon is None:
        return Action(Do.START, Daemon(spec, State.STARTING, started_at=now)) if spec else None
    if daemon.state in LIVE:
        if seen.lives:
            return _alive(daemon, spec, seen, asked, config, now)
        return _ended(daemon, spec, seen, config, now)
    if seen.gone:
        return Action(Do.FORGET, daemon)
    if asked and daemon.state is not State.BACKOFF:
        daemon = _asked(daemon, now)
    if seen.left:
        return _outlived(replace(daemon, retry_at=now) if asked else daemon, seen.left, now)
    if daemon.state is State.BACKOFF:
        return _backoff(daemon, spec, seen, now, asked)
    if daemon.state is State.DONE and spec is not None:
        return Action(Do.START, _started(daemon, spec, now))
    return Action(Do.NOTE, replace(daemon, waiting_on=None))


def _asked(daemon: Daemon, now: float) -> Daemon:
    """A person wants what is not alive to be started: at once, and whatever happened before."""
    daemon = replace(daemon, state=State.BACKOFF, retry_at=now, reason=None)
    return replace(daemon, num_crashes=0, num_early_ends=0, num_looped=0)


def _alive(
    daemon: Daemon, spec: DaemonSpec | None, seen: Seen, asked: bool, config: SupervisorConfig, now: float
) -> Action:
    if daemon.state is State.STOPPING:
        return _stopping(daemon, config, now)
    if seen.gone:
        return _stop(daemon, "its run folder is gone", now)
    if spec is None and daemon.spec.run_id is None:  # an orchestrator ends by itself
        return _stop(daemon, NOT_REQUESTED, now)
    if asked:
        return _stop(daemon, "restart requested", now, After.RESTART)
    # It unloads what an orchestrator that was killed at a pause left in inference.
    unloads = spec is not None and daemon.state is State.STARTING
    if (held := _held(seen)) and not unloads:
        since = daemon.held_at if daemon.held_at is not None else now
        if now - since >= config.grace_s:
            return _stop(daemon, held, now)
        daemon = replace(daemon, held_at=since)
    else:
        daemon = replace(daemon, held_at=None)
    if daemon.state is State.STARTING and not seen.ready:
        if seen.waiting_on == TAKES_ITS_SHARE:
            daemon = replace(daemon, started_at=now)
        if now - daemon.started_at >= config.start_timeout_s:
            what = f" (it waits for {seen.waiting_on})" if seen.waiting_on else ""
            return _stop(daemon, f"not ready within {config.start_timeout_s:g} s{what}", now, After.NOT_READY)
        return Action(Do.NOTE, replace(daemon, waiting_on=seen.waiting_on))
    return _judged(daemon, seen, config, now)


def _held(seen: Seen) -> str | None:
    """Why a run has no orchestrator until a person or the trainer changes that."""
    states = {"evicted": seen.evicted, "finished": seen.ended, "paused": seen.paused}
    return next((f"its run is {state}" for state, holds in states.items() if holds), None)


def _stopping(daemon: Daemon, config: SupervisorConfig, now: float) -> Action:
    """SIGKILL when its time is over. A process that survives it is reported, and nothing waits for it."""
    if daemon.killed_at is None:
        # A working daemon may finish and save; a stuck one has nothing to finish.
        patience_s = config.drain_s if daemon.after_stop in (After.END, After.RESTART) else config.grace_s
        is_over = now - daemon.stop_at >= patience_s
        return Action(Do.KILL, replace(daemon, killed_at=now)) if is_over else Action(Do.NOTE, daemon)
    if now - daemon.killed_at < KILL_WAIT_S:
        return Action(Do.NOTE, daemon)
    pid = daemon.process.pid if daemon.process else 0
    reason = f"process {pid} cannot be ended: it {_UNKILLABLE}"
    return Action(Do.NOTE, replace(daemon, stalled_since=daemon.killed_at, reason=reason))


def _outlived(daemon: Daemon, left: frozenset[int], now: float) -> Action:
    """Processes of its last start are left: it is not started beside them."""
    what = f"processes {', '.join(map(str, sorted(left)))} of its last start to end"
    hangs = daemon.killed_at is not None and now - daemon.killed_at >= KILL_WAIT_S
    return Action(Do.NOTE, replace(daemon, waiting_on=f"{what} (it {_UNKILLABLE})" if hangs else what))


def _judged(daemon: Daemon, seen: Seen, config: SupervisorConfig, now: float) -> Action:
    """A daemon that is up: running, or stalled. One that names what it waits for is never ended for it."""
    limit = config.stall.of(daemon.spec.kind)
    silent_s = seen.heartbeat_age_s if seen.heartbeat_age_s is not None else 0.0
    still_s = seen.still_s if seen.still_s is not None else 0.0
    if silent_s > LOST_AFTER_S:
        why, age_s, stuck = _SILENT, silent_s, silent_s >= limit.limit_s
    elif seen.loop_still_s is not None:
        why, age_s, stuck = stall_text(now - seen.loop_still_s), seen.loop_still_s, seen.loop_still_s >= limit.limit_s
    elif still_s >= limit.limit_s:
        why = f"no progress for {limit.limit_s:g} s, since {utc(now - still_s)}"
        age_s, stuck = still_s, seen.waiting_on is None
    else:
        fine = replace(daemon, state=State.RUNNING, waiting_on=seen.waiting_on, reason=None, stalled_since=None)
        return Action(Do.NOTE, fine)
    if stuck and limit.restart:
        return _stop(daemon, why, now, After.STALL)
    if daemon.state is State.STALLED:  # reported already
        return Action(Do.NOTE, replace(daemon, waiting_on=seen.waiting_on))
    since_s = now - age_s
    return Action(
        Do.NOTE, replace(daemon, state=State.STALLED, waiting_on=seen.waiting_on, reason=why, stalled_since=since_s)
    )


def _ended(daemon: Daemon, spec: DaemonSpec | None, seen: Seen, config: SupervisorConfig, now: float) -> Action:
    """The process is gone: stopped by us, in a final state, or crashed."""
    before = daemon.state
    daemon = replace(
        daemon,
        process=None,
        exit_code=seen.exit_code,
        waiting_on=None,
        held_at=None,
        stalled_since=None,
        killed_at=now,  # what it left behind is killed now
    )
    stopped = before is State.STOPPING
    if stopped and daemon.after_stop is After.END:
        return Action(Do.CLEAN, replace(daemon, state=State.DONE))
    if seen.final_state is not None:
        return Action(Do.CLEAN, replace(daemon, state=State.DONE, reason=seen.last_reason or seen.final_state))
    held = _held(seen)
    if (held and spec is None) or seen.gone:
        return Action(Do.CLEAN, replace(daemon, state=State.DONE, reason=held or "its run is gone"))
    if stopped and daemon.after_stop is After.RESTART:
        return Action(Do.CLEAN, replace(daemon, state=State.BACKOFF, retry_at=now))
    crash = _crash(daemon, before, seen, now)
    evicts = _culprit(daemon, seen, config) if crash.kind == "crash" else None
    if evicts:  # without that run it may well work
        daemon = replace(daemon, num_crashes=0, num_early_ends=0, num_looped=0)
    return Action(Do.CLEAN, _after_crash(daemon, crash, before, config, now), evicts)


def _culprit(daemon: Daemon, seen: Seen, config: SupervisorConfig) -> tuple[str, str] | None:
    """The run that is evicted, and why: it was in work at several crashes, and is the one suspect at this one.

    The daemon works for suspects one after another. So a crash of a neighbour evicts no run, however many were in work.
    """
    work, who = seen.work or Work(), "the trainer" if daemon.spec.name == TRAINER else daemon.spec.name
    found = {item.run_id: item.what for item in work.suspected if item.run_id}
    run_id, what = next(iter(found.items()), ("", ""))
    deaths = work.suspects.get(run_id, 0) + 1
    if len(found) != 1 or deaths < config.max_deaths_of_run:
        return None
    often = "twice" if deaths == 2 else f"{deaths} times in a row"
    return run_id, f"{who} ended {often} while it {what}, last: {_exit_text(seen)}"


def _crash(daemon: Daemon, before: State, seen: Seen, now: float) -> Crash:
    """Its end in words. A process that exits by itself before it is ready did not start; it has not crashed."""
    kind, why = "crash", _exit_text(seen)
    items = (seen.work.suspected or seen.work.items) if seen.work else []
    if before is State.STOPPING:
        kind, why = ("stall" if daemon.after_stop is After.STALL else "start"), daemon.reason or why
    elif before is State.STARTING and daemon.exit_code is not None and daemon.exit_code >= 0 and not items:
        kind = "start"
    if items:
        told = _newest_of_each(items)
        more = [f"{len(told) - MAX_ITEMS_SHOWN} more"] if len(told) > MAX_ITEMS_SHOWN else []
        why = f"{why} while it {' and '.join([*told[:MAX_ITEMS_SHOWN], *more])}"
    return Crash(at=now, kind=kind, reason=why, exit_code=daemon.exit_code, uptime_s=now - daemon.started_at)


def _newest_of_each(items: Iterable[Item]) -> list[str]:
    """Of each run its newest version or step: the note has those of the last seconds too."""

    def number(item: Item) -> tuple[int, str]:
        found = re.search(r"\d+$", item.what)
        return int(found[0]) if found else -1, item.what

    newest = {item.run_id or item.what: item.what for item in sorted(items, key=number)}
    return [newest[name] for name in sorted(newest)]


def _after_crash(daemon: Daemon, crash: Crash, before: State, config: SupervisorConfig, now: float) -> Daemon:
    daemon = replace(daemon, crashes=(*daemon.crashes, crash)[-MAX_CRASHES_KEPT:])
    if crash.kind == "start" and daemon.exit_code == EXIT_WRONG_USE:
        return replace(daemon, state=State.FAILED, reason=f"invalid config ({crash.reason})")
    is_early = crash.kind == "start" or before is State.STARTING or crash.uptime_s < config.early_crash_s
    early = daemon.num_early_ends + 1 if is_early and crash.kind != "stall" else 0
    crashes = daemon.num_crashes + 1 if crash.uptime_s < config.max_backoff_s else 1
    is_loop = crash.kind == "crash" and crash.uptime_s < LOOP_WAITS * config.max_backoff_s
    looped = daemon.num_looped + 1 if is_loop else 0
    daemon = replace(daemon, num_early_ends=early, num_crashes=crashes, num_looped=looped)
    if looped >= LOOP_TIMES * config.max_early_crashes:
        return replace(daemon, state=State.FAILED, reason=f"{looped} crashes in a row, last: {crash.reason}")
    if early >= config.max_early_crashes:
        what = "failed starts" if crash.kind == "start" else "early crashes"
        return replace(daemon, state=State.FAILED, reason=f"{early} {what} in a row, last: {crash.reason}")
    wait_s = min(config.backoff_s * 2.0 ** min(crashes - 1, 30), config.max_backoff_s)
    return replace(daemon, state=State.BACKOFF, retry_at=now + wait_s, reason=crash.reason)


def _exit_text(seen: Seen) -> str:
    code = seen.exit_code
    if seen.end_reason or code is None:
        return seen.end_reason or "it ended"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _backoff(daemon: Daemon, spec: DaemonSpec | None, seen: Seen, now: float, asked: bool) -> Action:
    over = _held(seen) or ("finished" if seen.has_all_steps else None if daemon.spec.run_id else NOT_REQUESTED)
    if spec is None and over:
        return Action(Do.NOTE, replace(daemon, state=State.DONE, waiting_on=None, reason=over))
    if spec is None:
        return Action(Do.NOTE, replace(daemon, waiting_on="the trainer to hold its run in a slot"))
    if asked or now >= daemon.retry_at:
        return Action(Do.START, _started(daemon, spec, now))
    return Action(Do.NOTE, replace(daemon, waiting_on=f"its restart (after {daemon.reason})"))


def _started(daemon: Daemon, spec: DaemonSpec, now: float) -> Daemon:
    return replace(
        daemon,
        spec=spec,
        state=State.STARTING,
        started_at=now,
        after_stop=After.END,
        killed_at=None,
        num_restarts=daemon.num_restarts + (daemon.state is not State.DONE),  # it goes on after a pause
        exit_code=None,
        waiting_on=None,
        reason=daemon.reason if daemon.state is State.BACKOFF else None,
    )


def _stop(daemon: Daemon, reason: str, now: float, after: After = After.END) -> Action:
    return Action(
        Do.TERM,
        replace(
            daemon,
            state=State.STOPPING,
            stop_at=now,
            after_stop=after,
            reason=reason,
            waiting_on="its processes to end",
        ),
    )
