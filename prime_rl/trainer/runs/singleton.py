"""The one manager of a process."""

from __future__ import annotations

from pathlib import Path

from prime_rl.configs.validate import TrainerLimits
from prime_rl.trainer.runs.manager import MultiRunManager
from prime_rl.trainer.runs.sync import Channel

_manager: MultiRunManager | None = None


def setup_multi_run_manager(
    output_dir: Path,
    max_runs: int,
    *,
    limits: TrainerLimits | None = None,
    channel: Channel | None = None,
    settle_s: float = 0.0,
) -> MultiRunManager:
    """Make the manager of this process; a second call replaces it."""
    global _manager
    _manager = MultiRunManager(output_dir, max_runs, limits=limits, channel=channel, settle_s=settle_s)
    return _manager


def get_multi_run_manager() -> MultiRunManager:
    """The manager of this process. Raises RuntimeError before `setup_multi_run_manager`."""
    if _manager is None:
        raise RuntimeError("no MultiRunManager yet: call setup_multi_run_manager first")
    return _manager
