"""What differs for the one run that trains the whole model: its optimizer's state and its snapshots are sharded.

Putting them together is a collective, which must not stand under a handler that belongs to one run. So all ranks do it
in `ModelSnapshots.collect`, right after an update; what rank 0 publishes and saves later, it takes from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prime_rl.trainer.checkpoint import Snapshots
from prime_rl.trainer.optim import Moments
from prime_rl.trainer.runs import MultiRunManager, TrainerRun
from prime_rl.trainer.sharding import cut, join, part_here
from prime_rl.trainer.whole_model import ModelFiles, ModelSnapshot, WholeModel, load_weights
from prime_rl.trainer.world import World


class ShardedWeights:
    """This rank's part of every parameter; nearly all optimizers look at one number at a time, so a part is enough.

    Attributes:
        vectors: on the memory of the parameters themselves: there is no second copy of the model.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.names = [name for name, _ in named]
        self.num_weights = sum(leaf.numel() for _, leaf in named)
        self.vectors = [nn.Parameter(part_here(leaf.detach())) for _, leaf in named]
        self.leaves = [leaf for _, leaf in named]

    @property
    def matrices(self) -> list[nn.Parameter]:
        """Not available: raises ValueError, since a rank has parts only."""
        raise ValueError("an optimizer that looks at whole matrices is for adapters")

    def begin(self, world: World) -> float:
        """FSDP summed the gradients over ranks in every pass. Returns the norm over all parts. A collective."""
        square = torch.zeros((), device=world.device)
        for leaf, part in zip(self.leaves, self.vectors, strict=True):
            part.grad = part_here(leaf.grad) if leaf.grad is not None else torch.zeros_like(part)
            square += part.grad.square().sum()
        return math.sqrt(float(world.sum(square)))

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of this rank's parts by `factor`, in place; after `begin`."""
        for part in self.vectors:
            assert part.grad is not None, "begin comes first"
            part.grad.mul_(factor)

    def finish(self) -> None:
        """The optimizer worked in place."""

    def drop_gradients(self) -> None:
        """Set the gradients of parameters and parts to None."""
        for parameter in (*self.leaves, *self.vectors):
            parameter.grad = None

    def are_within(self, limit: float) -> bool:
        """Whether all updated weights of this rank's parts are numbers from -`limit` to `limit`."""
        parts = (part.detach() for part in self.vectors if part.numel())
        return all(float(torch.linalg.vector_norm(part, math.inf)) <= limit for part in parts)

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
        return load_weights(folder)

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
