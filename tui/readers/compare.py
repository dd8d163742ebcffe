"""Reads what the screen Compare shows: configs and one metric of many runs. Called by one thread.

Runs are grouped by a tag or a config key, with mean and spread of each group. Results and places are those of
`daemons.ranking`: at equal steps, and runs of different environments apart.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from daemons.ranking import RUN, TAG, Standing, compared_config, differing, learns_texts, notes, rank, winners
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.metrics import HELD_OUT_LOSS, REWARD, SUPERVISED_LOSS, TEACHER_KL, bounded_mean
from prime_rl.contract.notes import SweepPlan, list_sweeps, read_plan
from prime_rl.utils.text import CleanText, one_line
from tui.readers.charts import EVAL_PREFIX, ChartData, ChartView, Curve, History, RunMetrics, read_slice, thin, window
from tui.readers.run_config import config_stamp
from tui.readers.tabs import TabData

# More runs than fit on a screen; the first of the workspace's order are taken, and the screen tells how many are not.
MAX_RUNS = 200
CAPACITY = 4096
READ_SLICE_S = 0.25
METRICS = (
    REWARD,
    HELD_OUT_LOSS,
    SUPERVISED_LOSS,
    TEACHER_KL,
    "loss",
    "entropy",
    "mismatch_kl",
    "grad_norm",
    "completion_len/mean",
    "tokens_per_s",
)
MAX_CURVES = 8
# Keys that several tables of a config have.
NAMES_OF_MANY = ("id", "name", "type")


@dataclass(frozen=True)
class Contender:
    """One run as it is compared. `config`: of `compared_config`; `at_most`: values of later steps do not count yet."""

    run_id: str
    tags: tuple[str, ...]
    config: Mapping[str, str]
    history: History | None = None
    has_failed: bool = False
    at_most: float = math.inf

    @property
    def steps(self) -> Sequence[float]:
        """Ascending."""
        return self.history.steps[: bisect_right(self.history.steps, self.at_most)] if self.history is not None else ()

    @property
    def values(self) -> Sequence[float]:
        """By step."""
        return self.history.values[: len(self.steps)] if self.history is not None else ()

    @property
    def step(self) -> int:
        """The newest step that has the metric; 0 without values."""
        return int(next(reversed(self.steps), 0))


@dataclass(frozen=True)
class Group:
    """Runs with one value of what they are grouped by, the best first. `spread` is the deviation of their results.

    `results` has the result of each run, at `step` at most.
    """

    name: str
    runs: tuple[Contender, ...]
    results: tuple[float | None, ...]
    result: float | None
    spread: float | None
    step: int


def differing_keys(runs: Sequence[Contender], swept: Sequence[str] = ()) -> tuple[str, ...]:
    """The config keys that are not the same in all runs with a valid config.

    Those that a sweep has set (`swept`, also tables) come first, then those that runs of every kind have, of these
    those with the most values; last the seed, which a person repeats and does not choose.
    """
    found = differing(runs)
    num_with = Counter(key for run in runs for key in run.config)

    def place(key: str) -> tuple[int, bool, int, int, str]:
        places = (at for at, each in enumerate(swept) if f"{key}.".startswith(f"{each}."))
        return next(places, len(swept)), key == "seed", -num_with[key], -len(found[key]), key

    return tuple(sorted(found, key=place))


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """The end of each dotted key, without its numbers: as many parts as tell it from all others, `lr` of `optim.lr`."""
    ends: dict[str, list[str]] = {}
    for key in keys:
        parts = [part for part in key.split(".") if not part.isdecimal()]
        least = 1 + (parts[-1] in NAMES_OF_MANY)
        ends[key] = [".".join(parts[-num:]) for num in range(least, len(parts) + 1)]
    num_of = Counter(itertools.chain(*ends.values()))
    return {key: next((end for end in own if num_of[end] == 1), key) for key, own in ends.items()}


def make_groups(standings: Sequence[Standing[Contender]]) -> tuple[Group, ...]:
    """A group for each standing; one that is in several environments has the name of its own with it."""
    names = Counter(each.name for each in standings)
    found = []
    for each in standings:
        name = f"{each.name}  {each.environment}" if names[each.name] > 1 else each.name
        known = [value for value in each.results if value is not None]
        spread = _deviation(known) if len(known) > 1 else None
        found.append(Group(name, each.runs, each.results, each.value, spread, each.step))
    return tuple(found)


def drawn_groups(groups: Sequence[Group]) -> list[Group]:
    """Those with a curve, in the order of their colours."""
    return [group for group in groups if any(run.step for run in group.runs)][:MAX_CURVES]


def compare_chart(groups: Sequence[Group], view: ChartView) -> ChartData:
    """One curve a group, at most MAX_CURVES: the mean of its runs, and faint behind it one deviation to each side."""
    drawn = drawn_groups(groups)
    ends = [
        (run.history.steps[0], run.history.steps[-1])
        for group in drawn
        for run in group.runs
        if run.history is not None and len(run.history)
    ]
    if not ends:
        return ChartData()
    shown = window(view, (min(first for first, _ in ends), max(last for _, last in ends)))
    curves: list[Curve] = []
    for colour, group in enumerate(drawn):
        mean = replace(_mean_curve(group, view, shown), colour=colour, spread=group.spread)
        if len(group.runs) > 1:
            curves.append(replace(mean, is_faint=True, is_band=True))
        curves.append(replace(mean, lows=mean.values, highs=mean.values))
    return ChartData(tuple(curves), shown, view.num_columns)


def _mean_curve(group: Group, view: ChartView, shown: tuple[float, float]) -> Curve:
    """By column the mean over the runs that have come so far, each with its newest value up to there."""
    histories = [run.history for run in group.runs if run.history is not None and len(run.history)]
    thinned = [thin("", each, each.smoothed(view.smoothing), shown, view.num_columns) for each in histories]
    columns = sorted({x for curve in thinned for x in curve.xs})
    rows: list[tuple[int, float, float, float, float]] = []
    places = [0] * len(thinned)
    for x in columns:
        values, steps = [], []
        for number, curve in enumerate(thinned):
            while places[number] < len(curve.xs) and curve.xs[places[number]] <= x:
                places[number] += 1
            if places[number] and curve.xs[-1] >= x:  # a run that has ended does not count beyond its end
                values.append(curve.values[places[number] - 1])
                steps.append(curve.steps[places[number] - 1])
        mean, spread = bounded_mean(values), _deviation(values)
        rows.append((x, max(steps), mean, mean - spread, mean + spread))
    return Curve(group.name, 0, *map(tuple, zip(*rows, strict=True)), last=group.result)  # type: ignore[arg-type, misc]


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation, of the population."""
    mean = bounded_mean(values)
    return math.sqrt(bounded_mean([(value - mean) * (value - mean) for value in values]))


@dataclass(frozen=True)
class CompareRequest:
    """The runs to compare: `runs` are ids with their tags and newest step; `by` is RUN, TAG or a key.

    `metric`: "" takes the one that tells most of runs of their kinds. `failed`: those that have failed. `step`: up to
    which values count; None: the largest that all have.
    """

    runs: tuple[tuple[str, tuple[str, ...], int], ...] = ()
    failed: frozenset[str] = frozenset()
    metric: str = ""
    by: str = RUN
    step: int | None = None
    view: ChartView = field(default_factory=ChartView)


@dataclass(frozen=True)
class CompareData(TabData):
    """One look. `keys` are the config keys that differ; `groupings` and `metrics` what can be chosen.

    `best`: the best run of each environment, with its result. `notes`: what to know of the ranking.
    """

    tab = "compare"
    request: CompareRequest = field(default_factory=CompareRequest)
    groups: tuple[Group, ...] = ()
    chart: ChartData = field(default_factory=ChartData)
    keys: tuple[str, ...] = ()
    best: tuple[tuple[Contender, float], ...] = ()
    notes: tuple[CleanText, ...] = ()
    groupings: tuple[str, ...] = (RUN, TAG)
    metrics: tuple[str, ...] = METRICS
    num_left_out: int = 0
    is_reading: bool = False


def usual_metrics(configs: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Of runs with these configs the metrics that tell most, the best first; of two kinds those that both may have."""
    kinds = {learns_texts(config) for config in configs if config}
    if kinds == {True}:
        return HELD_OUT_LOSS, SUPERVISED_LOSS
    return (HELD_OUT_LOSS, SUPERVISED_LOSS, "loss") if len(kinds) == 2 else (REWARD,)


class CompareReader:
    """Keeps up with the files of the requested runs. Another metric is read from the start of each file."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._shown: CompareRequest | None = None
        self._metrics: tuple[str, ...] = ()
        self._readers: dict[str, RunMetrics] = {}
        self._configs: dict[str, tuple[object, dict[str, str]]] = {}
        self._plans: dict[str, SweepPlan] = {}

    def read(
        self, request: CompareRequest, is_wanted: Callable[[], bool] = lambda: True
    ) -> tuple[CompareData | None, bool]:
        """A new look, or None when nothing changed; and whether to look again at once."""
        runs = request.runs[:MAX_RUNS]
        wanted = {run_id for run_id, *_ in runs}
        self._configs = {run_id: value for run_id, value in self._configs.items() if run_id in wanted}
        num_changed = sum(self._read_config(run_id) for run_id, *_ in runs)
        metrics = (request.metric,) if request.metric else usual_metrics([each for _, each in self._configs.values()])
        if metrics != self._metrics:
            self._metrics, self._readers = metrics, {}
        self._readers = {run_id: self._readers.get(run_id) or self._open(run_id) for run_id, *_ in runs}
        read, more = read_slice(self._readers.values(), READ_SLICE_S, is_wanted)
        if not (num_changed or read) and request == self._shown:
            return None, more
        self._shown = request
        return self._data(request, more), more

    def _open(self, run_id: str) -> RunMetrics:
        return RunMetrics(RunDir(self._output_dir / run_id), self._metrics, CAPACITY)

    def _read_config(self, run_id: str) -> bool:
        run = RunDir(self._output_dir / run_id)
        stamp = config_stamp(run)
        known = self._configs.get(run_id)
        if known is not None and known[0] == stamp:
            return False
        self._configs[run_id] = (stamp, compared_config(run))
        return True

    def _swept(self) -> list[str]:
        """The keys that sweeps have set in the compared runs, in the order of their plans, which never change."""
        output = OutputDir(self._output_dir)
        for name in list_sweeps(output):
            if name not in self._plans and (plan := read_plan(output, name)) is not None:
                self._plans[name] = plan
        runs = (run for plan in self._plans.values() for run in plan.runs if run.run_id in self._readers)
        return list(dict.fromkeys(key for run in runs for key in run.set))

    def _data(self, request: CompareRequest, is_reading: bool) -> CompareData:
        evals: set[str] = set()
        contenders, read = [], {run_id: self._readers[run_id].histories() for run_id, *_ in request.runs[:MAX_RUNS]}
        going_on = [histories for run_id, histories in read.items() if run_id not in request.failed and histories]
        is_known = {name: all(histories.get(name) for histories in going_on) for name in self._metrics}
        request = replace(request, metric=next((name for name in self._metrics if is_known[name]), self._metrics[-1]))
        for run_id, tags, step in request.runs[:MAX_RUNS]:
            histories = read[run_id]
            evals.update(key for key in histories if key.startswith(EVAL_PREFIX))
            history, has_failed = histories.get(request.metric), run_id in request.failed
            contenders.append(Contender(run_id, tags, self._configs[run_id][1], history, has_failed, step or math.inf))
        keys = differing_keys(contenders, self._swept())
        by = request.by if request.by in (RUN, TAG, *keys) else RUN
        runs = rank(contenders, request.metric, step=request.step)
        grouped = rank(contenders, request.metric, by=by, step=request.step)
        groups = make_groups(grouped)
        return CompareData(
            run_id="",
            request=request,
            groups=groups,
            chart=compare_chart(groups, request.view),
            keys=keys,
            best=tuple((each.runs[0], each.value) for each in winners(runs) if each.value is not None),
            notes=notes(grouped, request.metric, ":step"),
            groupings=(RUN, TAG, *keys),
            metrics=(*METRICS, *sorted(one_line(key, 60) for key in evals)),
            num_left_out=max(len(request.runs) - MAX_RUNS, 0),
            is_reading=is_reading,
        )
