"""The learning rate of each run over its own steps: torch's LambdaLR over a pure function of config and step.

A run that resumes gets the rate that it would have had without a break: the function has no state. Constants (peak,
shape, `max_steps`) are always those of the run's present config, also when a saved state is loaded.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from prime_rl.configs.orchestrator import OrchestratorConfig, SchedulerConfig
from prime_rl.trainer.runs import MultiRunManager


def lr_factor(config: SchedulerConfig, max_steps: int, step: int) -> float:
    """Learning rate over its peak for the update after `step` updates.

    The warm-up rises from zero but the first update already moves: its factor is 1 / (warmup_steps + 1).
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.type == "constant":
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps))
    left = 1.0 - done if config.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left


def make_scheduler(optimizer: Optimizer, config: OrchestratorConfig, step: int) -> LRScheduler:
    """A scheduler that stands after `step` updates, and has set the rate of the next one."""
    for group in optimizer.param_groups:
        group["initial_lr"] = config.optim.lr
    factor = functools.partial(lr_factor, config.scheduler, config.max_steps)
    # torch counts "epochs" and makes one step at the start.
    return LambdaLR(optimizer, factor, last_epoch=step - 1)


class MultiLoRAScheduler:
    """The schedulers of all slots.

    Attributes:
        schedulers: by slot; None where no run is.
    """

    def __init__(self, manager: MultiRunManager) -> None:
        self.schedulers: list[LRScheduler | None] = [None] * manager.max_runs
        self._manager = manager

    def scheduler_creation_hook(self, optimizer: Optimizer, run_idx: int) -> None:
        """For `MultiLoRAOptimizer.register_post_creation_callback`. Starts where the run's progress stands."""
        self._make(optimizer, run_idx, self._manager.progress[run_idx].step)

    def deletion_hook(self, run_idx: int, run_id: str) -> None:
        self.schedulers[run_idx] = None

    def step(self) -> None:
        """After the optimizers stepped: the next rate of every run that is ready."""
        for run_idx in self._manager.ready_to_update_idxs:
            self.step_run(run_idx)

    def step_run(self, run_idx: int) -> None:
        self._of(run_idx).step()

    def state_dict(self, run_idx: int) -> dict[str, Any]:
        """Plain values: the steps that the schedule has counted."""
        return {"step": self._of(run_idx).last_epoch}

    def load_state_dict(self, run_idx: int, saved: dict[str, Any]) -> None:
        """Stand where `saved` stood, with the constants of the present config. Raises ValueError."""
        step = saved.get("step")
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"the saved scheduler is at step {step!r}")
        self._make(self._of(run_idx).optimizer, run_idx, step)

    def _make(self, optimizer: Optimizer, run_idx: int, step: int) -> None:
        self.schedulers[run_idx] = make_scheduler(optimizer, self._manager.config[run_idx], step)

    def _of(self, run_idx: int) -> LRScheduler:
        scheduler = self.schedulers[run_idx]
        assert scheduler is not None, f"slot {run_idx} has no scheduler"
        return scheduler
