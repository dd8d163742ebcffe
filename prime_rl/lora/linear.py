"""A frozen linear layer with a low-rank adapter for each slot, and the object that maps rows to slots.

Every adapter has its own leaf parameters, so gradients of different runs cannot mix and a slot that no row uses takes
part in nothing. `AdapterRouting.set_rows` sets the rows of each adapter once for all layers, before the model is
called.

The layer and the adapters of its rows are one differentiable operation (`grouped_lora`), out of autograd's hands
because of what it would add: a temporary for every product, a second sum into the output and into the gradient of the
inputs, and a multiplication by the scale as large as the activations. Here both low-rank products are added in place,
and the scale goes onto x A^T, which is K wide. A gated MLP is one operation too: it keeps its input alone, and backward
makes what lies between again, at two products of seven.

Dimensions: R rows (sequences), T tokens of a row, N tokens of all rows, I inputs, O outputs, W width of an MLP, K rank,
G groups (neighbouring tokens of one adapter), M tokens of a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, silu

# Major compute capabilities of the cards that have a kernel for `torch._grouped_mm`; others get a loop that waits.
HAVE_GROUPED_MM = (9, 10)


# What the CUDA context and the libraries of a process take of a GPU, beside torch's allocator.
CONTEXT_BYTES = 1 << 30


def take_share(share: float) -> float:
    """Keep torch's allocator, and what it does not count, within `share` of the present GPU; returns the free bytes."""
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(max(0.0, share - CONTEXT_BYTES / total))
    return min(float(free), share * total - CONTEXT_BYTES)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, which is on the host, on `device`. The host waits for no GPU: it copies from pinned memory only."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class TokenGroup:
    """Tokens `start` to `stop` use `adapter`, whose output is multiplied by `scale`."""

    adapter: int
    start: int
    stop: int
    scale: float

    @property
    def tokens(self) -> slice:
        """The group's tokens among all N."""
        return slice(self.start, self.stop)


class Plan(Protocol):
    """The way in which the low-rank products of the groups are computed; made once for all layers of a pass."""

    @property
    def adapters(self) -> list[int]:
        """The adapter of each group."""

    def tables(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Any:
        """A or B of each group as `project` and `add` take them, to be kept for many passes without gradients."""

    def project(self, x_NI: Tensor, A_GKI: Tensor) -> Tensor:
        """`h`, that is `scale * (x A^T)`, which backward needs too."""

    def add(self, out_NO: Tensor, h: Tensor, B_GOK: Tensor) -> None:
        """Add `h B^T` to `out_NO`, in place."""

    def differentiate(
        self, grad_NO: Tensor, grad_x_NI: Tensor | None, x_NI: Tensor, h: Tensor, A_GKI: Tensor, B_GOK: Tensor
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Add to `grad_x_NI`, in place, and return the gradients of each A and of each B, in float32 or wider."""


def make_plan(groups: Sequence[TokenGroup], num_tokens: int, *, one_kernel: bool = False) -> Plan:
    """Groups of one size that leave no token out go through batched products, others one by one.

    Args:
        one_kernel: the device has products of uneven groups in one kernel, so their number costs nothing. On a CPU the
            loop was measured to be the quickest, also quicker than padding the groups to one size.
    """
    size = groups[0].stop - groups[0].start
    is_whole = sum(group.stop - group.start for group in groups) == num_tokens
    if is_whole and len(groups) > 1:
        if all(group.stop - group.start == size for group in groups):
            return BatchedPlan(groups)
        if one_kernel:
            return GroupedPlan(groups)
    return LoopedPlan(groups)


@dataclass(frozen=True)
class Layer:
    """A frozen layer, weight `[O, I]`, and A `[K, I]` and B `[O, K]` of each group, in any floating type."""

    weight_OI: Tensor
    bias_O: Tensor | None
    A_G: Sequence[Tensor]
    B_G: Sequence[Tensor]
    tables: tuple[Any, Any] | None = None  # A and B of the groups, where they are kept

    @property
    def leaves(self) -> list[Tensor]:
        """A of each group, then B of each group: where backward adds gradients."""
        return [*self.A_G, *self.B_G]

    def kept(self, x_NI: Tensor, plan: Plan) -> _Kept:
        """The tables that backward needs."""
        A_GKI, B_GOK = self.tables or (stacked(part, x_NI.dtype) for part in (self.A_G, self.B_G))
        return _Kept(plan.project(x_NI, A_GKI), A_GKI, B_GOK)

    def run(self, x_NI: Tensor, plan: Plan, out_NO: Tensor | None = None) -> tuple[Tensor, _Kept]:
        """The output, in `out_NO` where that is given, and what backward needs."""
        if out_NO is None:
            out_NO = linear(x_NI, self.weight_OI, self.bias_O)
        else:
            torch.mm(x_NI, self.weight_OI.T, out=out_NO)
            if self.bias_O is not None:
                out_NO.add_(self.bias_O)
        kept = self.kept(x_NI, plan)
        plan.add(out_NO, kept.h, kept.B_GOK)
        return out_NO, kept


class _Kept(NamedTuple):
    h: Tensor
    A_GKI: Tensor
    B_GOK: Tensor


def stacked(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One table of all `parts`, in `dtype`."""
    return torch.stack(list(parts)).to(dtype)


def grouped_lora(x_NI: Tensor, layer: Layer, plan: Plan) -> Tensor:
    """`x W^T + bias`, and for the tokens of each group `+ scale * (x A^T) B^T`. Returns `[N, O]`.

    A and B are used in the type of `x_NI`. Backward adds their gradients to their own `.grad`; the frozen layer gets
    none. Without gradients (a server) the operation goes around autograd, whose bookkeeping was measured to take a
    tenth of a decode step.
    """
    if not torch.is_grad_enabled():
        return layer.run(x_NI, plan)[0]
    out_NO: Tensor = _GroupedLoRA.apply(x_NI, layer, plan, layer.A_G[0])  # type: ignore[no-untyped-call]
    return out_NO


class _GroupedLoRA(torch.autograd.Function):
    """A grouped product whose gradients are added to the leaves here.

    `anchor` is one of the leaves: autograd calls backward for it. The others are not handed to autograd, whose
    bookkeeping for the hundreds of small leaves of a pass was measured to take a twentieth of a short step.
    """

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, layer: Layer, plan: Plan, anchor: Tensor) -> Tensor:
        out_NO, kept = layer.run(x_NI, plan)
        ctx.plan, ctx.leaves = plan, layer.leaves
        ctx.save_for_backward(x_NI, layer.weight_OI, *kept)
        return out_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI, h, A_GKI, B_GOK = ctx.saved_tensors
        grad_x_NI = grad_NO @ weight_OI if ctx.needs_input_grad[0] else None
        _accumulate(ctx.leaves, ctx.plan.differentiate(grad_NO, grad_x_NI, x_NI, h, A_GKI, B_GOK))
        return grad_x_NI, None, None, None


def gated_mlp(
    x_NI: Tensor, gate: Layer, up: Layer, down: Layer, plan: Plan, *, keeps: bool, for_backward: bool = False
) -> Tensor:
    """`down(silu(gate(x)) * up(x))`, each layer with its adapters as in `grouped_lora`. Returns `[N, I]`.

    Args:
        keeps: keep what gate and up gave for backward, two tables of `[N, W]`, instead of making them again there.
        for_backward: the result is NaN, and only what backward needs is computed.
    """
    if not torch.is_grad_enabled():
        return _run_mlp(x_NI, gate, up, down, plan, keeps, for_backward)[0]
    out_NI: Tensor = _GatedMLP.apply(  # type: ignore[no-untyped-call]
        x_NI, gate, up, down, plan, keeps, for_backward, gate.A_G[0]
    )
    return out_NI


def _run_mlp(
    x_NI: Tensor, gate: Layer, up: Layer, down: Layer, plan: Plan, keeps: bool, for_backward: bool
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The output of `gated_mlp`, and what backward needs: two products or None, then the tables of each layer."""
    out_NI = x_NI.new_empty(len(x_NI), len(down.weight_OI))  # what stays is made before what goes: fewer holes
    gate_NW, of_gate = gate.run(x_NI, plan)
    up_NW, of_up = up.run(x_NI, plan)
    products = (gate_NW, up_NW) if keeps else (None, None)
    product_NW = silu(gate_NW, inplace=not keeps).mul_(up_NW)
    of_down = down.kept(product_NW, plan) if for_backward else down.run(product_NW, plan, out_NI)[1]
    if for_backward:
        out_NI.fill_(math.nan)
    return out_NI, (*products, *of_gate, *of_up, *of_down)


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        gate: Layer,
        up: Layer,
        down: Layer,
        plan: Plan,
        keeps: bool,
        for_backward: bool,
        anchor: Tensor,
    ) -> Tensor:
        out_NI, kept = _run_mlp(x_NI, gate, up, down, plan, keeps, for_backward)
        ctx.plan, ctx.layers = plan, (gate, up, down)
        weights = (each.weight_OI for each in (gate, up, down))
        ctx.save_for_backward(x_NI, *kept[:2], *weights, *kept[2:])
        return out_NI

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NI: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, gate_NW, up_NW, gate_WI, up_WI, down_IW, *kept = ctx.saved_tensors
        of_gate, of_up, of_down = kept[:3], kept[3:6], kept[6:]
        plan: Plan = ctx.plan
        gate, up, down = ctx.layers
        if gate_NW is None:
            gate_NW, up_NW = gate.run(x_NI, plan)[0], up.run(x_NI, plan)[0]
        product_NW = silu(gate_NW).mul_(up_NW)
        grad_NW = grad_NI @ down_IW
        _accumulate(down.leaves, plan.differentiate(grad_NI, grad_NW, product_NW, *of_down))
        # In the order and with the rounding of torch's own; what is needed no more is overwritten: memory that the
        # system must clear first costs more than the operation.
        grad_up_NW = torch.ops.aten.silu.out(gate_NW, out=product_NW).mul_(grad_NW)
        grad_NW.mul_(up_NW)
        grad_gate_NW = torch.ops.aten.silu_backward.grad_input(grad_NW, gate_NW, grad_input=grad_NW)
        del product_NW, grad_NW, gate_NW, up_NW
        grad_x_NI = grad_up_NW @ up_WI if ctx.needs_input_grad[0] else None
        _accumulate(up.leaves, plan.differentiate(grad_up_NW, grad_x_NI, x_NI, *of_up))
        del grad_up_NW
        rest_NI = grad_gate_NW @ gate_WI if grad_x_NI is not None else None
        _accumulate(gate.leaves, plan.differentiate(grad_gate_NW, rest_NI, x_NI, *of_gate))
        if grad_x_NI is not None:
            grad_x_NI.add_(rest_NI)
        return grad_x_NI, *[None] * 7


def _accumulate(leaves: Sequence[Tensor], grads: tuple[Sequence[Tensor], Sequence[Tensor]]) -> None:
    """Add to each leaf's `.grad`, those of A and then of B; in few launches, however many leaves there are."""
    old, new = [], []
    for leaf, grad in zip(leaves, [*grads[0], *grads[1]], strict=True):
        if leaf.grad is None:
            leaf.grad = grad
        else:
            old.append(leaf.grad)
            new.append(grad)
    if old:
        torch._foreach_add_(old, new)


class BatchedPlan:
    """All groups in one batched product each time. `h` is `[G, M, K]`."""

    def __init__(self, groups: Sequence[TokenGroup]) -> None:
        self.adapters = [group.adapter for group in groups]
        self._shape = len(groups), groups[0].stop - groups[0].start, -1
        self._scales_G11 = torch.tensor([group.scale for group in groups]).view(-1, 1, 1)

    def tables(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Any:
        """`Plan.tables`."""
        return stacked(parts, dtype)

    def project(self, x_NI: Tensor, A_GKI: Tensor) -> Tensor:
        """`scale * (x A^T)`, `[G, M, K]`."""
        return torch.bmm(x_NI.view(self._shape), A_GKI.mT).mul_(self._scales_like(x_NI))

    def add(self, out_NO: Tensor, h: Tensor, B_GOK: Tensor) -> None:
        """Add `h B^T` to `out_NO`, in place."""
        out_NO.view(self._shape).baddbmm_(h, B_GOK.mT)

    def differentiate(
        self, grad_NO: Tensor, grad_x_NI: Tensor | None, x_NI: Tensor, h: Tensor, A_GKI: Tensor, B_GOK: Tensor
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Add to `grad_x_NI`, in place, and return the gradients of each A and of each B."""
        grad_GMO = grad_NO.reshape(self._shape)
        grad_h_GMK = torch.bmm(grad_GMO, B_GOK).mul_(self._scales_like(x_NI))
        if grad_x_NI is not None:
            grad_x_NI.view(self._shape).baddbmm_(grad_h_GMK, A_GKI)
        grad_A_GKI = torch.bmm(grad_h_GMK.mT, x_NI.view(self._shape))
        return _unbind(grad_A_GKI), _unbind(torch.bmm(grad_GMO.mT, h))

    def _scales_like(self, x_NI: Tensor) -> Tensor:
        if self._scales_G11.device != x_NI.device:
            self._scales_G11 = sent(self._scales_G11, x_NI.device)
        return self._scales_G11


class LoopedPlan:
    """Each group separately. `h` is `[N, K]`."""

    def __init__(self, groups: Sequence[TokenGroup]) -> None:
        self.adapters = [group.adapter for group in groups]
        self._groups = groups

    def tables(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Any:
        """`Plan.tables`: the parts themselves, where they have the type."""
        return [part.detach().to(dtype) for part in parts]

    def project(self, x_NI: Tensor, A_GKI: Tensor) -> Tensor:
        """`scale * (x A^T)`, `[N, K]`; undefined for tokens that are in no group."""
        h_NK = x_NI.new_empty(len(x_NI), len(A_GKI[0]))
        for group, A_KI in zip(self._groups, A_GKI, strict=True):
            torch.mm(x_NI[group.tokens], A_KI.T, out=h_NK[group.tokens]).mul_(group.scale)
        return h_NK

    def add(self, out_NO: Tensor, h: Tensor, B_GOK: Tensor) -> None:
        """Add `h B^T` to the groups' tokens of `out_NO`, in place."""
        for group, B_OK in zip(self._groups, B_GOK, strict=True):
            out_NO[group.tokens].addmm_(h[group.tokens], B_OK.T)

    def differentiate(
        self, grad_NO: Tensor, grad_x_NI: Tensor | None, x_NI: Tensor, h: Tensor, A_GKI: Tensor, B_GOK: Tensor
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Add to the groups' tokens of `grad_x_NI`, in place, and return the gradients of each A and of each B."""
        grads_A, grads_B = [], []
        for group, A_KI, B_OK in zip(self._groups, A_GKI.unbind(), B_GOK.unbind(), strict=True):
            grad_MO = grad_NO[group.tokens]
            grad_h_MK = (grad_MO @ B_OK).mul_(group.scale)
            if grad_x_NI is not None:
                grad_x_NI[group.tokens].addmm_(grad_h_MK, A_KI)
            grads_A.append(_widened(grad_h_MK.T @ x_NI[group.tokens]))
            grads_B.append(_widened(grad_MO.T @ h[group.tokens]))
        return grads_A, grads_B


class GroupedPlan:
    """Groups of any size that follow each other without a gap, in one kernel each time. `h` is `[N, K]`.

    `torch._grouped_mm`: bfloat16 on a GPU, strides of a multiple of 16 bytes. No group is empty: one is made of rows.
    """

    def __init__(self, groups: Sequence[TokenGroup]) -> None:
        self.adapters = [group.adapter for group in groups]
        self._ends_G = torch.tensor([group.stop for group in groups], dtype=torch.int32)
        sizes_G = torch.tensor([group.stop - group.start for group in groups])
        scales_G = torch.tensor([group.scale for group in groups])
        self._scales_N1 = scales_G.repeat_interleave(sizes_G, output_size=groups[-1].stop)[:, None]

    def tables(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Any:
        """`Plan.tables`."""
        return stacked(parts, dtype)

    def project(self, x_NI: Tensor, A_GKI: Tensor) -> Tensor:
        """`scale * (x A^T)`, `[N, K]`."""
        if self._ends_G.device != x_NI.device:
            self._ends_G, self._scales_N1 = (sent(each, x_NI.device) for each in (self._ends_G, self._scales_N1))
        return torch._grouped_mm(x_NI, A_GKI.mT, offs=self._ends_G).mul_(self._scales_N1)

    def add(self, out_NO: Tensor, h: Tensor, B_GOK: Tensor) -> None:
        """Add `h B^T` to `out_NO`, in place."""
        out_NO.add_(torch._grouped_mm(h, B_GOK.mT, offs=self._ends_G))

    def differentiate(
        self, grad_NO: Tensor, grad_x_NI: Tensor | None, x_NI: Tensor, h: Tensor, A_GKI: Tensor, B_GOK: Tensor
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Add to `grad_x_NI`, in place, and return the gradients of each A and of each B."""
        grad_NO = grad_NO.contiguous()  # the kernels read rows
        grad_h_NK = torch._grouped_mm(grad_NO, B_GOK, offs=self._ends_G).mul_(self._scales_N1)
        if grad_x_NI is not None:
            grad_x_NI.add_(torch._grouped_mm(grad_h_NK, A_GKI, offs=self._ends_G))
        grad_A_GKI = torch._grouped_mm(grad_h_NK.T, x_NI, offs=self._ends_G)
        return _unbind(grad_A_GKI), _unbind(torch._grouped_mm(grad_NO.T, h, offs=self._ends_G))


def _widened(grad: Tensor) -> Tensor:
    """Gradients of many passes are summed: not in sixteen bits."""
    return grad.to(torch.promote_types(grad.dtype, torch.float32))


def _unbind(grad_G: Tensor) -> Sequence[Tensor]:
    return _widened(grad_G).unbind()


@dataclass(frozen=True)
class RowGroup:
    """Neighbours that use `adapter` (None: the base model alone): so many rows, or, in a packed row, tokens."""

    adapter: int | None
    size: int


class AdapterRouting:
    """The map from rows of the activations to adapters. One object for all layers of a model.

    Attributes:
        scaling: alpha / rank of each adapter.
        groups: equal neighbours merged, in the order of the rows. Sorted rows make few groups and quick passes.
        is_served: whether adapters change by `put_adapter` alone, so that a layer may keep what it made of them from
            one pass to the next, as long as the rows are the same.
    """

    def __init__(self, n_adapters: int, *, is_served: bool = False) -> None:
        self.is_served = is_served
        self.scaling: list[float] = [1.0] * n_adapters
        self.groups: list[RowGroup] = []
        self.num_rows = 0
        self._is_packed = False
        self._scaling: list[float] = []  # of the plan
        self._plan: tuple[int, Plan] | None = None

    def set_rows(self, adapter_idxs: Sequence[int | None], lengths: Sequence[int] | None = None) -> None:
        """Say for each row of dim 0 of the next activations which adapter it uses; None is the base model alone.

        With `lengths` the rows are packed: they lie end to end in one row, of so many tokens each.
        """
        for idx in adapter_idxs:
            if idx is not None and not 0 <= idx < len(self.scaling):
                raise ValueError(f"adapter {idx} does not exist: there are {len(self.scaling)}")
        sizes = lengths or [1] * len(adapter_idxs)
        pairs = zip(adapter_idxs, sizes, strict=True)
        before = self.groups, self._is_packed, self._scaling
        self.groups = [
            RowGroup(idx, sum(size for _, size in same)) for idx, same in groupby(pairs, lambda pair: pair[0])
        ]
        self._is_packed, self._scaling = lengths is not None, list(self.scaling)
        self.num_rows = 1 if self._is_packed else len(adapter_idxs)
        if before != (self.groups, self._is_packed, self._scaling):
            self._plan = None

    def plan(self, num_tokens: int, *, one_kernel: bool = False) -> Plan:
        """The plan of the products of rows of `num_tokens`: worked out once, and the same for all layers."""
        if self._plan is None or self._plan[0] != num_tokens:
            groups = self._token_groups(num_tokens)
            self._plan = num_tokens, make_plan(groups, self.num_rows * num_tokens, one_kernel=one_kernel)
        return self._plan[1]

    def _token_groups(self, num_tokens: int) -> list[TokenGroup]:
        groups, start = [], 0
        for group in self.groups:
            stop = start + group.size * (1 if self._is_packed else num_tokens)
            if group.adapter is not None:
                groups.append(TokenGroup(group.adapter, start, stop, self.scaling[group.adapter]))
            start = stop
        return groups


class LayerRegistry(Protocol):
    """A registry of adapted layers (the trainer's MultiRunManager)."""

    def register_module(self, name: str, module: MultiLoRALinear) -> None:
        """Take up an adapted layer under its name in the model."""


class MultiLoRALinear(nn.Module):
    """`base_layer(x) + scaling * (x A^T) B^T`, with A and B those of the row's adapter.

    Args:
        base_layer: the frozen layer, weights `[out, in]`.
        rank: the largest rank; an adapter of a lower one leaves the rest of A and B at zero, which adds nothing to
            outputs or gradients.
        n_adapters: slots.
        routing: shared by all layers of the model; default: the layer has its own.

    The adapters are kept in float32 and used in the type of the activations.
    """

    def __init__(
        self, base_layer: nn.Linear, rank: int, n_adapters: int, routing: AdapterRouting | None = None
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.rank = rank
        self.routing = routing or AdapterRouting(n_adapters)
        device = base_layer.weight.device
        num_in, num_out = base_layer.in_features, base_layer.out_features
        self.lora_A = nn.ParameterList([torch.zeros(rank, num_in, device=device) for _ in range(n_adapters)])
        self.lora_B = nn.ParameterList([torch.zeros(num_out, rank, device=device) for _ in range(n_adapters)])
        # The same parameters once more: looking one up in a ParameterList costs more than a small product.
        self._pairs = list(zip(self.lora_A, self.lora_B, strict=True))
        self._served: tuple[Plan, Layer] | None = None

    def register_with_runs(self, manager: LayerRegistry, name: str) -> None:
        """Enter this layer into `manager` under `name`, its name in the model."""
        manager.register_module(name, self)

    def parameters_of(self, idx: int) -> tuple[nn.Parameter, nn.Parameter]:
        """A `[rank, in]` and B `[out, rank]` of adapter `idx`."""
        return self._pairs[idx]

    def plan_for(self, x_RTI: Tensor) -> Plan | None:
        """The plan of the products of these activations; None where all rows are the base model's alone."""
        routing = self.routing
        if x_RTI.shape[0] != routing.num_rows:
            raise ValueError(f"activations have {x_RTI.shape[0]} rows, the routing was set for {routing.num_rows}")
        if all(group.adapter is None for group in routing.groups):
            return None
        # A rank that is no multiple of eight has strides that the kernel does not take.
        fits = x_RTI.is_cuda and x_RTI.dtype == torch.bfloat16 and self.rank % 8 == 0
        one_kernel = fits and torch.cuda.get_device_capability(x_RTI.device)[0] in HAVE_GROUPED_MM
        return routing.plan(x_RTI.shape[1], one_kernel=one_kernel)

    def with_adapters(self, plan: Plan) -> Layer:
        """The frozen layer with A and B of each group of `plan`."""
        if self._served is not None and self._served[0] is plan:
            return self._served[1]
        A_G, B_G = zip(*(self._pairs[idx] for idx in plan.adapters), strict=True)
        weight_OI, bias_O = self.base_layer.weight, self.base_layer.bias
        if not self.routing.is_served:
            return Layer(weight_OI, bias_O, A_G, B_G)
        self._served = None  # its tables go before there are others
        tables = plan.tables(A_G, weight_OI.dtype), plan.tables(B_G, weight_OI.dtype)
        self._served = plan, Layer(weight_OI, bias_O, A_G, B_G, tables)
        return self._served[1]

    def forget_tables(self) -> None:
        """Make what is kept of the adapters again: one of them has other weights now."""
        self._served = None

    def forward(self, x_RTI: Tensor) -> Tensor:
        """`[R, T, O]`."""
        plan = self.plan_for(x_RTI)
        if plan is None:
            base_RTO: Tensor = self.base_layer(x_RTI)
            return base_RTO
        out_NO = grouped_lora(x_RTI.reshape(-1, x_RTI.shape[-1]), self.with_adapters(plan), plan)
        return out_NO.reshape(*x_RTI.shape[:-1], -1)


def apply_lora_to_model(
    model: nn.Module, rank: int, n_adapters: int, target_modules: Sequence[str], routing: AdapterRouting
) -> dict[str, MultiLoRALinear]:
    """Replace the linear layers whose last name is in `target_modules`; returns them by their name in the base model.

    Every adapter starts at zero, so the model's outputs are unchanged. Raises ValueError when a target names no linear
    layer, or weights of experts: such a run would train less than it asked for.
    """
    if experts := _expert_weights(model).intersection(target_modules):
        raise ValueError(
            f"target_modules {sorted(experts)} name weights of experts: adapters are for linear layers only; "
            f"the model has {_linear_names(model)}"
        )
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in target_modules
    }
    missing = set(target_modules) - {name.rpartition(".")[2] for name in found}
    if missing:
        raise ValueError(
            f"target_modules {sorted(missing)} match no linear layer of the model; it has {_linear_names(model)}"
        )
    layers = {name: MultiLoRALinear(base, rank, n_adapters, routing) for name, base in found.items()}
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
    return layers


def _expert_weights(model: nn.Module) -> set[str]:
    """The names of a mixture's weights: each is one tensor `[expert, out, in]`, two of them may be in one."""
    stacked = {name.rpartition(".")[2] for name, weight in model.named_parameters() if weight.dim() == 3}
    return stacked | ({"gate_proj", "up_proj"} if "gate_up_proj" in stacked else set())


def _linear_names(model: nn.Module) -> list[str]:
    return sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
