"""The charts of one run and of those it is compared with: which there are, what is looked at, the thinned-out curves.

A chart is `num_columns` dots wide. Each curve gives for each of these columns the newest, the least and the greatest
value of the steps that fall on it: a spike of one step is seen whatever is zoomed to. All is thinned by `ChartsReader`,
off the thread that draws.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prime_rl.contract.layout import RunDir
from prime_rl.utils.text import one_line
from tui.readers.history import (
    CAPACITY,
    EVAL_PREFIX,
    EVAL_SUFFIX,
    SMALL_POINTS,
    History,
    RunMetrics,
    change,
    downsample,
)
from tui.readers.tabs import CHARTS as CHARTS_TAB
from tui.readers.tabs import TabData

SMOOTHINGS = (0.0, 0.6, 0.9, 0.97)
MIN_SPAN = 4.0
NUM_RECENT = 10


@dataclass(frozen=True)
class ChartSpec:
    """One chart: its title, the metrics in it, how each is called there. `stacks`: their sum has a meaning."""

    title: str
    keys: tuple[str, ...]
    names: tuple[str, ...] = ()
    stacks: bool = False
    total: str = ""
    """The curve that is shown when several runs are compared; default: the first."""
    is_reward: bool = False


CHARTS = (
    ChartSpec("reward", ("reward/mean",), is_reward=True),
    ChartSpec("loss", ("loss",)),
    ChartSpec("entropy", ("entropy",)),
    ChartSpec("mismatch KL", ("mismatch_kl",)),
    ChartSpec("grad norm", ("grad_norm",)),
    ChartSpec("learning rate", ("lr",)),
    ChartSpec("lengths", ("completion_len/mean", "prompt_len/mean"), ("completion", "prompt")),
    ChartSpec("lag", ("async_level/max", "async_level/mean"), ("max", "mean")),
    ChartSpec(
        "step time, s",
        ("time/generate", "time/environment", "time/wait_for_policy", "time/wait_for_inference"),
        ("generate", "environment", "policy", "inference"),
        stacks=True,
        total="time/step",
    ),
    ChartSpec(
        "trainer time, s",
        ("time/forward_backward", "time/optim", "time/broadcast", "time/checkpoint"),
        ("passes", "optim", "broadcast", "checkpoint"),
        stacks=True,
    ),
    ChartSpec("tokens/s", ("tokens_per_s",)),
    ChartSpec("evaluation", (EVAL_PREFIX,), is_reward=True),
)
KEYS = tuple(dict.fromkeys(key for spec in CHARTS for key in (*spec.keys, spec.total) if key and key != EVAL_PREFIX))


@dataclass(frozen=True)
class ChartView:
    """What is looked at. `span` steps up to `end`; None: all steps, up to the newest."""

    span: float | None = None
    end: float | None = None
    is_log: bool = False
    smoothing: float = 0.0
    is_stacked: bool = True
    compare: tuple[str, ...] = ()
    num_columns: int = 120

    def zoomed(self, factor: float, newest: tuple[float, float], centre: float | None) -> ChartView:
        """Show `factor` times as many steps around `centre` (None: keep the end); `newest` are the steps there are."""
        first, last = window(self, newest)
        span = max((last - first) * factor, MIN_SPAN)
        if span >= newest[1] - newest[0]:
            return replace(self, span=None, end=None)
        if centre is None:
            return replace(self, span=span)
        share = (centre - first) / max(last - first, 1e-9)
        return self._ending(centre + span * (1 - share), span, newest)

    def panned(self, share: float, newest: tuple[float, float]) -> ChartView:
        """Move by `share` of what is shown; at the newest step it follows again."""
        if self.span is None:
            return self
        return self._ending(window(self, newest)[1] + share * self.span, self.span, newest)

    def _ending(self, end: float, span: float, newest: tuple[float, float]) -> ChartView:
        end = max(end, newest[0] + span)
        return replace(self, span=span, end=None if end >= newest[1] else end)


@dataclass(frozen=True)
class Curve:
    """One line. By column that has a value: its index, the newest step on it, that step's value, least and greatest.

    `last` is the newest value of all, whatever is looked at. `is_faint`: the values before smoothing.
    """

    name: str
    colour: int = 0
    xs: tuple[int, ...] = ()
    steps: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    lows: tuple[float, ...] = ()
    highs: tuple[float, ...] = ()
    last: float | None = None
    is_faint: bool = False

    def at(self, step: float) -> int | None:
        """Index of the column whose newest step is nearest to `step`."""
        if not self.steps:
            return None
        place = bisect_left(self.steps, step)
        near = [index for index in (place - 1, place) if 0 <= index < len(self.steps)]
        return min(near, key=lambda index: abs(self.steps[index] - step))


@dataclass(frozen=True)
class ChartData:
    """What one chart shows. `window` are the first and the last step of its width."""

    curves: tuple[Curve, ...] = ()
    window: tuple[float, float] = (0.0, 0.0)
    num_columns: int = 1
    is_log: bool = False
    is_stacked: bool = False
    change: float | None = None

    @property
    def has_values(self) -> bool:
        """Whether a curve has a point in the window."""
        return any(curve.xs for curve in self.curves)


@dataclass(frozen=True)
class ChartsData(TabData):
    """One look at all charts. `newest` are the first and the last step that there are; `run_ids` by colour."""

    tab = CHARTS_TAB
    charts: tuple[ChartData, ...]
    view: ChartView
    newest: tuple[float, float] = (0.0, 0.0)
    run_ids: tuple[str, ...] = ()
    is_reading: bool = False


def window(view: ChartView, newest: tuple[float, float]) -> tuple[float, float]:
    """(first, last) step that `view` shows."""
    if view.span is None:
        return newest
    last = newest[1] if view.end is None else view.end
    return last - view.span, last


def thin(name: str, history: History, values: Sequence[float], shown: tuple[float, float], num_columns: int) -> Curve:
    """The curve of `values` (one for each step of `history`) between the steps `shown`."""
    steps = history.steps
    first, last = shown
    width = max(last - first, 1e-9) / max(num_columns - 1, 1)

    def column(step: float) -> int:
        return int((step - first) / width + 0.5)

    start, stop = bisect_left(steps, first), bisect_right(steps, last)
    columns: list[tuple[int, float, float, float, float]] = []
    while start < stop:
        x = column(steps[start])
        end = bisect_right(steps, x, start, stop, key=column)
        piece = values[start:end]
        columns.append((x, steps[end - 1], values[end - 1], min(piece), max(piece)))
        start = end
    last_value = history.values[-1] if len(history) else None
    if not columns:
        return Curve(name, last=last_value)
    return Curve(name, 0, *map(tuple, zip(*columns, strict=True)), last=last_value)  # type: ignore[arg-type, misc]


def simple_chart(
    steps: Sequence[float], values: Sequence[float], *, last: float | None = None, change: float | None = None
) -> ChartData:
    """One curve, for a small picture."""
    history = History()
    history.extend(*downsample(steps, values, SMALL_POINTS))
    if not len(history):
        return ChartData()
    shown = (history.steps[0], history.steps[-1])
    num_columns = max(len(history), 2)
    curve = replace(thin("", history, history.values, shown, num_columns), last=last)
    return ChartData((curve,), shown, num_columns, change=change)


def build_chart(
    spec: ChartSpec,
    runs: Sequence[Mapping[str, History]],
    names: Sequence[str],
    view: ChartView,
    newest: tuple[float, float],
) -> ChartData:
    """One chart. `runs` are the histories of each run that is shown, by metric; `names` what the runs are called."""
    shown = window(view, newest)
    curves: list[Curve] = []
    chosen = _chosen(spec, runs, names)
    for colour, (name, history) in enumerate(chosen):
        if history is None:
            continue
        if view.smoothing and len(chosen) == 1:
            raw = thin(name, history, history.values, shown, view.num_columns)
            curves.append(replace(raw, colour=colour, is_faint=True))
        curve = thin(name, history, history.smoothed(view.smoothing), shown, view.num_columns)
        curves.append(replace(curve, colour=colour))
    first = chosen[0][1] if chosen else None
    return ChartData(
        curves=tuple(curves),
        window=shown,
        num_columns=view.num_columns,
        is_log=view.is_log,
        is_stacked=spec.stacks and view.is_stacked and len(runs) == 1 and not view.is_log,
        change=change(first.values[-NUM_RECENT:]) if first is not None and len(chosen) == 1 else None,
    )


def _chosen(
    spec: ChartSpec, runs: Sequence[Mapping[str, History]], names: Sequence[str]
) -> list[tuple[str, History | None]]:
    """The curves by name: all metrics of a run that is alone, one metric of each of several runs."""
    keys = spec.keys
    if keys == (EVAL_PREFIX,):
        keys = tuple(sorted({key for run in runs for key in run if key.startswith(EVAL_PREFIX)}))
        labels: list[str] = [one_line(key.removeprefix(EVAL_PREFIX).removesuffix(EVAL_SUFFIX), 40) for key in keys]
    else:
        labels = list(spec.names or ("",) * len(keys))
    if len(runs) == 1:
        return [(label, runs[0].get(key)) for label, key in zip(labels, keys, strict=True)]
    key = spec.total or (keys[0] if keys else "")
    return [(name, run.get(key)) for name, run in zip(names, runs, strict=True)]


# A look at the files takes at most this long before it is shown; the rest follows at once. The first picture comes
# soon; each later one has more points and takes longer.
READ_SLICE_S, NEXT_SLICE_S = 0.25, 0.5
# Compared runs are read less finely: there may be many of them.
COMPARED_CAPACITY = 1 << 14
MAX_COMPARED = 7


class ChartsReader:
    """Reads what is new in each file. Drops runs that are no longer compared."""

    def __init__(self, output_dir: Path, run_id: str) -> None:
        self._output_dir = output_dir
        self._run_id = run_id
        self._runs: dict[str, RunMetrics] = {}
        self._shown: ChartView | None = None
        self._slice_s = READ_SLICE_S

    def read(self, view: ChartView) -> tuple[ChartsData | None, bool]:
        """Read for one slice: (the charts, or None when neither files nor `view` changed; whether more is left)."""
        changed, more = self._update((self._run_id, *view.compare[:MAX_COMPARED]))
        self._slice_s = NEXT_SLICE_S if more else READ_SLICE_S
        if not changed and view == self._shown:
            return None, more
        self._shown = view
        return self._data(view, more), more

    def _update(self, run_ids: tuple[str, ...]) -> tuple[bool, bool]:
        self._runs = {run_id: self._runs.get(run_id) or self._open(run_id) for run_id in run_ids}
        deadline = time.monotonic() + self._slice_s
        changed = False
        while True:
            looks = [run.update() for run in self._runs.values()]
            changed |= any(each for each, _ in looks)
            more = any(each for _, each in looks)
            if not more or time.monotonic() > deadline:
                return changed, more

    def _open(self, run_id: str) -> RunMetrics:
        capacity = CAPACITY if run_id == self._run_id else COMPARED_CAPACITY
        return RunMetrics(RunDir(self._output_dir / run_id), KEYS, capacity)

    def _data(self, view: ChartView, is_reading: bool) -> ChartsData:
        names = tuple(self._runs)
        runs = [run.histories() for run in self._runs.values()]
        ends = [(each.steps[0], each.steps[-1]) for run in runs for each in run.values() if len(each)]
        newest = (min(first for first, _ in ends), max(last for _, last in ends)) if ends else (0.0, 0.0)
        charts = tuple(build_chart(spec, runs, names, view, newest) for spec in CHARTS)
        return ChartsData(self._run_id, charts, view, newest, names, is_reading)
