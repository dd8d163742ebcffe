"""Nested training state as one safetensors file and plain values, and back. Pure but for the file itself.

Optimizers and schedulers describe themselves as dicts of dicts. Tensors go into the file under the path of their keys;
the rest stays as it is, and each tensor leaves a reference in its place. Nothing is pickled, so reading runs no code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

# The one key of a reference, and the mark of a key that was a number: optimizers count their parameters.
_TENSOR = "$tensor"
_NUMBER = "#"


def split_tensors(value: Any, path: str = "") -> tuple[Any, dict[str, Tensor]]:
    """(`value` with references, in JSON types; the tensors by path)."""
    if isinstance(value, Tensor):
        return {_TENSOR: path}, {path: value.contiguous()}
    tensors: dict[str, Tensor] = {}
    if isinstance(value, dict):
        plain = {}
        for key, inner in value.items():
            name = f"{_NUMBER}{key}" if isinstance(key, int) else key
            plain[name], found = split_tensors(inner, f"{path}/{key}" if path else str(key))
            tensors |= found
        return plain, tensors
    if isinstance(value, list | tuple):
        parts = [split_tensors(inner, f"{path}/{at}") for at, inner in enumerate(value)]
        for _, found in parts:
            tensors |= found
        return [part for part, _ in parts], tensors
    if value is None or isinstance(value, bool | int | float | str):
        return value, tensors
    raise TypeError(f"{path}: a {type(value).__name__} cannot be saved")


def join_tensors(plain: Any, tensors: dict[str, Tensor]) -> Any:
    """What `split_tensors` took apart; ValueError when a tensor is missing."""
    if isinstance(plain, dict):
        if plain.keys() == {_TENSOR}:
            if plain[_TENSOR] not in tensors:
                raise ValueError(f"tensor {plain[_TENSOR]!r} not found")
            return tensors[plain[_TENSOR]]
        return {_key(name): join_tensors(inner, tensors) for name, inner in plain.items()}
    return [join_tensors(inner, tensors) for inner in plain] if isinstance(plain, list) else plain


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raises OSError."""
    path.write_bytes(save(tensors))


def _key(name: str) -> str | int:
    return int(name[len(_NUMBER) :]) if name.startswith(_NUMBER) else name
