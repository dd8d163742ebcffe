"""All that the run screen reads of one run: a reader for each tab, of which only the open one reads.

`read` is called by one thread; the screen sets the open tab and each reader's request from another.
"""

from __future__ import annotations

from pathlib import Path

from tui.charts_reader import ChartsReader
from tui.checkpoints import CheckpointsReader
from tui.log_reader import LogTabReader
from tui.rollouts import RolloutsReader
from tui.run_config import ConfigReader
from tui.run_events import EventsReader
from tui.tabs import CHARTS, LOGS, TabData, TabReader


class RunReader:
    def __init__(self, output_dir: Path, run_id: str) -> None:
        self._tab = CHARTS
        self.charts = ChartsReader(output_dir, run_id)
        self.rollouts = RolloutsReader(output_dir, run_id)
        self.config = ConfigReader(output_dir, run_id)
        self.logs = LogTabReader(output_dir, run_id)
        self.checkpoints = CheckpointsReader(output_dir, run_id)
        self.events = EventsReader(output_dir, run_id)
        readers: tuple[TabReader, ...] = (
            self.charts,
            self.rollouts,
            self.config,
            self.logs,
            self.checkpoints,
            self.events,
        )
        self._readers = {reader.tab: reader for reader in readers}

    @property
    def tab(self) -> str:
        """The open tab. Set it from any thread."""
        return self._tab

    @tab.setter
    def tab(self, tab: str) -> None:
        self._tab = tab
        self.logs.is_open = tab == LOGS

    def stop(self) -> None:
        self.logs.is_open = False

    def read(self) -> tuple[TabData | None, bool]:
        """A new look at what the open tab shows, or None; and whether to look again at once."""
        return self._readers[self._tab].read()
