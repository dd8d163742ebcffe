"""Thinning, sparklines, and numbers as text."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.utils.text import size_text
from tui import fmt
from tui.fmt import sparkline
from tui.readers.charts import change, downsample

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


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
    sweep = [f"run_sweep-lr{lr}-seed{seed}" for lr in ("5e-4", "2e-3") for seed in (1, 2)]
    short = fmt.short_names((*sweep, "run_a", "run_reverse-and-sort"), 15)
    assert [short[run_id] for run_id in sweep[::3]] == ["ru…lr5e-4-seed1", "ru…lr2e-3-seed2"]
    assert short["run_a"] == "run_a" and short["run_reverse-and-sort"] == "run_rev…nd-sort"
    assert set(fmt.short_names(tuple(sweep), 9).values()) == {"lr2e…eed1", "lr2e…eed2", "lr5e…eed1", "lr5e…eed2"}
    inside = tuple(f"run_sort-lr{lr}-seed{seed}" for lr in ("5e-4", "1.5e-3", "5e-3") for seed in (1, 2, 3))
    assert fmt.short_names(inside, 9)[inside[0]] == "lr5e-4…d1", "it is cut where no two become alike"
    assert all(len(set(fmt.short_names(inside, width).values())) == len(inside) for width in range(8, 30))
    assert fmt.first_line("\n\n two\nthree") == "two"
    assert fmt.first_line(None) == ""
    assert [size_text(number) for number in (512, 2048, 5 * 1024**3)] == ["512 B", "2.0 KiB", "5.0 GiB"]
    assert [fmt.signed(value) for value in (0.12, -1.2e-5, 0.0, None)] == ["+0.120", "-1.2e-5", "±0", "·"]
    assert [fmt.reward(value) for value in (0.0042, 12.34, None)] == ["0.004", "12.3", "·"]
    assert [fmt.gain(value) for value in (0.12, -0.0042, 0.0004, math.nan)] == ["+0.120", "-0.004", "±0", "·"]
    assert [fmt.percent(0.074), fmt.counted(1, "step"), fmt.counted(0, "step")] == ["7 %", "1 step", "0 steps"]
    assert [fmt.duration(value) for value in (0.01, 0.21, 71, 720)] == ["·", "0.21s", "71s", "12m"]
    assert fmt.stamp(0.0) == "1970-01-01 00:00:00" and len(fmt.stamp(None)) == 19


@pytest.mark.parametrize(
    ("low", "high", "most", "texts"),
    [(0.0, 1.0, 4, ["0", "0.5", "1.0"]), (0.13, 0.87, 4, ["0.2", "0.4", "0.6", "0.8"]),
     (1, 50, 5, ["10", "20", "30", "40", "50"]),
     (-0.02, 0.031, 6, ["-0.02", "-0.01", "0", "0.01", "0.02", "0.03"]),
     (1e-5, 3e-5, 3, ["1.0e-5", "2.0e-5", "3.0e-5"]),
     (0, 123_456, 3, ["0", "50000", "100000"]), (3.0, 3.0, 4, []), (0.0, math.inf, 4, [])],
)  # fmt: skip
def test_ticks_are_round(low: float, high: float, most: int, texts: list[str]) -> None:
    assert [text for _, text in fmt.ticks(low, high, most)] == texts


@given(low=st.floats(-1e4, 1e4), span=st.floats(1e-3, 1e9), most=st.integers(2, 8))
def test_ticks_are_few_inside_and_1_2_or_5_apart(low: float, span: float, most: int) -> None:
    high = low + span
    found = fmt.ticks(low, high, most)
    assert len(found) <= most and all(len(text) <= 8 for _, text in found)
    values = [value for value, _ in found]
    assert all(low - 1e-6 * span <= value <= high + 1e-6 * span for value in values)
    for near, far in itertools.pairwise(values):
        assert f"{far - near:.0e}"[0] in "125"


def test_ticks_of_a_logarithm_are_powers_of_ten_where_there_are_two() -> None:
    assert [text for _, text in fmt.log_ticks(-5.3, 0.2, 4)] == ["1.0e-5", "1.0e-3", "0.100"]
    assert [text for _, text in fmt.log_ticks(math.log10(2), math.log10(7), 3)] == ["2", "4", "6"]
