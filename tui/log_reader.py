"""Stand-in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prime_rl.contract.layout import RunDir
from tui.readers import LogReader
from tui.tabs import LOGS, Part


@dataclass(frozen=True)
class LogPart(Part):
    """Newest lines."""

    tab = LOGS
    lines: tuple[str, ...] = ()
    num_read: int = 0
    generation: int = 0


class LogTabReader:
    """The end of the log."""

    tab = LOGS

    def __init__(self, output_dir: Path, run_id: str) -> None:
        self._run = RunDir(output_dir / run_id)
        self._log = LogReader(self._run.log)
        self._is_shown = False

    def read(self) -> tuple[LogPart | None, bool]:
        changed, more = self._log.update()
        if not changed and self._is_shown:
            return None, more
        self._is_shown = True
        return LogPart(self._run.run_id, tuple(self._log.lines()), self._log.num_read, self._log.generation), more
