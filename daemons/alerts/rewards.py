"""Whether the reward of a run has collapsed: judged by all batches in its `metrics/orchestrator.jsonl`.

The file is the memory: a new start of the daemon reads it from its beginning and judges as the one before did. A look
reads little of each file, so the reward of a run is unproven until its file is read and has `window` batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from daemons.alerts.rules import Incident, unproven
from daemons.results import REWARD
from daemons.workspace import RunView
from prime_rl.configs.alerts import RewardRule
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.metrics import parse_metrics
from prime_rl.contract.run_state import RunState
from prime_rl.utils.tail import FileTail

# Of 1 MiB each, of one run: thousands of batches, and no file is so large that the other runs wait for it.
READS_PER_LOOK = 8
# A run that has ended gets no better reward, so its incident is over; one that waits or is paused may go on.
_ENDED = (RunState.FINISHED, RunState.FAILED, RunState.EVICTED)


class RewardWatch:
    """The rewards of the runs that hold a slot."""

    def __init__(self, output: OutputDir, rule: RewardRule) -> None:
        self._output, self._rule = output, rule
        self._rewards: dict[str, _Rewards] = {}

    def look(self, runs: Sequence[RunView]) -> Iterator[Incident]:
        """Read what is new, and judge."""
        active = [run.run_id for run in runs if run.state is RunState.ACTIVE]
        self._rewards = {run_id: self._rewards.get(run_id) or self._begin(run_id) for run_id in active}
        for run_id, rewards in self._rewards.items():
            if not rewards.read() or rewards.mean is None:
                yield from unproven(run_id, "reward_collapsed")
            elif rewards.best - rewards.mean > self._rule.drop * abs(rewards.best):
                what = f"mean reward of {self._rule.window} batches"
                why = f"{what} is {rewards.mean:.3g}, was {rewards.best:.3g} at best"
                yield Incident("reward_collapsed", run_id, why)
        for run in runs:
            if run.state not in (RunState.ACTIVE, *_ENDED):
                yield from unproven(run.run_id, "reward_collapsed")

    def _begin(self, run_id: str) -> _Rewards:
        return _Rewards(self._output.run(run_id).orchestrator_metrics, self._rule.window)


class _Rewards:
    """Of one run. `mean`: of its newest `window` batches, None while there are fewer; `best`: the highest so far."""

    def __init__(self, path: Path, window: int) -> None:
        self._tail = FileTail(path)
        self._newest: deque[tuple[int, float]] = deque(maxlen=window)
        self.mean: float | None = None
        self.best = float("-inf")

    def read(self) -> bool:
        """Read on; whether that was all."""
        for _ in range(READS_PER_LOOK):
            found = self._tail.read()
            if found.reset:
                self._newest.clear()
                self.mean, self.best = None, float("-inf")
            for line in found.lines:
                self._take(line)
            if not found.more:
                return True
        return False

    def _take(self, line: bytes) -> None:
        step, figures = parse_metrics(line) or (0, {})
        if REWARD not in figures:
            return
        while self._newest and self._newest[-1][0] >= step:  # the run went back to a checkpoint
            self._newest.pop()
        self._newest.append((step, figures[REWARD]))
        is_full = len(self._newest) == self._newest.maxlen
        # Not fmean, which raises for sums without end: these are numbers of a tenant.
        self.mean = sum(reward for _, reward in self._newest) / len(self._newest) if is_full else None
        self.best = self.best if self.mean is None else max(self.best, self.mean)
