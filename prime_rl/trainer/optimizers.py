"""Which optimizer a run's config asks for, and what all of them have in common. Knows nothing of runs or slots.

Weight decay is decoupled in all types, and weights that are kept in bfloat16 are rounded after every update. Both hang
on the optimizer itself, so a call of its `step` does the whole update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from prime_rl.configs.orchestrator import OptimConfig
from prime_rl.trainer.muon import Muon

Params = list[nn.Parameter]

# Look at the shape of each weight matrix; the others take all weights of a run as one vector.
NEEDS_MATRICES = ("muon",)

# Decay is zero here: `make_optimizer` does it for all alike. With no decay Adam is AdamW.
_MAKERS: dict[str, Callable[[Params, OptimConfig], Optimizer]] = {
    "adamw": lambda params, config: AdamW(params, config.lr, config.betas, weight_decay=0.0, fused=True),
    "adam": lambda params, config: AdamW(params, config.lr, config.betas, weight_decay=0.0, fused=True),
    "nadam": lambda params, config: NAdam(params, config.lr, config.betas),
    "radam": lambda params, config: RAdam(params, config.lr, config.betas),
    "adamax": lambda params, config: Adamax(params, config.lr, config.betas),
    "rmsprop": lambda params, config: RMSprop(params, config.lr, config.betas[1]),
    "adagrad": lambda params, config: Adagrad(params, config.lr),
    "sgd": lambda params, config: SGD(params, config.lr, config.betas[0]),
    "muon": lambda params, config: Muon(params, lr=config.lr, momentum=config.betas[0]),
}


def make_optimizer(config: OptimConfig, params: Params, dtype: torch.dtype = torch.float32) -> Optimizer:
    """The optimizer of a run whose weights are kept in `dtype` (the parameters themselves are float32)."""
    optimizer = _MAKERS[config.type](params, config)
    if config.weight_decay:
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: _decay(opt, config.weight_decay))
    if dtype != torch.float32:
        optimizer.register_step_post_hook(lambda opt, args, kwargs: round_to(dtype, params))
    return optimizer


def check_state(config: OptimConfig, params: Params, state: dict[Any, Any]) -> None:
    """Raises ValueError when `state` (by number of the parameter) is not what this optimizer has after a step.

    torch takes any state and fails at the next update, where one run's damaged file would stop them all.
    """
    probe = nn.Parameter(torch.zeros(1, 1))
    probe.grad = torch.zeros(1, 1)
    optimizer = _MAKERS[config.type]([probe], config)
    optimizer.step()
    for number, values in state.items():
        if number not in range(len(params)) or not isinstance(values, dict):
            raise ValueError(f"the checkpoint has moments of parameter {number!r}, the run has {len(params)}")
        for key in optimizer.state[probe].keys() | values.keys():
            found, expected = _kind(values.get(key), 1), _kind(optimizer.state[probe].get(key), params[number].numel())
            if found != expected:
                raise ValueError(f"the checkpoint has {found} for {key!r} of parameter {number}, not {expected}")


def _kind(value: Any, num_weights: int) -> str:
    """Type and size of a part of a state; each number that is not a mere count belongs to `num_weights` weights."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return (
        f"{value.dtype} of {value.numel() * num_weights} numbers" if value.dim() else f"{value.dtype} of no dimension"
    )


@torch.no_grad()
def round_to(dtype: torch.dtype, params: Params) -> None:
    """Round values to what `dtype` can hold; the parameters keep their own type."""
    for param in params:
        param.copy_(param.to(dtype))


@torch.no_grad()
def _decay(optimizer: Optimizer, weight_decay: float) -> None:
    groups: list[dict[str, Any]] = optimizer.param_groups
    for group in groups:
        for param in group["params"]:
            param.mul_(1.0 - group["lr"] * weight_decay)
