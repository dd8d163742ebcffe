"""Rank 0, after an update of a run: publish, checkpoint, metrics, prune, status, always in this order.

Whatever fails here on behalf of one run (its disk is full, its folder is gone) evicts that run and no other. Holds no
collective, so it may catch.
"""

from __future__ import annotations

from prime_rl.trainer.broadcast import FileSystemWeightBroadcast
from prime_rl.trainer.checkpoint import CheckpointManager
from prime_rl.trainer.metrics import MetricsWriter, PhaseTimer, StatusReporter
from prime_rl.trainer.runs import MultiRunManager
from prime_rl.trainer.runs.sync import ReadyRun
from prime_rl.trainer.step import UpdateReport


class Publisher:
    """See the module."""

    def __init__(
        self,
        manager: MultiRunManager,
        broadcast: FileSystemWeightBroadcast,
        checkpoints: CheckpointManager,
        metrics: MetricsWriter,
        status: StatusReporter,
    ) -> None:
        self._manager = manager
        self._broadcast = broadcast
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._status = status

    def after_update(self, run_idx: int, ready: ReadyRun, report: UpdateReport, timer: PhaseTimer) -> None:
        """Make the update known. `timer` has the phases since the last update of any run, and is emptied."""
        if report.problem is not None:
            self._manager.evict_run(run_idx, report.problem)
        else:
            with self._manager.run_boundary(run_idx, f"publishing version {report.step}"):
                self._publish(run_idx, ready, report, timer)
            if report.step >= self._manager.config[run_idx].max_steps:
                self._manager.finish_run(run_idx)
        self._status.updated(timer.take(), ready.num_tokens)

    def _publish(self, run_idx: int, ready: ReadyRun, report: UpdateReport, timer: PhaseTimer) -> None:
        before = dict(timer.seconds)
        with timer("broadcast"):
            self._broadcast.broadcast_weights(run_idx)
        with timer("checkpoint"):
            self._checkpoints.save_if_due(run_idx)
        own_s = {phase: timer.seconds[phase] - before[phase] for phase in ("broadcast", "checkpoint")}
        self._metrics.write(run_idx, ready, report, own_s)
        self._checkpoints.prune(run_idx)

    def before_exit(self) -> None:
        """Save every run after its last complete update, so that a stop loses nothing that was done."""
        for run_idx in self._manager.active_idxs:
            with self._manager.run_boundary(run_idx, "saving the last checkpoint"):
                self._checkpoints.save(run_idx)
        self._status.close()
