"""One forward/backward pass over rows of many runs, and the update of one run.

Gradients of a run collect in its own slot over as many passes as its batch takes; `update` then sums them over ranks,
clips them by the run's own limit, and steps the run's optimizer and scheduler. What is not finite is reported, not
raised: every rank sees the same numbers and comes to the same end.

Dimensions: R rows, T tokens, K positions of tokens that are a loss token in at least one row, N loss tokens.
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

from prime_rl.configs.losses import LossConfig
from prime_rl.contract.types import MicroBatch
from prime_rl.trainer.loss import LossInputs, compute_losses
from prime_rl.trainer.loss_report import LossSums, row_statistics, sums_by_run
from prime_rl.trainer.model import PolicyModel, Targets
from prime_rl.trainer.optim import MultiLoRAOptimizer
from prime_rl.trainer.runs import MultiRunManager
from prime_rl.trainer.runs.sync import ReadyRun
from prime_rl.trainer.scheduler import MultiLoRAScheduler
from prime_rl.trainer.world import World


@dataclass(frozen=True)
class Rows:
    """A micro-batch on the host, padded at the right with token 0, which no loss token ever sees.

    Attributes:
        mask_RT: true at loss tokens. The first token of a row is never one: nothing predicts it.
        columns_K: the positions in T of the tokens that are loss tokens in at least one row.
    """

    token_ids_RT: npt.NDArray[np.int64]
    mask_RT: npt.NDArray[np.bool_]
    columns_K: npt.NDArray[np.int64]
    mask_RK: npt.NDArray[np.bool_]
    sampled_logprobs_RK: npt.NDArray[np.float32]
    advantages_R: npt.NDArray[np.float32]
    temperatures_R: npt.NDArray[np.float32]
    scales_R: npt.NDArray[np.float32]

    @classmethod
    def of(cls, batch: MicroBatch) -> Rows:
        mask_RT = _padded(batch.loss_mask, batch.num_tokens, np.bool_)
        mask_RT[:, 0] = False
        columns_K = np.flatnonzero(mask_RT.any(axis=0))
        return cls(
            token_ids_RT=_padded(batch.token_ids, batch.num_tokens, np.int64),
            mask_RT=mask_RT,
            columns_K=columns_K,
            mask_RK=mask_RT[:, columns_K],
            sampled_logprobs_RK=_padded(batch.logprobs, batch.num_tokens, np.float32)[:, columns_K],
            advantages_R=np.array(batch.advantages, dtype=np.float32),
            temperatures_R=np.array(batch.temperatures, dtype=np.float32),
            scales_R=np.array(batch.loss_scales, dtype=np.float32),
        )

    def targets(self, rows: Sequence[int], device: torch.device) -> tuple[Targets, Tensor]:
        """The loss tokens of `rows`, laid end to end, and the cells of `[R, K]` in which they stand."""
        chosen = np.asarray(rows)
        row_N, token_N = np.nonzero(self.mask_RT[chosen])
        at_N = row_N * self.mask_RT.shape[1] + token_N - 1
        cells_N = chosen[row_N] * len(self.columns_K) + np.searchsorted(self.columns_K, token_N)
        ids_N, temperatures_N = self.token_ids_RT[chosen[row_N], token_N], self.temperatures_R[chosen[row_N]]
        found = [torch.from_numpy(array).to(device) for array in (at_N, ids_N, temperatures_N, cells_N)]
        return Targets(*found[:3]), found[3]


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
        rows = Rows.of(batch)
        configs_R = [self._manager.config[run_idx].loss for run_idx in batch.run_idxs]
        # Before the pass with gradients: the adapters that it routes to must stay the same until its end.
        base_logprobs_RK = self._base_logprobs(rows, configs_R) if batch.base_pass else None
        logprobs_RK, entropy_RK = self._logprobs(rows, range(len(configs_R)), batch.run_idxs)
        if not len(rows.columns_K):
            # A sum over no position: it goes through all layers, for the other ranks, and its gradients are zero.
            torch.autograd.backward(logprobs_RK.sum())
            return time.perf_counter() - start
        inputs = LossInputs(
            logprobs_RK=logprobs_RK,
            sampled_logprobs_RK=self._on_device(rows.sampled_logprobs_RK),
            advantages_R=self._on_device(rows.advantages_R),
            mask_RK=self._on_device(rows.mask_RK),
            scales_R=self._on_device(rows.scales_R),
            base_logprobs_RK=base_logprobs_RK,
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

    def _logprobs(self, rows: Rows, chosen: Sequence[int], run_idxs: Sequence[int | None]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies `[R, K]` of the `chosen` rows, each with its adapter; zero elsewhere."""
        targets, cells_N = rows.targets(chosen, self._world.device)
        both_N = self._model.token_logprobs(self._on_device(rows.token_ids_RT[list(chosen)]), run_idxs, targets)
        shape = len(rows.mask_RT), len(rows.columns_K)
        logprobs_RK, entropy_RK = (
            each_N.new_zeros(math.prod(shape)).index_copy(0, cells_N, each_N).view(shape) for each_N in both_N
        )
        return logprobs_RK, entropy_RK

    @torch.no_grad()
    def _base_logprobs(self, rows: Rows, configs_R: Sequence[LossConfig]) -> Tensor:
        """The base model's log-probabilities for rows whose loss compares with it, and zero for the others.

        A collective like the pass that follows: a rank that needs no row takes part too.
        """
        chosen = [row for row, config in enumerate(configs_R) if config.kl_coef > 0] or [0]
        logprobs_RK, _ = self._logprobs(rows, chosen, [None] * len(chosen))
        return logprobs_RK

    def _on_device(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._world.device)

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
