"""One forward/backward pass over rows of many runs, and the update of one run.

Gradients of a run collect in its own slot over as many passes as its batch takes; `update` then sums them over ranks,
clips them by the run's own limit, and steps the run's optimizer and scheduler. What is not finite is reported, not
raised: every rank sees the same numbers and comes to the same end.

Dimensions: R rows, T tokens, K positions that predict a loss token of at least one row.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prime_rl.contract.types import MicroBatch
from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.loss import LossInputs, compute_losses
from prime_rl.trainer.loss_report import LossSums, row_statistics, sums_by_run
from prime_rl.trainer.model import PolicyModel
from prime_rl.trainer.optim import MultiLoRAOptimizer
from prime_rl.trainer.runs import MultiRunManager
from prime_rl.trainer.runs.sync import ReadyRun
from prime_rl.trainer.scheduler import MultiLoRAScheduler
from prime_rl.trainer.world import World


@dataclass(frozen=True)
class RowTensors:
    """A micro-batch on the device. Position k predicts the token after `positions_K[k]`."""

    token_ids_RT: Tensor
    positions_K: Tensor
    targets_RK: Tensor
    mask_RK: Tensor
    sampled_logprobs_RK: Tensor
    advantages_R: Tensor
    temperatures_R: Tensor
    scales_R: Tensor


def to_tensors(batch: MicroBatch, device: torch.device) -> RowTensors:
    """Pad at the right and pick the positions that matter. Token id 0 pads: no loss token ever sees it."""
    token_ids_RT = _padded(batch.token_ids, batch.num_tokens, np.int64)
    mask_RT = _padded(batch.loss_mask, batch.num_tokens, np.bool_)
    logprobs_RT = _padded(batch.logprobs, batch.num_tokens, np.float32)
    targets_K = np.flatnonzero(mask_RT[:, 1:].any(axis=0)) + 1

    def on_device(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    def by_row(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return RowTensors(
        token_ids_RT=on_device(token_ids_RT),
        positions_K=on_device(targets_K - 1),
        targets_RK=on_device(token_ids_RT[:, targets_K]),
        mask_RK=on_device(mask_RT[:, targets_K]),
        sampled_logprobs_RK=on_device(logprobs_RT[:, targets_K]),
        advantages_R=by_row(batch.advantages),
        temperatures_R=by_row(batch.temperatures),
        scales_R=by_row(batch.loss_scales),
    )


def _padded(rows: Sequence[Sequence[float]], width: int, dtype: type) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.zeros((len(rows), width), dtype=dtype)
    for row, values in enumerate(rows):
        array[row, : len(values)] = values
    return array


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
        """One pass; adds to the gradients and sums of the runs in `batch`. Returns the seconds it took.

        A collective when the base model is sharded: every rank makes a pass for each pack, if only a blank one.
        """
        start = time.perf_counter()
        rows = to_tensors(batch, self._world.device)
        configs_R = [self._manager.config[run_idx].loss for run_idx in batch.run_idxs]
        # Before the pass with gradients: the adapters that it routes to must stay the same until its end.
        compares_R = [config.kl_coef > 0 for config in configs_R]
        base_logprobs_RK = self._base_logprobs(rows, compares_R) if batch.base_pass else None
        logits_RKV = self._model.logits(rows.token_ids_RT, rows.positions_K, batch.run_idxs)
        if not rows.positions_K.numel():
            # A sum over no position: it goes through all layers, for the other ranks, and its gradients are zero.
            torch.autograd.backward(logits_RKV.sum())
            return time.perf_counter() - start
        logprobs_RK, entropy_RK = token_logprobs(logits_RKV, rows.targets_RK, rows.temperatures_R)
        inputs = LossInputs(
            logprobs_RK, rows.sampled_logprobs_RK, rows.advantages_R, rows.mask_RK, rows.scales_R, base_logprobs_RK
        )
        losses = compute_losses(configs_R, inputs)
        # The sum mixes no gradients: each row reaches its run's adapter alone.
        torch.autograd.backward(losses.loss_R.sum())
        num_rows = {run_idx: len(list(same)) for run_idx, same in groupby(batch.run_idxs)}
        sums = sums_by_run(row_statistics(inputs, losses, entropy_RK), list(num_rows.values()))
        seconds = time.perf_counter() - start
        for run_idx, sums_of_run in zip(num_rows, sums, strict=True):
            self._sums[run_idx].add(sums_of_run)
            self._pass_s[run_idx] += seconds
        return seconds

    @torch.no_grad()
    def _base_logprobs(self, rows: RowTensors, wanted_R: list[bool]) -> Tensor:
        """The base model's log-probabilities for rows whose loss compares with it, and zero for the others.

        A collective like the pass that follows: a rank that needs no row takes part too.
        """
        chosen = [row for row, is_wanted in enumerate(wanted_R) if is_wanted] or [0]
        chosen_R = torch.tensor(chosen, device=self._world.device)
        logits_RKV = self._model.logits(rows.token_ids_RT[chosen_R], rows.positions_K, [None] * len(chosen))
        logprobs_RK, _ = token_logprobs(logits_RKV, rows.targets_RK[chosen_R], rows.temperatures_R[chosen_R])
        return torch.zeros_like(rows.sampled_logprobs_RK).index_copy(0, chosen_R, logprobs_RK)

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
