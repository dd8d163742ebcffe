"""One torch optimizer for each run: its own type, rate, moments, clipping. Nothing is shared between slots.

A run of a lower rank than the slots' uses the first rows of A and columns of B; the rest is zero and stays so. Its
optimizer works on views of that part, so its moments, its gradient norm and (for Muon) the shapes are those of its own
rank, and its state fits a trainer with larger slots.

Gradients stay in the slots' leaf parameters, where backward puts them, until the run's batch is complete. Which class
of optimizer a run gets is decided in `optimizers`, its learning rate in `scheduler`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prime_rl.configs.orchestrator import OptimConfig
from prime_rl.trainer.optimizers import make_optimizer
from prime_rl.trainer.runs import MultiRunManager
from prime_rl.trainer.world import World


class PostCreationCallback(Protocol):
    """Called on all ranks with each new optimizer and its slot."""

    def __call__(self, optimizer: Optimizer, run_idx: int, /) -> None: ...


@dataclass(frozen=True)
class _RunOptimizer:
    """`leaves` are the slot's parameters, `views` the run's own part of each, in the same order."""

    config: OptimConfig
    optimizer: Optimizer
    names: list[str]
    leaves: list[nn.Parameter]
    views: list[nn.Parameter]


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
        config, rank = self._manager.config[run_idx].optim, self._manager.rank_of(run_idx)
        named = self._manager.get_named_parameters_for_run(run_idx)
        views = [_view(name, leaf, rank) for name, leaf in named]
        optimizer = make_optimizer(config, views, self._manager.dtype_of(run_idx))
        self._runs[run_idx] = _RunOptimizer(
            config, optimizer, [name for name, _ in named], [leaf for _, leaf in named], views
        )
        self.optimizers[run_idx] = optimizer
        for callback in self._post_creation:
            callback(optimizer, run_idx)

    def deletion_hook(self, run_idx: int, run_id: str) -> None:
        self.optimizers[run_idx] = None
        run = self._runs.pop(run_idx, None)
        if run is not None:
            self._drop_gradients(run)

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
        run = self._runs[run_idx]
        parts = [
            (_cut(leaf.grad, view) if leaf.grad is not None else torch.zeros_like(view)) for leaf, view in _pairs(run)
        ]
        flat = self._world.sum(torch.cat([part.reshape(-1) for part in parts]))
        for view, values in zip(run.views, torch.split(flat, [view.numel() for view in run.views]), strict=True):
            view.grad = values.view(view.shape)
        return float(torch.linalg.vector_norm(flat))

    def step_run(self, run_idx: int, grad_norm: float) -> None:
        """Clip to the run's own `max_norm`, update, drop the gradients."""
        run = self._runs[run_idx]
        limit = run.config.max_norm
        if 0 < limit < grad_norm:
            for view in run.views:
                assert view.grad is not None
                view.grad.mul_(limit / grad_norm)
        run.optimizer.step()
        self._drop_gradients(run)

    def is_finite(self, run_idx: int) -> bool:
        """Whether all weights of the run are numbers."""
        return all(bool(torch.isfinite(view).all()) for view in self._runs[run_idx].views)

    def drop_gradients(self, run_idx: int) -> None:
        """Forget what was accumulated for the run."""
        self._drop_gradients(self._runs[run_idx])

    def state_dict(self, run_idx: int) -> dict[str, Any]:
        """Moments of the run's optimizer, with the names they belong to. Tensors and plain values only."""
        run = self._runs[run_idx]
        return {"type": run.config.type, "names": run.names, "state": run.optimizer.state_dict()["state"]}

    def load_state_dict(self, run_idx: int, saved: dict[str, Any]) -> None:
        """Take over saved moments; rates and constants stay those of the run's config. Raises ValueError."""
        run = self._runs[run_idx]
        if saved["type"] != run.config.type:
            raise ValueError(
                f"the checkpoint has the state of {saved['type']!r}, the config asks for optim.type = "
                f"{run.config.type!r}; change it back, or start anew with ckpt.resume_step = 0"
            )
        if saved["names"] != run.names:
            raise ValueError("the checkpoint is of a model with other target modules")
        groups = run.optimizer.state_dict()["param_groups"]
        run.optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})

    @staticmethod
    def _drop_gradients(run: _RunOptimizer) -> None:
        for leaf, view in _pairs(run):
            leaf.grad = view.grad = None


def _view(name: str, leaf: nn.Parameter, rank: int) -> nn.Parameter:
    """The run's own part of a slot's parameter, on the same memory."""
    return nn.Parameter(leaf.detach()[:rank] if name.endswith(".lora_A") else leaf.detach()[:, :rank])


def _cut(grad: Tensor, view: Tensor) -> Tensor:
    return grad[: view.shape[0], : view.shape[1]]


def _pairs(run: _RunOptimizer) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return list(zip(run.leaves, run.views, strict=True))
