"""Passes over rows of many runs, and the update of one run.

Gradients of a run collect in its own slot over as many passes as its batch takes; `update` then sums them over ranks,
clips them by the run's own limit, and steps the run's optimizer and scheduler. What is not finite is reported, not
raised: every rank sees the same numbers and comes to the same end.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby

import torch

from prime_rl.contract.types import MicroBatch
from prime_rl.trainer.loss_report import LossSums, row_statistics, sums_by_run
from prime_rl.trainer.model import PolicyModel
from prime_rl.trainer.optim import MultiLoRAOptimizer
from prime_rl.trainer.passes import forward_backward
from prime_rl.trainer.runs import MultiRunManager
from prime_rl.trainer.runs.sync import ReadyRun
from prime_rl.trainer.scheduler import MultiLoRAScheduler
from prime_rl.trainer.world import World


@dataclass(frozen=True)
class UpdateReport:
    """What one update of a run did. `problem` is set when it was not done, with the numbers.

    `compares_with_base`: the loss has a KL to the base model, and `sums.kl_base` is it.
    """

    step: int
    sums: LossSums
    grad_norm: float
    lr: float
    optim_s: float
    forward_backward_s: float
    problem: str | None = None
    compares_with_base: bool = False


class TrainStep:
    """Collects the gradients of all runs and updates those that are ready."""

    def __init__(
        self,
        model: PolicyModel,
        manager: MultiRunManager,
        optimizer: MultiLoRAOptimizer,
        scheduler: MultiLoRAScheduler,
        world: World,
    ) -> None:
        self._model = model
        self._manager = manager
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._world = world
        self._sums: dict[int, LossSums] = defaultdict(LossSums)
        self._pass_s: dict[int, float] = defaultdict(float)

    def deletion_hook(self, run_idx: int, run_id: str) -> None:
        self._sums.pop(run_idx, None)
        self._pass_s.pop(run_idx, None)

    def forward_backward(self, batch: MicroBatch) -> float:
        """One pass; adds to the gradients and sums of the runs in `batch`. Returns the seconds it took."""
        start = time.perf_counter()
        configs_R = [self._manager.config[run_idx].loss for run_idx in batch.run_idxs]
        found = forward_backward(self._model, batch, configs_R, self._world.device)
        if found is None:
            return time.perf_counter() - start
        num_rows = {run_idx: len(list(same)) for run_idx, same in groupby(batch.run_idxs)}
        statistics = row_statistics(found.inputs, found.losses, found.entropy_RK)
        sums = sums_by_run(statistics, list(num_rows.values()))
        seconds = time.perf_counter() - start
        for run_idx, sums_of_run in zip(num_rows, sums, strict=True):
            self._sums[run_idx].add(sums_of_run)
            self._pass_s[run_idx] += seconds
        return seconds

    def update(self, run_idx: int, ready: ReadyRun) -> UpdateReport:
        """Update one run from what was collected. A collective: all ranks call it, for the same runs in one order."""
        start = time.perf_counter()
        sums = self._reduced_sums(run_idx)
        grad_norm = self._optimizer.reduce_gradients(run_idx)
        lr = self._optimizer.lr(run_idx)
        step = self._manager.progress[run_idx].step + 1
        problem = None
        is_finite = math.isfinite(sums.loss) and math.isfinite(grad_norm)
        if is_finite:
            self._optimizer.step_run(run_idx, grad_norm)
        if is_finite and self._optimizer.is_finite(run_idx):
            self._scheduler.step_run(run_idx)
            progress = self._manager.progress[run_idx]
            progress.step = step
            progress.total_tokens += ready.num_tokens
            progress.total_samples += ready.num_samples
        else:
            what = "the weights after it" if is_finite else "its loss or gradient"
            problem = (
                f"update {step}: {what} are not finite: loss {sums.loss:g}, gradient norm {grad_norm:g}, lr {lr:g}"
            )
            self._optimizer.drop_gradients(run_idx)
        self._manager.ready_to_update[run_idx] = False
        seconds = time.perf_counter() - start
        pass_s, compares = self._pass_s.pop(run_idx, 0.0), self._manager.config[run_idx].loss.kl_coef > 0
        return UpdateReport(step, sums, grad_norm, lr, seconds, pass_s, problem, compares)

    def _reduced_sums(self, run_idx: int) -> LossSums:
        mine = self._sums.pop(run_idx, LossSums())
        # On the CPU, in double precision: reports, small and rare.
        return LossSums(*self._world.sum(torch.tensor(mine.as_list(), dtype=torch.float64)).tolist())
