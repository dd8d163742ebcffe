"""Publish a run's new policy version as a folder that appears complete at once: PEFT for an adapter, or a whole model.

Versions that no orchestrator can ask for again are removed. A version that was published once is not written again:
inference may serve it under a name that identifies exactly these weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prime_rl.contract.files import make_folder, mark_stable, staged_dir
from prime_rl.contract.layout import RunDir, list_steps, stable_marker
from prime_rl.trainer.checkpoint import RunSnapshot, WeightsSnapshot
from prime_rl.trainer.retention import remove_step

# Beside the versions that rollouts may still lag behind by: the newest, the one that is being loaded, and one to spare.
NUM_SPARE_VERSIONS = 3


class FileSystemWeightBroadcast:
    """Writes `broadcast/step_N` of a run (rank 0)."""

    def publish(self, snapshot: RunSnapshot) -> Path:
        """Publish what was taken, from any thread; returns the folder. Raises OSError."""
        run, target = snapshot.run, snapshot.run.broadcast_dir(snapshot.progress.step)
        self._put(target, snapshot.weights)
        self._prune(run, keep=snapshot.config.max_async_level + NUM_SPARE_VERSIONS)
        return target

    def close(self) -> None:
        """Nothing is open."""

    def _put(self, target: Path, weights: WeightsSnapshot) -> None:
        if not stable_marker(target).exists():
            write_version(target, weights.published().save)

    @staticmethod
    def _prune(run: RunDir, keep: int) -> None:
        for old in list_steps(run.broadcast)[:-keep]:
            remove_step(run.broadcast_dir(old))


def write_version(target: Path, save: Callable[[Path], None]) -> None:
    """Let `save` fill a folder that then appears as `target`, complete at once. Raises OSError."""
    make_folder(target.parent)
    with staged_dir(target) as folder:
        save(folder)
        mark_stable(folder, sync=False)
