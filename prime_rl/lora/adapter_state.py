"""One adapter as tensors and as files: start values, PEFT names, export, load. Every name and shape is checked.

An adapter whose names do not match the model would silently act as the base model, so loading is all or nothing: all
names are compared before any tensor is taken. Files are safetensors and JSON; nothing is pickled. Others can write to
their folders: only regular files are taken, read and not mapped into memory unless asked for, since truncating a mapped
file ends the process. Whether a folder is complete (`STABLE`) is the caller's business.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from prime_rl.contract.files import FileRefused, open_file, read_file
from prime_rl.contract.peft import ADAPTER_FILE as ADAPTER_FILE
from prime_rl.contract.peft import CONFIG_FILE, MAX_ADAPTER_BYTES, MAX_CONFIG_BYTES, read_adapter_config
from prime_rl.contract.peft import AdapterConfig as AdapterConfig
from prime_rl.lora.linear import MultiLoRALinear

# What is known of no file; the bytes that the head of a file has for each tensor, and besides.
MAX_TENSORS, HEAD_BYTES_A_TENSOR, LEAST_HEAD_BYTES = 65_536, 256, 65_536
# Of `served_parts`, in numbers: 64 MiB of float32.
PART_SIZE = 16 << 20
PEFT_PREFIX = "base_model.model."


def peft_names(layer_name: str) -> tuple[str, str]:
    """`model.layers.0.mlp.up_proj` -> the names of its A and its B in a PEFT file."""
    return f"{PEFT_PREFIX}{layer_name}.lora_A.weight", f"{PEFT_PREFIX}{layer_name}.lora_B.weight"


@torch.no_grad()
def reset_adapter(
    layers: Mapping[str, MultiLoRALinear],
    idx: int,
    generator: torch.Generator,
    rank: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Start values of adapter `idx`: A Kaiming uniform in its first `rank` rows (null: all), the rest and B zero.

    The values depend on the generator (on the CPU), the layers and `rank` alone, not on the slot, and are rounded to
    `dtype`. Gradients are dropped.
    """
    for layer in layers.values():
        lora_A, lora_B = layer.parameters_of(idx)
        num_in = lora_A.shape[1]
        # Kaiming uniform with a = sqrt(5), as nn.Linear and PEFT start theirs: bound 1 / sqrt(fan_in).
        start = torch.rand(rank or layer.rank, num_in, generator=generator) * 2 - 1
        lora_A.zero_()
        lora_A[: start.shape[0]].copy_((start / math.sqrt(num_in)).to(dtype))
        lora_B.zero_()
        lora_A.grad = lora_B.grad = None


def export_adapter(layers: Mapping[str, MultiLoRALinear], idx: int, rank: int) -> dict[str, Tensor]:
    """Adapter `idx` under PEFT names, cut to its own rank; parts of one copy on the CPU: one wait for a GPU."""
    own: dict[str, Tensor] = {}
    for name, layer in layers.items():
        lora_A, lora_B = layer.parameters_of(idx)
        own |= zip(peft_names(name), (lora_A.detach()[:rank], lora_B.detach()[:, :rank]), strict=True)
    if not own:
        return {}
    values_P = torch.cat([each.flatten() for each in own.values()]).cpu()
    parts = torch.split(values_P, [each.numel() for each in own.values()])
    return {name: part.view(each.shape) for (name, each), part in zip(own.items(), parts, strict=True)}


def load_adapter(layers: Mapping[str, MultiLoRALinear], idx: int, tensors: Mapping[str, Tensor], rank: int) -> None:
    """Put `tensors` (PEFT names, of `rank`) into slot `idx`; what is above `rank` becomes zero. Gradients are dropped.

    Raises ValueError, before anything is changed, when a name is missing or unknown or a shape is wrong.
    """
    _check_fit(layers, shapes_of(tensors), rank)
    put_adapter(layers, idx, tensors, rank)


def check_served_adapter(
    layers: Mapping[str, MultiLoRALinear], shapes: Shapes, config: AdapterConfig, base: str
) -> None:
    """Raises ValueError unless `put_adapter` may put tensors of `shapes` into `layers`, or into a part of them.

    It is refused when it was trained on another model than `base`, when it targets what takes no adapter here, or when
    its tensors are not exactly those that it lists.
    """
    if _is_other_model(config.base_model, base):
        raise ValueError(f"its base model is {config.base_model}, not {base}")
    targeted = {name: layer for name, layer in layers.items() if _is_target(name, config.target_modules)}
    idle = [target for target in config.target_modules if not any(_is_target(name, [target]) for name in layers)]
    if idle or not targeted:
        takes = sorted({name.rpartition(".")[2] for name in layers})
        raise ValueError(
            f"its target_modules are {sorted(config.target_modules)}, this model takes adapters in {takes} only"
        )
    _check_fit(targeted, shapes, config.rank)


@dataclass(frozen=True)
class ServedPart:
    """Some layers, with the tensors that the file of an adapter has for them, by their PEFT names."""

    layers: Mapping[str, MultiLoRALinear]
    tensors: Mapping[str, Tensor]
    config: AdapterConfig

    def put(self, idx: int) -> None:
        """Into slot `idx`; see `put_adapter`."""
        put_adapter(self.layers, idx, self.tensors, self.config.rank)


def served_parts(
    layers: Mapping[str, MultiLoRALinear], folder: Path, *, base: str
) -> Generator[ServedPart, None, None]:
    """Read what `save_peft` wrote in parts of about PART_SIZE numbers, once the whole of it was checked by its shapes.

    Reading holds Python's lock, so each part holds up a thread that decodes only for so long. Raises as `load_peft`
    and `check_served_adapter` do.
    """
    config = read_adapter_config(folder)
    with open_tensors(folder / ADAPTER_FILE, limit=MAX_ADAPTER_BYTES, num=2 * len(layers)) as file:
        check_served_adapter(layers, file.shapes, config, base)
        num_parts = math.ceil(sum(map(math.prod, file.shapes.values())) / PART_SIZE)
        for start in range(num_parts):
            part = dict(itertools.islice(layers.items(), start, None, num_parts))
            names = {name for layer in part for name in peft_names(layer)} & file.shapes.keys()
            tensors = file.read(names)
            check_finite(tensors)
            yield ServedPart(part, tensors, config)


DIVERGED = "the training of this version has diverged"


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError for a tensor with a value that is not a finite number."""
    for name, tensor in tensors.items():
        # Types of 8 bits have no `isfinite`.
        if not (tensor.float() if tensor.element_size() == 1 else tensor).isfinite().all():
            raise ValueError(f"{name} is not finite: {DIVERGED}")


@torch.no_grad()
def put_adapter(layers: Mapping[str, MultiLoRALinear], idx: int, tensors: Mapping[str, Tensor], rank: int) -> None:
    """Copy `tensors` that were checked into slot `idx` of `layers`, which may be a part of them.

    A layer without tensors becomes zero, as does what is above `rank`. Gradients are dropped.
    """
    for name, layer in layers.items():
        lora_A, lora_B = layer.parameters_of(idx)
        name_A, name_B = peft_names(name)
        filled = rank if name_A in tensors else 0
        if filled:
            lora_A[:rank].copy_(tensors[name_A])
            lora_B[:, :rank].copy_(tensors[name_B])
        lora_A[filled:].zero_()
        lora_B[:, filled:].zero_()
        lora_A.grad = lora_B.grad = None
        layer.routing.forget()


def _check_fit(layers: Mapping[str, MultiLoRALinear], shapes: Shapes, rank: int) -> None:
    problem = mismatch(shapes, _expected_shapes(layers, rank))
    if problem:
        raise ValueError(f"adapter does not fit the model: {problem}")


def _is_other_model(name: str, base: str) -> bool:
    """True when two models differ for certain: by their configs when both are folders here, by name when neither is."""
    configs = [_model_config(Path(each)) for each in (name, base)]
    if None in configs:
        return configs == [None, None] and name != base and not Path(name).is_absolute()
    return configs[0] != configs[1]


def _model_config(folder: Path) -> bytes | None:
    try:
        return read_file(folder / "config.json", limit=MAX_CONFIG_BYTES, follow_links=True)
    except (OSError, ValueError):
        return None


def _is_target(layer_name: str, targets: Sequence[str]) -> bool:
    """As in PEFT: a target is the whole name of a layer, or its end after a dot."""
    return any(layer_name == target or layer_name.endswith(f".{target}") for target in targets)


def _expected_shapes(layers: Mapping[str, MultiLoRALinear], rank: int) -> dict[str, tuple[int, int]]:
    shapes: dict[str, tuple[int, int]] = {}
    for name, layer in layers.items():
        if rank > layer.rank:
            raise ValueError(f"adapter has rank {rank}, the model allows at most {layer.rank}")
        name_A, name_B = peft_names(name)
        shapes[name_A] = (rank, layer.base_layer.in_features)
        shapes[name_B] = (layer.base_layer.out_features, rank)
    return shapes


def save_peft(
    folder: Path, tensors: dict[str, Tensor], *, rank: int, alpha: float, target_modules: Sequence[str], base_model: str
) -> None:
    """Write the two files of the PEFT format into `folder`, which must exist. Raises OSError."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "target_modules": sorted(target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }
    # Not `save_file`: its error for a full disk is no OSError and names no path.
    (folder / ADAPTER_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_peft(
    folder: Path, *, limit: int = MAX_ADAPTER_BYTES, num: int = MAX_TENSORS
) -> tuple[dict[str, Tensor], AdapterConfig]:
    """Read what `save_peft` wrote, at most `limit` bytes of weights in about `num` tensors.

    Raises ValueError when the files are not an adapter that this project can use, OSError when they cannot be read.
    """
    config = read_adapter_config(folder)
    try:
        tensors = load_tensors(folder / ADAPTER_FILE, limit=limit, num=num)
    except ValueError as error:
        raise ValueError(f"{folder}: not an adapter: {error}") from error
    return tensors, config


def load_tensors(
    path: Path, *, limit: int | None = None, num: int = MAX_TENSORS, mapped: bool = False
) -> dict[str, Tensor]:
    """The about `num` tensors of a file of at most `limit` bytes. Raises OSError, or ValueError for a damaged file.

    `mapped` shares the memory between processes, for whole models, whose only run can hurt no other.
    """
    with _opened(path, limit, num) as name:
        tensors: dict[str, Tensor] = load_file(name, backend="mmap" if mapped else "pread")
    return tensors


class TensorFile:
    """A file that is open. Reads what it is asked for, and raises as `load_tensors` does.

    Attributes:
        shapes: of all its tensors, by name.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        names = file.keys()
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(file.get_slice(name).get_shape()) for name in names}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these names, read from the file."""
        return {name: self._file.get_tensor(name) for name in names}


@contextlib.contextmanager
def open_tensors(path: Path, *, limit: int | None = None, num: int = MAX_TENSORS) -> Iterator[TensorFile]:
    """Reads the head of a file as `load_tensors` takes it. Raises as that does, and so does the block."""
    with _opened(path, limit, num) as name, safe_open(name, framework="pt", backend="pread") as file:
        yield TensorFile(file)


def read_shapes(path: Path, num: int = MAX_TENSORS) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a file, by name; reads its head alone. Raises as `load_tensors` does."""
    with open_tensors(path, num=num) as file:
        return file.shapes


@contextlib.contextmanager
def _opened(path: Path, limit: int | None, num: int) -> Iterator[str]:
    """A name of the file that stays its name, whatever is put at `path` meanwhile.

    A head that is too large for `num` tensors is refused: reading one takes Python's lock, seconds for a million.
    """
    fd = open_file(path)
    try:
        size = os.fstat(fd).st_size
        if limit is not None and size > limit:
            raise FileRefused(path, f"has {size} bytes, expected at most {limit}")
        head, most = int.from_bytes(os.pread(fd, 8, 0), "little"), LEAST_HEAD_BYTES + num * HEAD_BYTES_A_TENSOR
        if most < head < size:
            raise FileRefused(path, f"has a head of {head} bytes, expected at most {most} for {num} tensors")
        yield f"/dev/fd/{fd}"
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}") from error
    finally:
        os.close(fd)


Shapes = Mapping[str, tuple[int, ...]]

# In a foreign file every name is wrong and may be long: the first few are enough to recognize it.
MAX_PROBLEMS = 3
MAX_NAME_CHARS = 200


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """The shape of each tensor, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def mismatch(found: Shapes, wanted: Shapes) -> str | None:
    """The problems of `found`, the first few of them; None when names and shapes are exactly as expected."""
    problems = [f"{name[:MAX_NAME_CHARS]} is not in the model" for name in sorted(found.keys() - wanted.keys())]
    problems += [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    problems += [
        f"{name} has shape {list(found[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    more = f" (and {len(problems) - MAX_PROBLEMS} more)" if len(problems) > MAX_PROBLEMS else ""
    return "; ".join(problems[:MAX_PROBLEMS]) + more if problems else None
