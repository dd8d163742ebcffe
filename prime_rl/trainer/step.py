"""Passes over rows of many runs, and the update of one run.

Gradients of a run collect in its own slot over as many passes as its batch takes; `update` then sums them over ranks,
clips them by the run's own limit, and steps the run's optimizer and scheduler. What is not finite is reported, not
raised: every rank sees the same numbers and comes to the same end.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import groupby

import torch

from prime_rl.contract.types import MicroBatch
from prime_rl.trainer.loss import LossSums, row_statistics, sums_by_run
from prime_rl.trainer.model import PolicyModel
from prime_rl.trainer.passes import forward_backward
from prime_rl.trainer.runs import MultiRunManager, TrainerRun
from prime_rl.trainer.runs.sync import ReadyRun
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

    def __init__(self, model: PolicyModel, manager: MultiRunManager, world: World) -> None:
        self._model = model
        self._manager = manager
        self._world = world

    def forward_backward(self, batch: MicroBatch) -> float:
        """One pass; adds to the gradients and sums of the runs in `batch`. Returns the seconds it took."""
        start = time.perf_counter()
        runs_R = [self._manager.run(run_idx) for run_idx in batch.run_idxs]
        found = forward_backward(self._model, batch, [run.config.loss for run in runs_R], self._world.device)
        if found is None:
            return time.perf_counter() - start
        num_rows = {run: len(list(same)) for run, same in groupby(runs_R)}
        statistics = row_statistics(found.inputs, found.losses, found.entropy_RK)
        sums = sums_by_run(statistics, list(num_rows.values()))
        seconds = time.perf_counter() - start
        for run, sums_of_run in zip(num_rows, sums, strict=True):
            run.sums.add(sums_of_run)
            run.pass_s += seconds
        return seconds

    def update(self, run: TrainerRun, batch: ReadyRun) -> UpdateReport:
        """Update one run from what was collected. A collective: all ranks call it, for the same runs in one order."""
        start = time.perf_counter()
        sums, pass_s = self._reduced(run.sums), run.pass_s
        run.sums, run.pass_s, run.ready = LossSums(), 0.0, False
        optimizer, progress = run.training, run.progress
        grad_norm, lr = optimizer.reduce_gradients(), optimizer.lr
        problem = "its loss or gradient"
        if math.isfinite(sums.loss) and math.isfinite(grad_norm):
            problem = "" if optimizer.step(grad_norm) else "the weights after it"
        step = progress.step + 1
        if problem:
            optimizer.drop_gradients()
            problem = (
                f"update {step}: {problem} are not finite: loss {sums.loss:g}, gradient norm {grad_norm:g}, lr {lr:g}"
            )
        else:
            optimizer.next_rate()
            progress.step = step
            progress.total_tokens += batch.num_tokens
            progress.total_samples += batch.num_samples
        seconds = time.perf_counter() - start
        return UpdateReport(step, sums, grad_norm, lr, seconds, pass_s, problem or None, run.config.loss.kl_coef > 0)

    def _reduced(self, mine: LossSums) -> LossSums:
        # On the CPU, in double precision: reports, small and rare.
        return LossSums(*self._world.sum(torch.tensor(mine.as_list(), dtype=torch.float64)).tolist())
