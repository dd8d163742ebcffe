"""The part of vLLM's workers for whole weights, called through `collective_rpc`. Runs in vLLM's own processes.

In two steps, so that several workers change together or not at all: each gets the new weights beside those in force
(`prl_stage_weights`), then each takes them over. That is vLLM's own reload, which handles its weight layout.
vLLM imports this file because `server` names one of its classes to it; on a CPU that fixes another bug: vLLM takes the
adapter of each row out of the stack of all slots by its index. A row of the base model has the index -1, which in
Python is the last slot: next to rows with adapters it would be computed with whatever adapter lies or once lay there,
that is, with another tenant's weights. Here such rows are zero before they reach B.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from prime_rl.inference.guard import WEIGHTS_FILE
from prime_rl.lora.adapter_state import check_finite, load_tensors
from prime_rl.transfer import TransferError, WeightReceiver

# Position 3 of both is the slot of each row. The operations for prompts call these.
_OPERATIONS = ("bgmv_expand", "bgmv_expand_slice")
# What went wrong, else names and shapes of what was staged.
Staged = str | dict[str, list[int]]


def without_base_rows(expand: Callable[..., None]) -> Callable[..., None]:
    """`expand` that adds nothing to rows of slot -1."""

    @wraps(expand)
    def mended(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, *args: Any, **kwargs: Any) -> None:
        expand(inputs * (slots >= 0).unsqueeze(-1), weights, output, slots, *args, **kwargs)

    return mended


if current_platform.is_cpu():
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for _name in _OPERATIONS:
        _mended = without_base_rows(getattr(lora_ops, _name))
        for _module in (lora_ops, punica_cpu):
            setattr(_module, _name, _mended)


class _WeightUpdateWorker:
    """Mixed into vLLM's worker class, so every name has a prefix that is ours."""

    _prl_staged: dict[str, Tensor] | None = None
    # vLLM's own.
    reload_weights: Callable[..., None]
    model_runner: Any

    def prl_apply_weights(self) -> None:
        """Take over what was staged; without it, the weights that the server was started with."""
        staged, self._prl_staged = self._prl_staged, None
        if staged is None:
            self.reload_weights()
        else:
            self.reload_weights(weights_iterator=iter(staged.items()))

    def prl_drop_weights(self) -> None:
        """Forget what was staged."""
        self._prl_staged = None

    def prl_adapter_size(self, lora_id: int) -> tuple[float, float] | None:
        """The sums of squares of all A and of all scaled B that the kernels get for this adapter; None without it."""
        manager = self.model_runner.lora_manager._adapter_manager
        if lora_id not in manager.lora_index_to_id:
            return None
        slot = manager.lora_index_to_id.index(lora_id)

        def squares(name: str) -> float:
            stacks = [getattr(module, name) for module in manager.modules.values()]
            flat = [stack for each in stacks for stack in (each if isinstance(each, (tuple, list)) else (each,))]
            return math.fsum(float(stack[slot].double().square().sum()) for stack in flat)

        return squares("lora_a_stacked"), squares("lora_b_stacked")

    def _prl_keep(self, tensors: dict[str, Tensor]) -> Staged:
        try:
            check_finite(tensors)
        except ValueError as error:
            return str(error)
        self._prl_staged = tensors
        return {name: list(tensor.shape) for name, tensor in tensors.items()}


class FileSystemWeightUpdateWorker(_WeightUpdateWorker):
    """Weights from a model folder."""

    def prl_stage_weights(self, folder: str) -> Staged:
        """Map the weights file of `folder` into memory and keep its tensors until they are applied or dropped."""
        try:
            return self._prl_keep(load_tensors(Path(folder) / WEIGHTS_FILE, mapped=True))
        except (ValueError, OSError) as error:
            return f"{folder} cannot be read: {error}"


class NCCLWeightUpdateWorker(_WeightUpdateWorker):
    """Weights from the trainer's memory."""

    _prl_receiver: WeightReceiver | None = None
    # vLLM's own: which worker of its engine this one is, which engine that is, and where the model is.
    rank: int
    parallel_config: Any
    device: torch.device

    def prl_stage_weights(
        self, host: str, port: int, label: str, ticket: str, num_workers: int, timeout_s: float
    ) -> Staged:
        """Receive the weights `label` from the trainer at `host`:`port`, and keep them until applied or dropped.

        The first call makes the receiver for this worker; later ones use it again.
        """
        if self._prl_receiver is None:
            before = self.parallel_config.data_parallel_index * self.parallel_config.world_size
            rank = 1 + before + self.rank
            self._prl_receiver = WeightReceiver(
                host, port, rank=rank, num_receivers=num_workers, timeout_s=timeout_s, device=self.device
            )
        try:
            tensors = self._prl_receiver.receive(label, ticket)
        except TransferError as error:
            return str(error)
        return self._prl_keep(tensors)
