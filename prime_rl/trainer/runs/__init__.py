"""The runs of one trainer: slots, discovery, synchronization, hooks.

`setup_multi_run_manager` makes the one manager of a process and `get_multi_run_manager` returns it. Only entry files
call these; every other part is handed the manager. `Runs`, `setup_runs` and `get_runs` are older names of the same, as
are `check_for_changes` and `sync_runs` for the two steps of a look.
"""

from __future__ import annotations

from pathlib import Path

from prime_rl.configs.validate import TrainerLimits
from prime_rl.trainer.runs.manager import MultiRunManager
from prime_rl.trainer.runs.slots import Progress
from prime_rl.trainer.runs.sync import Channel

__all__ = [
    "MultiRunManager",
    "Progress",
    "Runs",
    "check_for_changes",
    "get_multi_run_manager",
    "get_runs",
    "setup_multi_run_manager",
    "setup_runs",
    "sync_runs",
]

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


def check_for_changes() -> None:
    """`discover_runs` under its older name."""
    get_multi_run_manager().discover_runs()


def sync_runs() -> None:
    """`synchronize_state` under its older name."""
    get_multi_run_manager().synchronize_state()


Runs = MultiRunManager
setup_runs = setup_multi_run_manager
get_runs = get_multi_run_manager
