"""The whole model as what the one run trains, where `model.lora` is unset: in the place of adapters.

`WholeModel` has the weights of the manager's one slot; `ModelSnapshot` is what is published and saved: a folder that
`AutoModelForCausalLM.from_pretrained` loads. How parameters are cut over ranks is in `sharding`.
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from prime_rl.configs.orchestrator import RunLoRAConfig
from prime_rl.lora.misfit import misfit, shapes_of
from prime_rl.lora.tensor_files import load_tensors
from prime_rl.trainer.sharding import cut, join, part_here

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
# Further files of a model folder, beside weights and config. Which of them a tokenizer needs depends on its kind.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


class WholeModel:
    """The parameters of a model, of which each rank may hold a part. There is one slot.

    Names are those of the model's own weight files; a tied weight is there once.
    """

    def __init__(self, module: nn.Module, *, keeps: bool) -> None:
        self._keeps = keeps
        self._named = list(module.named_parameters())
        # A run that starts from step 0 gets the base model back; each rank keeps its own part in host memory.
        self._base = [part_here(parameter).detach().to("cpu", copy=True) for _, parameter in self._named]

    def named_parameters(self, run_idx: int) -> list[tuple[str, nn.Parameter]]:
        """All parameters of the model, in the order of the module; a sharded one holds this rank's part."""
        return list(self._named)

    @property
    def device(self) -> torch.device:
        """What this rank trains on."""
        return self._named[0][1].device

    def export(self, run_idx: int, lora: RunLoRAConfig) -> dict[str, Tensor]:
        """The whole weights on rank 0 (`keeps`), {} on the others. A collective."""
        return self.gather(torch.float32, torch.device("cpu"))

    @torch.no_grad()
    def gather(self, dtype: torch.dtype, home: torch.device) -> dict[str, Tensor]:
        """The same as `dtype`, on `home`: the CPU, or the device itself. A collective.

        Rounded before it is sent: half of the bytes between the ranks and to the host.
        """
        tensors = {}
        for name, parameter in self._named:
            # What stays on the device must not be the parameter itself.
            whole = join(part_here(parameter).to(dtype, copy=home.type != "cpu"), parameter)
            if self._keeps:
                tensors[name] = to_host(whole) if home.type == "cpu" else whole
        finish_copies(self.device)
        return tensors

    @torch.no_grad()
    def load(self, run_idx: int, tensors: dict[str, Tensor], lora: RunLoRAConfig) -> None:
        """Take over whole weights, which every rank has. ValueError, and nothing changed, when they do not fit."""
        if problem := misfit(shapes_of(tensors), shapes_of(dict(self._named))):
            raise ValueError(f"the weights do not fit the model: {problem}")
        for name, parameter in self._named:
            part_here(parameter).copy_(cut(tensors[name], parameter))
            parameter.grad = None

    @torch.no_grad()
    def reset(self, run_idx: int, generator: torch.Generator, lora: RunLoRAConfig) -> None:
        """Put the base model's weights back; gradients are dropped. Nothing is drawn from `generator`."""
        for (_, parameter), base in zip(self._named, self._base, strict=True):
            part_here(parameter).copy_(base)
            parameter.grad = None

    def scale_of(self, lora: RunLoRAConfig) -> float:
        """1.0: no adapter scales the weights."""
        return 1.0


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model folder without the weights. `dtype` is the type in which the weights are published."""

    config_json: str
    companions: tuple[Path, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, config: Any, dtype: torch.dtype) -> ModelFiles:
        """Those of the base model `name`, whose loaded `config` this is."""
        config = copy.deepcopy(config)
        config.dtype = dtype
        found = [
            cached_file(
                name,
                file,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_gated_repo=False,
                _raise_exceptions_for_connection_errors=False,
            )
            for file in COMPANIONS
        ]
        return cls(config.to_json_string(use_diff=True), tuple(Path(path) for path in found if path), dtype)

    def save(self, folder: Path) -> None:
        """Write them into `folder`, which must exist. Raises OSError."""
        (folder / CONFIG_FILE).write_text(self.config_json)
        for path in self.companions:
            shutil.copyfile(path, folder / path.name)


@dataclass(frozen=True)
class ModelSnapshot:
    """The weights that were trained, in float32, and those for inference, in the type that the model computes in.

    `tensors` are {} where no checkpoint is due.
    """

    tensors: dict[str, Tensor]
    for_inference: dict[str, Tensor]
    files: ModelFiles

    def published(self) -> ModelSnapshot:
        """What inference gets."""
        return replace(self, tensors=self.for_inference)

    def save(self, folder: Path) -> None:
        """Write a model folder into `folder`, which must exist. Raises OSError."""
        assert self.tensors, "no checkpoint was due"
        save_file(self.tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        self.files.save(folder)


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the CPU.

    One from a GPU is complete after `finish_copies`, and is in pinned memory: else the copies would wait for each
    other, and go through another buffer.
    """
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def finish_copies(device: torch.device) -> None:
    """Wait for what `to_host` began."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def load_weights(folder: Path) -> dict[str, Tensor]:
    """What `ModelSnapshot.save` wrote. Raises OSError, or ValueError when the file is damaged."""
    return load_tensors(folder / WEIGHTS_FILE, mapped=True)
