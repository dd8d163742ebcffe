"""Imported into each of vLLM's workers on a CPU (by `worker`); importing it fixes one bug there.

On a CPU vLLM takes the adapter of each row out of the stack of all slots by its index. A row of the base model has the
index -1, which in Python is the last slot: next to rows with adapters it would be computed with whatever adapter lies
or once lay there, that is, with another tenant's weights. Here such rows are zero before they reach B.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

# Position 3 of both is the slot of each row. The operations for prompts call these.
_OPERATIONS = ("bgmv_expand", "bgmv_expand_slice")


def without_base_rows(expand: Callable[..., None]) -> Callable[..., None]:
    """`expand` that adds nothing to rows of slot -1."""

    @wraps(expand)
    def mended(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, *args: Any, **kwargs: Any) -> None:
        expand(inputs * (slots >= 0).unsqueeze(-1), weights, output, slots, *args, **kwargs)

    return mended


for _name in _OPERATIONS:
    _mended = without_base_rows(getattr(lora_ops, _name))
    for _module in (lora_ops, punica_cpu):
        setattr(_module, _name, _mended)
