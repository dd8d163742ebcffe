"""Whole weights for the model that the embedded engine holds: read and checked first, then put in place at once.

Identifies the model's parameters by the names that a model folder has for them, whatever adapters were put around its
layers. When it is safe to change them is the caller's business.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.errors import ApiError
from prime_rl.inference.weight_files import WEIGHTS_FILE, check_fit, readable, weights_label
from prime_rl.lora.misfit import shapes_of
from prime_rl.lora.tensor_files import load_tensors
from prime_rl.transfer import TransferError, WeightReceiver

_ADAPTERS = (".lora_A.", ".lora_B.")


class WholeWeights:
    """The parameters of `model`. `shapes` are those that a weight file must have; a tied weight is there once."""

    def __init__(self, model: nn.Module, config: InferenceConfig) -> None:
        self._parameters = {
            name.replace(".base_layer.", "."): parameter
            for name, parameter in model.named_parameters()
            if not any(part in name for part in _ADAPTERS)
        }
        self.shapes = shapes_of(self._parameters)
        self._config = config
        self._receiver: WeightReceiver | None = None
        self._base: dict[str, Tensor] | None = None  # made when it is first needed: adapters alone never do

    def read(self, folder: Path) -> dict[str, Tensor]:
        """The weights that were published in `folder`: from its file, or from the trainer's memory. Raises ApiError
        (400) when they do not fit the model. Changes nothing."""
        if self._config.broadcast.type == "nccl":
            name = weights_label(self._config.output_dir.resolve(), folder)
            tensors = self._received(name)
        else:
            name = str(folder / WEIGHTS_FILE)
            with readable(folder / WEIGHTS_FILE):
                tensors = load_tensors(folder / WEIGHTS_FILE, mapped=True)
        check_fit(name, shapes_of(tensors), self.shapes)
        return tensors

    def _received(self, label: str) -> dict[str, Tensor]:
        if self._receiver is None:
            source, device = self._config.broadcast, next(iter(self._parameters.values())).device
            self._receiver = WeightReceiver(source.host, source.port, timeout_s=source.timeout_s, device=device)
        try:
            return self._receiver.receive(label, ticket=uuid.uuid4().hex)
        except TransferError as error:
            raise ApiError(400, f"The weights stay as they are: {error}", param="weight_dir") from error

    @torch.no_grad()
    def apply(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Put what `read` returned in place; None: the weights that the model was loaded with. No forward may run
        meanwhile."""
        if self._base is None:
            if tensors is None:
                return
            self._base = {name: parameter.to("cpu", copy=True) for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            parameter.copy_((tensors or self._base)[name])
