"""A frozen linear layer and the adapters of its rows in one differentiable operation.

Out of autograd's hands because of what it would add: a temporary for every product, a second sum into the output and
into the gradient of the inputs, and a multiplication by the scale as large as the activations. Here both low-rank
products are added in place, and the scale goes onto x A^T, which is K wide. Knows no modules.

Dimensions: N tokens of all rows, I inputs, O outputs, K rank, G groups (neighbouring tokens of one adapter), M tokens
of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


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


def grouped_lora(
    x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, groups: Sequence[TokenGroup], leaves: Sequence[Tensor]
) -> Tensor:
    """`x W^T + bias`, and for the tokens of each group `+ scale * (x A^T) B^T`. Returns `[N, O]`.

    Args:
        groups: ascending, without overlap; tokens of no group get the frozen layer alone.
        leaves: A `[K, I]` and B `[O, K]` of each group in turn, in any floating type; they are used in that of `x_NI`.
            Gradients reach these and `x_NI`, never the frozen layer.
    """
    out_NO: Tensor = _GroupedLoRA.apply(  # type: ignore[no-untyped-call]
        x_NI, weight_OI, bias_O, groups, *leaves
    )
    return out_NO


class _GroupedLoRA(torch.autograd.Function):
    """Groups of one size go through batched products; others one by one."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        groups: Sequence[TokenGroup],
        *leaves: Tensor,
    ) -> Tensor:
        out_NO = linear(x_NI, weight_OI, bias_O)
        A_GKI = torch.stack(list(leaves[0::2])).to(x_NI.dtype)
        B_GOK = torch.stack(list(leaves[1::2])).to(x_NI.dtype)
        parts = _Batched(groups, len(x_NI)) if _is_even(groups, len(x_NI)) else _Looped(groups)
        h_NK = parts.add(out_NO, x_NI, A_GKI, B_GOK)
        ctx.parts, ctx.leaf_dtype = parts, leaves[0].dtype
        ctx.save_for_backward(x_NI, weight_OI, h_NK, A_GKI, B_GOK)
        return out_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI, h_NK, A_GKI, B_GOK = ctx.saved_tensors
        grad_x_NI = grad_NO @ weight_OI if ctx.needs_input_grad[0] else None
        grads = ctx.parts.differentiate(grad_NO, grad_x_NI, x_NI, h_NK, A_GKI, B_GOK)
        return grad_x_NI, None, None, None, *(grad.to(ctx.leaf_dtype) for pair in grads for grad in pair)


def _is_even(groups: Sequence[TokenGroup], num_tokens: int) -> bool:
    """Whether the groups are more than one, have one size, and leave no token out."""
    size = groups[0].stop - groups[0].start
    return len(groups) > 1 and len(groups) * size == num_tokens and all(g.stop - g.start == size for g in groups)


class _Batched:
    """All groups in one batched product each time."""

    def __init__(self, groups: Sequence[TokenGroup], num_tokens: int) -> None:
        self._shape = len(groups), num_tokens // len(groups), -1
        self._scales = [group.scale for group in groups]

    def add(self, out_NO: Tensor, x_NI: Tensor, A_GKI: Tensor, B_GOK: Tensor) -> Tensor:
        h_GMK = torch.bmm(x_NI.view(self._shape), A_GKI.transpose(1, 2)).mul_(self._scales_of(x_NI))
        out_NO.view(self._shape).baddbmm_(h_GMK, B_GOK.transpose(1, 2))
        return h_GMK

    def differentiate(
        self,
        grad_NO: Tensor,
        grad_x_NI: Tensor | None,
        x_NI: Tensor,
        h_GMK: Tensor,
        A_GKI: Tensor,
        B_GOK: Tensor,
    ) -> Iterable[tuple[Tensor, Tensor]]:
        grad_GMO = grad_NO.reshape(self._shape)
        grad_h_GMK = torch.bmm(grad_GMO, B_GOK).mul_(self._scales_of(x_NI))
        if grad_x_NI is not None:
            grad_x_NI.view(self._shape).baddbmm_(grad_h_GMK, A_GKI)
        grad_A_GKI = torch.bmm(grad_h_GMK.transpose(1, 2), x_NI.view(self._shape))
        grad_B_GOK = torch.bmm(grad_GMO.transpose(1, 2), h_GMK)
        return zip(grad_A_GKI.unbind(), grad_B_GOK.unbind(), strict=True)

    def _scales_of(self, like: Tensor) -> Tensor:
        return like.new_tensor(self._scales).view(-1, 1, 1)


class _Looped:
    """Each group by itself."""

    def __init__(self, groups: Sequence[TokenGroup]) -> None:
        self._groups = groups

    def add(self, out_NO: Tensor, x_NI: Tensor, A_GKI: Tensor, B_GOK: Tensor) -> Tensor:
        h_NK = x_NI.new_empty(len(x_NI), A_GKI.shape[1])
        for group, A_KI, B_OK in zip(self._groups, A_GKI, B_GOK, strict=True):
            h_MK = torch.mm(x_NI[group.tokens], A_KI.T, out=h_NK[group.tokens]).mul_(group.scale)
            out_NO[group.tokens].addmm_(h_MK, B_OK.T)
        return h_NK

    def differentiate(
        self,
        grad_NO: Tensor,
        grad_x_NI: Tensor | None,
        x_NI: Tensor,
        h_NK: Tensor,
        A_GKI: Tensor,
        B_GOK: Tensor,
    ) -> Iterable[tuple[Tensor, Tensor]]:
        for group, A_KI, B_OK in zip(self._groups, A_GKI, B_GOK, strict=True):
            grad_MO = grad_NO[group.tokens]
            grad_h_MK = (grad_MO @ B_OK).mul_(group.scale)
            if grad_x_NI is not None:
                grad_x_NI[group.tokens].addmm_(grad_h_MK, A_KI)
            yield grad_h_MK.T @ x_NI[group.tokens], grad_MO.T @ h_NK[group.tokens]
