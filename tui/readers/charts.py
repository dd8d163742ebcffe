"""The metrics of a run in columns, kept up to date from its files, and the charts that are made of them.

Built for runs of 100,000 steps: a block of lines is decoded to the requested keys only and appended column by column.
Each metric keeps at most `capacity` points; beyond that neighbours are thinned so that every least and greatest value
stays, and the newest values as they came. The home screen reads only the end of each file (`newest_bytes`), and keeps
only the newest values.

A chart is `num_columns` dots wide. Each curve gives for each of these columns the newest, the least and the greatest
value of the steps that fall on it: a spike of one step is seen whatever is zoomed to. All is thinned by `ChartsReader`,
off the thread that draws.
"""

from __future__ import annotations

import functools
import operator
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import msgspec

from prime_rl.contract.files import UNDECODABLE
from prime_rl.contract.layout import RunDir
from prime_rl.contract.metrics import parse_metrics
from prime_rl.utils.tail import FileTail
from prime_rl.utils.text import one_line
from tui.readers.tabs import CHARTS as CHARTS_TAB
from tui.readers.tabs import TabData

CAPACITY = 1 << 17
# Of a curve in a small picture: more than it has dots beside each other.
SMALL_POINTS = 240
MAX_STEP = 2.0**53
# No larger value is shown: a float32 does not hold it.
MAX_FIGURE = 3.4e38
# So many of the newest values are never thinned, but for a quarter of the capacity at most.
NUM_KEPT = 128
# Metrics whose names are known only when they come: one for each environment that is evaluated.
EVAL_PREFIX, EVAL_SUFFIX = "eval/", "/reward"
MAX_EVALS = 8
# From this many values on the greatest smoothing factor has no bias left that a float32 shows.
_UNBIASED = 1_000


class History:
    """One metric: ascending steps and their values. A step that was seen before replaces it and what follows.

    `is_newest`: of more than `capacity` values the oldest are dropped, none thinned, and they keep all their digits, as
    times in Unix seconds need; otherwise they are float32.
    """

    __slots__ = ("_factor", "_is_newest", "_smooth", "_sum", "capacity", "steps", "values")

    def __init__(self, capacity: int = CAPACITY, *, is_newest: bool = False) -> None:
        self.capacity = capacity
        self._is_newest = is_newest
        self.steps = array("d")
        self.values = array("d" if is_newest else "f")
        self._factor = 0.0
        self._smooth = array("f")
        self._sum = 0.0  # of the average so far, weighted, with the bias to zero that a start from zero has

    def __len__(self) -> int:
        return len(self.steps)

    def extend(self, steps: Sequence[float], values: Sequence[float], *, ascends: bool = False) -> None:
        """Take new points; `ascends`: it is known that each step is greater than the one before."""
        if not steps:
            return
        if not (ascends or _ascends(steps)):
            for step, value in zip(steps, values, strict=True):
                self.extend((step,), (value,), ascends=True)
            return
        if self.steps and steps[0] <= self.steps[-1]:
            num_kept = bisect_left(self.steps, steps[0])
            del self.steps[num_kept:], self.values[num_kept:]
            self._forget_smooth()
        self.steps.extend(steps)
        self.values.extend(values)
        if len(self.steps) > self.capacity:
            self._thin()

    def smoothed(self, factor: float) -> array[float]:
        """The exponential moving average of all values, without a bias to zero at the start; computed once a value."""
        if factor <= 0:
            return self.values
        if factor != self._factor:
            self._factor, self._smooth, self._sum = factor, array("f"), 0.0
        start = len(self._smooth)
        new = self.values[start:]
        if new:
            rest = 1.0 - factor
            sums = list(accumulate(new, lambda total, value: total * factor + value * rest, initial=self._sum))[1:]
            self._sum = sums[-1]
            # What the weights of the first values lack to one; soon they lack nothing.
            for index in range(min(len(sums), max(_UNBIASED - start, 0))):
                sums[index] /= 1.0 - factor ** (start + index + 1)
            self._smooth.extend(sums)
        return self._smooth

    def _thin(self) -> None:
        if self._is_newest:
            del self.steps[: -self.capacity], self.values[: -self.capacity]
            return
        num_recent = min(NUM_KEPT, self.capacity // 4)
        recent = slice(-num_recent, None)
        older = self.steps[:-num_recent], self.values[:-num_recent]
        steps, values = downsample(*older, self.capacity // 2 - num_recent)
        self.steps = array("d", steps) + self.steps[recent]
        self.values = array(self.values.typecode, values) + self.values[recent]
        self._forget_smooth()

    def _forget_smooth(self) -> None:
        self._factor, self._smooth, self._sum = 0.0, array("f"), 0.0


@dataclass(frozen=True)
class _Line:
    """The decoder of a line for some keys: its type, which names them `v0`, `v1`, ..., and who gets them from it."""

    make: Callable[..., Any]
    decode: Callable[[bytes], Any]
    names: Mapping[str, str]
    getters: Sequence[tuple[str, Callable[[Any], float | None]]]


@functools.cache
def _line_of(keys: tuple[str, ...]) -> _Line:
    """Made once: it costs as much as reading a file of the home screen, which has one for each run."""
    names = {key: f"v{number}" for number, key in enumerate(keys)}
    fields = [(name, float | None, msgspec.field(name=key, default=None)) for key, name in names.items()]
    line = msgspec.defstruct("Line", [("step", float), *fields], gc=False)
    getters = [(key, operator.attrgetter(name)) for key, name in names.items()]
    return _Line(line, msgspec.json.Decoder(line).decode, names, getters)


class HistoryReader:
    """The histories of `keys`, and of all evaluations, in one metrics file.

    With `newest_bytes` only the end of the file is read, of its newest `capacity` lines `keys` alone; values are exact.
    """

    def __init__(
        self, path: Path, keys: Iterable[str], capacity: int = CAPACITY, *, newest_bytes: int | None = None
    ) -> None:
        self._tail = FileTail(path, start_bytes=newest_bytes)
        self._is_whole = newest_bytes is None
        self._capacity = capacity
        self._line = _line_of(tuple(keys))
        self.histories: dict[str, History] = {}

    def update(self) -> tuple[bool, bool]:
        """Read one block of what is new: (whether anything changed, whether there is more to read at once)."""
        read = self._tail.read()
        if read.reset:
            self.histories = {}
        if read.lines:
            self._take(read.lines)
        return read.reset or bool(read.lines), read.more

    def _take(self, lines: list[bytes]) -> None:
        if not self._is_whole:
            lines = lines[-self._capacity :]
        rows = [row for line in lines if (row := self._row(line)) is not None]
        steps = array("d", [row.step for row in rows])
        ascends = _ascends(steps)
        for key, get in self._line.getters:
            values = list(map(get, rows))
            if values.count(None) < len(values):
                self._extend(key, steps, values, ascends)

    def _extend(self, key: str, steps: Sequence[float], values: list[float | None], ascends: bool) -> None:
        if None not in values and sum(map(abs, values)) <= MAX_FIGURE:  # type: ignore[arg-type]
            known: Sequence[float] = values  # type: ignore[assignment]
        else:
            pairs = [
                (step, value)
                for step, value in zip(steps, values, strict=True)
                if value is not None and abs(value) <= MAX_FIGURE
            ]
            steps, known = [step for step, _ in pairs], [value for _, value in pairs]
        if steps:
            self._history(key).extend(steps, known, ascends=ascends)

    def _row(self, line: bytes) -> Any:
        """A decoded line, or None. Evaluations are taken at once: their keys are not known before."""
        is_eval = self._is_whole and b'"eval/' in line
        if not is_eval:
            try:
                row = self._line.decode(line)
                return row if 0 <= row.step < MAX_STEP else None
            except UNDECODABLE:
                pass
        parsed = parse_metrics(line)
        if parsed is None:
            return None
        step, values = parsed
        if is_eval:
            self._take_evals(step, values)
        return self._line.make(step, **{name: values[key] for key, name in self._line.names.items() if key in values})

    def _take_evals(self, step: int, values: dict[str, float]) -> None:
        known = sum(key.startswith(EVAL_PREFIX) for key in self.histories)
        for key, value in values.items():
            if key.startswith(EVAL_PREFIX) and key.endswith(EVAL_SUFFIX):
                known += key not in self.histories
                if key in self.histories or known <= MAX_EVALS:
                    self._history(key).extend((step,), (value,))

    def _history(self, key: str) -> History:
        if key not in self.histories:
            self.histories[key] = History(self._capacity, is_newest=not self._is_whole)
        return self.histories[key]


class RunMetrics:
    """The two metrics files of one run. Arguments as of `HistoryReader`."""

    def __init__(
        self, run: RunDir, keys: Iterable[str], capacity: int = CAPACITY, *, newest_bytes: int | None = None
    ) -> None:
        paths = (run.trainer_metrics, run.orchestrator_metrics)
        self._readers = [HistoryReader(path, keys, capacity, newest_bytes=newest_bytes) for path in paths]

    def update(self) -> tuple[bool, bool]:
        """Read one block of each: (whether anything changed, whether there is more to read at once)."""
        looks = [reader.update() for reader in self._readers]
        return any(changed for changed, _ in looks), any(more for _, more in looks)

    def histories(self) -> dict[str, History]:
        """By metric. Of one that both files have the orchestrator's counts."""
        return {key: history for reader in self._readers for key, history in reader.histories.items()}


def read_slice(
    runs: Collection[RunMetrics], slice_s: float, is_wanted: Callable[[], bool] = lambda: True
) -> tuple[bool, bool]:
    """Read what is new of all, for `slice_s` at most: (whether anything changed, whether there is more)."""
    deadline, changed = time.monotonic() + slice_s, False
    while True:
        looks = [run.update() for run in runs]
        changed |= any(each for each, _ in looks)
        more = any(each for _, each in looks)
        if not more or time.monotonic() > deadline or not is_wanted():
            return changed, more


def _ascends(steps: Sequence[float]) -> bool:
    return all(map(operator.lt, steps, steps[1:]))


def downsample(steps: Sequence[float], values: Sequence[float], limit: int) -> tuple[list[float], list[float]]:
    """At most `limit` points (4 or more): both ends, and the least and the greatest value of each of equal buckets."""
    if limit < 4:
        raise ValueError(f"limit {limit} is too small: at least 4")
    if len(steps) <= limit:
        return list(steps), list(values)
    num_buckets, num_inner = (limit - 2) // 2, len(steps) - 2
    kept = [0]
    for bucket in range(num_buckets):
        start, end = 1 + bucket * num_inner // num_buckets, 1 + (bucket + 1) * num_inner // num_buckets
        piece = values[start:end]
        kept.extend(sorted({start + piece.index(min(piece)), start + piece.index(max(piece))}))
    kept.append(len(steps) - 1)
    return [steps[i] for i in kept], [values[i] for i in kept]


CHANGE_WINDOW = 5


def change(values: Sequence[float], window: int = CHANGE_WINDOW) -> float | None:
    """Mean of the newest `window` values less the mean of the `window` before; None when there are too few."""
    if len(values) < 2 * window:
        return None
    newer, older = values[-window:], values[-2 * window : -window]
    return sum(newer) / window - sum(older) / window


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
    of: Literal["", "rollouts", "texts", "teacher"] = ""
    """Left out, while it has no values, in runs of the other kind."""


CHARTS = (
    ChartSpec("reward", ("reward/mean",), is_reward=True, of="rollouts"),
    ChartSpec("loss", ("loss",)),
    ChartSpec("KL to the teacher", ("distill/kl",), of="teacher"),
    ChartSpec("loss of texts", ("supervised/loss", "held_out/loss"), ("learned", "held out"), of="texts"),
    ChartSpec("tokens right", ("supervised/accuracy", "held_out/accuracy"), ("learned", "held out"), of="texts"),
    ChartSpec("epoch", ("epoch",), of="texts"),
    ChartSpec("entropy", ("entropy",)),
    ChartSpec("mismatch KL", ("mismatch_kl",), of="rollouts"),
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
    ChartSpec("tokens/s generated", ("tokens_per_s",)),
    ChartSpec("evaluation", (EVAL_PREFIX,), is_reward=True, of="rollouts"),
)
KEYS = tuple(dict.fromkeys(key for spec in CHARTS for key in (*spec.keys, spec.total) if key and key != EVAL_PREFIX))


@dataclass(frozen=True)
class ChartView:
    """The part that is looked at. `span` steps up to `end`; None: all steps, up to the newest."""

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

    `last` is the newest value of all, whatever is looked at, and `spread` its deviation. `is_faint`: the values before
    smoothing, or with `is_band` the area between the least and the greatest ones.
    """

    name: str
    colour: int = 0
    xs: tuple[int, ...] = ()
    steps: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    lows: tuple[float, ...] = ()
    highs: tuple[float, ...] = ()
    last: float | None = None
    spread: float | None = None
    is_faint: bool = False
    is_band: bool = False

    def at(self, step: float) -> int | None:
        """Index of the column whose newest step is nearest to `step`."""
        if not self.steps:
            return None
        place = bisect_left(self.steps, step)
        near = [index for index in (place - 1, place) if 0 <= index < len(self.steps)]
        return min(near, key=lambda index: abs(self.steps[index] - step))


@dataclass(frozen=True)
class ChartData:
    """The content of one chart. `window` are the first and the last step of its width."""

    curves: tuple[Curve, ...] = ()
    window: tuple[float, float] = (0.0, 0.0)
    num_columns: int = 1
    is_log: bool = False
    is_stacked: bool = False
    change: float | None = None

    @property
    def has_values(self) -> bool:
        """True when a curve has a point in the window."""
        return any(curve.xs for curve in self.curves)

    @property
    def has_any(self) -> bool:
        """True when a curve has a value, wherever one looks."""
        return any(curve.last is not None for curve in self.curves)


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


def simple_chart(steps: Sequence[float], values: Sequence[float]) -> ChartData:
    """One curve, for a small picture."""
    if not steps:
        return ChartData()
    history = History()
    history.extend(*downsample(steps, values, SMALL_POINTS))
    shown = (history.steps[0], history.steps[-1])
    num_columns = max(len(history), 2)
    curve = replace(thin("", history, history.values, shown, num_columns), last=values[-1])
    return ChartData((curve,), shown, num_columns)


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
        run_ids = (self._run_id, *view.compare[:MAX_COMPARED])
        self._runs = {run_id: self._runs.get(run_id) or self._open(run_id) for run_id in run_ids}
        changed, more = read_slice(self._runs.values(), self._slice_s)
        self._slice_s = NEXT_SLICE_S if more else READ_SLICE_S
        if not changed and view == self._shown:
            return None, more
        self._shown = view
        return self._data(view, more), more

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
