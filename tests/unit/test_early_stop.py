"""The stop rule: when it holds, and that a restart at any point decides the same."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.contract.metrics import EarlyStop, metric_value, series


def stops_at(values: list[float], **rule: float | str) -> int | None:
    """The first step (from 1) at which the run ends."""
    stop = EarlyStop("m", **rule)  # type: ignore[arg-type]
    for step, value in enumerate(values, start=1):
        stop.feed(step, value)
        if stop.reason:
            return step
    return None


@pytest.mark.parametrize(
    ("values", "rule", "step"),
    [
        ([1, 2, 3, 4], {"patience": 2}, None),
        ([1, 3, 2, 3, 4], {"patience": 2}, 4),  # as good as the best is not better
        ([1, 3, 2, 3.1, 2, 2], {"patience": 2}, 6),
        ([3, 2, 1, 1, 1], {"patience": 2, "mode": "min"}, 5),
        ([1, 1.05, 1.1, 1.15], {"patience": 3, "min_delta": 0.2}, 4),  # slow growth is none
        ([1, 1.15, 1.3, 1.45], {"patience": 2, "min_delta": 0.2}, None),
        ([1, 0, 0, 0, 0], {"patience": 2, "min_steps": 5}, 5),
        ([math.nan, math.nan], {"patience": 2}, 2),
    ],
)
def test_it_holds_when_the_metric_has_stopped_getting_better(
    values: list[float], rule: dict[str, float | str], step: int | None
) -> None:
    assert stops_at(values, **rule) == step


def test_the_reason_has_the_numbers() -> None:
    stop = EarlyStop("eval/pass@1", patience=2)
    for step, value in ((10, 0.25), (20, 0.5), (30, 0.5), (40, 0.25)):
        assert stop.reason is None
        stop.feed(step, value)
    assert stop.reason == ("stopped early: eval/pass@1 did not improve in 2 values (best 0.5 at step 20, now step 40)")


@given(
    values=st.lists(st.floats(-2, 2).map(lambda x: round(x, 1)), max_size=12),
    restart=st.integers(0, 12),
    patience=st.integers(1, 3),
)
def test_a_restart_at_any_point_decides_the_same(values: list[float], restart: int, patience: int) -> None:
    lines = [json.dumps({"step": step, "time": 0.0, "m": value}).encode() for step, value in enumerate(values)]
    live, again = EarlyStop("m", patience=patience), EarlyStop("m", patience=patience)
    for step, value in enumerate(values):
        live.feed(step, value)
    for step, value in series(lines[:restart], "m"):
        again.feed(step, value)
    for step, value in list(enumerate(values))[max(0, restart - 2) :]:  # some steps are made again
        again.feed(step, value)
    assert again == live


def test_a_metric_of_all_environments_is_their_mean() -> None:
    values = {"eval/a/pass@1": 0.2, "eval/b/pass@1": 0.6, "eval/b/pass@1_se": 9.0, "reward/mean": 3.0}
    assert metric_value(values, "eval/pass@1") == pytest.approx(0.4)
    assert metric_value({"eval/a/pass@1": 1.7e308, "eval/b/pass@1": 1.7e308}, "eval/pass@1") == 1.7e308
    assert metric_value(values, "eval/b/pass@1") == 0.6
    assert metric_value(values, "reward/mean") == 3.0
    assert metric_value(values, "reward/nothing") is None and metric_value({}, "eval/pass@1") is None


def test_what_a_rollback_made_void_does_not_count() -> None:
    steps = [(1, 0.1), (2, 0.2), (3, 0.9), (2, 0.3), (4, 0.4)]
    lines = [json.dumps({"step": step, "m": value}).encode() for step, value in steps]
    assert series([b"{torn", *lines], "m") == [(1, 0.1), (2, 0.3), (4, 0.4)]
    assert series(lines, "m", at_most=3) == [(1, 0.1), (2, 0.3)]
