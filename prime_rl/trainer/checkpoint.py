"""Save a run, and resume a run.

`checkpoints/step_N/trainer/` holds the weights (an adapter in PEFT format, or the whole model), the rest of the state
(optimizer, scheduler, random numbers) and the progress; the orchestrator's part is beside it; `STABLE` comes last.
Nothing in it depends on the number of ranks. What may be removed is decided in `retention`. Nothing here executes what
it reads: safetensors and JSON.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.files import make_folder, mark_stable, read_file, staged_dir, write_atomic
from prime_rl.contract.resume import pending_request
from prime_rl.lora.tensor_files import load_tensors
from prime_rl.trainer.retention import PROGRESS_FILE, drop_after, sweep, trainer_steps
from prime_rl.trainer.runs import MultiRunManager
from prime_rl.trainer.snapshot import RunSnapshot, Snapshots
from prime_rl.trainer.state_files import join_tensors, save_tensors, split_tensors

logger = logging.getLogger(__name__)

CHECKPOINT_VERSION = 2
STATE_FILE = "state.safetensors"
# A thousand times what a run's progress takes; its tensors are in another file.
MAX_PROGRESS_BYTES = 64 << 20


class _Version(msgspec.Struct, frozen=True):
    """What every version of `progress.json` has."""

    version: int = 1


class SavedProgress(msgspec.Struct, frozen=True):
    """`progress.json`. `state` is the training state with a reference for each tensor of STATE_FILE."""

    step: int
    total_tokens: int
    total_samples: int
    state: dict[str, Any]
    version: int = CHECKPOINT_VERSION


def is_due(config: OrchestratorConfig, step: int) -> bool:
    """Whether the run's config asks for a checkpoint after `step` updates."""
    return step % config.ckpt.interval == 0 or step == config.max_steps


class CheckpointManager:
    """Checkpoints of all runs. Only rank 0 writes; all ranks load."""

    def __init__(self, manager: MultiRunManager, snapshots: Snapshots) -> None:
        self._manager = manager
        self._snapshots = snapshots

    # Resume

    def discovered_hook(self, run_idx: int, run_id: str, config: OrchestratorConfig) -> None:
        """Decide where the run starts (rank 0), and drop what an explicit `ckpt.resume_step` makes void."""
        run = self._manager.run_dir(run_idx)
        sweep(run)
        complete = trainer_steps(run)
        request = pending_request(run, config.ckpt.resume_step)
        if request is None:
            step = complete[-1] if complete else 0
        else:
            step = request.resume_step
            if step and step not in complete:
                raise ValueError(
                    f"ckpt.resume_step = {step}: no complete checkpoint of that step; complete ones: {complete}"
                )
            drop_after(run, step)
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
        saved, weights, state = self._read(run_idx, folder)
        if saved.step != step:
            raise ValueError(f"{folder / PROGRESS_FILE} is of step {saved.step}, expected {step}")
        try:
            self._snapshots.restore(run_idx, weights, state)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder} is damaged: {type(error).__name__}: {error}") from error
        progress = self._manager.progress[run_idx]
        progress.step, progress.total_tokens, progress.total_samples = step, saved.total_tokens, saved.total_samples

    def _read(self, run_idx: int, folder: Path) -> tuple[SavedProgress, dict[str, Tensor], dict[str, Any]]:
        try:
            progress = read_file(folder / PROGRESS_FILE, limit=MAX_PROGRESS_BYTES)
            version = msgspec.json.decode(progress, type=_Version).version
            if version != CHECKPOINT_VERSION:
                raise ValueError(
                    f"{folder} has checkpoint format {version}, this program reads {CHECKPOINT_VERSION}: resume with "
                    "the program that wrote it, or start over with ckpt.resume_step = 0"
                )
            saved = msgspec.json.decode(progress, type=SavedProgress)
            tensors = self._snapshots.read(run_idx, folder)
            state = join_tensors(saved.state, load_tensors(folder / STATE_FILE, mapped=self._snapshots.maps_files))
        except msgspec.MsgspecError as error:
            raise ValueError(f"{folder} is damaged: {' '.join(str(error).split())}") from error
        return saved, tensors, state

    # Save

    def save(self, snapshot: RunSnapshot) -> None:
        """Save a run, from any thread. Nothing to do at step 0, or when it is saved. Raises OSError."""
        run, step = snapshot.run, snapshot.progress.step
        if step == 0 or step in trainer_steps(run):
            return
        make_folder(run.checkpoints)
        make_folder(run.checkpoint_dir(step))
        with staged_dir(run.trainer_checkpoint(step)) as folder:
            _write(folder, snapshot)
        mark_stable(run.checkpoint_dir(step))
        logger.info("%s: checkpoint of step %d is complete", run.run_id, step)


def _write(folder: Path, snapshot: RunSnapshot) -> None:
    plain, tensors = split_tensors(snapshot.state)
    snapshot.weights.save(folder)
    save_tensors(folder / STATE_FILE, tensors)
    now = snapshot.progress
    saved = SavedProgress(now.step, now.total_tokens, now.total_samples, plain)
    (folder / PROGRESS_FILE).write_bytes(msgspec.json.encode(saved))
