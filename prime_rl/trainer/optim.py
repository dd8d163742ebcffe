"""The optimizer of a run: its own type, rate, moments, schedule and clipping. Nothing is shared between runs.

Gradients are collected in the slot's leaf parameters until the run's batch is complete. The update itself works on
`RunWeights`: for an adapter the run's own part of its slot as one vector (`FlatWeights`), which lends the leaves its
memory.

Weight decay is decoupled in all types, and weights that are kept in bfloat16 are rounded after every update. Both hang
on the torch optimizer itself, so a call of its `step` does the whole update. The rate is a pure function of config and
step: a run that resumes gets the rate that it would have had without a break, with the constants of its present config.

Dimensions: P numbers of the run's own part of its slot, in the order of its parameters.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from prime_rl.configs.orchestrator import OptimConfig, OrchestratorConfig, SchedulerConfig
from prime_rl.trainer.world import World
from prime_rl.utils.runtime import is_out_of_memory
from prime_rl.utils.text import one_line

Params = list[nn.Parameter]
# An optimizer's state: by number of the parameter, its own names and values.
Moments = dict[int, dict[str, Any]]

# A problem of a step.
NO_MEMORY = "its optimizer does not fit into the memory that is left"
RAISED = "its optimizer raised"

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

# Five steps of X <- aX + b(XX')X + c(XX')^2 X bring every singular value near one; the factors are the published ones.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_NUM_STEPS = 5
_EPS = 1e-7


class RunWeights(ABC):
    """The weights that a run's optimizer works on: `vectors`, or `matrices` where it looks at shapes.

    Attributes:
        names: of the slot's parameters; a saved state must have the same ones.
        leaves: the slot's parameters, whose `grad` collects the gradients.
        vectors: what most optimizers update; the gradients are there after `begin`.
        num_weights: how many numbers the optimizer updates, on all ranks together.
    """

    vectors: list[nn.Parameter]
    num_weights: int

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.names = [name for name, _ in named]
        self.leaves = [leaf for _, leaf in named]

    @property
    def matrices(self) -> list[nn.Parameter]:
        """The same as `vectors`, each in the shape of its parameter. Raises ValueError where only parts are here."""
        raise ValueError("an optimizer that looks at whole matrices is for adapters")

    @abstractmethod
    def begin(self, world: World) -> float:
        """Give the optimizer weights and gradients, summed over ranks; returns the norm of these. A collective."""

    def keep_gradients(self) -> None:  # noqa: B027 (the leaves may be their place)
        """Move what a pass left in the leaves to where the optimizer takes it: nothing is held twice until then."""

    def finish(self) -> None:  # noqa: B027 (the optimizer may have worked in place)
        """Put the updated weights into the slot."""

    def drop_gradients(self) -> None:
        """Forget what was accumulated in the slot."""
        for leaf in self.leaves:
            leaf.grad = None

    def are_within(self, limit: float) -> bool:
        """True when all updated weights that are on this rank are numbers from -`limit` to `limit`."""
        # The largest is NaN as soon as one of them is.
        vectors = (vector.detach() for vector in self.vectors if vector.numel())
        return all(float(torch.linalg.vector_norm(vector, math.inf)) <= limit for vector in vectors)

    def join_state(self, state: Moments, world: World) -> Moments:
        """An optimizer's state as one rank alone would have it: `state` itself where every rank has all of it."""
        return state

    def cut_state(self, state: Moments) -> Moments:
        """The reverse of `join_state`."""
        return state


class RunOptimizer:
    """Optimizer and schedule of one run, for its `weights`, which are kept in `dtype`; it stands after `step` updates.

    Args:
        served: the type in which inference computes with the weights.

    Attributes:
        weights: as given.
        optimizer, scheduler: torch's own.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        weights: RunWeights,
        dtype: torch.dtype,
        world: World,
        step: int = 0,
        served: torch.dtype = torch.float32,
    ) -> None:
        self._config = config
        self.weights = weights
        self._world = world
        self._limit = largest_in(dtype, served)
        params = weights.matrices if config.optim.type in NEEDS_MATRICES else weights.vectors
        self.optimizer = make_optimizer(config.optim, params, dtype)
        self.scheduler = make_scheduler(self.optimizer, config, step)

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return float(self.optimizer.param_groups[0]["lr"])

    def reduce_gradients(self) -> float:
        """Sum the run's gradients over ranks and return their norm. A collective.

        A rank that had no row of the run adds zeros. The result is the same to the last bit on all ranks.
        """
        return self.weights.begin(self._world)

    def step(self, grad_norm: float) -> str | None:
        """Clip to the run's own `max_norm`, update, drop the gradients. The rate stays until `next_rate`.

        Returns what is wrong after it, on any rank: weights that are not finite, also in the type in which they are
        served, NO_MEMORY, or RAISED with what it raised here. A collective.
        """
        raised, is_held = "", True
        try:
            self._update(grad_norm)
        except torch.AcceleratorError:
            raise  # of the device, so of all runs
        except Exception as error:
            is_held = "without overflow" not in str(error)  # else float32 does not hold the rate
            if is_held:
                raised = NO_MEMORY if is_out_of_memory(error) else one_line(f"{RAISED} {type(error).__name__}: {error}")
        self.weights.drop_gradients()
        are_good = is_held and self.weights.are_within(self._limit)
        found = [raised == NO_MEMORY, bool(raised), not are_good]
        no_memory, any_raised, any_bad = self._world.sum(torch.tensor(found, dtype=torch.float32)).tolist()
        if any_raised >= 1:
            return NO_MEMORY if no_memory >= 1 else raised or f"{RAISED} on another rank"
        return "the weights after it" if any_bad >= 1 else None

    def _update(self, grad_norm: float) -> None:
        limit = self._config.optim.max_norm
        if 0 < limit < grad_norm:
            for vector in self.weights.vectors:
                assert vector.grad is not None, "begin comes first"
                vector.grad.mul_(limit / grad_norm)
        self.optimizer.step()
        self.weights.finish()

    def next_rate(self) -> None:
        """The learning rate of the next update."""
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Moments with the names they belong to, and the steps that the schedule counted. Tensors and plain values.

        A collective where the weights are sharded; rank 0 alone has the whole then.
        """
        moments = {
            "type": self._config.optim.type,
            "names": self.weights.names,
            "num_weights": self.weights.num_weights,
            "state": self.weights.join_state(self.optimizer.state_dict()["state"], self._world),
        }
        return {"optimizer": moments, "scheduler": {"step": self.scheduler.last_epoch}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over saved moments and steps; rates and constants stay those of the run's config. Raises ValueError."""
        self.load_moments(saved["optimizer"])
        step = saved["scheduler"].get("step")
        if not isinstance(step, int) or not 0 <= step < MAX_COUNT:
            raise ValueError(f"the saved scheduler is at step {step!r}")
        self.scheduler = make_scheduler(self.optimizer, self._config, step)

    def load_moments(self, saved: dict[str, Any]) -> None:
        """Take over the moments alone: the schedule stays where it is. Raises ValueError when they do not fit."""
        config, weights = self._config.optim, self.weights
        if saved["type"] != config.type:
            raise ValueError(
                f"the checkpoint has the state of {saved['type']!r}, the config asks for optim.type = "
                f"{config.type!r}; change it back, or start over with ckpt.resume_step = 0"
            )
        if saved["names"] != weights.names:
            raise ValueError("the checkpoint has other target modules than the model")
        if saved["num_weights"] != weights.num_weights:
            raise ValueError(f"the checkpoint is of {saved['num_weights']} weights, the run has {weights.num_weights}")
        groups = self.optimizer.state_dict()["param_groups"]
        state = weights.cut_state(saved["state"])
        check_state(config, self.optimizer.param_groups[0]["params"], state)
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


# Of updates: beyond it a float counts no further.
MAX_COUNT = 2**53


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
            value, own = values.get(key), params[number]
            found, expected = _kind(value, 1), _kind(optimizer.state[probe].get(key), own.numel())
            if found != expected:
                raise ValueError(f"the checkpoint has {found} for {key!r} of parameter {number}, not {expected}")
            if isinstance(value, torch.Tensor):  # of the weights' shape, or a count
                is_sound = value.shape == own.shape if value.dim() else 0 <= float(value) < MAX_COUNT
                if not is_sound:
                    raise ValueError(f"the checkpoint has a {key!r} of parameter {number} that no update leaves")


def _kind(value: Any, num_weights: int) -> str:
    """Type and size of a part of a state; each number that is not a mere count belongs to `num_weights` weights."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return (
        f"{value.dtype} of {value.numel() * num_weights} numbers" if value.dim() else f"{value.dtype} of no dimension"
    )


def largest_in(one: torch.dtype, other: torch.dtype) -> float:
    """The largest number that is finite in both types."""
    return min(torch.finfo(one).max, torch.finfo(other).max)


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


def lr_factor(config: SchedulerConfig, max_steps: int, step: int) -> float:
    """Learning rate over its peak for the update after `step` updates.

    The warm-up rises from zero but the first update already moves: its factor is 1 / (warmup_steps + 1).
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.type == "constant":
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps))
    left = 1.0 - done if config.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left


def make_scheduler(optimizer: Optimizer, config: OrchestratorConfig, step: int) -> LRScheduler:
    """A scheduler that stands after `step` updates, and has set the rate of the next one."""
    for group in optimizer.param_groups:
        group["initial_lr"] = config.optim.lr
    factor = functools.partial(lr_factor, config.scheduler, config.max_steps)
    # torch counts "epochs" and makes one step at the start.
    return LambdaLR(optimizer, factor, last_epoch=step - 1)


class FlatWeights(RunWeights):
    """`named` are the slot's parameters, A `[K, in]` under a name that ends in `.lora_A`, B `[out, K]` in `.lora_B`.

    All ranks have the same.

    Attributes:
        values_P: what the optimizer updates, with its gradient; `vectors` is the list of it.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], rank: int) -> None:
        super().__init__(named)
        self._own = [_own(name, leaf.detach(), rank) for name, leaf in named]
        self._rank = rank
        self.values_P = nn.Parameter(self._own[0].new_zeros(sum(own.numel() for own in self._own)))
        self.vectors = [self.values_P]
        self.num_weights = self.values_P.numel()
        self._gradients_P = torch.zeros_like(self.values_P)
        # Views: what is done to the vectors is done to them.
        self._values = self._parts(self.values_P.detach())
        self._gradients = self._parts(self._gradients_P)
        self._matrices = [nn.Parameter(values) for values in self._values]
        for matrix, gradients in zip(self._matrices, self._gradients, strict=True):
            matrix.grad = gradients
        self.values_P.grad = self._gradients_P
        moved = [self._moved_in(leaf, values) for leaf, values in zip(self.leaves, self._values, strict=True)]
        self._moved, self._apart = ([at for at, is_in in enumerate(moved) if is_in is kind] for kind in (True, False))

    @property
    def matrices(self) -> list[nn.Parameter]:
        """Views of `values_P` and its gradient by parameter."""
        return self._matrices

    @torch.no_grad()
    def begin(self, world: World) -> float:
        """Take the weights from the slot, and give the optimizer the sum of all ranks' gradients; returns its norm.

        A rank that had no row of the run adds zeros. A collective.
        """
        self._copy_apart(self._values, self._own)
        self.keep_gradients()
        if idle := [part for leaf, part in zip(self.leaves, self._gradients, strict=True) if leaf.grad is None]:
            torch._foreach_zero_(idle)
        grads = {at: leaf.grad for at in self._apart if (leaf := self.leaves[at]).grad is not None}
        if grads:
            own = [_own(self.names[at], grad, self._rank) for at, grad in grads.items()]
            torch._foreach_copy_([self._gradients[at] for at in grads], own)
        return float(torch.linalg.vector_norm(world.sum(self._gradients_P)))

    @torch.no_grad()
    def keep_gradients(self) -> None:
        """Leaves that are all the run's own have their gradients in the vector from then on."""
        parts, grads = [], []
        for leaf, part in ((self.leaves[at], self._gradients[at]) for at in self._moved):
            if leaf.grad is not None and leaf.grad is not part:
                parts.append(part)
                grads.append(leaf.grad)
                leaf.grad = part
        if grads:
            torch._foreach_copy_(parts, grads)

    @torch.no_grad()
    def finish(self) -> None:
        """Put the updated weights into the slot."""
        self._copy_apart(self._own, self._values)

    @staticmethod
    @torch.no_grad()
    def _moved_in(leaf: nn.Parameter, values: Tensor) -> bool:
        """True when the slot's parameter is all the run's own; it is then in the vector and never copied again."""
        if leaf.shape == values.shape:
            values.copy_(leaf)
            leaf.data = values
        return leaf.shape == values.shape

    def _copy_apart(self, to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
        if self._apart:
            torch._foreach_copy_([to[at] for at in self._apart], [source[at] for at in self._apart])

    def _parts(self, vector_P: Tensor) -> list[Tensor]:
        parts = torch.split(vector_P, [own.numel() for own in self._own])
        return [part.view(own.shape) for part, own in zip(parts, self._own, strict=True)]


def _own(name: str, tensor: Tensor, rank: int) -> Tensor:
    return tensor[:rank] if name.endswith(".lora_A") else tensor[:, :rank]


class Muon(Optimizer):
    """Momentum, then the nearest orthogonal matrix instead of the gradient (K. Jordan, 2024). Takes matrices.

    Nesterov momentum; the rate grows with sqrt(rows / columns) of a tall matrix. torch's own Muon rounds to bfloat16 on
    the way. Gradients that differ in their last bit, as they do when a batch was split otherwise, then lead to updates
    that differ by a thousandth, so neighbours would change a run's result. Here all is in float32, which adapters of a
    few rows can afford.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every matrix that has a gradient. Takes no `closure`."""
        assert closure is None, "a run's loss is not evaluated again"
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return None

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, momentum, lr = self.state[param], group["momentum"], group["lr"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        running = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        direction = orthogonalized(grad.lerp(running, momentum))
        param.sub_(direction, alpha=lr * math.sqrt(max(1.0, param.shape[0] / param.shape[1])))


def orthogonalized(matrix: Tensor) -> Tensor:
    """Nearly the orthogonal matrix that is nearest to `matrix`; zero stays zero."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if is_tall else matrix
    x = x / (torch.linalg.matrix_norm(x) + _EPS)
    for _ in range(_NUM_STEPS):
        gram = x @ x.T
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.T if is_tall else x
