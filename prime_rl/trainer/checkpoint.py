"""Save a run, resume a run, and remove what a checkpoint makes needless.

`checkpoints/step_N/trainer/` holds the adapter (PEFT), the optimizer's moments and the progress; the orchestrator's
part stands beside it; `STABLE` comes last. Rollout files are kept until a complete checkpoint of both covers them, so a
trainer that starts again replays them from there and reaches the same weights. Nothing here executes what it reads:
safetensors, JSON, and torch state with `weights_only=True`.
"""

from __future__ import annotations

import logging
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from prime_rl.configs.orchestrator import CkptConfig, OrchestratorConfig
from prime_rl.configs.shared import LoRAConfig
from prime_rl.contract.files import mark_stable, staged_dir, write_atomic
from prime_rl.contract.layout import RunDir, list_steps, stable_marker, step_name
from prime_rl.contract.resume import pending_request
from prime_rl.lora.adapter_state import load_peft, save_peft
from prime_rl.trainer.optim import MultiLoRAOptimizer
from prime_rl.trainer.runs import MultiRunManager

logger = logging.getLogger(__name__)

CHECKPOINT_VERSION = 1
OPTIMIZER_FILE = "optimizer.pt"
PROGRESS_FILE = "progress.json"


class SavedProgress(msgspec.Struct, frozen=True):
    """`progress.json`."""

    step: int
    total_tokens: int
    total_samples: int
    version: int = CHECKPOINT_VERSION


def is_due(config: OrchestratorConfig, step: int) -> bool:
    """Whether the run wants a checkpoint after `step` updates."""
    return step % config.ckpt.interval == 0 or step == config.max_steps


def steps_to_remove(config: CkptConfig, complete: Sequence[int], with_orchestrator: Sequence[int]) -> list[int]:
    """Complete checkpoints that may go: not among the newest `keep_last`, no multiple of `keep_interval`, and not the
    newest one from which the orchestrator can go on too."""
    keep = set(sorted(complete)[-config.keep_last :])
    if config.keep_interval is not None:
        keep |= {step for step in complete if step % config.keep_interval == 0}
    if with_orchestrator:
        keep.add(max(with_orchestrator))
    return sorted(set(complete) - keep)


def remove_step(folder: Path) -> None:
    """Remove a step folder; its marker goes first, so nobody takes half of it for a whole."""
    stable_marker(folder).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


class CheckpointManager:
    """Checkpoints of all runs. Only rank 0 writes; all ranks load."""

    def __init__(
        self, manager: MultiRunManager, optimizer: MultiLoRAOptimizer, base_model: str, lora: LoRAConfig
    ) -> None:
        self._manager = manager
        self._optimizer = optimizer
        self._base_model = base_model
        self._lora = lora

    # Resume

    def discovered_hook(self, run_idx: int, run_id: str, config: OrchestratorConfig) -> None:
        """Decide where the run starts (rank 0), and drop what an explicit `ckpt.resume_step` makes void."""
        run = self._manager.run_dir(run_idx)
        _sweep(run)
        complete = trainer_steps(run)
        request = pending_request(run, config.ckpt.resume_step)
        if request is None:
            step = complete[-1] if complete else 0
        else:
            step = request.resume_step
            if step and step not in complete:
                raise ValueError(f"ckpt.resume_step = {step}: there is no complete checkpoint of it, only {complete}")
            _drop_after(run, step)
            write_atomic(run.resumed, msgspec.json.encode(request))
        self._manager.progress[run_idx].step = step

    def creation_hook(self, run_idx: int, run_id: str) -> None:
        """Load the checkpoint from which the run goes on; comes after the optimizer's hook."""
        step = self._manager.progress[run_idx].step
        if step:
            self.load(run_idx, step)
            logger.info("%s resumes from its checkpoint of step %d", run_id, step)

    def load(self, run_idx: int, step: int) -> None:
        """Put a checkpoint into the slot. ValueError or OSError when it is damaged or does not fit the config."""
        folder = self._manager.run_dir(run_idx).trainer_checkpoint(step)
        try:
            tensors, adapter = load_peft(folder)
            saved = msgspec.json.decode((folder / PROGRESS_FILE).read_bytes(), type=SavedProgress)
            moments: dict[str, Any] = torch.load(folder / OPTIMIZER_FILE, weights_only=True, map_location="cpu")
        except (msgspec.MsgspecError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
            raise ValueError(f"{folder} is damaged: {' '.join(str(error).split())}") from error
        rank = self._manager.rank_of(run_idx)
        if adapter.rank != rank:
            raise ValueError(
                f"{folder} has rank {adapter.rank}, the config asks for model.lora.rank = {rank}; "
                "change it back, or start anew with ckpt.resume_step = 0"
            )
        if saved.version != CHECKPOINT_VERSION or saved.step != step:
            raise ValueError(f"{folder / PROGRESS_FILE} says version {saved.version}, step {saved.step}")
        self._manager.load_state_dict_for_run(run_idx, tensors)
        self._optimizer.load_state_dict(run_idx, moments)
        progress = self._manager.progress[run_idx]
        progress.step, progress.total_tokens, progress.total_samples = step, saved.total_tokens, saved.total_samples

    # Save

    def save_if_due(self, run_idx: int) -> bool:
        """Save the run when its own cadence says so."""
        due = is_due(self._manager.config[run_idx], self._manager.progress[run_idx].step)
        if due:
            self.save(run_idx)
        return due

    def save(self, run_idx: int) -> None:
        """Save the run as it stands after its last complete update. Nothing to do at step 0, or when it is saved."""
        run, step = self._manager.run_dir(run_idx), self._manager.progress[run_idx].step
        if step == 0 or step in trainer_steps(run):
            return
        run.checkpoints.mkdir(exist_ok=True)
        run.checkpoint_dir(step).mkdir(exist_ok=True)
        with staged_dir(run.trainer_checkpoint(step)) as folder:
            self._write(run_idx, folder)
        mark_stable(run.checkpoint_dir(step))
        logger.info("%s: checkpoint of step %d is complete", run.run_id, step)

    def _write(self, run_idx: int, folder: Path) -> None:
        lora, progress = self._manager.config[run_idx].model.lora, self._manager.progress[run_idx]
        assert lora.alpha is not None, "the config in a slot is resolved"
        save_peft(
            folder,
            self._manager.get_state_dict_for_run(run_idx),
            rank=self._manager.rank_of(run_idx),
            alpha=lora.alpha,
            target_modules=self._lora.target_modules,
            base_model=self._base_model,
        )
        torch.save(self._optimizer.state_dict(run_idx), folder / OPTIMIZER_FILE)
        saved = SavedProgress(progress.step, progress.total_tokens, progress.total_samples)
        (folder / PROGRESS_FILE).write_bytes(msgspec.json.encode(saved))

    # Prune

    def prune(self, run_idx: int) -> None:
        """Remove old checkpoints, and the rollout files that a checkpoint of both parts covers."""
        run, config = self._manager.run_dir(run_idx), self._manager.config[run_idx].ckpt
        complete = trainer_steps(run)
        of_both = [step for step in complete if _has_files(run.orchestrator_checkpoint(step))]
        for step in steps_to_remove(config, complete, of_both):
            remove_step(run.checkpoint_dir(step))
        if of_both:
            for step in list_steps(run.rollouts):
                if step <= of_both[-1]:
                    shutil.rmtree(run.rollout_dir(step), ignore_errors=True)


def trainer_steps(run: RunDir) -> list[int]:
    """Steps of the complete checkpoints from which the trainer can resume, ascending."""
    steps = list_steps(run.checkpoints, stable_only=True)
    return [step for step in steps if (run.trainer_checkpoint(step) / PROGRESS_FILE).exists()]


def _has_files(folder: Path) -> bool:
    """Whether something is in `folder` under its final name."""
    return folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir())


def _drop_after(run: RunDir, step: int) -> None:
    """Remove what was made after `step`: versions first, so that nobody picks up one that is about to be void."""
    for parent in (run.broadcast, run.checkpoints, run.rollouts):
        for later in [later for later in list_steps(parent) if later > step]:
            remove_step(parent / step_name(later))


def _sweep(run: RunDir) -> None:
    """Remove what a killed trainer left half written."""
    for pattern in ("broadcast/.step_*.tmp", "checkpoints/step_*/.trainer.*.tmp"):
        for leftover in run.path.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)
