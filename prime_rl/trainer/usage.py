"""Rank 0: whose work the trainer's seconds were, in `usage/trainer.jsonl`.

The seconds of a pass are split over its runs by their tokens on all ranks; what an update takes (optimizer, snapshots)
is its run's. So the seconds of all runs together are those of the trainer's phases without waiting. A run's line is
written after each update, and when it leaves. Work that is done again after a crash was used again, and counts again.
"""

from __future__ import annotations

from collections.abc import Mapping

from prime_rl.contract.usage import UsageLog
from prime_rl.trainer.runs import MultiRunManager, TrainerRun

# Phases whose seconds belong to the run that is updated.
_OF_UPDATE = ("optim", "broadcast", "checkpoint")


class TrainerUsage:
    """See the module."""

    def __init__(self, manager: MultiRunManager, log: UsageLog) -> None:
        self._manager = manager
        self._log = log

    def passed(self, seconds: float) -> None:
        """A pass over rows of the runs that have `pass_tokens` took so long."""
        runs = [run for run in self._manager.used if run.pass_tokens]
        total = sum(run.pass_tokens for run in runs)
        for run in runs:
            run.used_s += seconds * run.pass_tokens / total
            run.used_tokens += run.pass_tokens
            run.pass_tokens = 0

    def updated(self, run: TrainerRun, time_s: Mapping[str, float]) -> None:
        """The run was updated. `time_s` is where the time since the last update of any run went."""
        run.used_s += sum(time_s[phase] for phase in _OF_UPDATE)
        self.write(run)

    def write(self, run: TrainerRun) -> None:
        """Write down what the run has used since its last line."""
        if run.used_s or run.used_tokens:
            used = {"trainer_s": run.used_s, "trained_tokens": run.used_tokens}
            self._log.add(run.run_id, step=run.progress.step, used=used)
        run.used_s, run.used_tokens = 0.0, 0
