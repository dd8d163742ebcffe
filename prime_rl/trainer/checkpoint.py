"""A run at one moment, as copies on the CPU; saved as a checkpoint, and resumed from one.

Nothing in a snapshot changes or refers to the slot, so training goes on while another thread writes it. What has been
trained (the weights: an adapter, or the whole model of `whole_model`) is in each one; what else is needed to go on from
there (`state`) only where a checkpoint is due.

`checkpoints/step_N/trainer/` holds the weights (an adapter in PEFT format, or the whole model), the rest of the state
(optimizer, scheduler, random numbers) and the progress; the orchestrator's part is beside it; `STABLE` comes last.
Optimizers and schedulers describe themselves as dicts of dicts: tensors go into one file under the path of their keys,
and each leaves a reference in its place. Nothing depends on the number of ranks, and nothing here executes what it
reads: safetensors and JSON.

A run may start from an adapter (`[init]`), which `prl` has put into its `init/`; `begun_from` makes version 0 of it.
Old checkpoints are removed, and rollout files once a complete checkpoint of both trainer and orchestrator covers them
(never with `ckpt.keep_rollouts`). The marker goes first, so that half a folder never counts as complete; what a killed
process left half removed is removed at the next occasion.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import torch
from safetensors.torch import save
from torch import Tensor

from prime_rl.configs.base import LoRAConfig
from prime_rl.configs.orchestrator import CkptConfig, OrchestratorConfig
from prime_rl.contract.files import (
    UNDECODABLE,
    make_folder,
    mark_stable,
    put_away,
    read_file,
    remove,
    staged_dir,
    write_atomic,
)
from prime_rl.contract.layout import RunDir, list_steps, stable_marker, step_name
from prime_rl.contract.notes import pending_request
from prime_rl.contract.peft import has_adapter
from prime_rl.contract.status import NOT_FINITE
from prime_rl.lora.adapter_state import AdapterConfig, load_peft, load_tensors, mismatch, save_peft, shapes_of
from prime_rl.trainer.optim import largest_in
from prime_rl.trainer.runs import MultiRunManager, Progress, TrainerRun

logger = logging.getLogger(__name__)

# The names of the tensors, which the file of an adapter has beside the tensors themselves.
ADAPTER_HEAD_BYTES = 16 << 20
# No optimizer keeps more numbers of four bytes for a weight.
MOST_MOMENTS = 4
CHECKPOINT_VERSION = 2
STATE_FILE = "state.safetensors"
# Many times what a run's progress takes without its tensors: besides, and for each tensor that the run trains.
PROGRESS_BYTES, PROGRESS_BYTES_A_TENSOR = 256 << 10, 1 << 10
# The one key of a reference, and the mark of a key that was a number: optimizers count their parameters.
_TENSOR = "$tensor"
_NUMBER = "#"
# Present when the trainer's part of a checkpoint is complete.
PROGRESS_FILE = "progress.json"


class WeightsSnapshot(Protocol):
    """The weights that a run has trained."""

    def published(self) -> WeightsSnapshot:
        """The snapshot that inference gets of it."""

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
        """The adapter itself: inference gets what is saved."""
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
    """A run after an update, on the CPU. `state`: nested dicts of tensors and values; None: no checkpoint is due."""

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
        """True when the folder is still the run's own: not deleted, and not another one of the same name."""
        try:
            return self.run.path.stat().st_ino == self.inode
        except OSError as error:
            return error.errno == errno.EIO  # a disk that fails has not lost the folder


class Snapshots(ABC):
    """Takes them. For the thread that trains. `maps_files`: whether the files of a checkpoint may be mapped.

    Attributes:
        served: the type in which inference computes with the weights.
    """

    maps_files = False

    def __init__(self, manager: MultiRunManager, served: torch.dtype) -> None:
        self._manager = manager
        self.served = served

    @abstractmethod
    def collect(self, run: TrainerRun, *, with_state: bool) -> None:
        """All ranks, after an update: gather on rank 0 what is sharded. A collective."""

    @abstractmethod
    def weights(self, run: TrainerRun) -> WeightsSnapshot:
        """The weights of a run as they stand."""

    @abstractmethod
    def read(self, run: TrainerRun, folder: Path) -> dict[str, Tensor]:
        """The tensors that `save` wrote. ValueError or OSError when they are damaged or do not fit the run's config."""

    def begin(self, run: TrainerRun) -> None:
        """Put the adapter of the run's `init/` into its slot. ValueError or OSError when it cannot be."""
        raise ValueError("init.from: only a run with an adapter can start from one")

    def state(self, run: TrainerRun) -> dict[str, Any]:
        """Beside its adapter, what a run needs to continue with the same bits: moments, schedule, random numbers."""
        copied: dict[str, Any] = copy_to_cpu({**run.training.state_dict(), "generator": run.generator.get_state()})
        return copied

    def whole(self, run: TrainerRun) -> RunSnapshot:
        """All of a run, for a checkpoint."""
        return RunSnapshot.of(run, self.weights(run), self.state(run))

    def restore(self, run: TrainerRun, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Put what `whole` took back into a slot. Raises ValueError when it does not fit the run's config."""
        self._put(run, weights)
        run.training.load_state_dict(state)
        run.generator.set_state(state["generator"])

    def _put(self, run: TrainerRun, weights: dict[str, Tensor]) -> None:
        """Into the run's slot. ValueError when they do not fit, or are not finite where they are served."""
        limit = largest_in(run.dtype, self.served)
        for name, tensor in weights.items():
            most = float(torch.linalg.vector_norm(tensor.float(), math.inf))
            if not most <= limit:
                raise ValueError(f"its weights {NOT_FINITE}: {name} has {most:g}, must be at most {limit:g}")
        self._manager.load_state_dict_for_run(run.run_idx, weights)


class AdapterSnapshots(Snapshots):
    """Snapshots of adapters, which are whole on every rank."""

    def __init__(
        self, manager: MultiRunManager, base_model: str, lora: LoRAConfig, served: torch.dtype = torch.float32
    ) -> None:
        super().__init__(manager, served)
        self._base_model = base_model
        self._lora = lora

    def collect(self, run: TrainerRun, *, with_state: bool) -> None:
        """There is nothing to put together."""

    def weights(self, run: TrainerRun) -> AdapterSnapshot:
        """A copy of the adapter in the run's slot, at its own rank."""
        return AdapterSnapshot(
            self._manager.get_state_dict_for_run(run.run_idx),
            run.rank,
            self._manager.alpha_of(run.run_idx),
            self._lora.target_modules,
            self._base_model,
        )

    def read(self, run: TrainerRun, folder: Path) -> dict[str, Tensor]:
        """The adapter in `folder`. ValueError when it has another rank than the config, or is damaged; OSError."""
        own = self._manager.get_state_dict_for_run(run.run_idx).values()
        own_bytes = sum(tensor.numel() * tensor.element_size() for tensor in own)
        tensors, config = load_peft(folder, limit=own_bytes + ADAPTER_HEAD_BYTES, num=len(own))
        if config.rank != run.rank:
            raise ValueError(
                f"{folder} has rank {config.rank}, the config asks for model.lora.rank = {run.rank}; "
                "change it back, or start over with ckpt.resume_step = 0"
            )
        return tensors

    def begin(self, run: TrainerRun) -> None:
        """Put the adapter of the run's `init/` into its slot, scaled as the run's config asks.

        Raises ValueError or OSError when it cannot be.
        """
        fresh, idx = self._manager.get_state_dict_for_run(run.run_idx), run.run_idx
        limit = 4 * sum(tensor.numel() for tensor in fresh.values()) + ADAPTER_HEAD_BYTES
        tensors, config = load_peft(run.dir.init, limit=limit)
        scale = self._manager.scaling_factors[idx]
        self._put(run, begun_from(fresh, tensors, config, rank=run.rank, scale=scale))


def copy_to_cpu(value: Any) -> Any:
    """Nested dicts and lists with their own tensors."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copy_to_cpu(inner) for key, inner in value.items()}
    return [copy_to_cpu(inner) for inner in value] if isinstance(value, list) else value


class _Version(msgspec.Struct, frozen=True):
    """The part that every version of `progress.json` has."""

    version: int = 1


# What no run reaches is not written on: sums of it must stay numbers that every rank and reader takes.
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class SavedProgress(msgspec.Struct, frozen=True):
    """`progress.json`. `state` is the training state with a reference for each tensor of STATE_FILE."""

    step: Count
    total_tokens: Count
    total_samples: Count
    state: dict[str, Any]
    version: int = CHECKPOINT_VERSION


def is_due(config: OrchestratorConfig, step: int) -> bool:
    """True when the run's config asks for a checkpoint after `step` updates."""
    return step % config.ckpt.interval == 0 or step == config.max_steps


class CheckpointManager:
    """Checkpoints of all runs. Only rank 0 writes; all ranks load."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

    # Resume

    def admitted(self, run: TrainerRun) -> None:
        """Decide where the run starts (rank 0), and drop what an explicit `ckpt.resume_step` makes void."""
        complete = trainer_steps(run.dir)
        request = pending_request(run.dir, run.config.ckpt.resume_step)
        if request is None:
            step = complete[-1] if complete else 0
        else:
            step = request.resume_step
            if step and step not in complete:
                raise ValueError(
                    f"ckpt.resume_step = {step}: no complete checkpoint of that step; complete ones: {complete}"
                )
            drop_after(run.dir, step)
            write_atomic(run.dir.resumed, msgspec.json.encode(request))
        if step == 0 and run.config.init.from_ is not None and not has_adapter(run.dir.init):
            raise ValueError(
                f"init.from = {run.config.init.from_!r}, but {run.dir.init} has no adapter: "
                "add the run with prl runs add, which puts it there"
            )
        run.progress.step = step

    def load(self, run: TrainerRun) -> None:
        """Load the checkpoint of `progress.step`. ValueError or OSError when it is damaged or does not fit the config.

        At step 0 that is the adapter of its `init/`, if it has one.
        """
        step = run.progress.step
        if step == 0:
            if run.config.init.from_ is not None:
                self._begin(run)
            return
        folder = run.dir.trainer_checkpoint(step)
        saved, state = self._read_state(run, folder)
        weights = self._snapshots.read(run, folder)
        if saved.step != step:
            raise ValueError(f"{folder / PROGRESS_FILE} is of step {saved.step}, expected {step}")
        with _damaged(folder):
            self._snapshots.restore(run, weights, state)
        run.progress.total_tokens, run.progress.total_samples = saved.total_tokens, saved.total_samples
        logger.info("%s resumes from its checkpoint of step %d", run.run_id, step)

    def _begin(self, run: TrainerRun) -> None:
        folder = run.dir.init
        self._snapshots.begin(run)
        if os.path.lexists(folder / PROGRESS_FILE):
            with _damaged(folder):
                run.training.load_moments(self._read_state(run, folder)[1]["optimizer"])
        logger.info("%s starts from %s", run.run_id, run.config.init.from_)

    def _read_state(self, run: TrainerRun, folder: Path) -> tuple[SavedProgress, dict[str, Any]]:
        limit = MOST_MOMENTS * 4 * run.training.weights.num_weights + ADAPTER_HEAD_BYTES
        try:
            num = len(run.training.weights.names)
            progress = read_file(folder / PROGRESS_FILE, limit=PROGRESS_BYTES + num * PROGRESS_BYTES_A_TENSOR)
            version = msgspec.json.decode(progress, type=_Version).version
            if version != CHECKPOINT_VERSION:
                raise ValueError(
                    f"{folder} has checkpoint format {version}, this program reads {CHECKPOINT_VERSION}: resume with "
                    "the program that wrote it, or start over with ckpt.resume_step = 0"
                )
            saved = msgspec.json.decode(progress, type=SavedProgress)
            tensors = load_tensors(folder / STATE_FILE, limit=limit, mapped=self._snapshots.maps_files)
            state = join_tensors(saved.state, tensors)
        except UNDECODABLE as error:
            raise ValueError(f"{folder} is damaged: {' '.join(str(error).split())}") from error
        return saved, state

    # Save

    def save(self, snapshot: RunSnapshot) -> None:
        """Save a run, from any thread. Nothing to do at step 0, or when it is saved. Raises OSError."""
        run, step = snapshot.run, snapshot.progress.step
        if step == 0 or step in trainer_steps(run):
            return
        make_folder(run.checkpoints)
        make_folder(run.checkpoint_dir(step))
        with staged_dir(run.trainer_checkpoint(step)) as folder:
            plain, tensors = split_tensors(snapshot.state)
            snapshot.weights.save(folder)
            (folder / STATE_FILE).write_bytes(save(tensors))
            now = snapshot.progress
            saved = SavedProgress(now.step, now.total_tokens, now.total_samples, plain)
            (folder / PROGRESS_FILE).write_bytes(msgspec.json.encode(saved))
        mark_stable(run.checkpoint_dir(step))
        logger.info("%s: checkpoint of step %d is complete", run.run_id, step)


@contextlib.contextmanager
def _damaged(folder: Path) -> Iterator[None]:
    """Inside, a state that lacks something raises ValueError with the folder that it comes from."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder} is damaged: {type(error).__name__}: {error}") from error


# Nested training state as tensors by path and plain values, and back.


def split_tensors(value: Any, path: str = "") -> tuple[Any, dict[str, Tensor]]:
    """(`value` with references, in JSON types; the tensors by path)."""
    if isinstance(value, Tensor):
        return {_TENSOR: path}, {path: value.contiguous()}
    tensors: dict[str, Tensor] = {}
    if isinstance(value, dict):
        plain = {}
        for key, inner in value.items():
            name = f"{_NUMBER}{key}" if isinstance(key, int) else key
            plain[name], found = split_tensors(inner, f"{path}/{key}" if path else str(key))
            tensors |= found
        return plain, tensors
    if isinstance(value, list | tuple):
        parts = [split_tensors(inner, f"{path}/{at}") for at, inner in enumerate(value)]
        for _, found in parts:
            tensors |= found
        return [part for part, _ in parts], tensors
    if value is None or isinstance(value, bool | int | float | str):
        return value, tensors
    raise TypeError(f"{path}: a {type(value).__name__} cannot be saved")


def join_tensors(plain: Any, tensors: dict[str, Tensor]) -> Any:
    """The value that `split_tensors` took apart; ValueError when a tensor is missing."""
    if isinstance(plain, dict):
        if plain.keys() == {_TENSOR}:
            if plain[_TENSOR] not in tensors:
                raise ValueError(f"tensor {plain[_TENSOR]!r} not found")
            return tensors[plain[_TENSOR]]
        names = [int(name[len(_NUMBER) :]) if name.startswith(_NUMBER) else name for name in plain]
        return {name: join_tensors(inner, tensors) for name, inner in zip(names, plain.values(), strict=True)}
    return [join_tensors(inner, tensors) for inner in plain] if isinstance(plain, list) else plain


@torch.no_grad()
def begun_from(
    fresh: Mapping[str, Tensor], source: Mapping[str, Tensor], config: AdapterConfig, *, rank: int, scale: float
) -> dict[str, Tensor]:
    """`fresh` (the run's start values under PEFT names, of `rank`) with the adapter `source` put into it.

    `scale` is the run's alpha / rank: B takes up the difference to the source's. ValueError when it does not fit.
    """
    if config.rank > rank:
        raise ValueError(f"the adapter has rank {config.rank}, the run model.lora.rank = {rank}: must be at most that")
    if problem := _problem(fresh, source, config.rank):
        raise ValueError(f"the adapter does not fit the model: {problem}")
    factor = config.scaling / scale
    begun = dict(fresh)
    for name, tensor in source.items():
        whole = begun[name].float().clone()
        if _is_a(name):
            whole[: config.rank] = tensor.float()
        else:
            whole.zero_()[:, : config.rank] = tensor.float() * factor
        begun[name] = whole
    return begun


def _problem(fresh: Mapping[str, Tensor], source: Mapping[str, Tensor], rank: int) -> str | None:
    """The problem of `source`; None when each of its modules is in the model and whole."""
    adapted = {_module(name) for name in source}
    wanted = {
        name: (rank, whole.shape[1]) if _is_a(name) else (whole.shape[0], rank)
        for name, whole in fresh.items()
        if _module(name) in adapted
    }
    return mismatch(shapes_of(source), wanted) if source else "it has no tensors"


def _module(name: str) -> str:
    return name.replace(".lora_A.", ".lora_B.")


def _is_a(name: str) -> bool:
    return name.endswith(".lora_A.weight")


def remove_step(folder: Path) -> None:
    """Remove a step folder; its marker goes first. Of a link only the link itself."""
    with contextlib.suppress(OSError):
        if not folder.is_symlink():
            remove(stable_marker(folder))
        remove(folder)


def trainer_steps(run: RunDir) -> list[int]:
    """Steps of the complete checkpoints from which the trainer can resume, ascending."""
    steps = list_steps(run.checkpoints, stable_only=True)
    return [step for step in steps if os.path.exists(run.trainer_checkpoint(step) / PROGRESS_FILE)]


def steps_to_remove(config: CkptConfig, complete: Sequence[int], with_orchestrator: Sequence[int]) -> list[int]:
    """Complete checkpoints that may go.

    Not among the newest `keep_last`, no multiple of `keep_interval`, and not the newest one from which the orchestrator
    can go on too.
    """
    keep = set(sorted(complete)[-config.keep_last :])
    if config.keep_interval is not None:
        keep |= {step for step in complete if step % config.keep_interval == 0}
    if with_orchestrator:
        keep.add(max(with_orchestrator))
    return sorted(set(complete) - keep)


def prune(run: RunDir, config: CkptConfig) -> None:
    """Remove old checkpoints, and the rollout files that a checkpoint of both parts covers."""
    complete = trainer_steps(run)
    of_both = [step for step in complete if _has_files(run.orchestrator_checkpoint(step))]
    for step in [*steps_to_remove(config, complete, of_both), *_fragments(run, complete)]:
        remove_step(run.checkpoint_dir(step))
    if of_both and not config.keep_rollouts:
        for step in list_steps(run.rollouts):
            if step <= of_both[-1]:
                remove_step(run.rollout_dir(step))


def drop_after(run: RunDir, step: int) -> None:
    """Put away what was made after `step`: versions first, so that no reader picks up one whose batches are gone.

    `sweep` removes it: all runs wait for this, which takes no longer where there is much in a folder.
    """
    for parent in (run.broadcast, run.checkpoints, run.rollouts):
        for later in [later for later in list_steps(parent) if later > step]:
            put_away(parent / step_name(later))


def sweep(run: RunDir) -> None:
    """Remove what a killed trainer left half written, and what `drop_after` put away, as far as the disk lets us."""
    with contextlib.suppress(OSError):
        saved = [(run.checkpoint_dir(step), ".trainer.*.tmp") for step in list_steps(run.checkpoints)]
        dropped = [(parent, ".step_*.old") for parent in (run.broadcast, run.checkpoints, run.rollouts)]
        for folder, pattern in [(run.broadcast, ".step_*.tmp"), *saved, *dropped]:
            for leftover in [] if folder.is_symlink() else folder.glob(pattern):
                remove_step(leftover)


def _fragments(run: RunDir, complete: Sequence[int]) -> list[int]:
    """Checkpoints without a marker that are older than a complete one: they will never be completed."""
    stable = set(list_steps(run.checkpoints, stable_only=True))
    return [step for step in list_steps(run.checkpoints) if complete and step < complete[-1] and step not in stable]


def _has_files(folder: Path) -> bool:
    """True when something is in `folder` under its final name."""
    return (
        folder.is_dir()
        and not folder.is_symlink()
        and any(not entry.name.startswith(".") for entry in folder.iterdir())
    )
