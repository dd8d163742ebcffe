"""One run in the trainer: everything that it has there is one object. What is gone with the object is forgotten.

`Slots` holds the runs, and shows them under the names by which others ask for them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import torch

from prime_rl.configs.lifetime import LIVE_KEYS, with_live_keys
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract import audit
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import RunDir
from prime_rl.contract.resume import note_done
from prime_rl.trainer.loss import LossSums
from prime_rl.trainer.optim import RunOptimizer
from prime_rl.trainer.runs.discovery import Claim
from prime_rl.trainer.runs.sync import ReadyRun, SlotState

logger = logging.getLogger(__name__)

# Why a run leaves that needs no more.
FINISHED = "it reached max_steps"


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        step: updates done.
        total_tokens: of all batches that it was updated with, prompts included.
        total_samples: of the same batches.
    """

    step: int = 0
    total_tokens: int = 0
    total_samples: int = 0


@dataclass(eq=False)
class TrainerRun:
    """A run from its admission until it leaves its slot. The adapter itself is in the layers, by `run_idx`.

    Attributes:
        run_idx: its slot.
        dir: the paths in its folder.
        config: resolved: it has rank, alpha and seq_len.
        admission: numbers all admissions: a run that left and came back is another one.
        inode: of its folder as it was admitted: another folder of the same name is another run (rank 0).
        progress: how far it is.
        generator: the run's own random numbers, a part of its checkpoints.
        optimizer: weights, moments and schedule; null until all ranks create the run.
        ready: its whole batch went through: it is updated next.
        sums, pass_s: of the passes since its last update, on this rank.
        pass_tokens: its tokens in the pass that is next or under way, on all ranks (rank 0).
        used_s, used_tokens: the trainer's time and tokens since its last line of usage (rank 0).
        ratios: log-ratios of the kept rollouts of its batch, by their number, on this rank.
        in_work: its batch of which rows wait or are in a pass (rank 0).
        published: what it did up to here is on disk and may be reported (rank 0).
        reported_step: up to which its metrics have a line (rank 0).
        gathered: of a whole model that is sharded over ranks, what was put together last.
        landed_ns: the time of its config file as it was admitted (rank 0).
        parting: why it leaves at the look after the batch in work, before it takes another (rank 0).
        leaving: why it is to leave its slot (rank 0).
        saves: it leaves after a checkpoint of its last update (rank 0).
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
    pass_tokens: int = 0
    used_s: float = 0.0
    used_tokens: int = 0
    ratios: dict[int, list[float]] = field(default_factory=dict)
    in_work: ReadyRun | None = None
    published: Progress | None = None
    reported_step: int = 0
    gathered: object = None
    landed_ns: int = 0
    parting: str | None = None
    leaving: str | None = None
    saves: bool = False
    waits_since: float | None = None

    @property
    def run_id(self) -> str:
        """The name of its folder."""
        return self.dir.run_id

    @property
    def claim(self) -> Claim:
        """Its place in the order in which runs get slots."""
        return Claim(self.run_id, self.config.priority, self.landed_ns)

    def part(self, reason: str | None, *, saves: bool) -> None:
        """It is to leave for `reason`, null: it may stay. One that is saved trains on the batch in work first."""
        is_amid = saves and self.in_work is not None
        self.parting = reason if is_amid else None
        if reason is not None and not is_amid:
            self.leaving, self.saves = reason, saves

    def note_preempted(self) -> bool:
        """Write down why it leaves. False when the disk does not take that: it stays."""
        try:
            write_atomic(self.dir.preempted, f"{self.leaving}: it goes on when a slot is free")
        except OSError as error:
            logger.error("%s keeps its slot: %s", self.run_id, error)
            self.leaving, self.saves = None, False
            return False
        audit.note(self.dir, "trainer", "preempt", self.leaving or "")
        return True

    def take_live_keys(self, changed: OrchestratorConfig) -> None:
        """Of its changed config, what may change while it has its slot; it keeps the rest as it was admitted."""
        config = with_live_keys(self.config, changed)
        if config is self.config:
            logger.info("%s: orch.toml has changed; it keeps its admitted config while it is in its slot", self.run_id)
            return
        logger.info("%s: now has %s", self.run_id, {key: getattr(config, key) for key in LIVE_KEYS})
        if changed.ckpt.resume_step == self.config.ckpt.resume_step:
            with contextlib.suppress(OSError):  # then it goes back once more when it comes next
                note_done(self.dir, changed.ckpt.resume_step)
        self.config = config

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


class Slots:
    """The runs of a trainer by slot.

    Attributes:
        runs: the runs by slot; null where it is free.
        progress, ready_to_update: of each run, by slot. What rank 0 sets before `synchronize_state` reaches all ranks
            with it.
    """

    def __init__(self, max_runs: int) -> None:
        self.max_runs = max_runs
        self.runs: list[TrainerRun | None] = [None] * max_runs
        self.progress = BySlot(self.runs, "progress", Progress)
        self.ready_to_update = BySlot(self.runs, "ready", bool)

    @property
    def used(self) -> list[TrainerRun]:
        """The runs in slots, by slot."""
        return [run for run in self.runs if run is not None]

    @property
    def active(self) -> list[TrainerRun]:
        """The runs that go on: neither evicted nor finished, only not yet removed. By slot."""
        return [run for run in self.used if run.leaving is None]

    @property
    def ready(self) -> list[TrainerRun]:
        """The runs to update. By slot."""
        return [run for run in self.used if run.ready]

    def run(self, run_idx: int) -> TrainerRun:
        """The run in a slot. Raises KeyError for a free one."""
        run = self.runs[run_idx]
        if run is None:
            raise KeyError(f"no run in slot {run_idx}; slots in use: {sorted(self.used_idxs)}")
        return run

    def run_of(self, run_id: str) -> TrainerRun | None:
        """The run of that id, if it has a slot."""
        return next((run for run in self.used if run.run_id == run_id), None)

    @property
    def config(self) -> dict[int, OrchestratorConfig]:
        """By slot in use, resolved: it has rank, alpha and seq_len."""
        return {run.run_idx: run.config for run in self.used}

    @property
    def idx_2_id(self) -> dict[int, str]:
        """Run ids by slot in use."""
        return {run.run_idx: run.run_id for run in self.used}

    @property
    def id_2_idx(self) -> dict[str, int]:
        """Slots by run id."""
        return {run.run_id: run.run_idx for run in self.used}

    @property
    def used_idxs(self) -> set[int]:
        """The slots with a run."""
        return {run.run_idx for run in self.used}

    @property
    def unused_idxs(self) -> set[int]:
        """The free slots."""
        return {run_idx for run_idx, run in enumerate(self.runs) if run is None}

    @property
    def ready_to_update_idxs(self) -> list[int]:
        """The slots of the runs to update, ascending."""
        return [run.run_idx for run in self.ready]

    def get_run_dir(self, idx: int) -> Path:
        """The folder of the run in a slot. Raises KeyError for a free one."""
        return self.run(idx).dir.path

    def run_dirs(self) -> list[Path]:
        """The folders of the runs in slots, by slot."""
        return [run.dir.path for run in self.used]
