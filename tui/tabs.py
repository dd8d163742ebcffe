"""The tabs of the run screen by name, and what a reader of one of them gives. Pure.

Each tab has a reader (`run_config`, `run_events`, ...) and a widget; only the reader of the open tab reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

CHARTS, ROLLOUTS, CONFIG, LOGS, CHECKPOINTS, EVENTS = "charts", "rollouts", "config", "logs", "checkpoints", "events"
TABS = (CHARTS, ROLLOUTS, CONFIG, LOGS, CHECKPOINTS, EVENTS)


@dataclass(frozen=True)
class TabData:
    """One look at what one tab shows of one run."""

    tab: ClassVar[str]
    run_id: str

    @property
    def replaces(self) -> bool:
        """Whether it makes an earlier look worthless."""
        return True


class TabReader(Protocol):
    """Called by one thread. `read` gives a new look, or None when nothing changed, and whether to look again at once.

    It never raises for what a file may do.
    """

    @property
    def tab(self) -> str: ...

    def read(self) -> tuple[TabData | None, bool]: ...
