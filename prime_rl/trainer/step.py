"""Passes over rows of many runs, and the update of one run.

A pass is one forward and backward: each row's loss is that of its run, and its gradients go to its run's own slot. They
collect there over as many passes as the run's batch takes; `TrainStep.update` then sums them over ranks, clips them by
the run's own limit, and steps the run's optimizer and scheduler. What is not finite is reported, not raised: every rank
sees the same numbers and comes to the same end.

A pass does not wait for the device, and nothing in it depends on a number that it worked out: so the same code runs on
tensors without memory (`fit`).

Dimensions: R rows, T tokens, K positions of tokens that are a loss token in at least one row, N loss tokens, M targets
of each; of packed rows N computed positions.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prime_rl.configs.losses import CrossEntropyLossConfig, RowLoss
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.contract.files import read_json, write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.metrics import USUAL_LR
from prime_rl.contract.status import NOT_FINITE
from prime_rl.contract.types import ADVANTAGE_DTYPE, LOGPROB_DTYPE, MASK_DTYPE, TOKEN_DTYPE, USES, MicroBatch
from prime_rl.lora.linear import sent
from prime_rl.trainer.loss import LossInputs, LossSums, RowLosses, compute_losses, row_statistics, sums_by_run
from prime_rl.trainer.model import PackedRows, PolicyModel, Targets
from prime_rl.trainer.optim import NO_MEMORY, RAISED
from prime_rl.trainer.runs import MultiRunManager, TrainerRun
from prime_rl.trainer.runs.discovery import Evictions
from prime_rl.trainer.runs.sync import ReadyRun
from prime_rl.trainer.world import World
from prime_rl.utils.runtime import give_back_holes, is_out_of_memory

logger = logging.getLogger(__name__)

MAX_LIMIT_BYTES = 100_000


@dataclass(frozen=True)
class UpdateReport:
    """The result of one update of a run. `problem` is set when it was not done, with the numbers.

    `compares_with_base`: the loss has a KL to the base model, and `sums.kl_base` is it. `ratios`: log-ratios of the
    kept rollouts, by place in the batch.
    """

    step: int
    sums: LossSums
    grad_norm: float
    lr: float
    optim_s: float
    forward_backward_s: float
    problem: str | None = None
    compares_with_base: bool = False
    ratios: Mapping[int, Sequence[float]] = field(default_factory=dict)


class TrainStep:
    """Collects the gradients of all runs and updates those that are ready.

    Attributes:
        most_tokens: positions of a pass, half of the smallest one of several rows that did not fit.
    """

    def __init__(self, model: PolicyModel, manager: MultiRunManager, world: World) -> None:
        self._model = model
        self._manager = manager
        self._world = world
        self._is_sharded = world.size > 1 or not model.layers
        self.most_tokens: float = math.inf

    def forward_backward(self, batch: MicroBatch) -> dict[TrainerRun, str]:
        """One pass; adds to the gradients and sums of the runs in `batch`. What does not fit is done in halves.

        Returns the runs with a row that does not fit alone, each with the reason. Raises PassTooLarge where the model
        is sharded: the other ranks wait for this one in the middle of the pass.
        """
        if self._fits(batch):
            return {}
        gc.collect()
        give_back_holes()
        torch.cuda.empty_cache()  # does nothing where no GPU is used
        num_rows, num_tokens = len(batch.run_idxs), sum(map(len, batch.loss_mask))
        rows, key = (f"{num_rows} samples", "max_tokens_per_micro_batch") if num_rows > 1 else ("a sample", "seq_len")
        problem = f"{rows} with {num_tokens} tokens: out of memory on {self._world.device}; make {key} smaller"
        if num_rows > 1:
            positions = Rows.of(batch).num_positions(packed=self._model.packs)
            self.most_tokens = min(self.most_tokens, positions // 2)
        if self._is_sharded:
            # A row without a loss token is a blank one: it fits where that of another rank does not.
            run = self._manager.run(batch.run_idxs[0]) if num_rows == 1 and any(batch.loss_mask[0]) else None
            raise PassTooLarge(f"rank {self._world.rank}: {problem}", run, self.most_tokens)
        if num_rows == 1:
            return {self._manager.run(batch.run_idxs[0]): problem}
        logger.warning("%s; now in halves", problem)
        halves = (split(batch, part) for part in (slice(num_rows // 2), slice(num_rows // 2, None)))
        return {run: reason for half in halves for run, reason in self.forward_backward(half).items()}

    def _fits(self, batch: MicroBatch) -> bool:
        """The pass, all of it or, where it does not fit, nothing of it."""
        start = time.perf_counter()
        runs_R = [self._manager.run(run_idx) for run_idx in batch.run_idxs]
        num_rows = {run: len(list(same)) for run, same in groupby(runs_R)}
        # What a pass that is broken off has added cannot be told from what was there.
        leaves = [] if self._is_sharded else [leaf for run in num_rows for leaf in run.training.weights.leaves]
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        try:
            found = forward_backward(self._model, batch, row_losses(runs_R, batch), self._world.device)
            if found is not None:
                collect_ratios(runs_R, batch, found.inputs)
                statistics = row_statistics(found.inputs, found.losses, found.entropy_RK, found.is_top_RK)
                sums = sums_by_run(statistics, list(num_rows.values()))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient
            return False
        add_gradients(leaves, before)
        for run in num_rows:
            run.training.weights.keep_gradients()
        if found is not None:
            seconds = time.perf_counter() - start
            for run, sums_of_run in zip(num_rows, sums, strict=True):
                run.sums.add(sums_of_run)
                run.pass_s += seconds
        return True

    def update(self, run: TrainerRun, batch: ReadyRun) -> UpdateReport:
        """Update one run from what was collected. A collective: all ranks call it, for the same runs in one order."""
        start = time.perf_counter()
        # On the CPU, in double precision: reports, small and rare.
        sums = LossSums(*self._world.sum(torch.tensor(run.sums.as_list(), dtype=torch.float64)).tolist())
        pass_s = run.pass_s
        ratios = gathered_ratios(run, batch.kept, self._world)
        run.sums, run.pass_s, run.ready = LossSums(), 0.0, False
        optimizer, progress = run.training, run.progress
        grad_norm, lr = optimizer.reduce_gradients(), optimizer.lr
        # A logit that is not finite makes the entropy NaN, also where the loss cuts it off.
        numbers = {**vars(sums), "gradient": grad_norm}
        bad = [name.replace("_", " ") for name, value in numbers.items() if not math.isfinite(value)]
        problem = f"its {' and '.join(bad)}" if bad else optimizer.step(grad_norm)
        step = progress.step + 1
        if problem == NO_MEMORY:
            problem = f"update {step}: {problem}: set model.lora.rank or max_concurrent_runs lower"
        elif problem and problem.startswith(RAISED):
            problem = f"update {step}: {problem}"
        elif problem:
            optimizer.weights.drop_gradients()
            problem = not_finite(run.run_id, step, problem, sums.loss, grad_norm, lr)
        else:
            optimizer.next_rate()
            progress.step = step
            progress.total_tokens += batch.num_tokens
            progress.total_samples += batch.num_samples
        seconds = time.perf_counter() - start
        compares = run.config.loss.kl_coef > 0
        return UpdateReport(step, sums, grad_norm, lr, seconds, pass_s, problem, compares, ratios)


def row_losses(runs_R: Sequence[TrainerRun], batch: MicroBatch) -> list[RowLoss]:
    """The loss of each row: its run's, or, where the policy did not sample it, the cross-entropy."""
    uses_R = batch.uses or [""] * len(runs_R)
    losses = [run.config.loss for run in runs_R]
    return [
        CrossEntropyLossConfig(kl_coef=loss.kl_coef) if use else loss for loss, use in zip(losses, uses_R, strict=True)
    ]


# The log-ratios of the rollouts that people get to read (`contract.samples`). They are copied out of a pass that has
# such a row, after its gradients; nothing depends on them.


@torch.no_grad()
def collect_ratios(runs_R: Sequence[TrainerRun], batch: MicroBatch, inputs: LossInputs) -> None:
    """Give each run the log-ratios of its kept rows of a pass. One copy from the device, of these rows alone."""
    rows = [row for row, number in enumerate(batch.kept) if number >= 0]
    if not rows:
        return
    log_ratio_RK = (inputs.logprobs_RK - inputs.sampled_logprobs_RK)[rows]
    found = torch.stack([log_ratio_RK.float(), inputs.mask_RK[rows].float()]).cpu().numpy()
    for row, values_K, mask_K in zip(rows, *found, strict=True):
        run, loss_mask = runs_R[row], batch.loss_mask[row]
        at_N = np.flatnonzero(np.frombuffer(loss_mask, MASK_DTYPE))
        at_N = at_N[at_N > 0]  # nothing predicts the first token of a row
        shown_N = np.isin(at_N, run.keeping.positions(loss_mask))
        run.ratios[batch.kept[row]] = values_K[mask_K > 0][shown_N].tolist()


def gathered_ratios(run: TrainerRun, places: Sequence[int], world: World) -> dict[int, list[float]]:
    """By place in the batch, of all ranks; the run's own start again. A collective, for a run that keeps any."""
    mine, run.ratios = run.ratios, {}
    if not places:
        return {}
    if world.size > 1:
        mine = _of_all_ranks(mine, len(places), run.keeping.max_tokens, world)
    return {places[number]: values for number, values in sorted(mine.items())}


def _of_all_ranks(
    mine: Mapping[int, Sequence[float]], num_kept: int, width: int, world: World
) -> dict[int, list[float]]:
    """Each rollout is on one rank, so a sum brings them together; the first column counts its tokens."""
    table = torch.zeros(num_kept, 1 + width, dtype=torch.float64)
    for number, values in mine.items():
        table[number, 0] = len(values)
        table[number, 1 : 1 + len(values)] = torch.tensor(values, dtype=torch.float64)
    rows = world.sum(table).tolist()
    return {number: row[1 : 1 + int(row[0])] for number, row in enumerate(rows) if row[0]}


class PassTooLarge(Exception):
    """A pass does not fit into the memory of a rank; the message has its size and the key to change.

    `run` has a row that does not fit alone; where it is None, passes of `most_tokens` positions may.
    """

    def __init__(self, problem: str, run: TrainerRun | None, most_tokens: float) -> None:
        super().__init__(problem)
        self.run = run
        self.most_tokens = most_tokens


class PassLimit(msgspec.Struct, frozen=True):
    """`pass_limit.json`: positions of a pass that may fit on `machine`, where more of them ended the trainer."""

    tokens: int
    machine: str


def remember(error: PassTooLarge, config: TrainerConfig, world: World) -> None:
    """Keep the next trainer from making that pass again. By the rank that did not have the memory."""
    if error.run is not None:
        Evictions(config.output_dir).add(error.run.run_id, str(error))
    elif math.isfinite(error.most_tokens):
        limit = PassLimit(int(error.most_tokens), _machine(config, world))
        write_atomic(OutputDir(config.output_dir).pass_limit, msgspec.json.encode(limit))


def remembered(config: TrainerConfig, world: World) -> float:
    """Positions of a pass, as far as an earlier trainer came to know."""
    path = OutputDir(config.output_dir).pass_limit
    limit = read_json(path, PassLimit, limit=MAX_LIMIT_BYTES)
    if limit is None or limit.machine != _machine(config, world):
        return math.inf
    logger.warning("passes have at most %d tokens: a larger one did not fit (%s)", limit.tokens, path)
    return limit.tokens


def _machine(config: TrainerConfig, world: World) -> str:
    memory = torch.cuda.get_device_properties(world.device).total_memory if world.device.type == "cuda" else 0
    return f"{world.size} ranks on {world.device.type} of {memory} bytes, {config.model!r}"


def split(batch: MicroBatch, rows: slice) -> MicroBatch:
    """Some `rows` of `batch`; what the first of them shares it computes itself."""
    columns = {name: value[rows] for name, value in msgspec.structs.asdict(batch).items() if isinstance(value, list)}
    if columns["shared"]:
        columns["shared"][0] = 0
    return msgspec.structs.replace(batch, **columns, num_tokens=max(map(len, columns["loss_mask"])))


@torch.no_grad()
def add_gradients(leaves: Sequence[Tensor], before: Sequence[Tensor | None]) -> None:
    """Add each gradient of `leaves` to what was there before, where something was: as backward would have done."""
    pairs = [(leaf, old) for leaf, old in zip(leaves, before, strict=True) if old is not None]
    new = [(old, leaf.grad) for leaf, old in pairs if leaf.grad is not None]
    if new:
        torch._foreach_add_([old for old, _ in new], [gradient for _, gradient in new])
    for leaf, old in pairs:
        leaf.grad = old


def not_finite(run_id: str, step: int, what: str, loss: float, grad_norm: float, lr: float) -> str:
    """The reason, with the numbers, for which a run is evicted whose update is not done, and what to do."""
    numbers = f"update {step}: {what} {NOT_FINITE}: loss {loss:g}, gradient norm {grad_norm:g}, lr {lr:g}"
    lower = f"lower optim.lr (prl runs set {run_id} optim.lr={min(lr / 3, USUAL_LR):.2g})"
    return f"{numbers}; {lower}, then prl runs rollback {run_id} --step N, of a checkpoint from before; 0 starts over"


@dataclass(frozen=True)
class Rows:
    """A micro-batch on the host, padded at the right with token 0, which no loss token ever sees.

    Attributes:
        seen_R: positions of each row without the padding: its tokens but the last, from which nothing is predicted.
        shared_R: the first of them that are those of the row before it.
        mask_RT: true at loss tokens. The first token of a row is never one: nothing predicts it.
        columns_K: the positions in T of the tokens that are loss tokens in at least one row.
        advantages_RK: `[R, 1]` when no row has its own for each token.
        soft_R: the columns of each row's soft targets (`SampleColumns`), empty for a row without; () for none.
    """

    seen_R: tuple[int, ...]
    shared_R: tuple[int, ...]
    token_ids_RT: npt.NDArray[np.int64]
    mask_RT: npt.NDArray[np.bool_]
    columns_K: npt.NDArray[np.int64]
    mask_RK: npt.NDArray[np.bool_]
    sampled_logprobs_RK: npt.NDArray[np.float32]
    advantages_RK: npt.NDArray[np.float32]
    temperatures_R: npt.NDArray[np.float32]
    scales_R: npt.NDArray[np.float32]
    uses_R3: npt.NDArray[np.float32] | None
    soft_R: tuple[tuple[bytes, bytes], ...]

    @classmethod
    def of(cls, batch: MicroBatch) -> Rows:
        """The rows of `batch` as arrays."""
        mask_RT = _padded(batch.loss_mask, MASK_DTYPE, batch.num_tokens, np.bool_)
        mask_RT[:, 0] = False
        columns_K = np.flatnonzero(mask_RT.any(axis=0))
        return cls(
            seen_R=tuple(len(row) - 1 for row in batch.loss_mask),
            shared_R=tuple(batch.shared) or (0,) * len(batch.loss_mask),
            token_ids_RT=_padded(batch.token_ids, TOKEN_DTYPE, batch.num_tokens, np.int64),
            mask_RT=mask_RT,
            columns_K=columns_K,
            mask_RK=mask_RT[:, columns_K],
            sampled_logprobs_RK=_padded(batch.logprobs, LOGPROB_DTYPE, batch.num_tokens, np.float32)[:, columns_K],
            advantages_RK=_advantages(batch, columns_K),
            temperatures_R=np.array(batch.temperatures, dtype=np.float32),
            scales_R=np.array(batch.loss_scales, dtype=np.float32),
            uses_R3=np.eye(len(USES), dtype=np.float32)[list(map(USES.index, batch.uses))] if batch.uses else None,
            soft_R=tuple(zip(batch.soft_ids, batch.soft_probs, strict=True)),
        )

    def num_positions(self, *, packed: bool) -> int:
        """Positions of a pass over all rows."""
        return sum(self.seen_R) - sum(self.shared_R) if packed else len(self.seen_R) * max(self.seen_R)

    def packed(self, chosen: Sequence[int]) -> tuple[npt.NDArray[np.int64], PackedRows]:
        """The computed positions of the `chosen` rows, `[1, N]`, and where each row finds its own in them."""
        rows = PackedRows(tuple(self.seen_R[row] for row in chosen), tuple(self.shared_R[row] for row in chosen))
        parts = [self.token_ids_RT[row, self.shared_R[row] : self.seen_R[row]] for row in chosen]
        return np.concatenate(parts)[None], rows

    def targets(self, chosen: Sequence[int], device: torch.device, packed: PackedRows | None) -> tuple[Targets, Tensor]:
        """The loss tokens of the `chosen` rows, and the cells of `[R, K]` in which they stand.

        The rows are `packed`, or lie end to end, each padded to T - 1 positions.
        """
        rows = np.asarray(chosen)
        row_N, token_N = np.nonzero(self.mask_RT[rows])
        lie = packed or PackedRows((self.mask_RT.shape[1] - 1,) * len(rows), (0,) * len(rows))
        seen_R = np.array(lie.seen)
        at_N = np.concatenate(lie.places)[(np.cumsum(seen_R) - seen_R)[row_N] + token_N - 1]
        cells_N = rows[row_N] * len(self.columns_K) + np.searchsorted(self.columns_K, token_N)
        ids_N, temperatures_N = self.token_ids_RT[rows[row_N], token_N], self.temperatures_R[rows[row_N]]
        arrays = [cells_N, at_N, ids_N, temperatures_N]
        if self.soft_R and any(self.soft_R[row][0] for row in chosen):
            arrays[2], shares_NM = self._soft(chosen, ids_N)
            arrays.append(shares_NM)
        cells, *found = [sent(torch.from_numpy(array), device) for array in arrays]
        return Targets(*found), cells

    def _soft(self, chosen: Sequence[int], ids_N: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
        """`[N, M]`, the targets of all loss tokens of the `chosen` rows, and their shares, filled up with 0.

        Where a row has no soft targets, its own token counts 1.
        """
        ids, shares = list[npt.NDArray[Any]](), list[npt.NDArray[Any]]()
        ends = np.cumsum(self.mask_RT[list(chosen)].sum(1))
        for row, own in zip(chosen, np.split(ids_N[:, None], ends[:-1]), strict=True):
            given, shape = self.soft_R[row], (len(own), -1)
            ids.append(np.frombuffer(given[0], TOKEN_DTYPE).reshape(shape) if given[0] else own)
            shares.append(np.frombuffer(given[1], LOGPROB_DTYPE).reshape(shape) if given[0] else np.ones(own.shape))
        most = max(each.shape[1] for each in ids)
        filled = [[np.pad(each, ((0, 0), (0, most - each.shape[1]))) for each in some] for some in (ids, shares)]
        return [np.concatenate(filled[0], dtype=np.int64), np.concatenate(filled[1], dtype=np.float32)]


def _padded(columns: Sequence[bytes], column_dtype: str, width: int, dtype: type) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.zeros((len(columns), width), dtype=dtype)
    for row, column in enumerate(columns):
        values = np.frombuffer(column, column_dtype)
        array[row, : len(values)] = values
    return array


def _advantages(batch: MicroBatch, columns_K: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """`[R, 1]`, or `[R, K]` as soon as one row has its own for each token."""
    advantages_R1 = np.array(batch.advantages, dtype=np.float32)[:, None]
    if not batch.token_advantages:
        return advantages_R1
    given_RT = _padded(batch.token_advantages, ADVANTAGE_DTYPE, batch.num_tokens, np.float32)
    is_given_R1 = np.array([bool(column) for column in batch.token_advantages])[:, None]
    return np.where(is_given_R1, given_RT[:, columns_K], advantages_R1)


@dataclass(frozen=True)
class PassResult:
    """The results of a pass, without gradient: for reports."""

    inputs: LossInputs
    losses: RowLosses
    entropy_RK: Tensor
    is_top_RK: Tensor


def forward_backward(
    model: PolicyModel, batch: MicroBatch, configs_R: Sequence[RowLoss], device: torch.device
) -> PassResult | None:
    """Add the gradients of `batch`, whose rows have the losses `configs_R`; None when it has no loss token.

    A collective when the base model is sharded: every rank makes a pass for each pack, if only a blank one.
    """
    try:
        return _Pass(model, Rows.of(batch), device).run(batch, configs_R)
    finally:
        model.routing.forget()


@dataclass(frozen=True)
class _Pass:
    model: PolicyModel
    rows: Rows
    device: torch.device

    def run(self, batch: MicroBatch, configs_R: Sequence[RowLoss]) -> PassResult | None:
        rows = self.rows
        # Sent first: behind the pass they would wait for all that it queues.
        host = rows.sampled_logprobs_RK, rows.advantages_RK, rows.mask_RK, rows.scales_R
        sampled_RK, advantages_RK, mask_RK, scales_R = map(self._on_device, host)
        uses_R3 = None if rows.uses_R3 is None else self._on_device(rows.uses_R3)
        # Before the pass with gradients: the adapters that it routes to must stay the same until its end.
        base_logprobs_RK = self._base_logprobs(configs_R) if batch.base_pass else None
        logprobs_RK, entropy_RK, is_top_RK = self._logprobs(range(len(configs_R)), batch.run_idxs)
        if not len(rows.columns_K):
            # A sum over no position: it goes through all layers, for the other ranks, and its gradients are zero.
            torch.autograd.backward(logprobs_RK.sum())
            return None
        inputs = LossInputs(logprobs_RK, sampled_RK, advantages_RK, mask_RK, scales_R, base_logprobs_RK, uses_R3)
        losses = compute_losses(configs_R, inputs)
        # The sum mixes no gradients: each row reaches its run's adapter alone.
        torch.autograd.backward(losses.loss_R.sum())
        return PassResult(inputs, losses, entropy_RK, is_top_RK)

    def _logprobs(self, chosen: Sequence[int], run_idxs: Sequence[int | None]) -> list[Tensor]:
        """What the head gives of the `chosen` rows, each with its adapter, as `[R, K]`; zero elsewhere."""
        rows = self.rows
        ids, packed = rows.packed(chosen) if self.model.packs else (rows.token_ids_RT[list(chosen), :-1], None)
        targets, cells_N = rows.targets(chosen, self.device, packed)
        found = self.model.token_logprobs(self._on_device(ids), run_idxs, targets, packed)
        shape = len(rows.mask_RT), len(rows.columns_K)
        return [each_N.new_zeros(math.prod(shape)).index_copy(0, cells_N, each_N).view(shape) for each_N in found]

    @torch.no_grad()
    def _base_logprobs(self, configs_R: Sequence[RowLoss]) -> Tensor:
        """The base model's log-probabilities for rows whose loss compares with it, and zero for the others.

        A collective like the pass that follows: a rank that needs no row takes part too.
        """
        chosen = [row for row, config in enumerate(configs_R) if config.kl_coef > 0] or [0]
        return self._logprobs(chosen, [None] * len(chosen))[0]

    def _on_device(self, array: npt.NDArray[Any]) -> Tensor:
        return sent(torch.from_numpy(array), self.device)
