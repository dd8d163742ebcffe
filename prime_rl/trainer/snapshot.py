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
from prime_rl.trainer.runs import MultiRunManager, Progress, TrainerRun


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

    @classmethod
    def of(cls, run: TrainerRun, weights: WeightsSnapshot, state: dict[str, Any] | None) -> RunSnapshot:
        """The parts together, with the progress of this moment."""
        return cls(run.dir, run.inode, run.config, replace(run.progress), weights, state)

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

    def __init__(self, manager: MultiRunManager) -> None:
        self._manager = manager

    @abstractmethod
    def collect(self, run: TrainerRun, *, with_state: bool) -> None:
        """All ranks, after an update: gather on rank 0 what is sharded. A collective."""

    @abstractmethod
    def weights(self, run: TrainerRun) -> WeightsSnapshot:
        """The weights of a run as they stand."""

    @abstractmethod
    def read(self, run: TrainerRun, folder: Path) -> dict[str, Tensor]:
        """What the weights' `save` wrote. ValueError or OSError when it is damaged or does not fit the run's config."""

    def state(self, run: TrainerRun) -> dict[str, Any]:
        """What a run needs besides its adapter to go on to the last bit: moments, schedule, random numbers."""
        copied: dict[str, Any] = copy_to_cpu({**run.training.state_dict(), "generator": run.generator.get_state()})
        return copied

    def whole(self, run: TrainerRun) -> RunSnapshot:
        """All of a run, for a checkpoint."""
        return RunSnapshot.of(run, self.weights(run), self.state(run))

    def restore(self, run: TrainerRun, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Put what `whole` took back into a slot. Raises ValueError when it does not fit the run's config."""
        self._manager.load_state_dict_for_run(run.run_idx, weights)
        run.training.load_state_dict(state)
        run.generator.set_state(state["generator"])


class AdapterSnapshots(Snapshots):
    """Snapshots of adapters, which are whole on every rank."""

    def __init__(self, manager: MultiRunManager, base_model: str, lora: LoRAConfig) -> None:
        super().__init__(manager)
        self._base_model = base_model
        self._lora = lora

    def collect(self, run: TrainerRun, *, with_state: bool) -> None:
        """There is nothing to put together."""

    def weights(self, run: TrainerRun) -> AdapterSnapshot:
        return AdapterSnapshot(
            self._manager.get_state_dict_for_run(run.run_idx),
            self._manager.rank_of(run.run_idx),
            self._manager.alpha_of(run.run_idx),
            self._lora.target_modules,
            self._base_model,
        )

    def read(self, run: TrainerRun, folder: Path) -> dict[str, Tensor]:
        own_bytes = sum(
            t.numel() * t.element_size() for t in self._manager.get_state_dict_for_run(run.run_idx).values()
        )
        tensors, config = load_peft(folder, limit=own_bytes + ADAPTER_HEAD_BYTES)
        rank = self._manager.rank_of(run.run_idx)
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
