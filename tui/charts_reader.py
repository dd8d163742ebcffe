"""Keeps up with the metrics of the run that is open and of those it is compared with, and makes its charts.

Called by one thread; the screen sets `view` from another. Everything is thinned here, off the thread that draws.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from prime_rl.contract.layout import RunDir
from tui.curves import CHARTS, KEYS, ChartsData, ChartView, build_chart
from tui.history import CAPACITY, History, HistoryReader
from tui.tabs import CHARTS as CHARTS_TAB

# A look at the files takes at most this long before it is shown; the rest follows at once.
READ_SLICE_S = 0.25
# Compared runs are read less finely: there may be many of them.
COMPARED_CAPACITY = 1 << 14
MAX_COMPARED = 7


class ChartsReader:
    """Reads what is new in each file. Drops runs that are no longer compared."""

    tab = CHARTS_TAB

    def __init__(self, output_dir: Path, run_id: str) -> None:
        self._output_dir = output_dir
        self._run_id = run_id
        self.view = ChartView()
        self._runs: dict[str, _RunHistories] = {}
        self._shown: ChartView | None = None

    def read(self) -> tuple[ChartsData | None, bool]:
        view = self.view
        changed, more = self._update((self._run_id, *view.compare[:MAX_COMPARED]))
        if not changed and view == self._shown:
            return None, more
        self._shown = view
        return self._data(view, more), more

    def _update(self, run_ids: tuple[str, ...]) -> tuple[bool, bool]:
        self._runs = {run_id: self._runs.get(run_id) or self._open(run_id) for run_id in run_ids}
        deadline = time.monotonic() + READ_SLICE_S
        changed = False
        while True:
            looks = [reader.update() for run in self._runs.values() for reader in run.readers]
            changed |= any(each for each, _ in looks)
            more = any(each for _, each in looks)
            if not more or time.monotonic() > deadline:
                return changed, more

    def _open(self, run_id: str) -> _RunHistories:
        capacity = CAPACITY if run_id == self._run_id else COMPARED_CAPACITY
        return _RunHistories(RunDir(self._output_dir / run_id), capacity)

    def _data(self, view: ChartView, is_reading: bool) -> ChartsData:
        names = tuple(self._runs)
        runs = [run.histories() for run in self._runs.values()]
        ends = [(each.steps[0], each.steps[-1]) for run in runs for each in run.values() if len(each)]
        newest = (min(first for first, _ in ends), max(last for _, last in ends)) if ends else (0.0, 0.0)
        charts = tuple(build_chart(spec, runs, names, view, newest) for spec in CHARTS)
        return ChartsData(self._run_id, charts, view, newest, names, is_reading)


class _RunHistories:
    """The two metrics files of one run. Of a figure that both have the orchestrator's counts."""

    def __init__(self, run: RunDir, capacity: int) -> None:
        self.readers = [HistoryReader(path, KEYS, capacity) for path in (run.trainer_metrics, run.orchestrator_metrics)]

    def histories(self) -> Mapping[str, History]:
        return {key: history for reader in self.readers for key, history in reader.histories.items()}
