"""Bounded series, thinning, sparklines, and numbers as text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tui import fmt
from tui.series import NUM_RECENT, Series, change, downsample, sparkline

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=60)
@given(num=st.integers(0, 2000), capacity=st.integers(2, 33))
def test_a_series_fits_and_keeps_every_value_in_some_mean(num: int, capacity: int) -> None:
    series = Series(capacity)
    for step in range(1, num + 1):
        series.append(step, 2.0)
    steps, values = series.points()
    assert len(steps) <= capacity
    assert steps == sorted(set(steps))
    assert values == [2.0] * len(steps)
    assert sum(series._counts) == num
    assert steps[-1:] == ([num] if num else [])
    assert series.recent(NUM_RECENT) == [2.0] * min(num, NUM_RECENT)


def test_a_full_series_holds_means_of_neighbours() -> None:
    series = Series(4)
    for step in range(1, 9):
        series.append(step, float(step))
    assert series.points() == ([2, 4, 6, 8], [1.5, 3.5, 5.5, 7.5])


def test_a_replayed_step_replaces_what_followed() -> None:
    series = Series(16)
    for step in (1, 2, 3, 4, 5):
        series.append(step, 1.0)
    series.append(3, 9.0)
    assert series.points() == ([1, 2, 3], [1.0, 1.0, 9.0])
    assert series.recent(10) == [1.0, 1.0, 9.0]
    assert (series.last_step, series.last) == (3, 9.0)


def test_a_series_needs_room() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        Series(1)


@given(values=st.lists(FLOATS, max_size=200), limit=st.integers(4, 60))
def test_thinning_keeps_order_limit_and_peaks(values: list[float], limit: int) -> None:
    steps = [float(step) for step in range(len(values))]
    kept_steps, kept = downsample(steps, values, limit)
    assert len(kept) <= limit
    assert (kept_steps[:1], kept_steps[-1:]) == (steps[:1], steps[-1:])
    assert kept_steps == sorted(kept_steps)
    assert all(values[int(step)] == value for step, value in zip(kept_steps, kept, strict=True))
    if values:
        assert (min(kept), max(kept)) == (min(values), max(values))


@given(values=st.lists(FLOATS, max_size=50), width=st.integers(1, 30))
def test_a_sparkline_has_a_block_a_value(values: list[float], width: int) -> None:
    drawn = sparkline(values, width)
    assert len(drawn) == min(len(values), width)
    assert set(drawn) <= set("▁▂▃▄▅▆▇█")


def test_sparkline_spans_its_own_range() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5, 5], 8) == "▄▄▄"
    assert sparkline([-1e308, 1e308], 2) == "▁█"


def test_change_compares_two_windows() -> None:
    assert change([0.0] * 5 + [1.0] * 5) == 1.0
    assert change([1.0] * 9) is None


@given(FLOATS)
def test_numbers_stay_in_their_width(value: float) -> None:
    assert len(fmt.number(abs(value))) <= 7
    assert len(fmt.number(value)) <= 8
    assert len(fmt.count(abs(value))) <= 6
    assert len(fmt.age(abs(value))) <= 4


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.8123, "0.812"), (0.0012, "1.2e-3"), (12.34, "12.3"), (1234.5, "1234"), (1.2e-5, "1.2e-5"),
                        (None, "·"),
                        (math.nan, "·"), (-0.05, "-0.050"), (123456.0, "1.2e5")],
)  # fmt: skip
def test_number(value: float | None, text: str) -> None:
    assert fmt.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (987, "987"), (999.9, "1.0k"), (1234, "1.2k"), (34_000, "34k"), (5.6e6, "5.6M")]
)
def test_count(value: float, text: str) -> None:
    assert fmt.count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.2, "now"), (59.9, "59s"), (60, "1m"), (3599, "59m"), (7300, "2h"), (90_000, "1d"), (-5, "now")],
)
def test_age(value: float, text: str) -> None:
    assert fmt.age(value) == text


@given(done=st.integers(-5, 500), total=st.one_of(st.none(), st.integers(0, 300)), width=st.integers(1, 40))
def test_a_bar_has_its_width_and_grows(done: int, total: int | None, width: int) -> None:
    filled, empty = fmt.bar(done, total, width)
    assert len(filled + empty) == width
    assert len(filled) <= len(fmt.bar(done + 1, total, width)[0])
    if total and done >= total:
        assert not empty


def test_short_texts() -> None:
    assert fmt.shorten("abcdef", 4) == "abc…"
    assert fmt.shorten_middle("run_reverse-lr1e-3", 10) == "run_…r1e-3"
    assert fmt.first_line("\n\n two\nthree") == "two"
    assert fmt.first_line(None) == ""
    assert [fmt.size(number) for number in (512, 2048, 5 * 1024**3)] == ["512 B", "2.0 KiB", "5.0 GiB"]
    assert (
        fmt.signed(0.12) == "+0.120"
        and fmt.signed(-0.0001, least=0.001) == "±0"
        and fmt.fixed(0.0042) == "0.004"
        and fmt.signed(None) == "·"
    )
