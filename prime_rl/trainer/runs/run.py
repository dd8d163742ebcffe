"""One run in the trainer: everything that it has there is one object. What is gone with the object is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.layout import RunDir
from prime_rl.trainer.loss import LossSums
from prime_rl.trainer.optim import RunOptimizer
from prime_rl.trainer.runs.sync import ReadyRun, SlotState

# Why a run leaves that needs no more.
FINISHED = "it reached max_steps"


@dataclass
class Progress:
    """How far a run is. `step` counts updates done."""

    step: int = 0
    total_tokens: int = 0
    total_samples: int = 0


@dataclass(eq=False)
class TrainerRun:
    """A run from its admission until it leaves its slot. The adapter itself is in the layers, by `run_idx`.

    Attributes:
        run_idx: its slot.
        config: resolved: it has rank, alpha and seq_len.
        admission: numbers all admissions: a run that left and came back is another one.
        inode: of its folder as it was admitted: another folder of the same name is another run (rank 0).
        generator: the run's own random numbers, a part of its checkpoints.
        optimizer: weights, moments and schedule; null until all ranks create the run.
        ready: its whole batch went through: it is updated next.
        sums, pass_s: of the passes since its last update, on this rank.
        in_work: its batch of which rows wait or are in a pass (rank 0).
        published: what it did up to here is on disk and may be reported (rank 0).
        reported_step: up to which its metrics have a line (rank 0).
        gathered: of a whole model that is sharded over ranks, what was put together last.
        leaving: why it is to leave its slot (rank 0).
        waits_since: it leaves when the disk has taken what it made; seconds of the monotonic clock (rank 0).
    """

    run_idx: int
    dir: RunDir
    config: OrchestratorConfig
    admission: int
    inode: int = 0
    progress: Progress = field(default_factory=Progress)
    generator: torch.Generator = field(default_factory=torch.Generator)
    optimizer: RunOptimizer | None = None
    ready: bool = False
    sums: LossSums = field(default_factory=LossSums)
    pass_s: float = 0.0
    in_work: ReadyRun | None = None
    published: Progress | None = None
    reported_step: int = 0
    gathered: object = None
    leaving: str | None = None
    waits_since: float | None = None

    @property
    def run_id(self) -> str:
        return self.dir.run_id

    def state(self, scaling: float) -> SlotState:
        """What the other ranks are sent of it."""
        config, now = self.config.model_dump_json(exclude_unset=True), self.progress
        counts = now.step, now.total_tokens, now.total_samples
        return SlotState(self.run_idx, self.run_id, self.admission, config, *counts, self.ready, scaling)

    @property
    def training(self) -> RunOptimizer:
        """`optimizer` of a run that was created."""
        assert self.optimizer is not None, f"{self.run_id} was not created yet"
        return self.optimizer


T = TypeVar("T")


class BySlot(Generic[T]):
    """One attribute of the runs as a list by slot; that of a free slot means nothing."""

    def __init__(self, runs: list[TrainerRun | None], name: str, empty: Callable[[], T]) -> None:
        self._runs = runs
        self._name = name
        self._empty = empty

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, run_idx: int) -> T:
        run = self._runs[run_idx]
        value: T = self._empty() if run is None else getattr(run, self._name)
        return value

    def __setitem__(self, run_idx: int, value: T) -> None:
        if (run := self._runs[run_idx]) is not None:
            setattr(run, self._name, value)
