"""The trainer's log-ratios of the rollouts that people get to read: taken from a pass, gathered over ranks, written.

They are copied out of a pass that has such a row, after its gradients; nothing depends on them. `contract.samples`
decides which rollouts and tokens they are of, and has the file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.samples import BatchRatios, Keeping, RatioFile
from prime_rl.contract.types import MASK_DTYPE, MicroBatch
from prime_rl.trainer.loss import LossInputs
from prime_rl.trainer.runs import TrainerRun
from prime_rl.trainer.world import World

logger = logging.getLogger(__name__)

DIGITS = 4


def keeping_of(config: OrchestratorConfig) -> Keeping:
    """Which rollouts of the run's batches are kept, by its config."""
    return Keeping(config.samples.per_step, config.rollouts_per_example)


@torch.no_grad()
def collect(runs_R: Sequence[TrainerRun], batch: MicroBatch, inputs: LossInputs) -> None:
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
        shown_N = np.isin(at_N, keeping_of(run.config).positions(loss_mask))
        run.ratios[batch.kept[row]] = values_K[mask_K > 0][shown_N].tolist()


def gathered(run: TrainerRun, places: Sequence[int], world: World) -> dict[int, list[float]]:
    """By place in the batch, of all ranks; the run's own start again. A collective, for a run that keeps any."""
    mine, run.ratios = run.ratios, {}
    if not places:
        return {}
    if world.size > 1:
        mine = _of_all_ranks(mine, len(places), keeping_of(run.config).max_tokens, world)
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


class RatioWriter:
    """Appends to `metrics/ratios.jsonl` of each run, from the run's own thread."""

    def __init__(self) -> None:
        self._files: dict[str, RatioFile] = {}

    def admitted(self, run: TrainerRun) -> None:
        """It may be another folder than the one of that name before."""
        self._files.pop(run.run_id, None)

    def write(self, run: TrainerRun, step: int, ratios: Mapping[int, Sequence[float]]) -> None:
        """A disk that does not take them is logged and costs nothing else."""
        if not ratios:
            return
        rounded: dict[int, list[float | None]] = {
            place: [round(value, DIGITS) for value in values] for place, values in ratios.items()
        }
        new = RatioFile(run.dir.ratios, keep=run.config.samples.keep_steps)
        try:
            self._files.setdefault(run.run_id, new).append(BatchRatios(step, rounded))
        except OSError as error:
            logger.warning("%s: log-ratios of step %d are not kept: %s", run.run_id, step, error)
