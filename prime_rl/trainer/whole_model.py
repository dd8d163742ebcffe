"""The one run that trains the whole model, where `model.lora` is unset: its weights and optimizer's state are sharded.

`WholeModel` has the weights of the manager's one slot, in the place of adapters; `ModelSnapshot` is what is published
and saved: a folder that `AutoModelForCausalLM.from_pretrained` loads. How parameters are cut over ranks is in
`model`.

Putting them together is a collective, which must not stand under a handler that belongs to one run. So all ranks do it
in `ModelSnapshots.collect`, right after an update; what rank 0 publishes and saves later, it takes from there.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from prime_rl.lora.adapter_state import load_tensors, mismatch, shapes_of
from prime_rl.trainer.checkpoint import Snapshots
from prime_rl.trainer.model import cut, join, part_here
from prime_rl.trainer.optim import Moments, RunWeights
from prime_rl.trainer.runs import MultiRunManager, TrainerRun
from prime_rl.trainer.world import World

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
# Further files of a model folder, beside weights and config. Which of them a tokenizer needs depends on its kind.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


class WholeModel:
    """The parameters of a model, of which each rank may hold a part. There is one slot.

    Names are those of the model's own weight files; a tied weight is there once.
    """

    def __init__(self, module: nn.Module, *, keeps: bool) -> None:
        self._keeps = keeps
        self._named = list(module.named_parameters())
        # A run that starts from step 0 gets the base model back; each rank keeps its own part in host memory.
        self._base = [part_here(parameter).detach().to("cpu", copy=True) for _, parameter in self._named]

    def named_parameters(self, run_idx: int) -> list[tuple[str, nn.Parameter]]:
        """All parameters of the model, in the order of the module; a sharded one holds this rank's part."""
        return list(self._named)

    @property
    def device(self) -> torch.device:
        """The device that this rank trains on."""
        return self._named[0][1].device

    def export(self, run: TrainerRun) -> dict[str, Tensor]:
        """The whole weights on rank 0 (`keeps`), {} on the others. A collective."""
        return self.gather(torch.float32, torch.device("cpu"))

    @torch.no_grad()
    def gather(self, dtype: torch.dtype, home: torch.device) -> dict[str, Tensor]:
        """The same as `dtype`, on `home`: the CPU, or the device itself. A collective.

        Rounded before it is sent: half of the bytes between the ranks and to the host.
        """
        tensors = {}
        for name, parameter in self._named:
            # What stays on the device must not be the parameter itself.
            whole = join(part_here(parameter).to(dtype, copy=home.type != "cpu"), parameter)
            if self._keeps:
                tensors[name] = to_host(whole) if home.type == "cpu" else whole
        finish_copies(self.device)
        return tensors

    @torch.no_grad()
    def load(self, run: TrainerRun, tensors: dict[str, Tensor]) -> None:
        """Take over whole weights, which every rank has. ValueError, and nothing changed, when they do not fit."""
        if problem := mismatch(shapes_of(tensors), shapes_of(dict(self._named))):
            raise ValueError(f"the weights do not fit the model: {problem}")
        for name, parameter in self._named:
            part_here(parameter).copy_(cut(tensors[name], parameter))
            parameter.grad = None

    @torch.no_grad()
    def reset(self, run: TrainerRun) -> None:
        """Put the base model's weights back; gradients are dropped. Nothing is drawn from the run's random numbers."""
        for (_, parameter), base in zip(self._named, self._base, strict=True):
            part_here(parameter).copy_(base)
            parameter.grad = None

    def scale_of(self, run: TrainerRun) -> float:
        """1.0: no adapter scales the weights."""
        return 1.0


def file_of(base: str, name: str) -> Path | None:
    """The file `name` of a model folder or hub name; None when it has none."""
    found = cached_file(
        base,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found) if found else None


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model folder without the weights. `dtype` is the type in which the weights are published."""

    config_json: str
    companions: tuple[Path, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, config: Any, dtype: torch.dtype) -> ModelFiles:
        """Those of the base model `name`, whose loaded `config` this is."""
        config = copy.deepcopy(config)
        config.dtype = dtype
        found = tuple(path for file in COMPANIONS if (path := file_of(name, file)) is not None)
        return cls(config.to_json_string(use_diff=True), found, dtype)

    def save(self, folder: Path) -> None:
        """Write them into `folder`, which must exist. Raises OSError."""
        (folder / CONFIG_FILE).write_text(self.config_json, encoding="utf-8")
        for path in self.companions:
            shutil.copyfile(path, folder / path.name)


@dataclass(frozen=True)
class ModelSnapshot:
    """The weights that were trained, in float32, and those for inference, in the type that the model computes in.

    `tensors` are {} where no checkpoint is due.
    """

    tensors: dict[str, Tensor]
    for_inference: dict[str, Tensor]
    files: ModelFiles

    def published(self) -> ModelSnapshot:
        """The snapshot that inference gets."""
        return replace(self, tensors=self.for_inference)

    def save(self, folder: Path) -> None:
        """Write a model folder into `folder`, which must exist. Raises OSError."""
        assert self.tensors, "no checkpoint was due"
        save_file(self.tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        self.files.save(folder)


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the CPU.

    One from a GPU is complete after `finish_copies`, and is in pinned memory: else the copies would wait for each
    other, and go through another buffer.
    """
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def finish_copies(device: torch.device) -> None:
    """Wait for what `to_host` began."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class ShardedWeights(RunWeights):
    """This rank's part of every parameter; nearly all optimizers look at one number at a time, so a part is enough.

    Attributes:
        vectors: on the memory of the parameters themselves: there is no second copy of the model.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        super().__init__(named)
        self.num_weights = sum(leaf.numel() for leaf in self.leaves)
        self.vectors = [nn.Parameter(part_here(leaf.detach())) for leaf in self.leaves]

    def begin(self, world: World) -> float:
        """FSDP summed the gradients over ranks in every pass. Returns the norm over all parts. A collective."""
        square = torch.zeros((), device=world.device)
        for leaf, part in zip(self.leaves, self.vectors, strict=True):
            part.grad = part_here(leaf.grad) if leaf.grad is not None else torch.zeros_like(part)
            square += part.grad.square().sum()
        return math.sqrt(float(world.sum(square)))

    def drop_gradients(self) -> None:
        """Set the gradients of parameters and parts to None."""
        for parameter in (*self.leaves, *self.vectors):
            parameter.grad = None

    def join_state(self, state: Moments, world: World) -> Moments:
        """On the CPU of rank 0, one tensor after another; the others keep nothing. A collective."""

        def to_rank_0(part: Tensor, leaf: Tensor) -> Tensor:
            whole = join(part, leaf)
            # A view of none of it would keep all of it.
            return whole.to("cpu") if world.is_master else whole.new_empty(0)

        return self._each(state, to_rank_0)

    def cut_state(self, state: Moments) -> Moments:
        """Every rank has all of `state` and takes its part."""
        return self._each(state, cut)

    def _each(self, state: Moments, turn: Callable[[Tensor, Tensor], Tensor]) -> Moments:
        """`turn` what has a number for each weight; counters stay."""
        return {
            at: {
                key: turn(value, self.leaves[at]) if isinstance(value, Tensor) and value.dim() else value
                for key, value in sorted(moments.items())
            }
            for at, moments in sorted(state.items())
        }


@dataclass(frozen=True)
class Gathered:
    """The run as `collect` put it together on rank 0; the other ranks have no tensors.

    `weights` and `state` only where a checkpoint is due; the former as they were trained.
    """

    step: int
    for_inference: dict[str, Tensor]
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] | None = None


class ModelSnapshots(Snapshots):
    """Snapshots of the whole model, from what `collect` put together last (`TrainerRun.gathered`).

    Args:
        home: where what is for inference is kept.
    """

    maps_files = True

    def __init__(self, manager: MultiRunManager, model: WholeModel, files: ModelFiles, home: torch.device) -> None:
        super().__init__(manager, files.dtype)
        self._model = model
        self._files = files
        self._home = home

    def collect(self, run: TrainerRun, *, with_state: bool) -> None:
        """Put the run together on rank 0 as it stands. A collective; nothing is done twice."""
        step = run.progress.step
        if not isinstance(run.gathered, Gathered) or run.gathered.step != step:
            run.gathered = None  # the old tensors go before the new ones come
            run.gathered = Gathered(step, self._model.gather(self._files.dtype, self._home))
        if with_state and run.gathered.state is None:
            # In float32 what inference gets is what was trained.
            same = self._files.dtype == torch.float32 and self._home.type == "cpu"
            weights = run.gathered.for_inference if same else self._manager.get_state_dict_for_run(run.run_idx)
            run.gathered = replace(run.gathered, weights=weights, state=super().state(run))

    def weights(self, run: TrainerRun) -> ModelSnapshot:
        """The weights that `collect` put together at this step; without tensors on other ranks than 0."""
        found = self._gathered(run)
        return ModelSnapshot(found.weights, found.for_inference, self._files)

    def state(self, run: TrainerRun) -> dict[str, Any]:
        """The state that `collect` put together at this step, for which it had `with_state`."""
        state = self._gathered(run).state
        assert state is not None, "collect comes first"
        return state

    def read(self, run: TrainerRun, folder: Path) -> dict[str, Tensor]:
        """The weights in `folder`. Raises OSError, or ValueError when the file is damaged."""
        return load_tensors(folder / WEIGHTS_FILE, mapped=True)

    def restore(self, run: TrainerRun, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Put weights and state into the slot, and keep on rank 0 what inference gets of them.

        Raises ValueError when they do not fit the model or the run's config.
        """
        super().restore(run, weights, state)
        held = weights if self._manager.is_master else {}
        for_inference = {name: tensor.to(self._home, self._files.dtype) for name, tensor in held.items()}
        run.gathered = Gathered(run.progress.step, for_inference)

    @staticmethod
    def _gathered(run: TrainerRun) -> Gathered:
        found = run.gathered
        assert isinstance(found, Gathered) and found.step == run.progress.step, "collect comes first"
        return found
