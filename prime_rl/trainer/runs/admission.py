"""Whether a run fits into this trainer, and what its config leaves to the trainer.

With the limits of a trainer's config the rules are those of `configs.validate`. Without (a manager that is used
on his own) the registered layers give the largest rank, and nothing else is checked.
"""

from __future__ import annotations

from dataclasses import dataclass

from prime_rl.configs.base import ConfigProblem
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.shared import LoRAConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.validate import TrainerLimits, check_against_trainer, resolve
from prime_rl.trainer.runs.adapters import SlotAdapters


@dataclass(frozen=True)
class AdmissionRules:
    """`limits` is None when there is no trainer's config to check against."""

    limits: TrainerLimits | None
    adapters: SlotAdapters

    def check(self, config: OrchestratorConfig) -> tuple[bool, str]:
        """A config validation hook: (fits, every problem)."""
        if self.limits is not None:
            problems = check_against_trainer(config, self.limits)
        else:
            problems = self._check_rank(config.model.lora.rank)
        return not problems, "; ".join(str(problem) for problem in problems)

    def resolve(self, config: OrchestratorConfig) -> OrchestratorConfig:
        """Fill in rank, alpha and seq_len where the run left them out."""
        return resolve(config, self.limits or self._limits_of_layers(config.model.name))

    def _check_rank(self, rank: int | None) -> list[ConfigProblem]:
        room = self.adapters.max_rank
        if rank is None or room is None or rank <= room:
            return []
        return [ConfigProblem("model.lora.rank", f"found {rank}: the registered layers hold at most {room}")]

    def _limits_of_layers(self, model: str) -> TrainerLimits:
        lora, seq_len = LoRAConfig(), TrainerConfig(max_concurrent_runs=1).seq_len
        return TrainerLimits(model, seq_len, self.adapters.max_rank or lora.rank, lora.alpha)
