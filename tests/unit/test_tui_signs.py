"""Clocks that differ invent neither ages nor life."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tui.watcher import Signs


def test_a_clock_that_is_behind_counts_from_what_is_seen() -> None:
    signs = Signs()
    assert signs.times([("run_a", 900.0)], 1000.0) == {"run_a": 900.0}, "nothing better is known yet"
    assert signs.times([("run_a", 905.0)], 1005.0) == {"run_a": 1005.0}
    assert signs.times([("run_a", 905.0)], 1050.0) == {"run_a": 1005.0}, "then it fell silent"


def test_a_clock_that_is_ahead_does_not_keep_the_dead_alive() -> None:
    signs = Signs()
    assert signs.times([("run_a", 5000.0)], 1000.0) == {"run_a": 1000.0}
    assert signs.times([("run_a", 5000.0)], 1060.0) == {"run_a": 1000.0}


def test_clocks_that_agree_count_as_before() -> None:
    signs = Signs()
    assert signs.times([("run_a", 999.0), ("run_b", None)], 1000.0) == {"run_a": 999.0}
    assert signs.times([("run_a", 999.0)], 1400.0) == {"run_a": 999.0}
    assert signs.times([], 1500.0) == {}


@given(skew=st.floats(-1e6, 1e6), gaps=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=20))
def test_whatever_the_skew_a_run_that_writes_is_never_old(skew: float, gaps: list[float]) -> None:
    signs, now = Signs(), 1e9
    for index, gap in enumerate(gaps):
        now += gap
        heard = signs.times([("run_a", now + skew)], now)["run_a"]
        assert heard <= now
        assert index == 0 or now - heard <= 1e-3 or skew == 0
