"""The trainer's token rate: over a window of wall time, so that bursts of updates do not make it jump."""

from __future__ import annotations

import pytest

from prime_rl.trainer.metrics import RATE_WINDOW_S, TokenRate


def test_the_rate_is_over_wall_time_and_forgets() -> None:
    now = [100.0]
    rate = TokenRate(lambda: now[0])
    assert rate.per_s() == 0.0
    now[0] += 10
    rate.add(3000)
    rate.add(1000)  # at the same moment: two runs were updated after one pass
    assert rate.per_s() == pytest.approx(400)
    now[0] += RATE_WINDOW_S
    rate.add(600)
    assert rate.per_s() == pytest.approx(4600 / RATE_WINDOW_S)
    now[0] += 1
    assert rate.per_s() == pytest.approx(600 / RATE_WINDOW_S)
