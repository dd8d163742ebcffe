"""Whole weights for the model that the embedded engine holds: checked and read first, then put in place at once.

Knows the model's parameters by the names that a model folder has for them, whatever adapters were put around its
layers. When it is safe to change them is the caller's business.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from prime_rl.configs.shared import BroadcastConfig
from prime_rl.inference.errors import ApiError
from prime_rl.inference.weight_files import WEIGHTS_FILE, check_fit, readable
from prime_rl.lora.misfit import shapes_of
from prime_rl.lora.tensor_files import load_tensors
from prime_rl.transfer import TransferError, WeightReceiver

_ADAPTERS = (".lora_A.", ".lora_B.")


class WholeWeights:
    """The parameters of `model`. `shapes` are those that a weight file must have; a tied weight is there once."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {
            name.replace(".base_layer.", "."): parameter
            for name, parameter in model.named_parameters()
            if not any(part in name for part in _ADAPTERS)
        }
        self.shapes = shapes_of(self._parameters)
        self._receiver: WeightReceiver | None = None
        self._base: dict[str, Tensor] | None = None  # made when it is first needed: adapters alone never do

    def read(self, folder: Path) -> dict[str, Tensor]:
        """The weights in `folder`. Raises ApiError (400) when they do not fit the model. Changes nothing."""
        path = folder / WEIGHTS_FILE
        with readable(path):
            tensors = load_tensors(path, mapped=True)
        check_fit(str(path), shapes_of(tensors), self.shapes)
        return tensors

    def fetch(self, broadcast: BroadcastConfig, label: str) -> dict[str, Tensor]:
        """The weights that the trainer calls `label`, from its memory. Raises ApiError (400) as `read` does."""
        if self._receiver is None:
            device = next(iter(self._parameters.values())).device
            self._receiver = WeightReceiver(
                broadcast.host, broadcast.port, timeout_s=broadcast.timeout_s, device=device
            )
        try:
            tensors = self._receiver.receive(label, ticket=uuid.uuid4().hex)
        except TransferError as error:
            raise ApiError(400, f"The weights stay as they are: {error}", param="weight_dir") from error
        check_fit(label, shapes_of(tensors), self.shapes)
        return tensors

    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        """Put what `read` returned in place. No forward may run meanwhile."""
        if self._base is None:
            self._base = {name: parameter.to("cpu", copy=True) for name, parameter in self._parameters.items()}
        self._copy(tensors)

    def apply_base(self) -> None:
        """Back to the weights that the model was loaded with."""
        if self._base is not None:
            self._copy(self._base)

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[name])
