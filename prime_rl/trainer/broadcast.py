"""Publish a run's new policy version as a PEFT folder that appears complete at once.

Versions that no orchestrator can ask for any more are removed. A version that was published once is not written again:
inference may serve it under a name that stands for exactly these weights.
"""

from __future__ import annotations

from pathlib import Path

from prime_rl.configs.shared import LoRAConfig
from prime_rl.contract.files import mark_stable, staged_dir
from prime_rl.contract.layout import list_steps, stable_marker
from prime_rl.lora.adapter_state import save_peft
from prime_rl.trainer.checkpoint import remove_step
from prime_rl.trainer.runs import MultiRunManager

# Beside the versions that rollouts may still lag behind by: the newest, the one that is being loaded, and one to spare.
NUM_SPARE_VERSIONS = 3


class FileSystemWeightBroadcast:
    """Writes `broadcast/step_N` of a run (rank 0)."""

    def __init__(self, manager: MultiRunManager, base_model: str, lora: LoRAConfig) -> None:
        self._manager = manager
        self._base_model = base_model
        self._lora = lora

    def creation_hook(self, run_idx: int, run_id: str) -> None:
        """Publish the version that a run resumes from when it is not there any more (rank 0)."""
        step = self._manager.progress[run_idx].step
        if step:
            self.broadcast_weights(run_idx)
        if step >= self._manager.config[run_idx].max_steps:
            self._manager.finish_run(run_idx)

    def broadcast_weights(self, run_idx: int) -> Path:
        """Publish the run's adapter as version `progress.step`; returns the folder. Raises OSError."""
        run, step = self._manager.run_dir(run_idx), self._manager.progress[run_idx].step
        target = run.broadcast_dir(step)
        if not stable_marker(target).exists():
            self._write(run_idx, target)
        keep = self._manager.config[run_idx].max_async_level + NUM_SPARE_VERSIONS
        for old in list_steps(run.broadcast)[:-keep]:
            remove_step(run.broadcast_dir(old))
        return target

    def _write(self, run_idx: int, target: Path) -> None:
        lora = self._manager.config[run_idx].model.lora
        assert lora.alpha is not None, "the config in a slot is resolved"
        target.parent.mkdir(exist_ok=True)
        with staged_dir(target) as folder:
            save_peft(
                folder,
                self._manager.get_state_dict_for_run(run_idx),
                rank=self._manager.rank_of(run_idx),
                alpha=lora.alpha,
                target_modules=self._lora.target_modules,
                base_model=self._base_model,
            )
            mark_stable(folder)
