"""All that the run screen reads of one run: a reader for each tab, of which only the open one reads. One thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tui.readers.charts import ChartsReader, ChartView
from tui.readers.log_reader import LogRequest, LogTabReader
from tui.readers.rollouts import RolloutsReader, RolloutsRequest
from tui.readers.run_config import CheckpointsReader, ConfigReader, ConfigRequest, EventsReader
from tui.readers.tabs import CHARTS, CHECKPOINTS, CONFIG, EVENTS, LOGS, ROLLOUTS, TabData


@dataclass(frozen=True)
class RunRequest:
    """The tab that is open, and what some tabs are to show."""

    tab: str = CHARTS
    charts: ChartView = field(default_factory=ChartView)
    config: ConfigRequest = field(default_factory=ConfigRequest)
    log: LogRequest = field(default_factory=LogRequest)
    rollouts: RolloutsRequest = field(default_factory=RolloutsRequest)


class RunReader:
    """The readers of all tabs of one run."""

    def __init__(self, output_dir: Path, run_id: str) -> None:
        self._charts = ChartsReader(output_dir, run_id)
        self._config = ConfigReader(output_dir, run_id)
        self._logs = LogTabReader(output_dir, run_id)
        self._rollouts = RolloutsReader(output_dir, run_id)
        self._others: dict[str, CheckpointsReader | EventsReader] = {
            CHECKPOINTS: CheckpointsReader(output_dir, run_id),
            EVENTS: EventsReader(output_dir, run_id),
        }

    def read(self, request: RunRequest, is_wanted: Callable[[], bool] = lambda: True) -> tuple[TabData | None, bool]:
        """A new look at what the open tab shows, or None when nothing changed; and whether to look again at once.

        Never raises for what a file may do. Long work ends when it `is_wanted` no more.
        """
        if request.tab == CHARTS:
            return self._charts.read(request.charts)
        if request.tab == CONFIG:
            return self._config.read(request.config)
        if request.tab == LOGS:
            return self._logs.read(request.log, is_wanted)
        if request.tab == ROLLOUTS:
            return self._rollouts.read(request.rollouts)
        reader = self._others.get(request.tab)
        return reader.read() if reader else (None, False)
