"""Status files, one writer each; the condition of their writers; the state of a run.

A status file is written at once when its headline changes, for the rest at most twice a second, and by a heartbeat
thread in between, so long work is not death. That thread would outlive a main loop that hangs, so the file shows both:
that the process is alive, and when its loop last turned.

`condition` judges them, for all readers alike. Lost: the file is older than three heartbeats, or the process is gone.
Stalled: the process is alive, for its heartbeat thread writes, and its main loop has not turned for longer than it may.
The writer measures that itself, by a clock that never jumps, so a reader needs no memory and no clock of the writer's.

`run_state` is the one function that derives the state of a run: trainer, daemons, CLI and TUI give it the same facts.
Whatever is in the place of a mark of `control/` counts as it, also a pipe or a link, whose refusal is then the text.
"""

from __future__ import annotations

import enum
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from prime_rl.contract.files import holding, read_json, read_text, write_atomic
from prime_rl.contract.metrics import Sign
from prime_rl.utils.process import ProcessId

LOST = "lost"
STALLED = "stalled"
# States that a writer leaves behind when it ends.
_LAST_STATES = frozenset({"stopped", "failed", "done", "finished", "evicted", "paused"})


@dataclass(frozen=True)
class Condition:
    """The condition of the writer of a status: its own state, `lost` or `stalled`.

    `since`: when a lost one last wrote, or a stalled one's loop last turned (Unix seconds on the writer's clock).
    """

    state: str
    since: float | None = None


def condition(status: Status, now: float) -> Condition:
    """The condition of the writer of `status` at `now` (Unix seconds)."""
    if status.state in _LAST_STATES:
        return Condition(status.state)
    if not is_alive(status, now):
        return Condition(LOST, status.updated_at)
    since = stalled_since(status)
    return Condition(status.state) if since is None else Condition(STALLED, since)


def stalled_since(status: Status) -> float | None:
    """When the main loop of a living writer last turned, if one turn takes longer than it may; None: it turns."""
    if status.loop is None or status.loop_still_s <= status.loop_limit_s:
        return None
    return status.updated_at - status.loop_still_s


def stall_text(since: float) -> str:
    """Such as "its main loop has not turned since 2026-01-31 12:00:00 UTC"."""
    return f"its main loop has not turned since {utc(since)}"


def utc(at: float) -> str:
    """Unix seconds for people, such as "2026-01-31 12:00:00 UTC"; what is beyond the year 9999 as its last second."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(max(0.0, min(at, 253402300799.0))))


STATUS_FORMAT_VERSION = 1
# Ten times the largest that a daemon writes with 1,024 runs; what is larger was not written by a daemon.
MAX_STATUS_BYTES = 4_000_000
# A run's own is read at each look at it, by all daemons.
MAX_RUN_STATUS_BYTES = 256_000
# A write costs one fsync; five seconds keep 200 runs cheap and still show a death within fifteen.
HEARTBEAT_S = 5.0
LOST_AFTER_S = 3 * HEARTBEAT_S
MIN_WRITE_INTERVAL_S = 0.5
# A third of what makes a status look lost: well beyond what NTP leaves, and before anything goes wrong for it.
CLOCK_LIMIT_S = LOST_AFTER_S / 3
# How long one turn of a main loop may take. An event loop turns several times a second; a turn of the trainer may be a
# pass over long samples; the daemons' files, which the supervisor's loop writes, look lost after LOST_AFTER_S.
EVENT_LOOP_LIMIT_S = 60.0
TRAINER_LOOP_LIMIT_S = 600.0
SUPERVISOR_LOOP_LIMIT_S = LOST_AFTER_S


class Status(msgspec.Struct, kw_only=True):
    """The fields that every status file has.

    `state` is set by the writer, `waiting_on` a sentence that names what is waited for (or null), `updated_at` Unix
    seconds. `progress` grows with whatever the writer gets done since its start (null: it counts nothing): one that
    stands still while there is work shows that the daemon is stuck, not busy. `loop` counts the turns of the writer's
    main loop, which turns without work too (null: it has not begun, or counts none); `loop_still_s` is how long ago it
    had last turned at `updated_at`, and `loop_limit_s` how long one turn may take. `pid_create_time` (Unix seconds) and
    `pid_start` identify the process `pid` (`utils.process`) on the machine `host` ("" in what earlier versions wrote).
    `disk`: the trouble of the file system for which the process holds what it has to write; `waiting_on` has it then.
    """

    version: int = STATUS_FORMAT_VERSION
    pid: int = 0
    pid_create_time: float = 0.0
    pid_start: str = ""
    host: str = ""
    state: str = "starting"
    waiting_on: str | None = None
    updated_at: float = 0.0
    progress: int | None = None
    loop: int | None = None
    loop_still_s: float = 0.0
    loop_limit_s: float = EVENT_LOOP_LIMIT_S
    disk: str | None = None

    @property
    def writer(self) -> ProcessId:
        """The process that wrote this; it means nothing on another machine than `host`."""
        return ProcessId(self.pid, self.pid_create_time, self.pid_start)

    @property
    def headline(self) -> tuple[object, ...]:
        """The facts whose change readers must know at once."""
        return self.state, self.waiting_on

    def sign(self, writer: ProcessId) -> None:
        """`writer` is a process of this machine."""
        self.pid, self.pid_create_time, self.pid_start = writer.pid, writer.create_time, writer.start
        self.host = socket.gethostname()


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An open session of a run. `since` and `used_at`, its last request, are Unix seconds; `waiting_on` is in words."""

    id: str
    example: str = ""
    since: float = 0.0
    num_calls: int = 0
    used_at: float = 0.0
    waiting_on: str = ""


class RunStatus(Status, kw_only=True):
    """`control/status.json`, written by the run's orchestrator.

    `state`: starting, running, finished, failed, evicted, paused, stopped. `step` is the last batch written,
    `policy_version` the version that generates now, `reward` the mean of the last batch, `reason` why it ended.
    `bottleneck`: what held the last batch up: trainer, inference or environment; null for none. `problem`: what goes
    wrong in its environments now, though the run goes on. `examples_unusable` counts examples that no rollout can be
    made of; `unusable` has the newest of them, as ENV/ID, with the reason. `signs`: that it does not learn.
    `num_sessions` are open, of which `sessions` has the oldest.
    """

    run_id: str
    step: int = 0
    max_steps: int = 0
    policy_version: int = 0
    num_in_flight: int = 0
    reward: float | None = None
    tokens_per_s: float | None = None
    async_level: int | None = None
    bottleneck: str | None = None
    reason: str | None = None
    problem: str | None = None
    examples_unusable: int = 0
    unusable: dict[str, str] = {}
    signs: list[Sign] = []
    num_sessions: int = 0
    sessions: list[SessionStatus] = []


class TrainerRunStatus(msgspec.Struct, kw_only=True):
    """One slot in use. `step` counts updates done; `ready`: a whole batch waits for its update."""

    run_idx: int
    step: int = 0
    max_steps: int = 0
    tokens: int = 0
    samples: int = 0
    ready: bool = False
    lr: float = 0.0


class TrainerStatus(Status, kw_only=True):
    """`trainer/status.json`. `state`: starting, waiting, training, stopped. `waiting` is in admission order.

    `time_s` is where the time between the last two updates went, `total_s` that of the process up to its last update.
    """

    loop_limit_s: float = TRAINER_LOOP_LIMIT_S
    max_runs: int = 0
    model: str = ""
    max_rank: int | None = None
    max_seq_len: int = 0
    max_async_level: int | None = None
    runs: dict[str, TrainerRunStatus] = {}
    waiting: list[str] = []
    refused: dict[str, str] = {}
    time_s: dict[str, float] = {}
    total_s: dict[str, float] = {}
    num_updates: int = 0
    tokens_per_s: float = 0.0

    @property
    def headline(self) -> tuple[object, ...]:
        """Also who has a slot and who waits for one: no run publishes a version before it is shown as active."""
        return *super().headline, frozenset(self.runs), tuple(self.waiting)


# What a trainer that shares its GPU waits for: it has not begun to start.
TAKES_ITS_SHARE = "inference to take its share of the GPU that both use"


class InferenceStatus(Status, kw_only=True):
    """`inference/<n>/status.json`, one a server. `base_url` ends in `/v1`.

    `state`: starting, serving, stopping (it takes no more requests and answers those under way), stopped.
    `kv_use` is the share of the room for running requests that is taken (vLLM: blocks of its KV cache; embedded: rows
    of its batch), null when the engine does not report it.
    """

    base_url: str = ""
    engine: str = ""
    model: str = ""
    adapters: list[str] = []
    num_running: int = 0
    num_waiting: int = 0
    tokens_per_s: float = 0.0
    kv_use: float | None = None


class GatewayStatus(Status, kw_only=True):
    """`gateway/status.json`. `base_url` is what agents are told, before /s/ID.

    `state`: starting, running, stopping, stopped. `address` and `link` are the HOST:PORT at which it listens for agents
    and for orchestrators. `num_runs`: runs whose orchestrators are connected.
    """

    base_url: str = ""
    address: str = ""
    link: str = ""
    num_runs: int = 0
    num_sessions: int = 0
    calls_per_min: float = 0.0


class Crash(msgspec.Struct, frozen=True, kw_only=True):
    """One unrequested end of a daemon.

    `kind`: crash; start (it ended, or was not ready in time: no crash); stall (ended because it got nowhere).
    `at` in Unix seconds; `exit_code` is null when it is not known, negative for a signal.
    """

    at: float
    kind: str
    reason: str
    exit_code: int | None = None
    uptime_s: float = 0.0


class Handle(msgspec.Struct, frozen=True, kw_only=True):
    """One start of one daemon, as data. It is saved, so that a later supervisor finds the daemon again.

    `start_id`: 12 random hex digits, others at every start. `pid`, `create_time` and `start` are those of the daemon's
    process on `host` since its boot `boot_id`; pid 0: not known yet. `ref` is the engine's own name of the start.
    """

    engine: str
    name: str
    start_id: str
    host: str = ""
    boot_id: str = ""
    pid: int = 0
    create_time: float = 0.0
    start: str = ""
    ref: str = ""


class DaemonStatus(Status, kw_only=True):
    """`daemons/<name>.json`, written by the supervisor about one daemon (or about itself, `supervisor`).

    `state`: starting, running, stalled, backoff, failed, stopped, done. `child_pid`, `child_create_time` and
    `child_start` identify the daemon on the machine `host` since its boot `boot_id`; `pid` is that of the writer, the
    supervisor. `log_tail` are the last lines before the newest of `crashes` (oldest first); `stalled_since` when its
    progress last moved. `handle` is the start that runs, for the launcher.
    """

    loop_limit_s: float = SUPERVISOR_LOOP_LIMIT_S
    name: str
    child_pid: int | None = None
    child_create_time: float | None = None
    child_start: str = ""
    argv: list[str] = []
    num_restarts: int = 0
    exit_code: int | None = None
    reason: str | None = None
    log_tail: list[str] = []
    started_at: float | None = None
    stalled_since: float | None = None
    crashes: list[Crash] = []
    boot_id: str = ""
    handle: Handle | None = None

    @property
    def child(self) -> ProcessId | None:
        """The daemon's process; None before it is known."""
        return ProcessId(self.child_pid, self.child_create_time or 0.0, self.child_start) if self.child_pid else None

    @child.setter
    def child(self, child: ProcessId | None) -> None:
        known = (child.pid, child.create_time, child.start) if child else (None, None, "")
        self.child_pid, self.child_create_time, self.child_start = known


class PhaseTime(msgspec.Struct, frozen=True, kw_only=True):
    """One phase that a node went through: how long it worked on its own part, then waited for the others."""

    iteration: int
    phase: int
    work_s: float
    wait_s: float = 0.0


class NodeStatus(Status, kw_only=True):
    """`multinode/node_<rank>.json`, written by one node of a multi-node group at every beat.

    `state`: starting, working, waiting (it has `arrived` at the end of `phase` and others have not), stopped, done,
    failed. `seq` grows by one at every beat, every `heartbeat_s`: readers judge life by it (`contract.nodes`), for
    clocks differ. So times are durations by the node's own clock: `phase_s` since the phase began, `waited_s` since
    it arrived. A node whose main loop stands still for longer than `loop_limit_s` is stalled. `progress` grows
    within the phase's work, `epoch` at every restart of the group. `history` holds the newest phases, oldest first;
    `weight` is its share of the tasks; `address` is where the others reach it. The master answers at `port`; a
    worker has failed to connect there `unreached` times in a row. `incarnation` is a random name for each start of
    the process, `group` the epoch that it joined, `fingerprint` what must be equal on all nodes, `word` the state
    in the terms of `multinode.decide`.
    """

    rank: int
    word: str = ""
    incarnation: str = ""
    group: str = ""
    fingerprint: dict[str, str] = {}
    round: int = 0
    num_nodes: int = 1
    weight: float = 1.0
    address: str = ""
    port: int = 0
    unreached: int = 0
    rl_phase: str = "both"
    epoch: int = 0
    seq: int = 0
    heartbeat_s: float = HEARTBEAT_S
    iteration: int = 0
    phase: int = 0
    phase_name: str = ""
    arrived: bool = False
    phase_s: float = 0.0
    waited_s: float = 0.0
    started_at: float = 0.0
    history: list[PhaseTime] = []
    reason: str | None = None


class GroupStatus(Status, kw_only=True):
    """`multinode/group/group.json`, written by the master of a multi-node group at every beat and every change.

    `state`: gathering, running, ending. `group` names the epoch: its number and the master's incarnation. `members` is
    rank to incarnation. All members work in `iteration` and `phase` (-1 while they gather); `awaited` has a sentence
    for each that holds the others up. `exit_code` and `reason` are those of the end.
    """

    incarnation: str
    group: str = ""
    epoch: int = 0
    seq: int = 0
    members: dict[int, str] = {}
    iteration: int = 0
    phase: int = -1
    round: int = 0
    awaited: list[str] = []
    exit_code: int = 0
    reason: str | None = None


StatusT = TypeVar("StatusT", bound=Status)


def read_status(path: Path, kind: type[StatusT]) -> StatusT | None:
    """The status in `path`, or None when it is missing, damaged or of another version."""
    return read_json(path, kind, limit=MAX_RUN_STATUS_BYTES if kind is RunStatus else MAX_STATUS_BYTES)


def is_alive(status: Status | None, now: float) -> bool:
    """True when the writer of `status` still runs: fresh enough, and on this machine its pid is that very process.

    `now` is Unix seconds. When the clock was set, all look lost until their next write: use `is_there` before starting,
    ending or moving anything.
    """
    return status is not None and _is_fresh(status, now) and is_there(status)


def _is_fresh(status: Status, now: float) -> bool:
    """Clocks of machines differ by less; a time further ahead was made up, and would be fresh for ever."""
    return abs(now - status.updated_at) <= LOST_AFTER_S


def is_there(status: Status) -> bool:
    """True when the writer of `status` has not stopped and its process runs.

    However old the file is, where the writer is a process of this machine; one of another machine must have beaten
    within LOST_AFTER_S.
    """
    if status.state == "stopped":
        return False
    if is_elsewhere(status):
        return _is_fresh(status, time.time())
    return status.writer.is_running()


def is_elsewhere(status: Status) -> bool:
    """True when another machine or container wrote `status`: its pid means nothing here. False for its earlier life."""
    return status.host not in ("", socket.gethostname()) and status.writer.is_of_another_boot()


def clock_ahead_s(status: Status, modified_at: float, now: float) -> float | None:
    """How far the clock of another machine, which has just written `status`, is ahead; None where it is right.

    `modified_at` is the time of the file, by the file system that both share, and `now` is ours. What was not written
    within LOST_AFTER_S tells nothing.
    """
    ahead_s = status.updated_at - modified_at
    is_new = abs(now - modified_at) <= LOST_AFTER_S
    return ahead_s if is_new and abs(ahead_s) > CLOCK_LIMIT_S and is_elsewhere(status) else None


class StatusWriter:
    """The one writer of one status file.

    A daemon thread writes it every HEARTBEAT_S. The main loop calls `turn` at every turn, also when it has nothing to
    do. After `close` the file holds the last state. An OSError (folder deleted, disk full) is kept in `error` and never
    stops the writer. `clock` is Unix seconds. `copies` are more files that hold the same.
    """

    def __init__(
        self, path: Path, status: Status, *, copies: Sequence[Path] = (), clock: Callable[[], float] = time.time
    ) -> None:
        self.path = path
        self._copies = copies
        self.status = status
        self.error: OSError | None = None
        self._clock = clock
        self._turned_s = 0.0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        status.sign(ProcessId.of(os.getpid()))
        self._write()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat {path.name}", daemon=True)
        self._thread.start()

    def update(self, **fields: object) -> None:
        """Set fields; written at once when the headline changed, else at most every MIN_WRITE_INTERVAL_S."""
        with self._lock:
            before = self.status.headline
            for name, value in fields.items():
                setattr(self.status, name, value)
            age_s = self._clock() - self.status.updated_at
            if self.status.headline != before or not 0.0 <= age_s < MIN_WRITE_INTERVAL_S:
                self._write()

    def turn(self) -> None:
        """The main loop has turned once more. It costs no write; only the main loop may call it."""
        self._turned_s = time.monotonic()
        self.status.loop = (self.status.loop or 0) + 1

    def close(self, **fields: object) -> None:
        """Write a last time with `fields` (for example state="stopped") and end the heartbeat."""
        self.abandon()
        with self._lock:
            for name, value in fields.items():
                setattr(self.status, name, value)
            self._write()

    def abandon(self) -> None:
        """End the heartbeat and write nothing more: the file is another process's."""
        self._closed.set()
        self._thread.join()

    def _write(self) -> None:
        self.status.updated_at = self._clock()
        if self.status.loop is not None:
            self.status.loop_still_s = round(max(0.0, time.monotonic() - self._turned_s), 3)
        written, trouble = self.status, holding()
        if trouble:
            written = msgspec.structs.replace(written, disk=trouble, waiting_on=f"the disk ({trouble})")
        try:
            for path in (self.path, *self._copies):
                write_atomic(path, msgspec.json.encode(written))
            self.error = None
        except OSError as error:
            self.error = error

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            with self._lock:
                self._write()


# In the reason for which the trainer evicts a run whose loss, gradient or weights are not: alerts tell it by this.
NOT_FINITE = "are not finite"


class RunState(enum.StrEnum):
    """The state of a run as people see it."""

    INVALID = "invalid"
    WAITING = "waiting"
    ACTIVE = "active"
    FINISHED = "finished"
    FAILED = "failed"
    EVICTED = "evicted"
    PAUSED = "paused"
    STOPPED = "stopped"


@dataclass(frozen=True)
class RunFacts:
    """All that decides a run's state, as read from disk.

    `published_step` is the newest STABLE broadcast (0 when none); `max_steps` is None when the config cannot be read;
    `supervisor_gave_up` is the reason when the supervisor no longer restarts the run's orchestrator. `paused` and
    `ended` are the texts of `paused.txt` and `finished.txt`.
    """

    evicted: str | None
    config_error: str | None
    max_steps: int | None
    published_step: int
    orchestrator: RunStatus | None
    trainer_alive: bool
    in_slot: bool
    supervisor_gave_up: str | None = None
    paused: str | None = None
    ended: str | None = None


def run_state(facts: RunFacts) -> tuple[RunState, str | None]:
    """The state of a run and its reason, if any. What a person did or must fix comes first."""
    if facts.evicted is not None:
        return RunState.EVICTED, facts.evicted
    if facts.config_error is not None:
        return RunState.INVALID, facts.config_error
    if facts.max_steps is not None and facts.published_step >= facts.max_steps:
        return RunState.FINISHED, None
    if facts.ended is not None:
        return RunState.FINISHED, facts.ended
    if facts.paused is not None:
        return RunState.PAUSED, facts.paused or None
    if facts.orchestrator is not None and facts.orchestrator.state == "failed":
        return RunState.FAILED, facts.orchestrator.reason
    if facts.supervisor_gave_up is not None:
        return RunState.FAILED, facts.supervisor_gave_up
    if not facts.trainer_alive:
        return RunState.STOPPED, None
    return (RunState.ACTIVE, None) if facts.in_slot else (RunState.WAITING, None)


# People read one line.
MAX_MARK_CHARS = 2_000
_MAX_BYTES = 10_000


def read_mark(path: Path, *, empty: str = "no reason given") -> str | None:
    """The text of a mark on one line, `empty` when it has none; None when the mark is not there. Never raises."""
    if not os.path.lexists(path):
        return None
    try:
        text = read_text(path, limit=_MAX_BYTES)
    except OSError as error:  # FileRefused is a sentence
        text = str(error)
    return None if text is None else " ".join(text.split())[:MAX_MARK_CHARS] or empty
