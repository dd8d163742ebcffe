"""Histories in columns, smoothing, thinning to what a chart can show, zoom and pan, and the drawing of it."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.budgets import examples
from tests.tui_support import metrics_lines
from tui.readers.charts import (
    CHARTS,
    KEYS,
    MAX_EVALS,
    ChartsReader,
    ChartView,
    Curve,
    History,
    HistoryReader,
    build_chart,
    simple_chart,
    thin,
    window,
)
from tui.widgets.chart import NOTHING, SHADES, Canvas, draw_band, draw_curve, draw_stack, name_letters

VALUES = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=200)


def history_of(values: list[float], *, first: int = 1) -> History:
    history = History()
    history.extend([float(first + i) for i in range(len(values))], values)
    return history


def read_all(reader: HistoryReader) -> HistoryReader:
    while reader.update()[1]:
        pass
    return reader


@given(steps=st.lists(st.integers(0, 50), min_size=1, unique=True).map(sorted), wanted=st.floats(-10, 60, width=32))
def test_the_column_under_the_cursor_is_the_nearest(steps: list[int], wanted: float) -> None:
    found = Curve("reward", steps=tuple(map(float, steps))).at(wanted)
    assert found is not None and abs(steps[found] - wanted) == min(abs(step - wanted) for step in steps)
    assert Curve("reward").at(wanted) is None


@settings(max_examples=examples(80))
@given(steps=st.lists(st.integers(0, 30), max_size=60), cuts=st.lists(st.integers(0, 60), max_size=4))
def test_a_step_seen_before_replaces_what_follows_however_the_lines_come(steps: list[int], cuts: list[int]) -> None:
    history = History()
    bounds = [0, *sorted(cut for cut in cuts if cut <= len(steps)), len(steps)]
    for start, end in itertools.pairwise(bounds):
        history.extend([float(s) for s in steps[start:end]], [float(i) for i in range(start, end)])
    kept: list[tuple[float, float]] = []
    for index, step in enumerate(steps):
        kept = [pair for pair in kept if pair[0] < step] + [(step, index)]
    assert list(zip(history.steps, history.values, strict=True)) == kept


@settings(max_examples=examples(60))
@given(values=VALUES, factor=st.sampled_from([0.6, 0.9, 0.97]), cut=st.integers(0, 200))
def test_smoothing_is_the_moving_average_without_bias_and_grows(values: list[float], factor: float, cut: int) -> None:
    history = history_of(values[:cut])
    history.smoothed(factor)
    history.extend([float(cut + 1 + i) for i in range(len(values[cut:]))], values[cut:])
    total = weight = 0.0
    for value, smooth in zip(values, history.smoothed(factor), strict=True):
        total, weight = total * factor + value * (1 - factor), weight * factor + 1 - factor
        assert math.isclose(smooth, total / weight, rel_tol=1e-4, abs_tol=1.0)
    assert history.smoothed(0.0) is history.values


@settings(max_examples=examples(120))
@example(values=[0.0, 0.0, 0.0], num_columns=2, start=0.0, share=1.0)  # a step between two columns
@given(values=VALUES, num_columns=st.integers(2, 60), start=st.floats(0, 1), share=st.floats(0.01, 1))
def test_a_thinned_curve_keeps_every_peak_of_what_is_shown(
    values: list[float], num_columns: int, start: float, share: float
) -> None:
    history = history_of(values)
    first = 1 + start * (len(values) - 1)
    last = first + share * (len(values) - first)
    curve = thin("x", history, history.values, (first, last), num_columns)
    shown = [value for step, value in zip(history.steps, history.values, strict=True) if first <= step <= last]
    assert len(curve.xs) <= num_columns
    assert list(curve.xs) == sorted(set(curve.xs)) and all(0 <= x < num_columns for x in curve.xs)
    if shown:
        assert (min(curve.lows), max(curve.highs)) == (min(shown), max(shown))
        assert curve.values[-1] == shown[-1]
    assert curve.last == history.values[-1]
    assert all(low <= value <= high for low, value, high in zip(curve.lows, curve.values, curve.highs, strict=True))


def test_a_full_history_keeps_its_peaks() -> None:
    history = History(capacity=64)
    for step in range(1000):
        history.extend((float(step),), (100.0 if step == 321 else step / 1000,))
    assert len(history) <= 65
    assert (max(history.values), history.steps[0], history.steps[-1]) == (100.0, 0.0, 999.0)


def test_odd_lines_cost_only_themselves(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines = [
        '{"step": 1, "loss": 0.5, "reward/mean": null}', "broken {", "[]", '{"loss": 1}', '{"step": -1, "loss": 9}',
        '{"step": 2, "loss": NaN, "lr": 0.1}', '{"step": 3, "loss": "high", "lr": 0.2}', '{"step": 4, "loss": 1e400}',
        '{"step": 5, "loss": 2, "unknown": {"a": 1}}', '{"step": true, "loss": 8}', '{"step": 1e300, "loss": 7}',
    ]  # fmt: skip
    path.write_text("\n".join(lines) + '\n{"step": 6, "loss": 3')
    reader = read_all(HistoryReader(path, ["loss", "reward/mean", "lr"]))
    found = {key: list(zip(each.steps, each.values, strict=True)) for key, each in reader.histories.items()}
    assert found == {"loss": [(1, 0.5), (5, 2)], "lr": [(2, pytest.approx(0.1)), (3, pytest.approx(0.2))]}
    with path.open("a") as file:
        file.write("}\n")
    reader.update()
    assert reader.histories["loss"].values[-1] == 3
    path.write_text('{"step": 1, "loss": 4}\n')
    reader.update()
    assert list(reader.histories["loss"].values) == [4]


def test_evaluations_are_found_by_their_names_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    names = [f"eval/env{number}/reward" for number in range(MAX_EVALS + 3)]
    lines = [json.dumps({"step": step, **dict.fromkeys(names, 0.5), "eval/env0/num_failed": 1}) for step in (10, 20)]
    path.write_text("\n".join(lines) + '\n{"step": 30, "reward/mean": 1}\n')
    reader = read_all(HistoryReader(path, ["reward/mean"]))
    assert set(reader.histories) == {*names[:MAX_EVALS], "reward/mean"}
    assert list(reader.histories["eval/env0/reward"].steps) == [10, 20]


def test_charts_of_one_run_and_of_several(tmp_path: Path) -> None:
    for run_id in ("run_a", "run_b"):
        folder = tmp_path / run_id / "metrics"
        folder.mkdir(parents=True)
        orchestrator, trainer = metrics_lines(30, seed=1)
        (folder / "orchestrator.jsonl").write_text("\n".join(orchestrator) + "\n")
        (folder / "trainer.jsonl").write_text("\n".join(trainer) + "\n")
    reader = ChartsReader(tmp_path, "run_a")
    data, more = reader.read(ChartView())
    assert data is not None and not more and reader.read(ChartView()) == (None, False)
    by_title = dict(zip((spec.title for spec in CHARTS), data.charts, strict=True))
    assert [curve.name for curve in by_title["step time, s"].curves] == [
        "generate", "environment", "policy", "inference",
    ]  # fmt: skip
    assert by_title["step time, s"].is_stacked and not by_title["lengths"].is_stacked
    assert by_title["reward"].change is not None and not by_title["evaluation"].has_values
    data, _ = reader.read(ChartView(compare=("run_b", "run_gone"), smoothing=0.9))
    assert data is not None and data.run_ids == ("run_a", "run_b", "run_gone")
    of_both = [chart for spec, chart in zip(CHARTS, data.charts, strict=True) if spec.of not in ("texts", "teacher")]
    assert all([curve.name for curve in chart.curves] == ["run_a", "run_b"] for chart in of_both[:8])
    assert not any(chart.is_stacked for chart in data.charts)


def test_zoom_keeps_what_is_under_the_cursor_and_pan_follows_at_the_end() -> None:
    newest = (1.0, 1001.0)
    near = ChartView().zoomed(0.5, newest, 251.0)
    assert window(near, newest) == (126.0, 626.0), "the step keeps its place"
    assert window(near.panned(0.25, newest), newest) == (251.0, 751.0)
    end = near.panned(5, newest)
    assert end.end is None and window(end, (1.0, 1101.0)) == (601.0, 1101.0)
    assert window(near.panned(-5, newest), newest) == (1.0, 501.0)
    assert near.zoomed(2, newest, None) == ChartView()
    assert ChartView().panned(1, newest) == ChartView()
    view = ChartView()
    for _ in range(50):
        view = view.zoomed(0.5, newest, None)
    assert window(view, newest) == (997.0, 1001.0)


def test_a_line_is_drawn_from_corner_to_corner_with_its_spike() -> None:
    canvas = Canvas(10, 4)
    data = simple_chart([1, 2, 3], [0.0, 1.0, 0.5])
    draw_curve(canvas, data.curves[0], data.num_columns, 0.0, 1.0)
    rows = canvas.rows()
    text = ["".join(char for char, _ in row) for row in rows]
    assert text[3][0] != " " and text[0].strip() and text[3][-1] == " "
    assert all(any(char != " " for char in (row[x] for row in text)) for x in range(10)), "no gap"
    assert {colour for row in rows for _, colour in row} == {0, NOTHING}
    spike = Curve("s", 2, (5,), (5.0,), (0.5,), (0.0,), (1.0,))
    canvas = Canvas(10, 4)
    draw_curve(canvas, spike, 10, 0.0, 1.0)
    assert all(any(colour == 2 for _, colour in row) for row in canvas.rows())


def test_bands_of_a_stack_differ_in_shade_and_add_up() -> None:
    canvas = Canvas(8, 10)
    curves = [Curve(name, i, (0, 7), (1, 2), (value,) * 2, (value,) * 2, (value,) * 2) for i, (name, value) in
              enumerate((("a", 5.0), ("b", 3.0), ("c", 2.0)))]  # fmt: skip
    draw_stack(canvas, curves, 8, 10.0)
    column = [row[4][0] for row in canvas.rows()]
    assert column == [SHADES[2]] * 2 + [SHADES[1]] * 3 + [SHADES[0]] * 5


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-1.0, -2.0], [0.0, 0.0, 1e-9]])
def test_no_value_stops_a_chart(values: list[float]) -> None:
    runs = [{key: history_of(values) for key in KEYS}]
    for spec in CHARTS:
        for is_log in (False, True):
            data = build_chart(spec, runs, ["run_a"], ChartView(is_log=is_log), (1.0, float(len(values))))
            assert data.has_values or spec.title == "evaluation"


def test_a_band_is_an_area_behind_the_lines_that_cross_it() -> None:
    canvas = Canvas(4, 4)
    curve = Curve("", xs=(0, 7), steps=(1.0, 8.0), values=(2.0, 2.0), lows=(1.0, 1.0), highs=(3.0, 3.0))
    draw_band(canvas, curve, 8, 0.0, 4.0)
    assert ["".join(char for char, _ in row) for row in canvas.rows()] == ["    ", "░░░░", "░░░░", "    "]
    draw_curve(canvas, replace(curve, lows=curve.values, highs=curve.values), 8, 0.0, 4.0)
    rows = ["".join(char for char, _ in row) for row in canvas.rows()]
    assert rows[0] == rows[3] == "    " and (rows[1] == "░░░░") != (rows[2] == "░░░░")


def test_a_band_thinner_than_a_character_is_seen_behind_its_line() -> None:
    canvas = Canvas(4, 4)
    curve = Curve("", xs=(0, 7), steps=(1.0, 8.0), values=(2.1, 2.1), lows=(2.09, 2.09), highs=(2.11, 2.11))
    draw_band(canvas, curve, 8, 0.0, 4.0)
    assert ["".join(char for char, _ in row) for row in canvas.rows()] == ["    ", "░░░░", "    ", "    "]
    line = replace(curve, lows=curve.values, highs=curve.values, colour=3)
    draw_curve(canvas, line, 8, 0.0, 4.0)
    shaded = {colour for char, colour in canvas.rows()[1] if char not in "░ "}
    assert shaded == {1003}, "the colour of the curve, on the shade of its band"
    bare = Canvas(4, 4)
    draw_curve(bare, line, 8, 0.0, 4.0)
    assert {colour for _, colour in bare.rows()[1]} == {3}


@pytest.mark.parametrize(
    ("names", "room", "expected"),
    [
        (("generate", "policy"), 16, 8),
        (("generate", "policy"), 15, 7),
        (("generate", "policy"), 10, 4),
        (("generate", "policy"), 9, 0),
        (("run_a", "run_b"), 12, 5),
        (("run_a", "run_b"), 11, 0),
        ((), 10, 0),
    ],
)
def test_names_of_curves_are_cut_to_the_room_as_long_as_they_differ(
    names: tuple[str, ...], room: int, expected: int
) -> None:
    assert name_letters(names, room) == expected
