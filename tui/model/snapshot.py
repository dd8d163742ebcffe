"""From the files on disk to the text on the screen: pure.

`make_snapshot` takes one look at the workspace (`daemons.workspace.Workspace`), the newest metrics of each run and the
room on the disk, and gives rows, daemons and problems in words. A row has the run's weight and priority where they are
not the usual ones, and its budget. `find_problems` alone decides what counts as a problem. All text in a look and in a
snapshot is clean.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from daemons.workspace import MAX_TROUBLE_CHARS, DaemonView, RunView, Workspace, replica_name, replica_number
from prime_rl.contract.layout import CONFIG_ERROR_PREFIX
from prime_rl.contract.status import LOST, LOST_AFTER_S, STALLED, RunState, Status, stall_text, stalled_since
from prime_rl.utils.text import CleanText, one_line, size_text
from tui import fmt
from tui.model.levels import LEVEL_SYMBOLS, STALL_STEPS, STATES, Level, Problem, with_alerts
from tui.model.nodes import Group
from tui.readers.charts import change
from tui.readers.machine import Alert
from tui.readers.workspace_metrics import RunTail

# A run stalls when no step ends for STALL_STEPS of its usual step times, and for this long at least.
STALL_MIN_S = 300.0
# Checkpoints and batches of a small workspace fit into this; what is full takes every run down with it.
LOW_DISK_BYTES = 2 * 1024**3
LOW_DISK_SHARE = 0.02


# How a validation error begins: which file it is about is clear from the row.
_CONFIG_FILE = re.compile(rf"^(?:{CONFIG_ERROR_PREFIX}: )?\S*orch\.toml: ")
_DAEMON_LEVELS = {
    "running": Level.GOOD,
    "serving": Level.GOOD,
    "training": Level.GOOD,
    "waiting": Level.GOOD,
    "starting": Level.BUSY,
    "done": Level.QUIET,
    "paused": Level.QUIET,
    "stopped": Level.QUIET,
    "down": Level.QUIET,
    "backoff": Level.WARN,
    "stalled": Level.WARN,
    "failed": Level.BAD,
    "lost": Level.BAD,
}
NO_TAIL = RunTail()


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run as the table shows it. `order` is its place in the workspace's own order."""

    run_id: str
    order: int
    state: str
    symbol: str
    level: Level
    step: int
    max_steps: int | None
    reward: float | None
    reward_change: float | None
    loss: float | None
    tokens_per_s: float | None
    lag: int | None
    note: CleanText
    reason: CleanText | None
    updated_at: float | None
    view: RunView
    tail: RunTail

    @property
    def is_live(self) -> bool:
        """True when processes may be at work for it, so that deleting it interrupts something."""
        return self.state in (RunState.ACTIVE, LOST, STALLED)

    @property
    def is_problem(self) -> bool:
        """True when it needs a person: evicted, stalled, invalid, failed or lost. All these are in `find_problems`."""
        return self.level >= Level.WARN

    @property
    def is_bad(self) -> bool:
        """True when its level is BAD: invalid, failed or lost."""
        return self.level is Level.BAD


@dataclass(frozen=True)
class DaemonRow:
    """Trainer, inference, supervisor or an orchestrator, and how it is."""

    name: CleanText
    state: CleanText
    level: Level
    detail: CleanText
    pid: int | None = None
    num_restarts: int = 0
    log_tail: tuple[CleanText, ...] = ()

    @property
    def symbol(self) -> str:
        """The symbol of its level, one cell wide."""
        return LEVEL_SYMBOLS[self.level]


@dataclass(frozen=True)
class Disk:
    """Room on the disk that holds the workspace."""

    free_bytes: int
    total_bytes: int

    @property
    def is_low(self) -> bool:
        """True when less is free than LOW_DISK_BYTES, or than LOW_DISK_SHARE of the disk."""
        return self.free_bytes < max(LOW_DISK_BYTES, LOW_DISK_SHARE * self.total_bytes)


@dataclass(frozen=True)
class Snapshot:
    """All that the home screen shows."""

    name: CleanText
    rows: tuple[RunRow, ...]
    daemons: tuple[DaemonRow, ...]
    problems: tuple[Problem, ...]
    num_used: int
    max_runs: int
    num_waiting: int
    tokens_per_s: float | None
    bottleneck: CleanText | None
    disk: Disk | None
    workspace: Workspace
    group: Group | None = None

    def row(self, run_id: str) -> RunRow | None:
        """The row of a run; None when the workspace does not have it."""
        return next((row for row in self.rows if row.run_id == run_id), None)


def make_snapshot(
    workspace: Workspace,
    tails: Mapping[str, RunTail],
    now: float,
    *,
    disk: Disk | None = None,
    since: Mapping[str, float] | None = None,
    before: Snapshot | None = None,
    group: Group | None = None,
    group_problems: Iterable[Problem] = (),
    alerts: Sequence[Alert] = (),
    alive_at: Mapping[str, float] | None = None,
) -> Snapshot:
    """Put one look at the workspace into rows, daemons and problems.

    `now` in Unix seconds; `since`: when evicted and invalid runs became so; `alive_at`: each run's last sign of life on
    our own clock (default: the time that the run wrote).

    A row that equals the one in `before` is the same object, so widgets compare rows by identity.
    """
    signs: Mapping[str, float | None] = alive_at or {}
    if workspace.disk:  # no run can give a sign of life
        signs = {run.run_id: None for run in workspace.runs}
    old = {row.run_id: row for row in before.rows} if before else {}
    rows = tuple(
        _same_or_new(
            old.get(run.run_id), order, run, tails.get(run.run_id, NO_TAIL), now, signs.get(run.run_id, run.updated_at)
        )
        for order, run in enumerate(workspace.runs)
    )
    daemons = _daemons(workspace)
    return Snapshot(
        name=one_line(workspace.output_dir.resolve().name or str(workspace.output_dir), 60),
        rows=rows,
        daemons=daemons,
        problems=find_problems(
            workspace, rows, daemons, disk=disk, since=since or {}, others=group_problems, alerts=alerts
        ),
        num_used=workspace.num_used,
        max_runs=workspace.max_runs,
        num_waiting=sum(row.state == RunState.WAITING for row in rows),
        tokens_per_s=workspace.trainer.tokens_per_s if workspace.trainer else None,
        bottleneck=workspace.bottleneck,
        disk=disk,
        workspace=workspace,
        group=group,
    )


def display_state(run: RunView, now: float, tail: RunTail, alive_at: float | None) -> str:
    """The run's state, or `lost` or `stalled`.

    Lost is one that should work and gives no sign of life, stalled one whose orchestrator is, or whose steps do not go
    on.
    """
    if run.state is not RunState.ACTIVE:
        return str(run.state)
    if alive_at is not None and now - alive_at > LOST_AFTER_S:
        return LOST
    stalled = run.stalled_since is not None or stalled_s(run, tail) is not None
    return STALLED if stalled else str(run.state)


def stalled_s(run: RunView, tail: RunTail) -> float | None:
    """For how long no step has ended since its last start, when that is too long.

    All times are of the run's own clock: no skew counts.
    """
    if run.updated_at is None or tail.last_step_at is None:
        return None
    silent_s = run.updated_at - max(tail.last_step_at, run.started_at or 0.0)
    return silent_s if silent_s > max(STALL_MIN_S, STALL_STEPS * (tail.step_s or 0.0)) else None


def _same_or_new(
    known: RunRow | None, order: int, run: RunView, tail: RunTail, now: float, alive_at: float | None
) -> RunRow:
    """The known row, when nothing in it changed. Only the row of a run that works depends on the time."""
    if known is not None and known.view is run and known.tail is tail and _is_timeless(known, run, now, tail, alive_at):
        if known.order == order and known.updated_at == alive_at:
            return known
        return replace(known, order=order, updated_at=alive_at)
    row = _row(order, run, tail, now, alive_at)
    return known if known == row else row


def _is_timeless(known: RunRow, run: RunView, now: float, tail: RunTail, alive_at: float | None) -> bool:
    """True when the time is without effect: of a run that works as long as it is neither lost nor stalled."""
    if run.state is not RunState.ACTIVE:
        return True
    return known.state == display_state(run, now, tail, alive_at) == RunState.ACTIVE


def _row(order: int, run: RunView, tail: RunTail, now: float, alive_at: float | None) -> RunRow:
    state = display_state(run, now, tail, alive_at)
    symbol, level = STATES[state]
    return RunRow(
        run_id=run.run_id,
        order=order,
        state=state,
        symbol=symbol,
        level=level,
        step=run.step,
        max_steps=run.max_steps,
        reward=tail.rewards[-1] if tail.rewards else run.reward,
        reward_change=change(tail.rewards),
        loss=tail.loss,
        tokens_per_s=run.tokens_per_s,
        lag=run.async_level,
        note=one_line(_note(run, state, now, tail, alive_at), MAX_TROUBLE_CHARS),
        reason=run.reason,
        updated_at=alive_at,
        view=run,
        tail=tail,
    )


def _note(run: RunView, state: str, now: float, tail: RunTail, alive_at: float | None) -> str:
    """The thing that it waits for, or the reason for its state."""
    if state == LOST or (state == STALLED and run.stalled_since is None):
        silent = f"no heartbeat for {fmt.age(now - (alive_at or now))}"
        if state == STALLED:
            silent = f"no step for {fmt.age(stalled_s(run, tail))}"
        return f"{silent}; waits for {run.waiting_on}" if run.waiting_on else silent
    if run.reason:
        words = _CONFIG_FILE.sub("", fmt.first_line(run.reason), count=1)
        return words + run.why.removeprefix(run.reason)
    if run.why:
        return run.why
    if state == RunState.PAUSED:
        return "paused without a reason"
    if run.bottleneck:
        return f"bottleneck: {run.bottleneck}"
    return ""


def _daemons(workspace: Workspace) -> tuple[DaemonRow, ...]:
    trainer = workspace.trainer
    supervisor = workspace.daemon("supervisor")
    found = [
        _daemon("trainer", *_own_state(trainer), workspace.daemon("trainer")),
        *(_replica(workspace, number) for number in _replica_numbers(workspace)),
        _daemon("supervisor", "running" if workspace.supervisor_alive else None, None, supervisor),
    ]
    known = {daemon.name for daemon in found}
    paused = {run.run_id for run in workspace.runs if run.state is RunState.PAUSED}
    others = [
        _daemon(each.name, "paused" if each.name in paused and each.state == "done" else each.state, None, each)
        for each in workspace.daemons
        if each.name not in known
    ]
    return (*found, *others)


def _replica_numbers(workspace: Workspace) -> list[int]:
    """Of all inference servers: those that live, and those that should. One that was scaled away is done."""
    named = (replica_number(daemon.name) for daemon in workspace.daemons if daemon.state != "done")
    return sorted({0, *dict(workspace.replicas), *(number for number in named if number is not None)})


def _replica(workspace: Workspace, number: int) -> DaemonRow:
    """One inference server."""
    name = replica_name(number)
    alone = workspace.inference if not (number or workspace.replicas) else None
    status = dict(workspace.replicas).get(number, alone)
    return _daemon(name, *_own_state(status), workspace.daemon(name))


def _own_state(status: Status | None) -> tuple[str | None, str | None]:
    if status is None:
        return None, None
    since = stalled_since(status)
    return (status.state, status.waiting_on) if since is None else (STALLED, stall_text(since))


def _daemon(name: str, own_state: str | None, waiting_on: str | None, daemon: DaemonView | None) -> DaemonRow:
    """A daemon's own state counts while it is alive; the supervisor's counts when it is not, or when it is worse."""
    state = own_state or (daemon.state if daemon else "down")
    if daemon and daemon.state in (STALLED, "backoff", "failed"):
        state, waiting_on = daemon.state, daemon.reason or waiting_on
    if own_state is None and state in ("running", "starting"):
        state = "starting"
    detail = waiting_on or (daemon and (daemon.reason or daemon.waiting_on)) or ""
    level = _DAEMON_LEVELS.get(state, Level.WARN)
    if daemon and daemon.crash_loop and level < Level.WARN:
        level, detail = Level.WARN, daemon.crash_loop
    return DaemonRow(
        name=one_line(name, 80),
        state=one_line(state, 20),
        level=level,
        detail=one_line(detail),
        pid=daemon.pid if daemon else None,
        num_restarts=daemon.num_restarts if daemon else 0,
        log_tail=daemon.log_tail if daemon else (),
    )


def find_problems(
    workspace: Workspace,
    rows: Iterable[RunRow],
    daemons: Iterable[DaemonRow],
    *,
    disk: Disk | None,
    since: Mapping[str, float],
    others: Iterable[Problem] = (),
    alerts: Sequence[Alert] = (),
) -> tuple[Problem, ...]:
    """Everything that needs a person, newest first; what has no known time last, in the order of the workspace."""
    rows = tuple(rows)
    found = [_run_problem(row, since.get(row.run_id)) for row in rows if row.is_problem]
    found += [
        Problem(one_line(row.run_id), one_line(trouble, MAX_TROUBLE_CHARS), "run", Level.WARN, kind=one_line(kind))
        for row in rows
        for trouble in row.view.troubles
        if not (row.is_problem and trouble in row.note)
        for kind in [trouble.partition(":")[0]]
    ]
    named = {problem.name for problem in found}
    found += [
        _daemon_problem(daemon, workspace)
        for daemon in daemons
        if daemon.level >= Level.WARN and daemon.name not in named
    ]
    found += [Problem(each.name, one_line(f"refused: {each.reason}"), "entry") for each in workspace.refused]
    if workspace.disk is not None:
        found.append(Problem(one_line("disk"), one_line(workspace.disk), "workspace"))
    elif disk is not None and disk.is_low:
        room = f"{size_text(disk.free_bytes)} of {size_text(disk.total_bytes)} free"
        text = one_line(f"{room}: remove deleted runs for good with prl runs purge")
        found.append(Problem(one_line("disk"), text, "workspace"))
    if workspace.clocks:
        found.append(Problem(one_line("clocks"), one_line("; ".join(workspace.clocks), 1000), "workspace", Level.WARN))
    found += others
    return tuple(sorted(with_alerts(found, alerts), key=lambda problem: -(problem.since or 0.0)))


def _run_problem(row: RunRow, since: float | None) -> Problem:
    if row.state == STALLED:
        since = row.view.stalled_since or row.tail.last_step_at
    text = one_line(f"{row.state}: {row.note}" if row.note else row.state)
    return Problem(one_line(row.run_id), text, "run", row.level, since if since is not None else row.updated_at)


def _daemon_problem(daemon: DaemonRow, workspace: Workspace) -> Problem:
    view = workspace.daemon(daemon.name)
    text = one_line(f"{daemon.state}: {daemon.detail}" if daemon.detail else daemon.state)
    return Problem(daemon.name, text, "daemon", daemon.level, (view.stalled_since or view.updated_at) if view else None)


def budget_share(row: RunRow) -> float | None:
    """The used share of a run's budget, of tokens and hours the larger; None without one, or while unread."""
    used, view = row.tail.used, row.view
    if used is None:
        return None
    limits = (view.max_tokens, view.max_hours)
    shares = [done / most for done, most in zip(used, limits, strict=True) if most]
    return max(shares, default=None)


def standing(row: RunRow) -> list[tuple[str, str]]:
    """(name, value) of weight and priority where they are not the usual ones."""
    view = row.view
    found = [("weight", f"{view.weight:g}")] if view.weight not in (None, 1.0) else []
    return [*found, ("priority", str(view.priority))] if view.priority else found


def standing_words(row: RunRow) -> str:
    """`weight 2 · priority 5 · budget 40 %`, or "" for a run like all others."""
    words = [f"{name} {value}" for name, value in standing(row)]
    share = budget_share(row)
    return " · ".join(words if share is None else [*words, f"budget {fmt.percent(share)}"])


def budget_words(row: RunRow) -> str:
    """`1.2M of 2.0M tokens · 0.5 of 3 hours`: what has been used of what is limited."""
    (tokens, hours), view = row.tail.used or (0, 0.0), row.view
    words = [f"{fmt.count(tokens)} of {fmt.count(view.max_tokens)} tokens"] if view.max_tokens else []
    return " · ".join([*words, f"{hours:.2f} of {view.max_hours:g} hours"] if view.max_hours else words)
