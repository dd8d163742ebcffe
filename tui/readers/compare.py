"""Reads what the screen Compare shows: configs and one metric of many runs. Called by one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from prime_rl.configs.base import ConfigError
from prime_rl.contract.layout import RunDir
from prime_rl.utils.text import one_line
from tui.readers.charts import ChartData, ChartView
from tui.readers.groups import (
    RUN,
    TAG,
    Contender,
    Group,
    best_run,
    compare_chart,
    differing_keys,
    make_groups,
)
from tui.readers.history import EVAL_PREFIX, RunMetrics
from tui.readers.run_config import all_values
from tui.readers.tabs import TabData, file_stamp, read_clean

# More runs than fit on a screen; the first of the workspace's order are taken, and the screen tells how many are not.
MAX_RUNS = 200
CAPACITY = 4096
READ_SLICE_S = 0.25
METRICS = ("reward/mean", "loss", "entropy", "mismatch_kl", "grad_norm", "completion_len/mean", "tokens_per_s")


@dataclass(frozen=True)
class CompareRequest:
    """What is compared: `runs` are ids with their tags; `by` is RUN, TAG or a config key."""

    runs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    metric: str = METRICS[0]
    by: str = RUN
    view: ChartView = field(default_factory=ChartView)


@dataclass(frozen=True)
class CompareData(TabData):
    """One look. `keys` are the config keys that differ; `groupings` and `metrics` what can be chosen."""

    tab = "compare"
    request: CompareRequest = field(default_factory=CompareRequest)
    groups: tuple[Group, ...] = ()
    chart: ChartData = field(default_factory=ChartData)
    keys: tuple[str, ...] = ()
    best: Contender | None = None
    groupings: tuple[str, ...] = (RUN, TAG)
    metrics: tuple[str, ...] = METRICS
    num_left_out: int = 0
    is_reading: bool = False


class CompareReader:
    """Keeps up with the files of the requested runs. Another metric is read from the start of each file."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._shown: CompareRequest | None = None
        self._metric = ""
        self._readers: dict[str, RunMetrics] = {}
        self._configs: dict[str, tuple[object, dict[str, str]]] = {}

    def read(
        self, request: CompareRequest, is_wanted: Callable[[], bool] = lambda: True
    ) -> tuple[CompareData | None, bool]:
        """A new look, or None when nothing changed; and whether to look again at once."""
        runs = request.runs[:MAX_RUNS]
        if request.metric != self._metric:
            self._metric, self._readers = request.metric, {}
        self._readers = {run_id: self._readers.get(run_id) or self._open(run_id) for run_id, _ in runs}
        self._configs = {run_id: value for run_id, value in self._configs.items() if run_id in self._readers}
        num_changed = sum(self._read_config(run_id) for run_id, _ in runs)
        read, more = self._read_metrics(is_wanted)
        if not (num_changed or read) and request == self._shown:
            return None, more
        self._shown = request
        return self._data(request, more), more

    def _read_metrics(self, is_wanted: Callable[[], bool]) -> tuple[bool, bool]:
        deadline, changed = time.monotonic() + READ_SLICE_S, False
        while True:
            looks = [reader.update() for reader in self._readers.values()]
            changed |= any(each for each, _ in looks)
            more = any(each for _, each in looks)
            if not more or time.monotonic() > deadline or not is_wanted():
                return changed, more

    def _open(self, run_id: str) -> RunMetrics:
        return RunMetrics(RunDir(self._output_dir / run_id), (self._metric,), CAPACITY)

    def _read_config(self, run_id: str) -> bool:
        path = RunDir(self._output_dir / run_id).orch_toml
        stamp = file_stamp(path)
        known = self._configs.get(run_id)
        if known is not None and known[0] == stamp:
            return False
        try:
            values = {str(value.key): str(value.text) for value in all_values(read_clean(path) or "")}
        except ConfigError:
            values = {}
        self._configs[run_id] = (stamp, values)
        return True

    def _data(self, request: CompareRequest, is_reading: bool) -> CompareData:
        evals: set[str] = set()
        contenders = []
        for run_id, tags in request.runs[:MAX_RUNS]:
            histories = self._readers[run_id].histories()
            evals.update(key for key in histories if key.startswith(EVAL_PREFIX))
            contenders.append(Contender(run_id, tags, self._configs[run_id][1], histories.get(request.metric)))
        keys = differing_keys(contenders)
        by = request.by if request.by in (RUN, TAG, *keys) else RUN
        groups = make_groups(contenders, by, request.metric)
        return CompareData(
            run_id="",
            request=request,
            groups=groups,
            chart=compare_chart(groups, request.view),
            keys=keys,
            best=best_run(contenders, request.metric),
            groupings=(RUN, TAG, *keys),
            metrics=(*METRICS, *sorted(one_line(key, 60) for key in evals)),
            num_left_out=max(len(request.runs) - MAX_RUNS, 0),
            is_reading=is_reading,
        )
