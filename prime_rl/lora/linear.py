"""A frozen linear layer with a low-rank adapter for each slot, and the object that maps rows to slots.

Every adapter has its own leaf parameters, so gradients of different runs cannot mix and a slot that no row uses takes
part in nothing. `AdapterRouting.set_rows` sets the rows of each adapter once for all layers, before the model is
called.

Layers that read the same input, one or more, and the adapters of its rows are one differentiable operation
(`grouped_lora`), of few launches, which a GPU waits for where passes are short. It is out of autograd's hands because
of what that would add: a temporary for every product, a second sum into the output and into the gradient of the inputs,
and a multiplication by the scale as large as the activations. Here both low-rank products are added in place, and the
scale goes onto x A^T, which is K wide. A gated MLP is one operation too: it keeps its input alone, and backward
makes what lies between again, at two products of seven.

Dimensions: R rows (sequences), T tokens of a row, N tokens of all rows, I inputs, O outputs, W width of an MLP, K rank,
G groups (neighbouring tokens of one adapter), M tokens of a group, L layers that read the same input.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
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


class Tables(NamedTuple):
    """A and B of the groups as the products of a plan take them: A of all layers together, B of each."""

    A: Sequence[Tensor]
    B: Sequence[Tensor]


class Plan(Protocol):
    """The way in which the low-rank products of the groups are computed; made once for all layers of a pass.

    A call is for L layers that read the same input. Of their leaves A are in the order of the groups, of each group
    those of its layers; B in the order of the layers, of each layer those of the groups.
    """

    @property
    def adapters(self) -> list[int]:
        """The adapter of each group."""

    def tables(self, leaves: Sequence[Tables], dtype: torch.dtype) -> list[Tables]:
        """The leaves, those of each input, as `project` and `add` take them, in `dtype`."""

    def project(self, x_NI: Tensor, A: Sequence[Tensor]) -> Tensor:
        """`h`, `[N, L * K]`: `scale * (x A^T)` of each layer, which backward needs too."""

    def add(self, outs: Sequence[Tensor], h: Tensor, B: Sequence[Tensor]) -> None:
        """Add `h B^T` to the output `[N, O]` of each layer, in place."""

    def differentiate(
        self, grads: Sequence[Tensor], grad_x_NI: Tensor | None, x_NI: Tensor, h: Tensor, tables: Tables
    ) -> list[Tensor]:
        """Add to `grad_x_NI`, in place, and return the gradient of each leaf, in float32 or wider.

        Args:
            grads: of the output `[N, O]` of each layer.
        """


def make_plan(groups: Sequence[TokenGroup], num_tokens: int, *, one_kernel: bool = False) -> Plan:
    """Groups of one size that leave no token out go through batched products, others one by one.

    Args:
        one_kernel: the device has products of uneven groups in one kernel, so their number costs nothing. On a CPU the
            loop was measured to be the quickest, also quicker than padding the groups to one size.
    """
    size = groups[0].stop - groups[0].start
    is_whole = sum(group.stop - group.start for group in groups) == num_tokens
    if is_whole and (len(groups) > 1 or one_kernel):
        if all(group.stop - group.start == size for group in groups):
            return BatchedPlan(groups)
        if one_kernel:
            return GroupedPlan(groups)
    return LoopedPlan(groups)


@dataclass(frozen=True)
class Layers:
    """L frozen layers that read the same input, with the adapters of the groups, in any floating type.

    Attributes:
        base: the frozen layers. With several ranks their weights are whole while they work, and only then.
        leaves: A `[K, I]` and B `[O, K]`, where backward adds gradients.
        tables: of these, where they are kept.
    """

    base: Sequence[nn.Linear]
    leaves: Tables
    tables: Tables | None = None

    @property
    def weights(self) -> list[Tensor]:
        """`[O, I]` of each layer."""
        return [each.weight for each in self.base]

    def kept(self, x_NI: Tensor, plan: Plan) -> _Kept:
        """What backward needs."""
        tables = self.tables or plan.tables([self.leaves], x_NI.dtype)[0]
        return _Kept(plan.project(x_NI, tables.A), tables)

    def run(self, x_NI: Tensor, plan: Plan, out_NO: Tensor | None = None) -> tuple[list[Tensor], _Kept]:
        """The outputs, that of a single layer in `out_NO` where it is given, and what backward needs."""
        if out_NO is None:
            outs = [linear(x_NI, each.weight, each.bias) for each in self.base]
        else:
            outs = [torch.mm(x_NI, self.base[0].weight.T, out=out_NO)]
            if self.base[0].bias is not None:
                out_NO.add_(self.base[0].bias)
        kept = self.kept(x_NI, plan)
        plan.add(outs, kept.h, kept.tables.B)
        return outs, kept


class _Kept(NamedTuple):
    h: Tensor
    tables: Tables

    def flat(self) -> list[Tensor]:
        return [self.h, *self.tables.A, *self.tables.B]

    @classmethod
    def of(cls, flat: Sequence[Tensor], num_A: int) -> _Kept:
        return cls(flat[0], Tables(flat[1 : 1 + num_A], flat[1 + num_A :]))


def grouped_lora(x_NI: Tensor, layers: Layers, plan: Plan) -> Sequence[Tensor]:
    """Of each layer `x W^T + bias`, and for the tokens of each group `+ scale * (x A^T) B^T`. Returns `[N, O]` each.

    A and B are used in the type of `x_NI`. Backward adds their gradients to their own `.grad`; the frozen layers get
    none. Without gradients (a server) the operation goes around autograd, whose bookkeeping was measured to take a
    tenth of a decode step.
    """
    if not torch.is_grad_enabled():
        return layers.run(x_NI, plan)[0]
    outs: Sequence[Tensor] = _GroupedLoRA.apply(x_NI, layers, plan, layers.leaves.A[0])  # type: ignore[no-untyped-call]
    return outs


class _GroupedLoRA(torch.autograd.Function):
    """Grouped products whose gradients are added to the leaves here.

    `anchor` is one of the leaves: autograd calls backward for it. The others are not handed to autograd, whose
    bookkeeping for the hundreds of small leaves of a pass was measured to take a twentieth of a short step.
    """

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, layers: Layers, plan: Plan, anchor: Tensor) -> tuple[Tensor, ...]:
        outs, kept = layers.run(x_NI, plan)
        ctx.plan, ctx.leaves, ctx.num_A = plan, layers.leaves, len(kept.tables.A)
        ctx.save_for_backward(x_NI, *layers.weights, *kept.flat())
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, *saved = ctx.saved_tensors
        weights, (h, tables) = saved[: len(grads)], _Kept.of(saved[len(grads) :], ctx.num_A)
        grad_x_NI = _grad_input(grads, weights) if ctx.needs_input_grad[0] else None
        _accumulate(ctx.leaves, ctx.plan.differentiate(grads, grad_x_NI, x_NI, h, tables))
        return grad_x_NI, None, None, None


def _grad_input(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The gradient of the input of frozen layers, `[N, I]`."""
    grad_x_NI = grads[0] @ weights[0]
    for grad_NO, weight_OI in zip(grads[1:], weights[1:], strict=True):
        grad_x_NI.addmm_(grad_NO, weight_OI)
    return grad_x_NI


def gated_mlp(
    x_NI: Tensor, gate_up: Layers, down: Layers, plan: Plan, *, keeps: bool, for_backward: bool = False
) -> Tensor:
    """`down(silu(gate(x)) * up(x))`, each layer with its adapters as in `grouped_lora`. Returns `[N, I]`.

    Args:
        keeps: keep what gate and up gave for backward, two tables of `[N, W]`, instead of making them again there.
        for_backward: the result is NaN, and only what backward needs is computed.
    """
    if not torch.is_grad_enabled():
        return _run_mlp(x_NI, gate_up, down, plan, keeps, for_backward)[0]
    out_NI: Tensor = _GatedMLP.apply(  # type: ignore[no-untyped-call]
        x_NI, gate_up, down, plan, keeps, for_backward, down.leaves.A[0]
    )
    return out_NI


def _run_mlp(
    x_NI: Tensor, gate_up: Layers, down: Layers, plan: Plan, keeps: bool, for_backward: bool
) -> tuple[Tensor, Sequence[Tensor | None], _Kept, _Kept]:
    """The output of `gated_mlp`, and what backward needs: two products or None, then the tables of the layers."""
    out_NI = x_NI.new_empty(len(x_NI), down.base[0].out_features)  # what stays is made before what goes: fewer holes
    (gate_NW, up_NW), of_gate_up = gate_up.run(x_NI, plan)
    products = (gate_NW, up_NW) if keeps else (None, None)
    product_NW = silu(gate_NW, inplace=not keeps).mul_(up_NW)
    of_down = down.kept(product_NW, plan) if for_backward else down.run(product_NW, plan, out_NI)[1]
    if for_backward:
        out_NI.fill_(math.nan)
    return out_NI, products, of_gate_up, of_down


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, gate_up: Layers, down: Layers, plan: Plan, keeps: bool, for_backward: bool, _: Tensor
    ) -> Tensor:
        out_NI, products, of_gate_up, of_down = _run_mlp(x_NI, gate_up, down, plan, keeps, for_backward)
        ctx.plan, ctx.layers, kept = plan, (gate_up, down), (of_gate_up, of_down)
        ctx.num_A, ctx.num_of_gate_up = [len(each.tables.A) for each in kept], len(of_gate_up.flat())
        weights = (*gate_up.weights, *down.weights)
        ctx.save_for_backward(x_NI, *products, *weights, *of_gate_up.flat(), *of_down.flat())
        return out_NI

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NI: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, gate_NW, up_NW, gate_WI, up_WI, down_IW, *saved = ctx.saved_tensors
        parts = saved[: ctx.num_of_gate_up], saved[ctx.num_of_gate_up :]
        of_gate_up, of_down = (_Kept.of(part, num_A) for part, num_A in zip(parts, ctx.num_A, strict=True))
        plan: Plan = ctx.plan
        gate_up, down = ctx.layers
        if gate_NW is None:
            gate_NW, up_NW = gate_up.run(x_NI, plan)[0]
        product_NW = silu(gate_NW).mul_(up_NW)
        grad_NW = grad_NI @ down_IW
        _accumulate(down.leaves, plan.differentiate([grad_NI], grad_NW, product_NW, *of_down))
        # In the order and with the rounding of torch's own; what is needed no more is overwritten: memory that the
        # system must clear first costs more than the operation.
        grad_up_NW = torch.ops.aten.silu.out(gate_NW, out=product_NW).mul_(grad_NW)
        grad_NW.mul_(up_NW)
        grad_gate_NW = torch.ops.aten.silu_backward.grad_input(grad_NW, gate_NW, grad_input=grad_NW)
        del product_NW, grad_NW, gate_NW, up_NW
        grads = [grad_gate_NW, grad_up_NW]
        grad_x_NI = _grad_input(grads, [gate_WI, up_WI]) if ctx.needs_input_grad[0] else None
        _accumulate(gate_up.leaves, plan.differentiate(grads, grad_x_NI, x_NI, *of_gate_up))
        return grad_x_NI, *[None] * 6


def _accumulate(leaves: Tables, grads: Sequence[Tensor]) -> None:
    """Add to each leaf's `.grad`; in few launches, however many leaves there are."""
    old, new = [], []
    for leaf, grad in zip([*leaves.A, *leaves.B], grads, strict=True):
        if leaf.grad is None:
            leaf.grad = grad
        else:
            old.append(leaf.grad)
            new.append(grad)
    if old:
        torch._foreach_add_(old, new)


class _TablePlan(ABC):
    """All groups in one product each time, with A of all layers and groups in one table `[G, L * K, I]`."""

    def __init__(self, groups: Sequence[TokenGroup]) -> None:
        self.adapters = [group.adapter for group in groups]
        sizes_G = torch.tensor([group.stop - group.start for group in groups])
        scales_G = torch.tensor([group.scale for group in groups])
        self._scales_N1 = scales_G.repeat_interleave(sizes_G, output_size=groups[-1].stop)[:, None]

    @abstractmethod
    def _times(self, x_NI: Tensor, table_GIO: Tensor) -> Tensor:
        """`[N, O]`: the tokens of each group by its own part of the table."""

    @abstractmethod
    def _add_times(self, out_NO: Tensor, x_NI: Tensor, table_GIO: Tensor) -> None:
        """The same, added to `out_NO` in place."""

    @abstractmethod
    def _outer(self, one_NO: Tensor, other_NI: Tensor) -> Tensor:
        """`[G, O, I]`: of the tokens of each group."""

    def tables(self, leaves: Sequence[Tables], dtype: torch.dtype) -> list[Tables]:
        """`Plan.tables`, in one launch."""
        made = [self._empty(each, dtype) for each in leaves]
        parts = [part for of_A, of_B in made for table in (of_A, *of_B) for part in table.unbind()]
        with torch.no_grad():
            torch._foreach_copy_(parts, [leaf for each in leaves for leaf in (*each.A, *each.B)])
        return [Tables([of_A.view(len(self.adapters), -1, of_A.shape[2])], of_B) for of_A, of_B in made]

    def _empty(self, leaves: Tables, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        shape, num_groups = leaves.A[0].shape, len(self.adapters)
        of_B = [B_OK.new_empty((num_groups, *B_OK.shape), dtype=dtype) for B_OK in leaves.B[::num_groups]]
        return leaves.A[0].new_empty((len(leaves.A), *shape), dtype=dtype), of_B

    def project(self, x_NI: Tensor, A: Sequence[Tensor]) -> Tensor:
        """`Plan.project`."""
        return self._times(x_NI, A[0].mT).mul_(self._scales_on(x_NI.device))

    def add(self, outs: Sequence[Tensor], h: Tensor, B: Sequence[Tensor]) -> None:
        """`Plan.add`."""
        for out_NO, h_NK, B_GOK in zip(outs, h.chunk(len(outs), 1), B, strict=True):
            self._add_times(out_NO, h_NK, B_GOK.mT)

    def differentiate(
        self, grads: Sequence[Tensor], grad_x_NI: Tensor | None, x_NI: Tensor, h: Tensor, tables: Tables
    ) -> list[Tensor]:
        """`Plan.differentiate`."""
        parts, of_B = [], []
        for grad_NO, B_GOK, h_NK in zip(grads, tables.B, h.chunk(len(grads), 1), strict=True):
            rows_NO = grad_NO.contiguous()  # the kernels read rows
            parts.append(self._times(rows_NO, B_GOK))
            of_B.append(self._outer(rows_NO, h_NK))
        grad_h = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).mul_(self._scales_on(x_NI.device))
        parts.clear()
        if grad_x_NI is not None:
            self._add_times(grad_x_NI, grad_h, tables.A[0])
        grad_A, *grads_B = _widened([self._outer(grad_h, x_NI), *of_B])
        of_A = grad_A.view(len(self.adapters) * len(grads), -1, grad_A.shape[2]).unbind()
        return [*of_A, *(grad for grad_B in grads_B for grad in grad_B.unbind())]

    def _scales_on(self, device: torch.device) -> Tensor:
        if self._scales_N1.device != device:
            self._scales_N1 = sent(self._scales_N1, device)
        return self._scales_N1


class BatchedPlan(_TablePlan):
    """Groups of one size, that follow each other without a gap, as a batch."""

    def _times(self, x_NI: Tensor, table_GIO: Tensor) -> Tensor:
        return torch.bmm(self._cut(x_NI), table_GIO).flatten(0, 1)

    def _add_times(self, out_NO: Tensor, x_NI: Tensor, table_GIO: Tensor) -> None:
        self._cut(out_NO).baddbmm_(self._cut(x_NI), table_GIO)

    def _outer(self, one_NO: Tensor, other_NI: Tensor) -> Tensor:
        return torch.bmm(self._cut(one_NO).mT, self._cut(other_NI))

    def _cut(self, x_NI: Tensor) -> Tensor:
        return x_NI.view(len(self.adapters), len(x_NI) // len(self.adapters), x_NI.shape[1])


class GroupedPlan(_TablePlan):
    """Groups of any size that follow each other without a gap, in one kernel each time.

    `torch._grouped_mm`: bfloat16 on a GPU, strides of a multiple of 16 bytes. No group is empty: one is made of rows.
    """

    def __init__(self, groups: Sequence[TokenGroup]) -> None:
        super().__init__(groups)
        self._ends_G = torch.tensor([group.stop for group in groups], dtype=torch.int32)

    def _times(self, x_NI: Tensor, table_GIO: Tensor) -> Tensor:
        return torch._grouped_mm(x_NI, table_GIO, offs=self._ends_on(x_NI.device))

    def _add_times(self, out_NO: Tensor, x_NI: Tensor, table_GIO: Tensor) -> None:
        out_NO.add_(self._times(x_NI, table_GIO))

    def _outer(self, one_NO: Tensor, other_NI: Tensor) -> Tensor:
        return torch._grouped_mm(one_NO.T, other_NI, offs=self._ends_on(one_NO.device))

    def _ends_on(self, device: torch.device) -> Tensor:
        if self._ends_G.device != device:
            self._ends_G = sent(self._ends_G, device)
        return self._ends_G


class LoopedPlan:
    """Each group and layer separately. Its tables are the leaves, where they have the type."""

    def __init__(self, groups: Sequence[TokenGroup]) -> None:
        self.adapters = [group.adapter for group in groups]
        self._groups = groups

    def tables(self, leaves: Sequence[Tables], dtype: torch.dtype) -> list[Tables]:
        """`Plan.tables`."""
        return [Tables(*([leaf.detach().to(dtype) for leaf in part] for part in each)) for each in leaves]

    def project(self, x_NI: Tensor, A: Sequence[Tensor]) -> Tensor:
        """`Plan.project`; undefined for tokens that are in no group."""
        num_layers = len(A) // len(self._groups)
        h = x_NI.new_empty(len(x_NI), num_layers * len(A[0]))
        for at, group in enumerate(self._groups):
            h_MK = h[group.tokens]
            for A_KI, part_MK in zip(A[at * num_layers :], h_MK.chunk(num_layers, 1), strict=False):
                torch.mm(x_NI[group.tokens], A_KI.T, out=part_MK)
            h_MK.mul_(group.scale)
        return h

    def add(self, outs: Sequence[Tensor], h: Tensor, B: Sequence[Tensor]) -> None:
        """`Plan.add`, to the groups' tokens."""
        num_groups = len(self._groups)
        for number, (out_NO, h_NK) in enumerate(zip(outs, h.chunk(len(outs), 1), strict=True)):
            for group, B_OK in zip(self._groups, B[number * num_groups :], strict=False):
                out_NO[group.tokens].addmm_(h_NK[group.tokens], B_OK.T)

    def differentiate(
        self, grads: Sequence[Tensor], grad_x_NI: Tensor | None, x_NI: Tensor, h: Tensor, tables: Tables
    ) -> list[Tensor]:
        """`Plan.differentiate`."""
        num_groups, num_layers = len(self._groups), len(grads)
        of_A: list[Tensor] = []
        of_B: list[list[Tensor]] = [[] for _ in grads]
        for at, group in enumerate(self._groups):
            tokens = group.tokens
            for number, (grad_NO, h_NK) in enumerate(zip(grads, h.chunk(num_layers, 1), strict=True)):
                A_KI, B_OK = tables.A[at * num_layers + number], tables.B[number * num_groups + at]
                grad_h_MK = (grad_NO[tokens] @ B_OK).mul_(group.scale)
                if grad_x_NI is not None:
                    grad_x_NI[tokens].addmm_(grad_h_MK, A_KI)
                of_A.append(grad_h_MK.T @ x_NI[tokens])
                of_B[number].append(grad_NO[tokens].T @ h_NK[tokens])
        return _widened([*of_A, *(grad for of_layer in of_B for grad in of_layer)])


def _widened(grads: list[Tensor]) -> list[Tensor]:
    """Gradients of many passes are summed: not in sixteen bits. In one launch."""
    dtype = torch.promote_types(grads[0].dtype, torch.float32)
    if dtype == grads[0].dtype:
        return grads
    wide = [torch.empty_like(grad, dtype=dtype) for grad in grads]
    torch._foreach_copy_(wide, grads)
    return wide


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
        is_served: whether adapters change by `put_adapter` alone, so that what was made of them is kept from one pass
            to the next, as long as the rows are the same.
        layers: all of the model.
        kept: what was made of their adapters, as long as rows and adapters are the same.
        waiting: an input, and what layers that read it have made of it and were not asked for yet.
    """

    def __init__(self, n_adapters: int, *, is_served: bool = False) -> None:
        self.is_served = is_served
        self.scaling: list[float] = [1.0] * n_adapters
        self.groups: list[RowGroup] = []
        self.num_rows = 0
        self.layers: list[MultiLoRALinear] = []
        self.kept: dict[tuple[Plan, SharedInput], Layers] = {}
        self.waiting: tuple[Tensor, dict[MultiLoRALinear, Tensor]] | None = None
        self._is_packed = False
        self._scaling: list[float] = []  # of the plan
        self._plan: tuple[int, Plan] | None = None

    def set_rows(self, adapter_idxs: Sequence[int | None], lengths: Sequence[int] | None = None) -> None:
        """Say for each row of dim 0 of the next activations which adapter it uses; None is the base model alone.

        Adapters may have changed since the last call, and do not until backward is done. With `lengths` the rows are
        packed: they lie end to end in one row, of so many tokens each.
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
        is_same = before == (self.groups, self._is_packed, self._scaling)
        if not is_same:
            self._plan = None
        if not is_same or not self.is_served:
            self.forget()

    def plan(self, num_tokens: int, *, one_kernel: bool = False) -> Plan:
        """The plan of the products of rows of `num_tokens`: worked out once, and the same for all layers."""
        if self._plan is None or self._plan[0] != num_tokens:
            groups = self._token_groups(num_tokens)
            self._plan = num_tokens, make_plan(groups, self.num_rows * num_tokens, one_kernel=one_kernel)
            self.forget()
        return self._plan[1]

    def forget(self) -> None:
        """Drop what was made of adapters and activations: an adapter changes, or a pass is over."""
        self.kept.clear()
        self.waiting = None

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


class SharedInput:
    """Adapted layers that read the same input: their products are one operation."""

    def __init__(self, layers: Sequence[MultiLoRALinear]) -> None:
        self._layers = layers
        for layer in layers:
            layer.shared = self

    def with_adapters(self, plan: Plan) -> Layers:
        """The frozen layers with A and B of each group of `plan`, and tables of these where they pay.

        They do where nothing else changes for long, and where they are in another type than the adapters: made at once
        for all layers of the model then, and not again where backward computes a layer again.
        """
        routing, layer = self._layers[0].routing, self._layers[0]
        if (kept := routing.kept.get((plan, self))) is not None:
            return kept
        dtype = layer.base_layer.weight.dtype
        if not routing.is_served and dtype == layer.lora_A[0].dtype:
            return self._layers_of(plan)
        every = dict.fromkeys(layer.shared for layer in routing.layers)
        layers = [each._layers_of(plan) for each in every]
        tables = plan.tables([each.leaves for each in layers], dtype)
        for one, each, of_each in zip(every, layers, tables, strict=True):
            routing.kept[plan, one] = replace(each, tables=of_each)
        return routing.kept[plan, self]

    def _layers_of(self, plan: Plan) -> Layers:
        base = [layer.base_layer for layer in self._layers]
        pairs = [[layer.parameters_of(idx) for idx in plan.adapters] for layer in self._layers]
        A_GL = [A_KI for of_group in zip(*pairs, strict=True) for A_KI, _ in of_group]
        B_LG = [B_OK for of_layer in pairs for _, B_OK in of_layer]
        return Layers(base, Tables(A_GL, B_LG))

    def output_of(self, layer: MultiLoRALinear, x_RTI: Tensor, plan: Plan) -> Tensor:
        """`[R, T, O]` of one layer; those of the others wait until they are asked for the same input."""
        routing = layer.routing
        if routing.waiting is None or routing.waiting[0] is not x_RTI or layer not in routing.waiting[1]:
            outs = grouped_lora(x_RTI.reshape(-1, x_RTI.shape[-1]), self.with_adapters(plan), plan)
            outs = [out_NO.reshape(*x_RTI.shape[:-1], -1) for out_NO in outs]
            routing.waiting = x_RTI, dict(zip(self._layers, outs, strict=True))
        outputs = routing.waiting[1]
        out_RTO = outputs.pop(layer)
        if not outputs:
            routing.waiting = None
        return out_RTO


class MultiLoRALinear(nn.Module):
    """`base_layer(x) + scaling * (x A^T) B^T`, with A and B those of the row's adapter.

    Args:
        base_layer: the frozen layer, weights `[out, in]`.
        rank: the largest rank; an adapter of a lower one leaves the rest of A and B at zero, which adds nothing to
            outputs or gradients.
        n_adapters: slots.
        routing: shared by all layers of the model; default: the layer has its own.

    Attributes:
        shared: the layers that read the same input, this one among them.

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
        self.shared = SharedInput([self])
        self.routing.layers.append(self)

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

    def forward(self, x_RTI: Tensor) -> Tensor:
        """`[R, T, O]`."""
        plan = self.plan_for(x_RTI)
        if plan is None:
            base_RTO: Tensor = self.base_layer(x_RTI)
            return base_RTO
        return self.shared.output_of(self, x_RTI, plan)


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
