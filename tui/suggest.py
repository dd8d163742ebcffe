"""Reasons to evict a run, from what can be seen of it: pure. A person chooses one, or writes another."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prime_rl.contract.condition import LOST, STALLED
from prime_rl.contract.status import RunState
from tui import fmt
from tui.snapshot import RunRow

# A mean of five rewards below this share of the best mean is a collapse; a smaller change is ignored.
COLLAPSE_SHARE = 0.5
LEAST_GAIN = 0.005
WINDOW = 5
MAX_SUGGESTIONS = 5
ALWAYS = ("makes room for another run", "the reward does not improve", "wrong configuration")


def suggest(rows: Sequence[RunRow], all_rows: Sequence[RunRow]) -> list[str]:
    """What fits the run best comes first; for several runs only what is true of any."""
    found: list[str] = []
    if len(rows) == 1:
        found += _seen(rows[0])
    waiting = next((row for row in all_rows if row.state == RunState.WAITING and row not in rows), None)
    if waiting is not None:
        found.append(f"makes room for {waiting.run_id}, which waits for a slot")
    heads = {reason.split(":")[0] for reason in found}
    return [*found, *(reason for reason in ALWAYS if reason not in heads)][:MAX_SUGGESTIONS]


def _seen(row: RunRow) -> list[str]:
    found: list[str] = []
    if row.state in (LOST, STALLED):
        found.append(row.note)
    if row.loss is not None and not math.isfinite(row.loss):
        found.append(f"the loss is {row.loss}")
    rewards = row.tail.rewards
    if len(rewards) >= 2 * WINDOW:
        means = [sum(rewards[i : i + WINDOW]) / WINDOW for i in range(len(rewards) - WINDOW + 1)]
        best, last = max(means), means[-1]
        if best > 0 and last < COLLAPSE_SHARE * best:
            found.append(f"the reward collapsed: {fmt.fixed(last)} after {fmt.fixed(best)}")
        elif row.reward_change is not None and row.reward_change < LEAST_GAIN:
            change = fmt.signed(row.reward_change, least=LEAST_GAIN / 10)
            found.append(f"the reward does not improve: {fmt.fixed(last)}, {change} over {2 * WINDOW} steps")
    return found
