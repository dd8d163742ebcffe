"""What vLLM's workers do for whole weights, called through `collective_rpc`. Runs in vLLM's own processes.

In two steps, so that several workers change together or not at all: each gets the new weights beside those in force
(`prl_stage_weights`), then each takes them over. That is vLLM's own reload, which handles its weight layout.
vLLM imports this file because `server` names one of its classes to it; on a CPU that fixes another bug.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from prime_rl.inference.weight_files import WEIGHTS_FILE
from prime_rl.lora.tensor_files import load_tensors
from prime_rl.transfer import TransferError, WeightReceiver

if current_platform.is_cpu():
    import prime_rl.inference.vllm.cpu_rows  # noqa: F401

# What went wrong, else names and shapes of what was staged.
Staged = str | dict[str, list[int]]


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
