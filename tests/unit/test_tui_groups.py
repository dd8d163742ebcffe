"""Runs grouped by tag or config key: results, spread, the best run, what differs, and the mean curve."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import pytest

from daemons.ranking import NO_VALUE, RUN, TAG, rank, winners
from tui.readers.charts import ChartView, History
from tui.readers.compare import (
    MAX_CURVES,
    CompareData,
    Contender,
    Group,
    compare_chart,
    differing_keys,
    make_groups,
    short_keys,
)
from tui.screens.compare import Table


def contender(
    name: str, values: list[float], *, tags: tuple[str, ...] = (), config: Mapping[str, str] | None = None
) -> Contender:
    history = History()
    history.extend([float(step) for step in range(1, len(values) + 1)], values)
    return Contender(name, tags, config or {}, history if values else None)


def groups_of(runs: list[Contender], by: str, metric: str = "reward/mean") -> tuple[Group, ...]:
    return make_groups(rank(runs, metric, by=by))


def test_results_are_those_at_the_step_that_all_runs_have() -> None:
    runs = [contender("run_a", [0.1, 0.2, 0.9]), contender("run_b", [0.3, 0.5])]
    assert [(group.name, group.result) for group in groups_of(runs, RUN)] == [
        ("run_b", pytest.approx(0.4)),
        ("run_a", pytest.approx(0.15)),
    ]
    assert contender("run_b", []).step == 0


def test_groups_of_several_environments_are_apart_and_named_with_theirs() -> None:
    runs = [
        contender(f"run_{env}{number}", [0.1 * number], config={"env.0.id": env, "seed": "1"})
        for env in ("sort", "add")
        for number in (1, 2)
    ]
    assert [(group.name, [run.run_id for run in group.runs]) for group in groups_of(runs, "seed")] == [
        ("1  add", ["run_add2", "run_add1"]),
        ("1  sort", ["run_sort2", "run_sort1"]),
    ]


def test_figures_of_a_tenant_beyond_all_bounds_end_no_view() -> None:
    runs = [contender(f"run_{number}", [1.7e308, -1.7e308, 1.7e308], tags=("a",)) for number in range(3)]
    (group,) = groups_of(runs, TAG)
    assert group.spread is not None and math.isfinite(group.spread)
    data = compare_chart((group,), ChartView())
    assert all(math.isfinite(value) for curve in data.curves for value in (*curve.lows, *curve.highs))


def test_only_keys_that_differ_are_named_and_a_missing_key_differs() -> None:
    runs = [
        contender("run_a", [], config={"seed": "1", "optim.lr": "1e-4", "tags": "x", "batch_size": "8"}),
        contender("run_b", [], config={"seed": "2", "optim.lr": "3e-4", "tags": "y", "batch_size": "8"}),
        contender("run_c", [], config={"seed": "3", "optim.lr": "3e-4", "tags": "z", "batch_size": "8", "stop": "1"}),
    ]
    assert differing_keys(runs) == ("optim.lr", "stop", "seed")
    assert differing_keys(runs, ["seed", "stop"]) == ("seed", "stop", "optim.lr"), "what was swept comes first"
    assert differing_keys(runs[:1]) == ()
    invalid = contender("run_d", [])
    assert differing_keys([*runs, invalid]) == differing_keys(runs), "a run without a valid config tells nothing"


def test_keys_that_runs_of_every_kind_have_come_before_those_of_one_kind() -> None:
    texts = [contender(f"run_t{at}", [], config={"optim.lr": "1", "data.path": str(at)}) for at in range(3)]
    rewarded = [contender(f"run_r{at}", [], config={"optim.lr": "2", "env.id": "sums"}) for at in range(2)]
    assert differing_keys([*texts, *rewarded]) == ("optim.lr", "data.path", "env.id")


def test_keys_that_end_alike_are_told_apart_and_the_most_varied_come_first() -> None:
    values = {
        "ckpt.interval": 2,
        "eval.interval": 2,
        "optim.lr": 4,
        "env.0.id": 2,
        "env.0.args.n": 2,
        "env.1.args.n": 2,
    }
    runs = [contender(f"run_{at}", [], config={key: str(at % num) for key, num in values.items()}) for at in range(4)]
    keys = differing_keys(runs)
    assert keys[0] == "optim.lr"
    assert differing_keys(runs, ["ckpt", "env.0.id"])[:2] == ("ckpt.interval", "env.0.id"), "a whole table too"
    heads = {**{key: key for key in values}, "optim.lr": "lr", "env.0.id": "env.id"}
    assert short_keys(keys) == heads and len(set(heads.values())) == len(values)


def test_a_column_whose_values_look_alike_when_they_are_cut_is_not_there() -> None:
    long = "a/long/way/to/the/middle/{}/and/from/there/to/the/end/of/it"
    runs = [
        contender(f"run_{at}", [0.1], config={"optim.lr": f"{at}e-4", "model.name": long.format(at)}) for at in (1, 2)
    ]
    data = CompareData("", groups=groups_of(runs, RUN), keys=differing_keys(runs))
    assert set(data.keys) == {"optim.lr", "model.name"}
    heading = Table(data, 160).heading().plain.split()
    assert heading == ["RUN", "STEP", "RESULT", "LR"]


@pytest.mark.parametrize(("metric", "order"), [("reward/mean", ["b", "a", "none"]), ("loss", ["a", "b", "none"])])
def test_the_best_group_is_first_and_one_without_a_result_last(metric: str, order: list[str]) -> None:
    runs = [contender("none", []), contender("a", [0.2]), contender("b", [0.7])]
    assert [group.name for group in groups_of(runs, RUN, metric)] == order
    assert [each.name for each in winners(rank(runs, metric))] == order[:1]
    assert not winners(rank(runs[:1], metric))


def test_a_group_has_mean_and_spread_of_its_runs() -> None:
    runs = [
        contender("run_a", [0.2], tags=("x",), config={"optim.lr": "1"}),
        contender("run_b", [0.6], tags=("x", "y"), config={"optim.lr": "1"}),
        contender("run_c", [0.9], config={"optim.lr": "2"}),
    ]
    groups = {group.name: group for group in groups_of(runs, "optim.lr")}
    assert [run.run_id for run in groups["1"].runs] == ["run_b", "run_a"]
    assert groups["1"].result == pytest.approx(0.4) and groups["1"].spread == pytest.approx(0.2)
    assert groups["2"].spread is None
    by_tag = {group.name: [run.run_id for run in group.runs] for group in groups_of(runs, TAG)}
    assert by_tag == {"x": ["run_b", "run_a"], "y": ["run_b"], "no tag": ["run_c"]}
    assert [group.name for group in groups_of(runs, "seed")] == [NO_VALUE]


def test_the_curve_of_a_group_is_the_mean_and_a_run_that_ended_no_longer_counts() -> None:
    long, short = [0.0, 0.2, 0.4, 0.6], [1.0, 1.0]
    runs = [contender("run_a", long, config={"k": "1"}), contender("run_b", short, config={"k": "1"})]
    chart = compare_chart(groups_of(runs, "k"), ChartView(num_columns=4))
    band, mean = chart.curves
    assert band.is_faint and band.is_band and not mean.is_faint
    assert mean.values == pytest.approx((0.5, 0.6, 0.4, 0.6))
    assert mean.steps == (1, 2, 3, 4)
    deviation = statistics.pstdev([0.2, 1.0])
    assert band.lows[1] == pytest.approx(0.6 - deviation) and band.highs[1] == pytest.approx(0.6 + deviation)


def test_at_most_so_many_curves_are_drawn_the_best_ones() -> None:
    runs = [contender(f"run_{number:02}", [number / 10]) for number in range(MAX_CURVES + 3)]
    chart = compare_chart(groups_of(runs, RUN), ChartView(num_columns=10))
    assert [curve.name for curve in chart.curves] == [f"run_{number:02}" for number in range(MAX_CURVES + 2, 2, -1)]
    assert not compare_chart(groups_of([contender("run_a", [])], RUN, "loss"), ChartView()).has_values
