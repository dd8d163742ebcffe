"""The frozen views of a workspace that `workspace_reader` reads, and what follows from them: order, bottleneck.

All text in a view is clean: it may be shown anywhere. Pure but for a look at the process table. It reads no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prime_rl.contract.metrics import Sign, learned_nothing, sign_texts
from prime_rl.contract.status import (
    LOST,
    STALLED,
    DaemonStatus,
    InferenceStatus,
    RunState,
    RunStatus,
    TrainerRunStatus,
    TrainerStatus,
    condition,
    is_elsewhere,
    stall_text,
    stalled_since,
    utc,
)
from prime_rl.contract.types import Kind
from prime_rl.utils.process import ProcessId
from prime_rl.utils.text import CleanText, clean_text, counted, one_line

SUPERVISOR = "supervisor"
# Why inference is not started.
NOT_NEEDED = "no run needs it"
NO_SAMPLING = "no run needs inference, so none is started"
MAX_REASON_CHARS, MAX_TROUBLE_CHARS = 10_000, 1000
# A restart that is followed by others is a loop when there are so many of them within this time, in seconds.
LOOP_CRASHES, LOOP_S = 3, 600.0
# States of a daemon without a process.
_FINAL = ("failed", "stopped", "done")


@dataclass(frozen=True, slots=True)
class RunView:
    """One run as people see it. `step` counts updates done; `run_idx` is its slot, `queue_position` counts from 1.

    `updated_at`, `added_at`, `started_at` and `stalled_since` (of its orchestrator) are Unix seconds.
    `policy_version` is the one that generates its rollouts, `async_level` the lag of its last batch; of a run that
    makes none it is the newest one, and null. `max_tokens` and `max_hours` are its budget. `problem` is what goes
    wrong in its environments while it goes on, `signs` are those that it does not learn (docs/learning.md),
    `sound_step` is its newest version on disk from before them, and `crash_loop` tells of an orchestrator that ends
    again and again. `edited`: how its config file differs from the config in effect, and what to do. `kind` is that of
    its config, None while that is unread.
    """

    run_id: str
    state: RunState
    step: int
    max_steps: int | None
    reward: float | None
    reason: CleanText | None
    waiting_on: CleanText | None
    updated_at: float | None
    run_idx: int | None
    queue_position: int | None
    tokens_per_s: float | None
    async_level: int | None
    policy_version: int | None
    lr: float | None
    bottleneck: CleanText | None
    model: CleanText | None
    batch_size: int | None
    num_restarts: int
    added_at: float | None
    stalled_since: float | None = None
    tags: tuple[CleanText, ...] = ()
    weight: float | None = None
    priority: int | None = None
    max_tokens: int | None = None
    max_hours: float | None = None
    problem: CleanText | None = None
    examples_unusable: int = 0
    signs: tuple[Sign, ...] = ()
    crash_loop: CleanText | None = None
    edited: CleanText | None = None
    sound_step: int | None = None
    started_at: float | None = None
    kind: Kind | None = None

    @property
    def sign_texts(self) -> tuple[CleanText, ...]:
        """Its signs in words, the most important first."""
        return tuple(map(_line, sign_texts(self.signs, self.run_id, self.sound_step, self.lr)))

    @property
    def troubles(self) -> tuple[CleanText, ...]:
        """All that a person should know of it while it goes on, the most important first; one line each."""
        found: tuple[CleanText | None, ...] = (self.edited,)
        if self.state is RunState.ACTIVE:
            found = (self.crash_loop, self.problem, *self.sign_texts, *found)
        return tuple(each for each in found if each)

    @property
    def trouble(self) -> CleanText | None:
        """The first of `troubles`."""
        return next(iter(self.troubles), None)

    @property
    def why(self) -> str:
        """In words why it is as it is: the reason of its state, or what goes wrong and what it waits for; its edit.

        Of a finished run also that it learned nothing at all.
        """
        if self.state is RunState.FINISHED:
            nothing = learned_nothing(self.signs, self.step)
            return "; ".join(filter(None, (self.reason, nothing and _line(nothing), self.edited)))
        waits = f"waits for {self.waiting_on}" if self.waiting_on else None
        told = dict.fromkeys((self.trouble, self.edited))
        num_more = len(self.troubles) - len(told.keys() - {None})
        more = counted(num_more, "more problem") if num_more > 0 else None
        return "; ".join(filter(None, (self.reason, self.edited) if self.reason else (*told, more, waits)))


_NO_SLOT = {
    RunState.INVALID: "is invalid and has no slot: fix its orch.toml instead",
    RunState.FINISHED: "is finished and has no slot",
    RunState.EVICTED: "is evicted and has no slot: prl runs readmit continues it",
    RunState.FAILED: "has failed and has no slot: prl runs readmit continues it",
}
# By act: what is said of a run to which it does nothing.
IDLE = {
    "pause": "cannot be paused: it {no_slot}",
    "pause again": "already paused; its first reason stays",
    "continue": "not paused, nothing to do",
    "evict": "already {state}, so nothing was changed",
    "readmit": "is {state}: only a run that is evicted, failed or ended early is readmitted",
}


def why_idle(act: str, run: RunView) -> str | None:
    """Why an act does nothing to a run in its state, in words that follow its id; None: it does something."""
    state = run.state
    has_effect = {
        "pause": state not in _NO_SLOT,
        "continue": state is RunState.PAUSED,
        "evict": state not in (RunState.FINISHED, RunState.EVICTED),
        "readmit": state in (RunState.EVICTED, RunState.FAILED)
        or (state is RunState.FINISHED and run.reason is not None),
    }
    return None if has_effect.get(act, True) else IDLE[act].format(state=state, no_slot=_NO_SLOT.get(state))


@dataclass(frozen=True)
class DaemonView:
    """One daemon. `state`: starting, running, stalled, backoff, failed, stopped, done, or lost (not supervised).

    Stalled: it is there, but makes no progress or does not respond; `reason` has which, since when, and what to do.

    `stalled_since` and `crashed_at` (its newest crash) in Unix seconds. `crash_loop` tells of one that ends again and
    again.
    """

    name: CleanText
    state: CleanText
    pid: int | None
    waiting_on: CleanText | None
    reason: CleanText | None
    log_tail: tuple[CleanText, ...]
    updated_at: float
    num_restarts: int
    pid_create_time: float | None = None
    pid_start: str = ""
    stalled_since: float | None = None
    crashed_at: float | None = None
    crash_loop: CleanText | None = None

    @property
    def process(self) -> ProcessId | None:
        """Its pid and start time, which together name one process for good; None without a pid."""
        return ProcessId(self.pid, self.pid_create_time or 0.0, self.pid_start) if self.pid else None


@dataclass(frozen=True)
class RefusedView:
    """A `run_*` entry that is not a run, and why."""

    name: CleanText
    reason: CleanText


@dataclass(frozen=True)
class Workspace:
    """One look at a workspace.

    `trainer` and `inference` are None when they do not live; `max_runs` is 0 when unknown. `num_unread` runs are left
    out of a first look. `replicas` are the inference servers that live, by number, and `inference` all of them in one.
    `disk`: the trouble of its file system that holds everything up, None without any. `clocks`: which machines have
    another time, in words.
    """

    output_dir: Path
    runs: tuple[RunView, ...]
    refused: tuple[RefusedView, ...]
    daemons: tuple[DaemonView, ...]
    max_runs: int
    num_used: int
    trainer: TrainerStatus | None
    inference: InferenceStatus | None
    supervisor_alive: bool
    bottleneck: CleanText | None
    read_at: float
    num_unread: int = 0
    replicas: tuple[tuple[int, InferenceStatus], ...] = ()
    disk: CleanText | None = None
    clocks: tuple[CleanText, ...] = ()

    def run(self, run_id: str) -> RunView | None:
        """The view of a run; None for one that this look does not have."""
        return next((run for run in self.runs if run.run_id == run_id), None)

    def daemon(self, name: str) -> DaemonView | None:
        """The view of a daemon, the supervisor among them; None without a record of it."""
        return next((daemon for daemon in self.daemons if daemon.name == name), None)

    @property
    def needs_inference(self) -> bool:
        """False while its supervisor starts no inference, because no run samples."""
        daemon = self.daemon("inference")
        return not (self.supervisor_alive and self.inference is None and is_needless(daemon))

    @property
    def address(self) -> str:
        """Where inference is, in words."""
        return (
            f"inference at {self.inference.base_url if self.inference else '?'}"
            if self.needs_inference
            else NO_SAMPLING
        )


def replica_name(number: int) -> str:
    """The daemon that is this inference server."""
    return f"inference-{number}" if number else "inference"


def replica_number(name: str) -> int | None:
    """The number of the inference server that the daemon `name` is; None for other daemons."""
    kind, _, number = name.partition("-")
    if kind != "inference":
        return None
    return int(number) if number.isdecimal() else None if number else 0


def together(replicas: Sequence[InferenceStatus]) -> InferenceStatus | None:
    """Several inference servers as one: what the first that serves is, and what all of them do. None without any."""
    if len(replicas) < 2:
        return replicas[0] if replicas else None
    first = next((each for each in replicas if each.state == "serving"), replicas[0])
    shares = [each.kv_use for each in replicas if each.kv_use is not None]
    return msgspec.structs.replace(
        first,
        adapters=sorted({name for each in replicas for name in each.adapters}),
        num_running=sum(each.num_running for each in replicas),
        num_waiting=sum(each.num_waiting for each in replicas),
        tokens_per_s=sum(each.tokens_per_s for each in replicas),
        kv_use=max(shares) if shares else None,
    )


def is_needless(inference: DaemonView | DaemonStatus | None) -> bool:
    """True when it is not running because no run samples."""
    return inference is not None and inference.state == "done" and inference.reason == NOT_NEEDED


def find_bottleneck(
    runs: list[RunView], trainer: TrainerStatus | None, inference: InferenceStatus | None, daemon: DaemonView | None
) -> str | None:
    """The runs that wait for a daemon, with what it is at, or None when nothing is in progress."""
    active = [run for run in runs if run.state is RunState.ACTIVE]
    if trainer is None:
        return None
    if active and inference is None and not is_needless(daemon):
        return f"{_names(active)}: inference is not running"
    if active and stalled_since(trainer) is not None:
        return f"{_names(active)}: the trainer is stalled"
    slow = [run for run in active if not trainer.runs[run.run_id].ready]
    if trainer.state == "waiting" and slow:
        last = min(slow, key=lambda run: (run.step, run.run_id))
        return f"the trainer waits for {last.run_id}" + (
            f", which waits for {last.waiting_on}" if last.waiting_on else ""
        )
    held = [run for run in active if run.bottleneck]
    if held:
        return f"{held[0].run_id} waits for {held[0].bottleneck}"
    return f"{_names(active)}: the trainer" if active and len(slow) < len(active) else None


def waits_for(
    state: RunState,
    status: RunStatus | None,
    slot: TrainerRunStatus | None,
    position: int | None,
    daemon: DaemonView | None,
    broken: str | None = None,
) -> str | None:
    """The cause that a run waits for; None when it waits for nothing.

    Args:
        status: of its orchestrator, while that lives.
        slot: its slot, as the trainer reports it.
        position: in the queue for slots, from 1.
        daemon: its orchestrator, as the supervisor records it.
        broken: what it needs and a person has to start again, or a trainer that is about to start.
    """
    if state is RunState.STOPPED:
        return broken
    if state is RunState.WAITING:
        return f"a free slot ({position}. in the queue)" if position else "the trainer to look at it"
    if state is not RunState.ACTIVE:
        return None
    if status is not None:
        return broken or status.waiting_on
    if daemon is not None and daemon.state in ("backoff", "lost"):
        return f"its orchestrator ({daemon.waiting_on or daemon.reason or daemon.state})"
    return "its orchestrator to start" if slot and not slot.ready else None


def waits_for_trainer(trainer: DaemonView | None) -> str | None:
    """Why runs are stopped while a supervisor is there, by the trainer's daemon; None when there is none."""
    if trainer is None or trainer.state in (*_FINAL, LOST):
        return failure(trainer)
    what = "the trainer to report" if trainer.state == "running" else "the trainer to start"
    why = trainer.waiting_on or trainer.reason
    return f"{what} ({why})" if why else what


def failure(service: DaemonView | None) -> str | None:
    """The failed service that its users wait for, and the way out; None when it has not failed for good."""
    if service is None or service.state != "failed":
        return None
    return f"{service.name}, which has failed ({service.reason}): prl restart {service.name}"


def _line(text: str) -> CleanText:
    return one_line(text, MAX_TROUBLE_CHARS)


def shown(text: str | None) -> CleanText | None:
    """`text` as a view has it; None for nothing."""
    return clean_text(text.strip(), MAX_REASON_CHARS) if text else None


def daemon_view(status: DaemonStatus, now: float, *, is_home: bool = False, disk: str | None = None) -> DaemonView:
    """The view of a daemon, by its status file. `now` in Unix seconds; `disk` keeps status files from being written.

    `is_home`: the supervisor of this very workspace runs on this machine.
    """
    found = condition(status, now)
    state, reason, since = found.state, status.reason, status.stalled_since
    process = status.writer if status.name == SUPERVISOR else status.child
    if state == LOST:
        lost = LOST, _lost_text(status)
        state, reason = _silence(status, disk) if is_home and status.writer.is_running() else lost
        since = status.updated_at if state == STALLED else None
    elif found.since is not None:
        reason, since = stall_text(found.since), found.since
    return DaemonView(
        name=clean_text(status.name),
        state=clean_text(state),
        pid=process.pid if process and state not in _FINAL else None,
        waiting_on=shown(status.waiting_on) if state != LOST else None,
        reason=shown(reason),
        log_tail=tuple(map(clean_text, status.log_tail)),
        updated_at=status.updated_at,
        num_restarts=status.num_restarts,
        pid_create_time=process.create_time if process else None,
        pid_start=process.start if process else "",
        stalled_since=since,
        crashed_at=status.crashes[-1].at if status.crashes else None,
        crash_loop=shown(_crash_loop(status, now)),
    )


def _crash_loop(status: DaemonStatus, now: float) -> str | None:
    """In words that the daemon ended by itself LOOP_CRASHES times within LOOP_S; None when it did not."""
    lately = [crash for crash in status.crashes if 0 <= now - crash.at < LOOP_S]
    if len(lately) < LOOP_CRASHES or status.state in _FINAL:
        return None
    times = f"ended {len(lately)} times within {LOOP_S / 60:.0f} minutes"
    return f"restart loop: {status.name} {times}: {one_line(lately[-1].reason)}; see prl logs {status.name}"


def _silence(status: DaemonStatus, disk: str | None) -> tuple[str, str | None]:
    """State and reason of a daemon whose supervisor, which writes `status`, runs but does not respond."""
    silent = f"does not respond, last heartbeat {utc(status.updated_at)}"
    if status.name == SUPERVISOR:
        remedy = f"if it was stopped, continue it with kill -CONT {status.pid}; prl down ends it"
        return STALLED, f"{silent}: {disk or remedy}"
    child = status.child
    runs_on = child is not None and child.is_running()
    if disk:
        return (STALLED, f"{silent}: {disk}") if runs_on else (status.state, status.reason)
    return LOST, f"its supervisor {silent}" + (f"; process {child.pid} still runs" if child and runs_on else "")


def _lost_text(status: DaemonStatus) -> str:
    """Why the daemon of `status` is not supervised; the supervisor writes that file."""
    is_there = is_elsewhere(status) or status.writer.is_running()
    if status.name == SUPERVISOR:
        return f"no heartbeat since {utc(status.updated_at)}" if is_there else "its process is gone"
    why = f"its supervisor last looked at it at {utc(status.updated_at)}" if is_there else "its supervisor is gone"
    child = status.child
    runs_on = child is not None and child.is_running()
    return (
        f"{why}; process {child.pid} still runs: prl up takes it over, prl down ends it" if child and runs_on else why
    )


_ORDER = {state: order for order, state in enumerate([RunState.ACTIVE, RunState.WAITING])}


def by_importance(run: RunView) -> tuple[int, int, str]:
    """Active runs by slot, waiting ones in the order of admission, then all others by name."""
    place = run.run_idx if run.state is RunState.ACTIVE else run.queue_position
    return (_ORDER.get(run.state, 2), place if place is not None else 10**9, run.run_id)


def _names(runs: list[RunView]) -> str:
    ids = sorted(run.run_id for run in runs)
    return ids[0] if len(ids) == 1 else f"{ids[0]} and {len(ids) - 1} more"
