"""One torch optimizer for each run: its own type, rate, moments, clipping. Nothing is shared between slots.

A run of a lower rank than the slots' uses the first rows of A and columns of B; the rest is zero and stays so. Its
optimizer works on views of that part, so its moments, its gradient norm and (for Muon) the shapes are those of its own
rank, and its state fits a trainer with larger slots.

Gradients stay in the slots' leaf parameters, where backward puts them, until the run's batch is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from prime_rl.configs.orchestrator import OptimConfig
from prime_rl.trainer.muon import Muon
from prime_rl.trainer.runs import MultiRunManager
from prime_rl.trainer.world import World


@dataclass(frozen=True)
class _RunOptimizer:
    """`leaves` are the slot's parameters, `views` the run's own part of each, in the same order."""

    config: OptimConfig
    optimizer: Optimizer
    names: list[str]
    leaves: list[nn.Parameter]
    views: list[nn.Parameter]


class MultiLoRAOptimizer:
    """The optimizers of all slots; made and dropped with their runs."""

    def __init__(self, manager: MultiRunManager, world: World) -> None:
        self._manager = manager
        self._world = world
        self._runs: dict[int, _RunOptimizer] = {}

    def creation_hook(self, run_idx: int, run_id: str) -> None:
        config, rank = self._manager.config[run_idx].optim, self._manager.rank_of(run_idx)
        named = self._manager.get_named_parameters_for_run(run_idx)
        views = [_view(name, leaf, rank) for name, leaf in named]
        self._runs[run_idx] = _RunOptimizer(
            config, make_optimizer(config, views), [name for name, _ in named], [leaf for _, leaf in named], views
        )

    def deletion_hook(self, run_idx: int, run_id: str) -> None:
        run = self._runs.pop(run_idx, None)
        if run is not None:
            self._drop_gradients(run)

    def lr(self, run_idx: int) -> float:
        return float(self._runs[run_idx].optimizer.param_groups[0]["lr"])

    def set_lr(self, run_idx: int, lr: float) -> None:
        for group in self._runs[run_idx].optimizer.param_groups:
            group["lr"] = lr

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

    def step(self, run_idx: int, grad_norm: float) -> None:
        """Clip to the run's own `max_norm`, update, drop the gradients."""
        run = self._runs[run_idx]
        limit = run.config.max_norm
        if 0 < limit < grad_norm:
            for view in run.views:
                assert view.grad is not None
                view.grad.mul_(limit / grad_norm)
        if isinstance(run.optimizer, SGD):
            _decay(run.views, self.lr(run_idx) * run.config.weight_decay)
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


def make_optimizer(config: OptimConfig, params: list[nn.Parameter]) -> Optimizer:
    """The run's optimizer. Weight decay is decoupled in all three; for SGD, whose own is not, `step` does it."""
    momentum = config.betas[0]
    if config.type == "adamw":
        return AdamW(params, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
    if config.type == "muon":
        return Muon(params, lr=config.lr, momentum=momentum, weight_decay=config.weight_decay)
    return SGD(params, lr=config.lr, momentum=momentum)


def _view(name: str, leaf: nn.Parameter, rank: int) -> nn.Parameter:
    """The run's own part of a slot's parameter, on the same memory."""
    return nn.Parameter(leaf.detach()[:rank] if name.endswith(".lora_A") else leaf.detach()[:, :rank])


def _cut(grad: Tensor, view: Tensor) -> Tensor:
    return grad[: view.shape[0], : view.shape[1]]


def _pairs(run: _RunOptimizer) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return list(zip(run.leaves, run.views, strict=True))


@torch.no_grad()
def _decay(params: list[nn.Parameter], amount: float) -> None:
    if amount:
        for param in params:
            param.mul_(1.0 - amount)
