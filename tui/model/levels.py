"""The need for a person: levels, the states of runs with theirs, and problems."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from prime_rl.contract.status import LOST, LOST_AFTER_S, STALLED, RunState
from prime_rl.utils.text import CleanText, one_line
from tui.readers.machine import Alert

# A run stalls when no step ends for this many of its usual step times.
STALL_STEPS = 10


class Level(enum.IntEnum):
    """The degree to which something needs a person. Symbols and words show it without one."""

    QUIET = 0
    GOOD = 1
    BUSY = 2
    WARN = 3
    BAD = 4

    @property
    def style(self) -> str:
        """The name of its style (`app.text_styles`)."""
        return ("muted", "success", "secondary", "warning", "error")[self]


LEVEL_SYMBOLS = {Level.QUIET: "■", Level.GOOD: "●", Level.BUSY: "◌", Level.WARN: "▲", Level.BAD: "✖"}


# State in words -> (symbol, level). The symbols differ in shape, so that no state needs colour to be read.
STATES: Mapping[str, tuple[str, Level]] = {
    RunState.ACTIVE: ("●", Level.GOOD),
    RunState.WAITING: ("◌", Level.BUSY),
    RunState.FINISHED: ("✔", Level.QUIET),
    RunState.STOPPED: ("■", Level.QUIET),
    STALLED: ("▲", Level.WARN),
    RunState.PAUSED: ("‖", Level.QUIET),
    RunState.EVICTED: ("⊘", Level.WARN),
    RunState.INVALID: ("!", Level.BAD),
    RunState.FAILED: ("✖", Level.BAD),
    LOST: ("?", Level.BAD),
}
STATE_WORDS: Mapping[str, str] = {
    RunState.ACTIVE: "trains in a slot",
    RunState.WAITING: "valid, waits for a free slot",
    RunState.FINISHED: "reached max_steps, its budget or its stop rule",
    RunState.PAUSED: "saved and out of its slot; z continues it",
    RunState.STOPPED: "the trainer is down",
    STALLED: f"alive, but makes no progress, or no step for {STALL_STEPS} times as long as usual",
    RunState.EVICTED: "out of its slot, reason kept; r readmits it",
    RunState.INVALID: "its orch.toml has errors; fix the file and it is checked again",
    RunState.FAILED: "its orchestrator failed",
    LOST: f"no heartbeat for more than {LOST_AFTER_S:.0f} s",
}


Target = Literal["run", "daemon", "entry", "workspace", "node"]
_NOTHING = one_line("")


@dataclass(frozen=True)
class Problem:
    """Something that a person should look at: what has it, what is wrong, and since when (Unix seconds, if known).

    `alerts`: the incidents that were reported of it, by name, and `note` who has acknowledged or muted them.
    `target` is the kind of `name`: a run that can be opened, a daemon, an entry that is not a run, the workspace, or a
    node of a multi-node group. `kind` tells problems of one `name` apart, the same at each look.
    """

    name: CleanText
    text: CleanText
    target: Target = "run"
    level: Level = Level.BAD
    since: float | None = None
    alerts: tuple[CleanText, ...] = ()
    note: CleanText = _NOTHING
    kind: CleanText = _NOTHING


def with_alerts(problems: Iterable[Problem], alerts: Sequence[Alert]) -> list[Problem]:
    """Each problem with what was reported of it, and the incidents that are no problem otherwise."""
    of: dict[str, list[Alert]] = {}
    for alert in alerts:
        of.setdefault(alert.subject, []).append(alert)
    found = [_noted(each, of[each.name]) if each.name in of else each for each in problems]
    named = {each.name for each in found}
    return found + [_noted(_of_alerts(same), same) for subject, same in of.items() if subject not in named]


def _of_alerts(same: Sequence[Alert]) -> Problem:
    subject = same[0].subject
    is_run, is_node, is_place = subject.startswith("run_"), subject.startswith("node "), subject in ("disk", "clocks")
    target: Target = "run" if is_run else "node" if is_node else "workspace" if is_place else "daemon"
    text = one_line("; ".join(each.text for each in same), 1000)
    return Problem(subject, text, target, Level.WARN, min(each.since for each in same))


def _noted(problem: Problem, alerts: Sequence[Alert]) -> Problem:
    notes = dict.fromkeys(each.note for each in alerts if each.note)
    return replace(problem, alerts=tuple(each.name for each in alerts), note=one_line("; ".join(notes)))
