"""One run in the trainer: everything that it has there is one object. What is gone with the object is forgotten.

`Slots` holds the runs, and shows them under the names by which others ask for them. What they train is in
`SlotAdapters`, the layers that registered themselves, or a whole model is in their place.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from prime_rl.configs.admitted import read_effect, write_admitted
from prime_rl.configs.base import LoRAConfig
from prime_rl.configs.orchestrator import LIVE_KEYS, OrchestratorConfig, with_live_keys
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.validate import TrainerLimits
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import RunDir
from prime_rl.contract.notes import audit_run
from prime_rl.contract.samples import Keeping
from prime_rl.lora.adapter_state import export_adapter, load_adapter, reset_adapter
from prime_rl.lora.linear import MultiLoRALinear
from prime_rl.trainer.loss import LossSums
from prime_rl.trainer.optim import RunOptimizer
from prime_rl.trainer.runs.discovery import Claim
from prime_rl.trainer.runs.sync import ReadyRun, SlotState
from prime_rl.utils.text import error_text

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        step: updates done.
        total_tokens: of all batches that it was updated with, prompts included.
        total_samples: of the same batches.
    """

    step: int = 0
    total_tokens: int = 0
    total_samples: int = 0


class Leaving(enum.Enum):
    """The way in which a run is to leave its slot."""

    NO = "it keeps its slot"
    AFTER_BATCH = "the batch in work is trained first, and it takes no other; then it is saved and leaves"
    SAVED = "it leaves after a checkpoint of its last update"
    FINISHED = "it reached max_steps"
    AT_ONCE = "nothing more of it is written"


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
        pass_positions: computed for it in the pass that is next or under way, on all ranks (rank 0).
        used_s, used_tokens, used_positions: the trainer's time, the tokens it was updated with and the positions that
            were computed for it, since its last line of usage (rank 0).
        ratios: log-ratios of the kept rollouts of its batch, by their number, on this rank.
        in_work: its batch of which rows wait or are in a pass (rank 0).
        published: what it did up to here is on disk and may be reported (rank 0).
        reported_step: up to which its metrics have a line (rank 0).
        gathered: of a whole model that is sharded over ranks, what was put together last.
        landed_ns: when it was added (rank 0).
        leaving: how it is to leave its slot (rank 0).
        reason: why it leaves (rank 0).
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
    pass_positions: int = 0
    used_s: float = 0.0
    used_tokens: int = 0
    used_positions: int = 0
    ratios: dict[int, list[float]] = field(default_factory=dict)
    in_work: ReadyRun | None = None
    published: Progress | None = None
    reported_step: int = 0
    gathered: object = None
    landed_ns: int = 0
    leaving: Leaving = Leaving.NO
    reason: str = ""
    waits_since: float | None = None

    @property
    def run_id(self) -> str:
        """The name of its folder."""
        return self.dir.run_id

    @property
    def claim(self) -> Claim:
        """Its place in the order in which runs get slots."""
        return Claim(self.run_id, self.config.priority, self.landed_ns)

    @property
    def rank(self) -> int:
        """Its own rank, at most that of the layers."""
        assert self.config.model.lora.rank is not None, "the config in a slot is resolved"
        return self.config.model.lora.rank

    @property
    def alpha(self) -> float:
        """The alpha of its config."""
        assert self.config.model.lora.alpha is not None, "the config in a slot is resolved"
        return self.config.model.lora.alpha

    @property
    def dtype(self) -> torch.dtype:
        """The type that its weights are rounded to, and published in; in memory all are float32."""
        return torch.bfloat16 if self.config.model.lora.dtype == "bfloat16" else torch.float32

    @property
    def keeping(self) -> Keeping:
        """The rule by which people get to read some rollouts of its batches."""
        return Keeping(self.config.samples.per_step, self.config.rollouts_per_example)

    @property
    def is_leaving(self) -> bool:
        """True when it trains no more, and only has not left its slot yet."""
        return self.leaving not in (Leaving.NO, Leaving.AFTER_BATCH)

    def leave(self, how: Leaving, reason: str = "") -> None:
        """It is to leave its slot, or to keep it after all; one that is saved trains on the batch in work first."""
        is_amid = how is Leaving.SAVED and self.in_work is not None
        self.leaving, self.reason = Leaving.AFTER_BATCH if is_amid else how, reason

    def note_preempted(self) -> bool:
        """Write down why it leaves. False when the disk does not take that: it stays."""
        try:
            write_atomic(self.dir.preempted, f"{self.reason}: it goes on when a slot is free")
        except OSError as error:
            logger.error("%s keeps its slot: %s", self.run_id, error)
            self.leave(Leaving.NO)
            return False
        audit_run(self.dir, "trainer", "preempt", self.reason)
        return True

    def take_live_keys(self, changed: OrchestratorConfig) -> None:
        """Of its changed config, what may change while it has its slot; it keeps the rest as it was admitted."""
        config = with_live_keys(self.config, changed)
        if config is self.config:
            logger.info("%s: orch.toml has changed; it keeps its admitted config while it is in its slot", self.run_id)
            return
        logger.info("%s: now has %s", self.run_id, {key: getattr(config, key) for key in LIVE_KEYS})
        self.config = config
        try:
            write_admitted(self.dir, read_effect(self.dir), self.progress.step)
        except Exception as error:  # the boundary of a run, whose files may hold anything; its next admission writes it
            logger.warning("%s: cannot write %s: %s", self.run_id, self.dir.admitted, error_text(error))

    def state(self, scaling: float) -> SlotState:
        """The state that the other ranks are sent."""
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
        return [run for run in self.used if not run.is_leaving]

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


class SlotWeights(Protocol):
    """The weights that the runs train, by slot."""

    def named_parameters(self, run_idx: int) -> list[tuple[str, nn.Parameter]]:
        """The leaves that gradients collect in."""

    def export(self, run: TrainerRun) -> dict[str, Tensor]:
        """The tensors that the run publishes, as copies on the CPU."""

    def load(self, run: TrainerRun, tensors: dict[str, Tensor]) -> None:
        """The reverse of `export`; ValueError, and nothing changed, when a name or a shape does not fit."""

    def reset(self, run: TrainerRun) -> None:
        """Start values, of the run's random numbers; gradients are dropped."""

    def scale_of(self, run: TrainerRun) -> float:
        """The factor of the run's weights in the model."""


class SlotAdapters:
    """The adapted layers of one model.

    Attributes:
        layers: by their name in the base model.
        scaling: by slot. The layers read this very list, so what is set here is what they use.
    """

    def __init__(self, max_runs: int) -> None:
        self.layers: dict[str, MultiLoRALinear] = {}
        self.scaling = [1.0] * max_runs

    def limits_for(self, config: OrchestratorConfig) -> TrainerLimits:
        """The limits of the layers, where there is no trainer's config: any model, and ranks that they hold."""
        max_rank = min((layer.rank for layer in self.layers.values()), default=None)
        rank = max_rank or config.model.lora.rank or LoRAConfig().rank
        seq_len = config.seq_len or TrainerConfig(max_concurrent_runs=1).seq_len
        return TrainerLimits(config.model.name, seq_len, rank, LoRAConfig().alpha)

    def register(self, name: str, layer: MultiLoRALinear) -> None:
        """Take up `layer`, which reads the slots' scaling from then on.

        Raises ValueError when it does not have one adapter for each slot.
        """
        if len(layer.lora_A) != len(self.scaling):
            raise ValueError(
                f"layer {name} has n_adapters = {len(layer.lora_A)}, the manager {len(self.scaling)} slots"
            )
        self.layers[name] = layer
        layer.routing.scaling = self.scaling

    def named_parameters(self, run_idx: int) -> list[tuple[str, nn.Parameter]]:
        """A and B of each layer, at the trainer's rank, as NAME.lora_A and NAME.lora_B."""
        named = []
        for name, layer in self.layers.items():
            lora_A, lora_B = layer.parameters_of(run_idx)
            named += [(f"{name}.lora_A", lora_A), (f"{name}.lora_B", lora_B)]
        return named

    def export(self, run: TrainerRun) -> dict[str, Tensor]:
        """PEFT names, the run's own rank and type; copies on the CPU."""
        tensors = export_adapter(self.layers, run.run_idx, run.rank)
        return {name: tensor.to(run.dtype) for name, tensor in tensors.items()}

    def load(self, run: TrainerRun, tensors: dict[str, Tensor]) -> None:
        """The reverse of `export`; ValueError, and nothing changed, when a name or a shape does not fit."""
        rounded = {name: tensor.to(run.dtype) for name, tensor in tensors.items()}
        load_adapter(self.layers, run.run_idx, rounded, run.rank)

    def reset(self, run: TrainerRun) -> None:
        """Start values, of the run's random numbers; gradients are dropped."""
        reset_adapter(self.layers, run.run_idx, run.generator, run.rank, run.dtype)

    def scale_of(self, run: TrainerRun) -> float:
        """alpha / rank of the run's config."""
        return run.alpha / run.rank
