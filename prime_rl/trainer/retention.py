"""What may be removed from a run's folder, and how: the marker first, so that half a folder never counts as complete.

Rollout files are kept until a complete checkpoint of both trainer and orchestrator covers them (forever with
`ckpt.keep_rollouts`). What a killed process left half removed is removed at the next occasion. No tensors here.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from prime_rl.configs.orchestrator import CkptConfig
from prime_rl.contract.files import remove
from prime_rl.contract.layout import RunDir, list_steps, stable_marker, step_name

# Present when the trainer's part of a checkpoint is complete.
PROGRESS_FILE = "progress.json"


def remove_step(folder: Path) -> None:
    """Remove a step folder; its marker goes first. Of a link only the link itself."""
    with contextlib.suppress(OSError):
        if not folder.is_symlink():
            remove(stable_marker(folder))
        remove(folder)


def trainer_steps(run: RunDir) -> list[int]:
    """Steps of the complete checkpoints from which the trainer can resume, ascending."""
    steps = list_steps(run.checkpoints, stable_only=True)
    return [step for step in steps if (run.trainer_checkpoint(step) / PROGRESS_FILE).exists()]


def steps_to_remove(config: CkptConfig, complete: Sequence[int], with_orchestrator: Sequence[int]) -> list[int]:
    """Complete checkpoints that may go.

    Not among the newest `keep_last`, no multiple of `keep_interval`, and not the newest one from which the orchestrator
    can go on too.
    """
    keep = set(sorted(complete)[-config.keep_last :])
    if config.keep_interval is not None:
        keep |= {step for step in complete if step % config.keep_interval == 0}
    if with_orchestrator:
        keep.add(max(with_orchestrator))
    return sorted(set(complete) - keep)


def prune(run: RunDir, config: CkptConfig) -> None:
    """Remove old checkpoints, and the rollout files that a checkpoint of both parts covers."""
    complete = trainer_steps(run)
    of_both = [step for step in complete if _has_files(run.orchestrator_checkpoint(step))]
    for step in [*steps_to_remove(config, complete, of_both), *_fragments(run, complete)]:
        remove_step(run.checkpoint_dir(step))
    if of_both and not config.keep_rollouts:
        for step in list_steps(run.rollouts):
            if step <= of_both[-1]:
                shutil.rmtree(run.rollout_dir(step), ignore_errors=True)


def drop_after(run: RunDir, step: int) -> None:
    """Remove what was made after `step`: versions first, so that no reader picks up one that is about to be removed."""
    for parent in (run.broadcast, run.checkpoints, run.rollouts):
        for later in [later for later in list_steps(parent) if later > step]:
            remove_step(parent / step_name(later))


def sweep(run: RunDir) -> None:
    """Remove what a killed trainer left half written."""
    saved = [run.checkpoint_dir(step) for step in list_steps(run.checkpoints)]
    for folder, pattern in [(run.broadcast, ".step_*.tmp"), *((each, ".trainer.*.tmp") for each in saved)]:
        for leftover in [] if folder.is_symlink() else folder.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def _fragments(run: RunDir, complete: Sequence[int]) -> list[int]:
    """Checkpoints without a marker that are older than a complete one: they will never be completed."""
    stable = set(list_steps(run.checkpoints, stable_only=True))
    return [step for step in list_steps(run.checkpoints) if complete and step < complete[-1] and step not in stable]


def _has_files(folder: Path) -> bool:
    """Whether something is in `folder` under its final name."""
    return (
        folder.is_dir()
        and not folder.is_symlink()
        and any(not entry.name.startswith(".") for entry in folder.iterdir())
    )
