"""What the supervisor does next: a pure function of a snapshot and the clock.

    start -> starting -> running <-> stalled
                 \\-> crash -> backoff -> start ... or failed;  an orchestrator's last word -> done

A part that crashes early several times in a row, never becomes ready, or refuses its config (exit code 2) has failed
and is left alone until a person asks for it. It reads no file and sends no signal: `supervisor` does both.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from daemons.process import Identity
from daemons.specs import PartSpec
from prime_rl.configs.system import SupervisorConfig
from prime_rl.contract.status import LOST_AFTER_S

EXIT_WRONG_USE = 2


class State(enum.StrEnum):
    """The supervisor's word for a part, as in `daemons/<name>.json` (STOPPING is written as running)."""

    STARTING = "starting"
    RUNNING = "running"
    STALLED = "stalled"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    FAILED = "failed"
    DONE = "done"


class After(enum.StrEnum):
    """What follows once a part that was told to stop has stopped."""

    END = "end"
    RESTART = "restart"
    CRASH = "crash"


LIVE = frozenset({State.STARTING, State.RUNNING, State.STALLED, State.STOPPING})


@dataclass(frozen=True)
class Part:
    """What the supervisor remembers of one part. Times are Unix seconds; counters are of crashes in a row."""

    spec: PartSpec
    state: State
    process: Identity | None = None
    started_at: float = 0.0
    stop_at: float = 0.0
    retry_at: float = 0.0
    evicted_at: float | None = None
    after_stop: After = After.END
    num_restarts: int = 0
    num_crashes: int = 0
    num_early_crashes: int = 0
    exit_code: int | None = None
    reason: str | None = None
    waiting_on: str | None = None


@dataclass(frozen=True)
class Seen:
    """What is seen of one part now. `last_word` is the final state that an orchestrator wrote since this start."""

    lives: bool = False
    exit_code: int | None = None
    ready: bool = False
    waiting_on: str | None = None
    heartbeat_age_s: float | None = None
    last_word: str | None = None
    last_reason: str | None = None
    evicted: bool = False
    gone: bool = False


@dataclass(frozen=True)
class Snapshot:
    """All that `decide` may know."""

    wanted: Mapping[str, PartSpec]
    parts: Mapping[str, Part]
    seen: Mapping[str, Seen]
    requests: frozenset[str]
    config: SupervisorConfig


class Do(enum.StrEnum):
    """What the executor does before it stores the part."""

    START = "start"
    TERM = "term"
    KILL = "kill"
    CLEAN = "clean"
    NOTE = "note"
    FORGET = "forget"


@dataclass(frozen=True)
class Action:
    """`part` is what the part is after the action. CLEAN kills what a dead part left behind."""

    do: Do
    part: Part


def decide(snapshot: Snapshot, now: float) -> list[Action]:
    """One action at most for each part, in the order in which parts are wanted."""
    names = list(snapshot.wanted) + [name for name in snapshot.parts if name not in snapshot.wanted]
    actions = []
    for name in names:
        part, spec = snapshot.parts.get(name), snapshot.wanted.get(name)
        seen = snapshot.seen.get(name, Seen())
        action = _decide_one(part, spec, seen, name in snapshot.requests, snapshot.config, now)
        if action is not None and (action.do is not Do.NOTE or action.part != part):
            actions.append(action)
    return actions


def _decide_one(
    part: Part | None, spec: PartSpec | None, seen: Seen, asked: bool, config: SupervisorConfig, now: float
) -> Action | None:
    if part is None:
        return Action(Do.START, Part(spec, State.STARTING, started_at=now)) if spec else None
    if part.state in LIVE:
        return _alive(part, seen, asked, config, now) if seen.lives else _ended(part, seen, config, now)
    if seen.gone:
        return Action(Do.FORGET, part)
    if asked and part.state is not State.BACKOFF:
        part = replace(part, state=State.BACKOFF, retry_at=now, num_crashes=0, num_early_crashes=0, reason=None)
    if part.state is State.BACKOFF:
        return _backoff(part, spec, seen, now, asked)
    if part.state is State.DONE and spec is not None:
        return Action(Do.START, _started(part, spec, now))
    return None


def _alive(part: Part, seen: Seen, asked: bool, config: SupervisorConfig, now: float) -> Action:
    if part.state is State.STOPPING:
        overdue = now - part.stop_at >= config.grace_s
        return Action(Do.KILL if overdue else Do.NOTE, part)
    if seen.gone:
        return _stop(part, "its run folder is gone", now)
    if asked:
        return _stop(part, "a person asked for a restart", now, After.RESTART)
    if seen.evicted:
        since = part.evicted_at if part.evicted_at is not None else now
        if now - since >= config.grace_s:
            return _stop(part, "its run is evicted", now)
        part = replace(part, evicted_at=since)
    else:
        part = replace(part, evicted_at=None)
    if part.state is State.STARTING and not seen.ready:
        if now - part.started_at >= config.start_timeout_s:
            what = f" (it waits for {seen.waiting_on})" if seen.waiting_on else ""
            return _stop(part, f"not ready within {config.start_timeout_s:g} s{what}", now, After.CRASH)
        return Action(Do.NOTE, replace(part, waiting_on=seen.waiting_on))
    if seen.heartbeat_age_s is not None and seen.heartbeat_age_s > LOST_AFTER_S:
        word = "lives, but its status file has not been written for more than three heartbeats"
        return Action(Do.NOTE, replace(part, state=State.STALLED, waiting_on=seen.waiting_on, reason=word))
    return Action(Do.NOTE, replace(part, state=State.RUNNING, waiting_on=seen.waiting_on, reason=None))


def _ended(part: Part, seen: Seen, config: SupervisorConfig, now: float) -> Action:
    """The process is gone: by our order, by its own last word, or by a crash."""
    part = replace(part, process=None, exit_code=seen.exit_code, waiting_on=None, evicted_at=None)
    stopped = part.state is State.STOPPING
    if stopped and part.after_stop is After.END:
        return Action(Do.CLEAN, replace(part, state=State.DONE))
    if seen.last_word is not None:
        return Action(Do.CLEAN, replace(part, state=State.DONE, reason=seen.last_reason or seen.last_word))
    if seen.evicted or seen.gone:
        return Action(Do.CLEAN, replace(part, state=State.DONE, reason="its run is evicted or gone"))
    if stopped and part.after_stop is After.RESTART:
        return Action(Do.CLEAN, replace(part, state=State.BACKOFF, retry_at=now))
    return Action(Do.CLEAN, _crashed(part, config, now, was_ready=part.state in (State.RUNNING, State.STALLED)))


def _crashed(part: Part, config: SupervisorConfig, now: float, *, was_ready: bool) -> Part:
    uptime_s = now - part.started_at
    why = part.reason if part.state is State.STOPPING else _exit_words(part.exit_code)
    if part.exit_code == EXIT_WRONG_USE and not was_ready:
        return replace(part, state=State.FAILED, reason=f"it refused its config ({why})")
    early = part.num_early_crashes + 1 if uptime_s < config.early_crash_s or not was_ready else 0
    crashes = part.num_crashes + 1 if uptime_s < config.max_backoff_s else 1
    part = replace(part, num_early_crashes=early, num_crashes=crashes)
    if early >= config.max_early_crashes:
        return replace(part, state=State.FAILED, reason=f"{early} early crashes in a row, the last: {why}")
    wait_s = min(config.backoff_s * 2.0 ** min(crashes - 1, 30), config.max_backoff_s)
    return replace(part, state=State.BACKOFF, retry_at=now + wait_s, reason=why)


def _exit_words(code: int | None) -> str:
    if code is None:
        return "it ended"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _backoff(part: Part, spec: PartSpec | None, seen: Seen, now: float, asked: bool) -> Action:
    if seen.evicted:
        return Action(Do.NOTE, replace(part, state=State.DONE, waiting_on=None, reason="its run is evicted"))
    if spec is None:
        return Action(Do.NOTE, replace(part, waiting_on="the trainer to hold its run in a slot"))
    if asked or now >= part.retry_at:
        return Action(Do.START, _started(part, spec, now))
    return Action(Do.NOTE, replace(part, waiting_on=f"its restart after {part.reason}"))


def _started(part: Part, spec: PartSpec, now: float) -> Part:
    return replace(
        part,
        spec=spec,
        state=State.STARTING,
        started_at=now,
        after_stop=After.END,
        num_restarts=part.num_restarts + 1,
        exit_code=None,
        waiting_on=None,
    )


def _stop(part: Part, reason: str, now: float, after: After = After.END) -> Action:
    return Action(
        Do.TERM,
        replace(
            part,
            state=State.STOPPING,
            stop_at=now,
            after_stop=after,
            reason=reason,
            waiting_on="its processes to end",
        ),
    )
