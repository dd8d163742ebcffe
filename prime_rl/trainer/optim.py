"""One torch optimizer for each run: its own type, rate, moments, clipping. Nothing is shared between slots.

Gradients stay in the slots' leaf parameters, where backward puts them, until the run's batch is complete. The update
itself works on the run's own part of the slot as one vector (`flat`). Which class of optimizer a run gets is decided in
`optimizers`, its learning rate in `scheduler`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from prime_rl.configs.orchestrator import OptimConfig
from prime_rl.trainer.flat import FlatWeights, Moments
from prime_rl.trainer.optimizers import NEEDS_MATRICES, check_state, make_optimizer
from prime_rl.trainer.runs import MultiRunManager
from prime_rl.trainer.world import World


class PostCreationCallback(Protocol):
    """Called on all ranks with each new optimizer and its slot."""

    def __call__(self, optimizer: Optimizer, run_idx: int, /) -> None: ...


class RunWeights(Protocol):
    """What a run's optimizer works on: `vectors`, or `matrices` where it looks at shapes. `names` are the slot's."""

    @property
    def names(self) -> list[str]: ...
    @property
    def num_weights(self) -> int: ...
    @property
    def vectors(self) -> list[nn.Parameter]: ...
    @property
    def matrices(self) -> list[nn.Parameter]: ...

    def begin(self, world: World) -> float:
        """Give the optimizer weights and gradients, summed over ranks; returns the norm of these. A collective."""

    def scale_gradients(self, factor: float) -> None: ...

    def finish(self) -> None:
        """Put the updated weights into the slot."""

    def drop_gradients(self) -> None: ...

    def is_finite(self, world: World) -> bool:
        """Whether all updated weights are numbers; the same on all ranks."""

    def join_state(self, state: Moments, world: World) -> Moments:
        """An optimizer's state as one rank alone would have it."""

    def cut_state(self, state: Moments) -> Moments:
        """The reverse."""


@dataclass(frozen=True)
class _RunOptimizer:
    config: OptimConfig
    optimizer: Optimizer
    weights: RunWeights


class MultiLoRAOptimizer:
    """The optimizers of all slots; made and dropped with their runs.

    Attributes:
        optimizers: by slot; None where no run is.
    """

    def __init__(self, manager: MultiRunManager, world: World) -> None:
        self.optimizers: list[Optimizer | None] = [None] * manager.max_runs
        self._manager = manager
        self._world = world
        self._runs: dict[int, _RunOptimizer] = {}
        self._post_creation: list[PostCreationCallback] = []

    def register_post_creation_callback(self, callback: PostCreationCallback) -> None:
        """`callback` gets every optimizer that is made from now on, in the order of registration."""
        self._post_creation.append(callback)

    def creation_hook(self, run_idx: int, run_id: str) -> None:
        config, weights = self._manager.config[run_idx].optim, self._weights_of(run_idx)
        params = weights.matrices if config.type in NEEDS_MATRICES else weights.vectors
        optimizer = make_optimizer(config, params, self._manager.dtype_of(run_idx))
        self._runs[run_idx] = _RunOptimizer(config, optimizer, weights)
        self.optimizers[run_idx] = optimizer
        for callback in self._post_creation:
            callback(optimizer, run_idx)

    def deletion_hook(self, run_idx: int, run_id: str) -> None:
        self.optimizers[run_idx] = None
        run = self._runs.pop(run_idx, None)
        if run is not None:
            run.weights.drop_gradients()

    def lr(self, run_idx: int) -> float:
        return float(self._runs[run_idx].optimizer.param_groups[0]["lr"])

    def step(self) -> None:
        """Update every run that is ready from the gradients of all ranks. A collective."""
        for run_idx in self._manager.ready_to_update_idxs:
            self.step_run(run_idx, self.reduce_gradients(run_idx))

    def reduce_gradients(self, run_idx: int) -> float:
        """Sum the run's gradients over ranks and return their norm. A collective.

        A rank that had no row of the run adds zeros. The result is the same to the last bit on all ranks.
        """
        return self._runs[run_idx].weights.begin(self._world)

    def step_run(self, run_idx: int, grad_norm: float) -> None:
        """Clip to the run's own `max_norm`, update, drop the gradients."""
        run = self._runs[run_idx]
        limit = run.config.max_norm
        if 0 < limit < grad_norm:
            run.weights.scale_gradients(limit / grad_norm)
        run.optimizer.step()
        run.weights.finish()
        run.weights.drop_gradients()

    def is_finite(self, run_idx: int) -> bool:
        """Whether all weights of the run are finite after its update. A collective where they are sharded."""
        return self._runs[run_idx].weights.is_finite(self._world)

    def drop_gradients(self, run_idx: int) -> None:
        """Forget what was accumulated for the run."""
        self._runs[run_idx].weights.drop_gradients()

    def state_dict(self, run_idx: int) -> dict[str, Any]:
        """Moments of the run's optimizer, with the names they belong to. Tensors and plain values only.

        A collective where the weights are sharded; rank 0 alone has the whole then.
        """
        run = self._runs[run_idx]
        return {
            "type": run.config.type,
            "names": run.weights.names,
            "num_weights": run.weights.num_weights,
            "state": run.weights.join_state(run.optimizer.state_dict()["state"], self._world),
        }

    def load_state_dict(self, run_idx: int, saved: dict[str, Any]) -> None:
        """Take over saved moments; rates and constants stay those of the run's config. Raises ValueError."""
        run = self._runs[run_idx]
        if saved["type"] != run.config.type:
            raise ValueError(
                f"the checkpoint has the state of {saved['type']!r}, the config asks for optim.type = "
                f"{run.config.type!r}; change it back, or start over with ckpt.resume_step = 0"
            )
        if saved["names"] != run.weights.names:
            raise ValueError("the checkpoint has other target modules than the model")
        if saved["num_weights"] != run.weights.num_weights:
            raise ValueError(
                f"the checkpoint is of {saved['num_weights']} weights, the run has {run.weights.num_weights}"
            )
        groups = run.optimizer.state_dict()["param_groups"]
        state = run.weights.cut_state(saved["state"])
        check_state(run.config, run.optimizer.param_groups[0]["params"], state)
        run.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _weights_of(self, run_idx: int) -> RunWeights:
        return FlatWeights(self._manager.get_named_parameters_for_run(run_idx), self._manager.rank_of(run_idx))
