"""An adapter on disk in PEFT format: the names of its files, its config, and its shapes. Loads no weights.

Trainer and inference read the weights (`lora.adapter_state`); `prl` reads only what is here, without torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.contract.files import open_file, read_file

ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
# A rank of 256 in every linear layer of a model with 70 billion parameters takes about as much.
MAX_ADAPTER_BYTES = 8 << 30
# Each changes what an adapter does; ignored, it would be served as something that was never trained.
NOT_PLAIN = (
    "use_rslora",
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
)


# By data type the bytes of a number. Of its last byte, sign and exponent: all that is below 2^17.
_WIDTHS = {"F32": 4, "BF16": 2}
_SOUND = bytes(byte for byte in range(256) if byte & 0x7F < 0x48)
_LOOK_BYTES = 1 << 24


@dataclass(frozen=True)
class AdapterConfig:
    """The part of `adapter_config.json` that a plain LoRA adapter needs. `base_model`: a name on the hub, or a path."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    base_model: str

    @property
    def scaling(self) -> float:
        """The factor of the product of the two LoRA matrices."""
        return self.alpha / self.rank


def read_adapter_config(folder: Path, *, follow_links: bool = False) -> AdapterConfig:
    """The config of the adapter in `folder`. Raises OSError, or ValueError when it is not a plain LoRA adapter.

    `follow_links`: as for `read_file`.
    """
    path = folder / CONFIG_FILE
    try:
        data = json.loads(read_file(path, limit=MAX_CONFIG_BYTES, follow_links=follow_links))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder}: not an adapter: {error}") from error
    return _parsed(path, data)


def has_adapter(folder: Path) -> bool:
    """True when both files of an adapter are in `folder`."""
    return all(os.path.isfile(folder / name) for name in (CONFIG_FILE, ADAPTER_FILE))


def check_adapter_file(path: Path, *, follow_links: bool = False) -> None:
    """Raises ValueError when the file cannot be safetensors (it was cut short, or is something else), else OSError."""
    with os.fdopen(open_file(path, follow_links=follow_links), "rb") as file:
        num_head_bytes = int.from_bytes(file.read(8), "little")
        begins_well = file.read(1) == b"{"
        if not begins_well or num_head_bytes + 8 > os.fstat(file.fileno()).st_size:
            raise ValueError(f"{path}: not a safetensors file, or only the beginning of one")


def copy_adapter(folder: Path, target: Path) -> None:
    """Copy an adapter into the folder `target`; no links are followed. Raises ValueError for no adapter, or OSError."""
    for name, limit in ((CONFIG_FILE, MAX_CONFIG_BYTES), (ADAPTER_FILE, MAX_ADAPTER_BYTES)):
        with os.fdopen(open_file(folder / name), "rb") as old, (target / name).open("xb") as new:
            while part := old.read(_LOOK_BYTES):
                if old.tell() > limit:
                    raise ValueError(f"{folder / name}: has more than {limit:,} bytes")
                new.write(part)
    read_adapter_config(target)
    check_adapter_file(target / ADAPTER_FILE)


def check_weights(path: Path) -> None:
    """Raises ValueError when a number of a safetensors file is not finite or beyond any weight (2^17), else OSError.

    Only the last byte of a number is looked at: it has the sign and most of the exponent.
    """
    check_adapter_file(path)
    with os.fdopen(open_file(path), "rb") as file:
        num_head_bytes = int.from_bytes(file.read(8), "little")
        try:
            for name, facts in json.loads(file.read(num_head_bytes)).items():
                width = _WIDTHS.get(facts.get("dtype"))
                begin, end = facts["data_offsets"] if width else (0, 0)
                file.seek(8 + num_head_bytes + begin)
                while begin < end and (data := file.read(min(_LOOK_BYTES, end - begin))):
                    begin += len(data)
                    if width and data[width - 1 :: width].translate(None, _SOUND):
                        raise ValueError(f"the weights are not finite, or far too large ({str(name)[:200]})")
        except (AttributeError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise ValueError(f"{path}: not a safetensors file: {error}") from error


def untrained_modules(wanted: Sequence[str], takes: Sequence[str]) -> list[str]:
    """Those of an adapter's target modules that a model with adapters in `takes` does not adapt."""
    return sorted(
        name
        for name in wanted
        if not any(name == take or name.endswith(f".{take}") or take.endswith(f".{name}") for take in takes)
    )


def _parsed(path: Path, data: Any) -> AdapterConfig:
    if not isinstance(data, dict) or not isinstance(data.get("target_modules"), list):
        raise ValueError(f"{path}: target_modules must be a list of names")
    try:
        config = AdapterConfig(
            rank=int(data["r"]),
            alpha=float(data["lora_alpha"]),
            target_modules=tuple(str(name) for name in data["target_modules"]),
            base_model=str(data["base_model_name_or_path"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    if data.get("peft_type") != "LORA" or any(data.get(name) for name in NOT_PLAIN):
        raise ValueError(f"{path}: only plain LoRA adapters can be loaded")
    if config.rank < 1:
        raise ValueError(f"{path}: r is {config.rank}, must be at least 1")
    if not math.isfinite(config.alpha):
        raise ValueError(f"{path}: lora_alpha is {config.alpha}, must be a finite number")
    return config
