"""The token rate: over a window of wall time, so that bursts do not make it jump, nor work that takes longer."""

from __future__ import annotations

from prime_rl.utils.runtime import TokenRate

WINDOW_S = 10.0


def test_the_token_rate_is_taken_over_a_window() -> None:
    now = [0.0]
    rate = TokenRate(WINDOW_S, lambda: now[0])
    assert rate.per_s(50) == 0.0  # no time has passed
    for now[0], total, expected in ((2.0, 100, 50), (2.0, 100, 50), (12.0, 600, 50), (22.0, 600, 0)):
        assert rate.per_s(total) == expected


def test_work_that_takes_longer_than_the_window_counts_over_all_of_its_time() -> None:
    now = [100.0]
    rate = TokenRate(WINDOW_S, lambda: now[0])
    for number in range(1, 4):
        now[0] += 10 * WINDOW_S
        assert rate.per_s(number * 1000) == 1000 / (10 * WINDOW_S)
