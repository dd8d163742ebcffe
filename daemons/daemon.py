"""The supervisor's records and observations of a daemon: plain values for `decide` and for the executor.

They hold no process and no file. Times are Unix seconds of the supervisor's own clock, which never
jumps (`prime_rl.utils.clock`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from daemons.specs import DaemonSpec
from prime_rl.configs.system import SupervisorConfig
from prime_rl.contract.status import Crash, Handle
from prime_rl.contract.work import Work
from prime_rl.utils.process import ProcessId


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
    """What follows once a daemon has stopped as asked."""

    END = "end"
    RESTART = "restart"
    NOT_READY = "not ready"
    STALL = "stall"


LIVE = frozenset({State.STARTING, State.RUNNING, State.STALLED, State.STOPPING})


@dataclass(frozen=True)
class Daemon:
    """What the supervisor remembers of one daemon.

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
    """What the supervisor sees of one daemon now.

    `exit_code` is None while it lives, and for a process that is not our child. `still_s`: how long its progress has
    stood still though it had work; None: no work, or it counts none. `loop_still_s`: how long its main loop has not
    turned, once that is longer than the loop may take. `end_reason`: why it ended, where its engine knows more than
    the exit code. `final_state`: written by an orchestrator since this start.
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
    """What the executor does before it stores the daemon."""

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
