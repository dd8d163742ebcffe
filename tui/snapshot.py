"""From what the disk says to what the screen says: pure.

`make_snapshot` takes one look at the house (`daemons.client.House`) and the newest metrics of each run, and gives rows,
parts and problems in words. All text that came from disk is cleaned here, so widgets never meet an escape sequence.
It knows no widget, no colour and no file.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

from daemons.client import DaemonView, House, RunView
from prime_rl.configs.validate import PARSE_ERROR_PREFIX
from prime_rl.contract.status import LOST_AFTER_S, RunState, Status
from prime_rl.utils.text import clean_text, one_line
from tui import fmt
from tui.series import change

MAX_REASON_CHARS = 4_000


class Level(enum.IntEnum):
    """How much something needs a person. Widgets turn it into a colour; symbols and words say it without colour."""

    QUIET = 0
    GOOD = 1
    BUSY = 2
    WARN = 3
    BAD = 4


LOST = "lost"
# How a validation error begins: which file it is about is clear from the row.
_CONFIG_FILE = re.compile(rf"^(?:{PARSE_ERROR_PREFIX}: )?\S*orch\.toml: ")
# State in words -> (symbol, level). The symbols differ in shape, so that no state needs colour to be read.
STATES: Mapping[str, tuple[str, Level]] = {
    RunState.ACTIVE: ("●", Level.GOOD),
    RunState.WAITING: ("◌", Level.BUSY),
    RunState.FINISHED: ("✔", Level.QUIET),
    RunState.STOPPED: ("■", Level.QUIET),
    RunState.EVICTED: ("⊘", Level.WARN),
    RunState.INVALID: ("!", Level.BAD),
    RunState.FAILED: ("✖", Level.BAD),
    LOST: ("?", Level.BAD),
}
STATE_WORDS: Mapping[str, str] = {
    RunState.ACTIVE: "trains in a slot",
    RunState.WAITING: "valid, waits for a free slot",
    RunState.FINISHED: "reached max_steps",
    RunState.STOPPED: "the trainer is down",
    RunState.EVICTED: "out of its slot, reason kept; r readmits it",
    RunState.INVALID: "its orch.toml has errors; edit it and it is looked at again",
    RunState.FAILED: "its orchestrator gave up",
    LOST: f"no sign of life for more than {LOST_AFTER_S:.0f} s",
}
_PART_LEVELS = {
    "running": Level.GOOD,
    "serving": Level.GOOD,
    "training": Level.GOOD,
    "waiting": Level.GOOD,
    "starting": Level.BUSY,
    "done": Level.QUIET,
    "stopped": Level.QUIET,
    "down": Level.QUIET,
    "backoff": Level.WARN,
    "stalled": Level.WARN,
    "failed": Level.BAD,
    "lost": Level.BAD,
}
PART_SYMBOLS = {Level.QUIET: "■", Level.GOOD: "●", Level.BUSY: "◌", Level.WARN: "▲", Level.BAD: "✖"}


@dataclass(frozen=True)
class RunTail:
    """The newest metrics of one run: `rewards` as they came, newest last; the curves thinned out."""

    rewards: tuple[float, ...] = ()
    loss: float | None = None
    reward_curve: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    loss_curve: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())


NO_TAIL = RunTail()


@dataclass(frozen=True)
class RunRow:
    """One run as the table shows it. `order` is its place in the house's own order."""

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
    note: str
    reason: str | None
    updated_at: float | None
    view: RunView
    tail: RunTail

    @property
    def is_live(self) -> bool:
        """Whether processes may be at work for it, so that deleting it interrupts something."""
        return self.state in (RunState.ACTIVE, LOST)

    @property
    def is_problem(self) -> bool:
        return self.level is Level.BAD


@dataclass(frozen=True)
class Part:
    """Trainer, inference, supervisor or an orchestrator, and how it is."""

    name: str
    state: str
    level: Level
    detail: str
    pid: int | None = None
    num_restarts: int = 0
    log_tail: tuple[str, ...] = ()

    @property
    def symbol(self) -> str:
        return PART_SYMBOLS[self.level]


@dataclass(frozen=True)
class Problem:
    """Something that a person should look at: what has it, and what is wrong."""

    name: str
    text: str


@dataclass(frozen=True)
class Snapshot:
    """All that the home screen shows."""

    name: str
    rows: tuple[RunRow, ...]
    parts: tuple[Part, ...]
    problems: tuple[Problem, ...]
    num_used: int
    max_runs: int
    num_waiting: int
    tokens_per_s: float | None
    bottleneck: str | None
    house: House

    def row(self, run_id: str) -> RunRow | None:
        return next((row for row in self.rows if row.run_id == run_id), None)


def make_snapshot(house: House, tails: Mapping[str, RunTail], now: float) -> Snapshot:
    """`now` in Unix seconds."""
    rows = tuple(_row(order, run, tails.get(run.run_id, NO_TAIL), now) for order, run in enumerate(house.runs))
    parts = _parts(house)
    return Snapshot(
        name=one_line(house.output_dir.resolve().name or str(house.output_dir), 60),
        rows=rows,
        parts=parts,
        problems=tuple(_problems(house, rows, parts)),
        num_used=house.num_used,
        max_runs=house.max_runs,
        num_waiting=sum(row.state == RunState.WAITING for row in rows),
        tokens_per_s=house.trainer.tokens_per_s if house.trainer else None,
        bottleneck=one_line(house.bottleneck) if house.bottleneck else None,
        house=house,
    )


def display_state(run: RunView, now: float) -> str:
    """The run's state; `lost` for one that should work and gives no sign of life."""
    stale = run.updated_at is not None and now - run.updated_at > LOST_AFTER_S
    return LOST if run.state is RunState.ACTIVE and stale else str(run.state)


def _row(order: int, run: RunView, tail: RunTail, now: float) -> RunRow:
    state = display_state(run, now)
    symbol, level = STATES[state]
    reason = clean_text(run.reason)[:MAX_REASON_CHARS].strip() if run.reason else None
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
        note=_note(run, state, reason, now),
        reason=reason,
        updated_at=run.updated_at,
        view=run,
        tail=tail,
    )


def _note(run: RunView, state: str, reason: str | None, now: float) -> str:
    """What it waits for, or why it is as it is, on one line."""
    if state == LOST:
        silent = f"no sign of life for {fmt.age(now - (run.updated_at or now))}"
        return f"{silent}; waits for {one_line(run.waiting_on)}" if run.waiting_on else silent
    if reason:
        return one_line(_CONFIG_FILE.sub("", fmt.first_line(reason), count=1))
    if run.waiting_on:
        return f"waits for {one_line(run.waiting_on)}"
    if run.bottleneck:
        return f"held up by {one_line(run.bottleneck)}"
    return ""


def _parts(house: House) -> tuple[Part, ...]:
    trainer, inference = house.trainer, house.inference
    supervisor = house.daemon("supervisor")
    found = [
        _part("trainer", *_word(trainer), house.daemon("trainer")),
        _part("inference", *_word(inference), house.daemon("inference")),
        _part("supervisor", "running" if house.supervisor_alive else None, None, supervisor),
    ]
    known = {part.name for part in found}
    others = [_part(each.name, None, None, each) for each in house.daemons if each.name not in known]
    return (*found, *others)


def _word(status: Status | None) -> tuple[str | None, str | None]:
    return (status.state, status.waiting_on) if status else (None, None)


def _part(name: str, own_word: str | None, waiting_on: str | None, daemon: DaemonView | None) -> Part:
    """A part's own word counts while it lives; the supervisor's counts when it does not, or when it is worse."""
    state = own_word or (daemon.state if daemon else "down")
    if daemon and daemon.state in ("stalled", "backoff", "failed"):
        state = daemon.state
    if own_word is None and state in ("running", "starting"):
        state = "starting"
    detail = waiting_on or (daemon and (daemon.reason or daemon.waiting_on)) or ""
    return Part(
        name=one_line(name, 80),
        state=one_line(state, 20),
        level=_PART_LEVELS.get(state, Level.WARN),
        detail=one_line(detail),
        pid=daemon.pid if daemon else None,
        num_restarts=daemon.num_restarts if daemon else 0,
        log_tail=tuple(one_line(line, 400) for line in daemon.log_tail) if daemon else (),
    )


def _problems(house: House, rows: tuple[RunRow, ...], parts: tuple[Part, ...]) -> list[Problem]:
    found = [
        Problem(row.run_id, f"{row.state}: {row.note}" if row.note else row.state) for row in rows if row.is_problem
    ]
    named = {problem.name for problem in found}
    found += [
        Problem(part.name, f"{part.state}: {part.detail}" if part.detail else part.state)
        for part in parts
        if part.level >= Level.WARN and part.name not in named
    ]
    found += [Problem(one_line(each.name, 80), f"refused: {one_line(each.reason)}") for each in house.refused]
    return found
