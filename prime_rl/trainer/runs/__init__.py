"""The runs of one trainer: slots, discovery, synchronization, hooks.

`setup_multi_run_manager` makes the one manager of a process and `get_multi_run_manager` returns it. Only entry files
call these; every other part is handed the manager. Older names of the same are in `compat`.
"""

from __future__ import annotations

from prime_rl.trainer.runs.compat import Runs, check_for_changes, get_runs, setup_runs, sync_runs
from prime_rl.trainer.runs.manager import MultiRunManager, get_multi_run_manager, setup_multi_run_manager
from prime_rl.trainer.runs.run import Progress, TrainerRun

__all__ = [
    "MultiRunManager",
    "Progress",
    "Runs",
    "TrainerRun",
    "check_for_changes",
    "get_multi_run_manager",
    "get_runs",
    "setup_multi_run_manager",
    "setup_runs",
    "sync_runs",
]
