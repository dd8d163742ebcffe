"""The one function that derives the state of a run: trainer, daemons, CLI and TUI give it the same facts.

Whatever is in the place of a mark of `control/` counts as it, also a pipe or a link, whose refusal is then the text.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.contract.files import read_text

if TYPE_CHECKING:
    from prime_rl.contract.status import RunStatus

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
