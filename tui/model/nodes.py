"""The nodes of a multi-node group as the screen shows them: which phase each is in, which is dead, slow or waited for.

Pure: made from `SeenNode`s (`prime_rl.contract.nodes`), whose ages are of the reader's own clock, and whose text is
clean. No widgets, colours or files.
"""

from __future__ import annotations

import enum
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prime_rl.contract.nodes import (
    NUM_PHASES,
    PHASE_NAMES,
    RL_PHASES,
    NodeHealth,
    SeenNode,
    node_health,
    stall,
    waited_for,
)
from prime_rl.contract.status import PhaseTime
from prime_rl.utils.text import CleanText, one_line
from tui import fmt
from tui.model.levels import Level, Problem

# A node is slow when the others wait for it and it takes this many times as long as is usual, but at least so long.
SLOW_FACTOR = 2.0
SLOW_MIN_S = 5.0
MISSING = "missing"
# How the message of a waiting node begins.
_POSITION = re.compile(r"^iteration \d+, phase \d+ \([^)]*\): ")
SLOW = "slow"
# Health -> (symbol, level). The symbols differ in shape, so that none needs colour.
HEALTH: Mapping[str, tuple[str, Level]] = {
    NodeHealth.ALIVE: ("●", Level.GOOD),
    NodeHealth.UNPROVEN: ("◌", Level.BUSY),
    SLOW: ("◔", Level.WARN),
    NodeHealth.SUSPECT: ("▲", Level.WARN),
    NodeHealth.STALLED: ("‖", Level.BAD),
    NodeHealth.DEAD: ("✖", Level.BAD),
    MISSING: ("?", Level.WARN),
    NodeHealth.LEFT: ("■", Level.WARN),
    NodeHealth.DONE: ("✔", Level.QUIET),
}


class Cell(enum.Enum):
    """One phase of one node in the iteration that it is in."""

    OFF = "off"
    PAST = "past"
    WORKING = "working"
    ARRIVED = "arrived"
    AHEAD = "ahead"


_NOTHING = one_line("")


@dataclass(frozen=True)
class NodeRow:
    """One node. `health` is shown to people; ages in seconds of our own clock; None: not known."""

    rank: int
    health: str
    symbol: str
    level: Level
    note: CleanText
    is_waited_for: bool
    cells: tuple[Cell, ...]
    host: CleanText = _NOTHING
    weight: float | None = None
    iteration: int | None = None
    phase: int | None = None
    phase_s: float | None = None
    waited_s: float = 0.0
    silent_s: float | None = None
    progress: int | None = None
    history: tuple[PhaseTime, ...] = ()
    is_gone: bool = False
    stalled_s: float | None = None


@dataclass(frozen=True)
class PhaseStat:
    """The recent times of a phase: the usual time of its work, and the slowest node with its own usual time."""

    phase: int
    usual_s: float
    slowest_rank: int
    slowest_s: float
    recent_s: tuple[float, ...]


@dataclass(frozen=True)
class Group:
    """One look at a group. `waited_s` is the longest that a node has waited now; `phase` where the slowest is."""

    rows: tuple[NodeRow, ...]
    num_nodes: int
    epoch: int
    iteration: int
    phase: int
    rl_phase: str
    waited_for: tuple[int, ...]
    waited_s: float
    phases: tuple[PhaseStat, ...]

    @property
    def num_living(self) -> int:
        """Number of nodes that are neither dead nor ended nor missing; slow, suspect and stalled ones count."""
        gone = (NodeHealth.DEAD, NodeHealth.LEFT, NodeHealth.DONE, MISSING)
        return sum(row.health not in gone for row in self.rows)

    @property
    def level(self) -> Level:
        """The level of the worst of them."""
        return max(row.level for row in self.rows)

    def row(self, rank: int) -> NodeRow | None:
        """The node of that rank; None when the group does not have it."""
        return next((row for row in self.rows if row.rank == rank), None)


def make_group(nodes: Sequence[SeenNode]) -> Group | None:
    """The group of these nodes; None without nodes."""
    if not nodes:
        return None
    statuses = [seen.status for seen in nodes]
    num_nodes = max(1, *(min(status.num_nodes, 4096) for status in statuses))
    held_by = waited_for(statuses)
    usual = _usual_times(nodes)
    rows = [_row(seen, seen.status.rank in held_by, usual) for seen in nodes]
    known = {row.rank for row in rows}
    rows += [_missing(rank, rank in held_by) for rank in range(num_nodes) if rank not in known]
    newest = max(statuses, key=lambda status: (status.epoch, status.iteration))
    behind = [status for status in statuses if status.rank in held_by] or [newest]
    first = min(behind, key=lambda status: (status.epoch, status.iteration, status.phase))
    return Group(
        rows=tuple(sorted(rows, key=lambda row: row.rank)),
        num_nodes=num_nodes,
        epoch=newest.epoch,
        iteration=newest.iteration,
        phase=first.phase if 0 <= first.phase < NUM_PHASES else 0,
        rl_phase=newest.rl_phase if newest.rl_phase in RL_PHASES else "both",
        waited_for=tuple(held_by),
        waited_s=max((seen.waited_s for seen in nodes if seen.status.state == "waiting"), default=0.0),
        phases=_phase_stats(nodes),
    )


def node_problems(group: Group | None, now: float) -> list[Problem]:
    """Problems of the group; `now` in Unix seconds. A group that is gone is one problem, not one per node."""
    if group is None:
        return []
    ended = (NodeHealth.DEAD, NodeHealth.LEFT, NodeHealth.DONE, MISSING)
    if all(row.health in ended for row in group.rows):
        dead = [row for row in group.rows if row.health == NodeHealth.DEAD]
        if not dead:
            return []
        names = ", ".join(f"node {row.rank} in phase {row.phase} ({phase_name(row.phase)})" for row in dead[:4])
        silent_s = min(row.silent_s or 0.0 for row in dead)
        text = f"the whole group is gone ({names} died): start the same commands again"
        return [Problem(one_line(f"node {dead[0].rank}"), one_line(text), "node", Level.BAD, now - silent_s)]
    return [
        Problem(
            one_line(f"node {row.rank}"),
            one_line(describe(row)),
            "node",
            row.level,
            now - (row.stalled_s or row.silent_s or 0.0),
        )
        for row in group.rows
        if row.level >= Level.WARN and row.health != MISSING
    ]


def describe(row: NodeRow) -> str:
    """A node's health, place and note, as in "dead: no heartbeat for 40s, in phase 1 (rollout) of iteration 3"."""
    where = f"in phase {row.phase} ({phase_name(row.phase)}) of iteration {row.iteration}"
    if row.health == NodeHealth.DEAD and row.is_gone:
        text = f"{row.health}: its process is gone, {where}"
    elif row.health in (NodeHealth.DEAD, NodeHealth.SUSPECT):
        text = f"{row.health}: no heartbeat for {fmt.age(row.silent_s)}, {where}"
    elif row.health == SLOW:
        text = f"{row.health}: {fmt.age(row.phase_s)} {where}"
    elif row.health == MISSING:
        text = MISSING
    else:
        text = f"{row.health} {where}"
    return f"{text}; {row.note}" if row.note else text


def phase_name(phase: int | None) -> str:
    """The name of a phase by its number; "?" for None, or for a number without a phase."""
    return PHASE_NAMES[phase] if phase is not None and 0 <= phase < NUM_PHASES else "?"


def _row(seen: SeenNode, is_waited_for: bool, usual: Mapping[int, float]) -> NodeRow:
    status = seen.status
    health: str = node_health(seen)
    limit_s = max(SLOW_FACTOR * usual.get(status.phase, 0.0), SLOW_MIN_S)
    if health == NodeHealth.ALIVE and is_waited_for and status.phase in usual and seen.phase_s > limit_s:
        health = SLOW
    symbol, level = HEALTH[health]
    return NodeRow(
        rank=status.rank,
        host=one_line(status.host, 60),
        health=health,
        symbol=symbol,
        level=level,
        weight=status.weight,
        iteration=status.iteration,
        phase=status.phase,
        cells=_cells(status.phase, status.arrived, status.rl_phase),
        phase_s=seen.phase_s,
        waited_s=seen.waited_s,
        silent_s=seen.silent_s,
        progress=status.progress,
        note=_note(seen),
        is_waited_for=is_waited_for,
        history=tuple(status.history[-200:]),
        is_gone=seen.is_gone,
        stalled_s=found.for_s if (found := stall(seen)) else None,
    )


def _note(seen: SeenNode) -> CleanText:
    """The part that has stopped, the reason why the node ended, or the nodes that it waits for."""
    if (found := stall(seen)) is not None:
        return one_line(f"{found.what} has stood still for {fmt.age(found.for_s)}")
    status = seen.status
    if status.reason or not status.waiting_on:
        return one_line(status.reason or "")
    return one_line(f"waits for {_POSITION.sub('', status.waiting_on, count=1)}")


def _missing(rank: int, is_waited_for: bool) -> NodeRow:
    symbol, level = HEALTH[MISSING]
    return NodeRow(
        rank=rank,
        health=MISSING,
        symbol=symbol,
        level=level,
        note=one_line("not started yet: run the same command with --worker"),
        is_waited_for=is_waited_for,
        cells=(Cell.AHEAD,) * NUM_PHASES,
    )


def _cells(phase: int, arrived: bool, rl_phase: str) -> tuple[Cell, ...]:
    used = RL_PHASES.get(rl_phase, range(NUM_PHASES))

    def cell(index: int) -> Cell:
        if index not in used:
            return Cell.OFF
        if index == phase:
            return Cell.ARRIVED if arrived else Cell.WORKING
        return Cell.PAST if index < phase else Cell.AHEAD

    return tuple(cell(index) for index in range(NUM_PHASES))


def _usual_times(nodes: Sequence[SeenNode]) -> dict[int, float]:
    """phase -> how long its work usually takes, by all nodes' history and by those that have just arrived."""
    times: dict[int, list[float]] = {}
    for seen in nodes:
        for past in seen.status.history:
            times.setdefault(past.phase, []).append(past.work_s)
        if seen.status.arrived:
            times.setdefault(seen.status.phase, []).append(max(seen.phase_s - seen.waited_s, 0.0))
    return {phase: statistics.median(values) for phase, values in times.items()}


def _phase_stats(nodes: Sequence[SeenNode]) -> tuple[PhaseStat, ...]:
    found = []
    for phase in range(NUM_PHASES):
        by_rank = {
            seen.status.rank: [past.work_s for past in seen.status.history if past.phase == phase] for seen in nodes
        }
        usual = {rank: statistics.median(times) for rank, times in by_rank.items() if times}
        if not usual:
            continue
        slowest = max(usual, key=lambda rank: usual[rank])
        # What the group needs for it: the longest of each iteration.
        iterations: dict[int, float] = {}
        for seen in nodes:
            for past in seen.status.history:
                if past.phase == phase:
                    iterations[past.iteration] = max(iterations.get(past.iteration, 0.0), past.work_s)
        recent = tuple(iterations[number] for number in sorted(iterations)[-24:])
        found.append(PhaseStat(phase, statistics.median(usual.values()), slowest, usual[slowest], recent))
    return tuple(found)
