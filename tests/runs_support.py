"""A MultiRunManager over one small layer, and runs on disk for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from prime_rl.configs.validate import TrainerLimits
from prime_rl.contract.layout import RunDir
from prime_rl.lora.linear import AdapterRouting, MultiLoRALinear
from prime_rl.trainer.runs import MultiRunManager
from prime_rl.trainer.runs.sync import Channel
from tests.trainer_support import write_run

BASE = Path("some/model")


def manager_of(workspace: Path, max_runs: int = 2, channel: Channel | None = None) -> MultiRunManager:
    limits = TrainerLimits(str(BASE), max_seq_len=64, max_rank=16, alpha=32)
    manager = MultiRunManager(workspace, max_runs, limits=limits, channel=channel)
    layer = MultiLoRALinear(nn.Linear(6, 4), 16, max_runs, AdapterRouting(max_runs))
    layer.register_with_runs(manager, "layer")
    return manager


def look(manager: MultiRunManager) -> MultiRunManager:
    manager.discover_runs()
    manager.synchronize_state()
    return manager


def add(workspace: Path, run_id: str, landed: int = 0, **changes: Any) -> RunDir:
    run = write_run(workspace, run_id, BASE, **changes)
    if landed:
        os.utime(run.orch_toml, ns=(landed * 10**9, landed * 10**9))
    return run
