"""The tabs of the run screen by name, what a reader of one of them gives, and how readers look at a run's small files.

Each tab has a reader (`run_config`, `rollouts`, ...) and a widget; only the reader of the open tab reads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from prime_rl.contract.files import open_file
from prime_rl.utils.text import CleanText, clean_text

MAX_TEXT_BYTES = 256 * 1024

CHARTS, ROLLOUTS, CONFIG, LOGS, CHECKPOINTS, EVENTS = "charts", "rollouts", "config", "logs", "checkpoints", "events"
TABS = (CHARTS, ROLLOUTS, CONFIG, LOGS, CHECKPOINTS, EVENTS)
# The last tab where a person may act. It reads no files.
CHAT = "chat"


@dataclass(frozen=True)
class TabData:
    """One look at what one tab shows of one run. A later one makes it worthless."""

    tab: ClassVar[str]
    run_id: str


def read_clean(path: Path, limit: int = MAX_TEXT_BYTES) -> CleanText | None:
    """At most `limit` bytes of a regular file, fit for the screen; None when it is not there or cannot be read."""
    try:
        with os.fdopen(open_file(path), "rb") as file:
            data = file.read(limit + 1)
    except OSError:
        return None
    text = data[:limit].decode(errors="replace").expandtabs(4)
    return clean_text(text + "\n# ... (the rest is not shown)" if len(data) > limit else text)


def changed_at(path: Path) -> float | None:
    """Unix seconds; None when it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
