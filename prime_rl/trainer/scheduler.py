"""The learning rate of each run over its own steps. The rate is a pure function of config and step, so resuming needs
nothing but the step.
"""

from __future__ import annotations

import math

from prime_rl.configs.orchestrator import SchedulerConfig
from prime_rl.trainer.optim import MultiLoRAOptimizer
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


class MultiLoRAScheduler:
    """Sets the learning rate of a run's optimizer from the run's progress."""

    def __init__(self, manager: MultiRunManager, optimizer: MultiLoRAOptimizer) -> None:
        self._manager = manager
        self._optimizer = optimizer

    def creation_hook(self, run_idx: int, run_id: str) -> None:
        self.set_rate(run_idx, self._manager.progress[run_idx].step)

    def step(self, run_idx: int) -> None:
        """After an update, before the run's progress counts it: the rate of the next update."""
        self.set_rate(run_idx, self._manager.progress[run_idx].step + 1)

    def set_rate(self, run_idx: int, step: int) -> None:
        config = self._manager.config[run_idx]
        self._optimizer.set_lr(run_idx, config.optim.lr * lr_factor(config.scheduler, config.max_steps, step))
