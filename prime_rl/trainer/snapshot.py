"""A run at one moment, as copies on the CPU: taken between two updates, written to disk later by another thread.

Nothing in a snapshot changes or refers to the slot, so training goes on while it is written. What has been trained (the
weights: an adapter, or the whole model of `whole_run`) is in each one; what else is needed to go on from there
(`state`) only where a checkpoint is due. Where snapshots are written is up to `broadcast` and `checkpoint`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.shared import LoRAConfig
from prime_rl.contract.layout import RunDir
from prime_rl.lora.adapter_state import load_peft, save_peft
from prime_rl.trainer.optim import MultiLoRAOptimizer
from prime_rl.trainer.runs import MultiRunManager, Progress
from prime_rl.trainer.scheduler import MultiLoRAScheduler


class WeightsSnapshot(Protocol):
    """What a run has trained."""

    def published(self) -> WeightsSnapshot:
        """What inference gets of it."""

    def save(self, folder: Path) -> None:
        """Write its files into `folder`, which must exist. Raises OSError."""


@dataclass(frozen=True)
class AdapterSnapshot:
    """An adapter under PEFT names, at its own rank."""

    tensors: dict[str, Tensor]
    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    base_model: str

    def published(self) -> AdapterSnapshot:
        return self

    def save(self, folder: Path) -> None:
        """Write the files of the PEFT format into `folder`. Raises OSError."""
        save_peft(
            folder,
            self.tensors,
            rank=self.rank,
            alpha=self.alpha,
            target_modules=self.target_modules,
            base_model=self.base_model,
        )


@dataclass(frozen=True)
class RunSnapshot:
    """See the module. `state` is nested dicts of tensors and plain values, null when no checkpoint is due."""

    run: RunDir
    inode: int
    config: OrchestratorConfig
    progress: Progress
    weights: WeightsSnapshot
    state: dict[str, Any] | None

    def is_at_home(self) -> bool:
        """Whether the folder is still the run's own: not deleted, and not another one of the same name."""
        try:
            return self.run.path.stat().st_ino == self.inode
        except OSError:
            return False


# What a file of an adapter has besides its tensors: their names.
ADAPTER_HEAD_BYTES = 16 << 20


class Snapshots(ABC):
    """Takes them. For the thread that trains. `maps_files`: whether the files of a checkpoint may be mapped."""

    maps_files = False

    def __init__(self, manager: MultiRunManager, optimizer: MultiLoRAOptimizer, scheduler: MultiLoRAScheduler) -> None:
        self._manager = manager
        self._optimizer = optimizer
        self._scheduler = scheduler

    @abstractmethod
    def collect(self, run_idx: int, *, with_state: bool) -> None:
        """All ranks, after an update: gather on rank 0 what is sharded. A collective."""

    @abstractmethod
    def weights(self, run_idx: int) -> WeightsSnapshot:
        """The weights of a slot as they stand."""

    @abstractmethod
    def read(self, run_idx: int, folder: Path) -> dict[str, Tensor]:
        """What the weights' `save` wrote. ValueError or OSError when it is damaged or does not fit the run's config."""

    def state(self, run_idx: int) -> dict[str, Any]:
        """What a run needs besides its adapter to go on to the last bit: moments, schedule, random numbers."""
        live = {
            "optimizer": self._optimizer.state_dict(run_idx),
            "scheduler": self._scheduler.state_dict(run_idx),
            "generator": self._manager.generators[run_idx].get_state(),
        }
        copied: dict[str, Any] = copy_to_cpu(live)
        return copied

    def of(self, run_idx: int, weights: WeightsSnapshot, state: dict[str, Any] | None) -> RunSnapshot:
        """The parts together, with the progress of this moment."""
        manager = self._manager
        return RunSnapshot(
            manager.run_dir(run_idx),
            manager.inode_of(run_idx),
            manager.config[run_idx],
            replace(manager.progress[run_idx]),
            weights,
            state,
        )

    def whole(self, run_idx: int) -> RunSnapshot:
        """All of a run, for a checkpoint."""
        return self.of(run_idx, self.weights(run_idx), self.state(run_idx))

    def restore(self, run_idx: int, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Put what `whole` took back into a slot. Raises ValueError when it does not fit the run's config."""
        self._manager.load_state_dict_for_run(run_idx, weights)
        self._optimizer.load_state_dict(run_idx, state["optimizer"])
        self._scheduler.load_state_dict(run_idx, state["scheduler"])
        self._manager.generators[run_idx].set_state(state["generator"])


class AdapterSnapshots(Snapshots):
    """Snapshots of adapters, which are whole on every rank."""

    def __init__(
        self,
        manager: MultiRunManager,
        optimizer: MultiLoRAOptimizer,
        scheduler: MultiLoRAScheduler,
        base_model: str,
        lora: LoRAConfig,
    ) -> None:
        super().__init__(manager, optimizer, scheduler)
        self._base_model = base_model
        self._lora = lora

    def collect(self, run_idx: int, *, with_state: bool) -> None:
        """There is nothing to put together."""

    def weights(self, run_idx: int) -> AdapterSnapshot:
        return AdapterSnapshot(
            self._manager.get_state_dict_for_run(run_idx),
            self._manager.rank_of(run_idx),
            self._manager.alpha_of(run_idx),
            self._lora.target_modules,
            self._base_model,
        )

    def read(self, run_idx: int, folder: Path) -> dict[str, Tensor]:
        own_bytes = sum(t.numel() * t.element_size() for t in self._manager.get_state_dict_for_run(run_idx).values())
        tensors, config = load_peft(folder, limit=own_bytes + ADAPTER_HEAD_BYTES)
        rank = self._manager.rank_of(run_idx)
        if config.rank != rank:
            raise ValueError(
                f"{folder} has rank {config.rank}, the config asks for model.lora.rank = {rank}; "
                "change it back, or start over with ckpt.resume_step = 0"
            )
        return tensors


def copy_to_cpu(value: Any) -> Any:
    """Nested dicts and lists with their own tensors."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copy_to_cpu(inner) for key, inner in value.items()}
    return [copy_to_cpu(inner) for inner in value] if isinstance(value, list) else value
