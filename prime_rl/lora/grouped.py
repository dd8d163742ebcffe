"""A frozen linear layer and the adapters of its rows in one differentiable operation.

Out of autograd's hands because of what it would add: a temporary for every product, a second sum into the output and
into the gradient of the inputs, and a multiplication by the scale as large as the activations. Here both low-rank
products are added in place, and the scale goes onto x A^T, which is K wide. The inputs can be the product of a gated
MLP, which backward then makes again from its two factors instead of keeping it. Knows no modules.

Dimensions: N tokens of all rows, I inputs, O outputs, K rank, G groups (neighbouring tokens of one adapter), M tokens
of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, silu


@dataclass(frozen=True)
class TokenGroup:
    """Tokens `start` to `stop` use `adapter`, whose output is multiplied by `scale`."""

    adapter: int
    start: int
    stop: int
    scale: float

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.stop)


class Plan(Protocol):
    """How the low-rank products of the groups are computed; made once for all layers of a pass."""

    @property
    def adapters(self) -> list[int]:
        """The adapter of each group."""

    def add(self, out_NO: Tensor, x_NI: Tensor, A_GKI: Tensor, B_GOK: Tensor) -> Tensor:
        """Add `scale * (x A^T) B^T` to `out_NO`, in place. Returns `scale * (x A^T)`, which backward needs."""

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


def grouped_lora(
    x_NI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    plan: Plan,
    A_G: Sequence[Tensor],
    B_G: Sequence[Tensor],
    gate_NI: Tensor | None = None,
) -> Tensor:
    """`x W^T + bias`, and for the tokens of each group `+ scale * (x A^T) B^T`. Returns `[N, O]`.

    Args:
        gate_NI: where it is given, `silu(gate) * x` takes the place of x.
        A_G, B_G: A `[K, I]` and B `[O, K]` of each group, in any floating type; they are used in that of `x_NI`.
            Backward adds their gradients to their own `.grad`; the frozen layer gets none.

    Without gradients (a server) the operation goes around autograd, whose bookkeeping was measured to take a tenth of a
    decode step.
    """
    if not torch.is_grad_enabled():
        out_NO, _, _, _ = _forward(_gated(x_NI, gate_NI), weight_OI, bias_O, plan, [*A_G, *B_G])
        return out_NO
    grown_NO: Tensor = _GroupedLoRA.apply(  # type: ignore[no-untyped-call]
        x_NI, gate_NI, weight_OI, bias_O, plan, [*A_G, *B_G], A_G[0]
    )
    return grown_NO


def _gated(x_NI: Tensor, gate_NI: Tensor | None) -> Tensor:
    return x_NI if gate_NI is None else silu(gate_NI).mul_(x_NI)


def _forward(
    x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, plan: Plan, leaves: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, and what backward needs: h, and A and B stacked."""
    num = len(leaves) // 2
    out_NO = linear(x_NI, weight_OI, bias_O)
    A_GKI, B_GOK = (torch.stack(list(part)).to(x_NI.dtype) for part in (leaves[:num], leaves[num:]))
    return out_NO, plan.add(out_NO, x_NI, A_GKI, B_GOK), A_GKI, B_GOK


class _GroupedLoRA(torch.autograd.Function):
    """`anchor` is one of the leaves: it makes autograd come by. The others are not handed to it, and none comes back to
    it: for the hundreds of small leaves of a pass, its bookkeeping was measured to take a twentieth of a short step.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        gate_NI: Tensor | None,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        plan: Plan,
        leaves: Sequence[Tensor],
        anchor: Tensor,
    ) -> Tensor:
        out_NO, h, A_GKI, B_GOK = _forward(_gated(x_NI, gate_NI), weight_OI, bias_O, plan, leaves)
        ctx.plan, ctx.leaves = plan, leaves
        ctx.save_for_backward(x_NI, gate_NI, weight_OI, h, A_GKI, B_GOK)
        return out_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, gate_NI, weight_OI, h, A_GKI, B_GOK = ctx.saved_tensors
        grad_x_NI = grad_NO @ weight_OI if any(ctx.needs_input_grad[:2]) else None
        product_NI = _gated(x_NI, gate_NI)
        grads_A, grads_B = ctx.plan.differentiate(grad_NO, grad_x_NI, product_NI, h, A_GKI, B_GOK)
        _accumulate(ctx.leaves, [*grads_A, *grads_B])
        grad_gate_NI = None
        if gate_NI is not None and grad_x_NI is not None:
            grad_x_NI, grad_gate_NI = _differentiate_gated(grad_x_NI, x_NI, gate_NI, product_NI)
        return grad_x_NI, grad_gate_NI, None, None, None, None, None


def _differentiate_gated(grad_NI: Tensor, x_NI: Tensor, gate_NI: Tensor, spare_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the gate, in the order and with the rounding of torch's own.

    `grad_NI` and `spare_NI` are overwritten: memory that the system must clear first costs more than the operation.
    """
    grad_x_NI = torch.ops.aten.silu.out(gate_NI, out=spare_NI).mul_(grad_NI)
    grad_NI.mul_(x_NI)
    return grad_x_NI, torch.ops.aten.silu_backward.grad_input(grad_NI, gate_NI, grad_input=grad_NI)


def _accumulate(leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Add to each leaf's `.grad`; in few launches, however many leaves there are."""
    old, new = [], []
    for leaf, grad in zip(leaves, grads, strict=True):
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

    def add(self, out_NO: Tensor, x_NI: Tensor, A_GKI: Tensor, B_GOK: Tensor) -> Tensor:
        h_GMK = torch.bmm(x_NI.view(self._shape), A_GKI.mT).mul_(self._scales_like(x_NI))
        out_NO.view(self._shape).baddbmm_(h_GMK, B_GOK.mT)
        return h_GMK

    def differentiate(
        self, grad_NO: Tensor, grad_x_NI: Tensor | None, x_NI: Tensor, h: Tensor, A_GKI: Tensor, B_GOK: Tensor
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        grad_GMO = grad_NO.reshape(self._shape)
        grad_h_GMK = torch.bmm(grad_GMO, B_GOK).mul_(self._scales_like(x_NI))
        if grad_x_NI is not None:
            grad_x_NI.view(self._shape).baddbmm_(grad_h_GMK, A_GKI)
        grad_A_GKI = torch.bmm(grad_h_GMK.mT, x_NI.view(self._shape))
        return _unbind(grad_A_GKI), _unbind(torch.bmm(grad_GMO.mT, h))

    def _scales_like(self, x_NI: Tensor) -> Tensor:
        if self._scales_G11.dtype != x_NI.dtype or self._scales_G11.device != x_NI.device:
            self._scales_G11 = self._scales_G11.to(x_NI)
        return self._scales_G11


class LoopedPlan:
    """Each group by itself. `h` is `[N, K]`."""

    def __init__(self, groups: Sequence[TokenGroup]) -> None:
        self.adapters = [group.adapter for group in groups]
        self._groups = groups

    def add(self, out_NO: Tensor, x_NI: Tensor, A_GKI: Tensor, B_GOK: Tensor) -> Tensor:
        h_NK = x_NI.new_empty(len(x_NI), A_GKI.shape[1])
        for group, A_KI, B_OK in zip(self._groups, A_GKI.unbind(), B_GOK.unbind(), strict=True):
            h_MK = torch.mm(x_NI[group.tokens], A_KI.T, out=h_NK[group.tokens]).mul_(group.scale)
            out_NO[group.tokens].addmm_(h_MK, B_OK.T)
        return h_NK

    def differentiate(
        self, grad_NO: Tensor, grad_x_NI: Tensor | None, x_NI: Tensor, h: Tensor, A_GKI: Tensor, B_GOK: Tensor
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
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

    def add(self, out_NO: Tensor, x_NI: Tensor, A_GKI: Tensor, B_GOK: Tensor) -> Tensor:
        self._move_to(x_NI)
        h_NK = torch._grouped_mm(x_NI, A_GKI.mT, offs=self._ends_G).mul_(self._scales_N1)
        out_NO.add_(torch._grouped_mm(h_NK, B_GOK.mT, offs=self._ends_G))
        return h_NK

    def differentiate(
        self, grad_NO: Tensor, grad_x_NI: Tensor | None, x_NI: Tensor, h: Tensor, A_GKI: Tensor, B_GOK: Tensor
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        grad_NO = grad_NO.contiguous()  # the kernels read rows
        grad_h_NK = torch._grouped_mm(grad_NO, B_GOK, offs=self._ends_G).mul_(self._scales_N1)
        if grad_x_NI is not None:
            grad_x_NI.add_(torch._grouped_mm(grad_h_NK, A_GKI, offs=self._ends_G))
        grad_A_GKI = torch._grouped_mm(grad_h_NK.T, x_NI, offs=self._ends_G)
        return _unbind(grad_A_GKI), _unbind(torch._grouped_mm(grad_NO.T, h, offs=self._ends_G))

    def _move_to(self, x_NI: Tensor) -> None:
        if self._ends_G.device != x_NI.device or self._scales_N1.dtype != x_NI.dtype:
            self._ends_G, self._scales_N1 = self._ends_G.to(x_NI.device), self._scales_N1.to(x_NI)


def _widened(grad: Tensor) -> Tensor:
    """Gradients of many passes are summed: not in sixteen bits."""
    return grad.to(torch.promote_types(grad.dtype, torch.float32))


def _unbind(grad_G: Tensor) -> Sequence[Tensor]:
    return _widened(grad_G).unbind()
