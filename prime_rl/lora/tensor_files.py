"""Safetensors files from folders that others can write to: only regular files, read as they were opened.

They are read and not mapped into memory, unless asked for: truncating a mapped file ends the process. A name that does
not match would leave a part of the model as it was, without an error: all are compared before any is taken.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from prime_rl.contract.files import FileRefused, open_file


def load_tensors(path: Path, *, limit: int | None = None, mapped: bool = False) -> dict[str, Tensor]:
    """The tensors of a file of at most `limit` bytes. Raises OSError, or ValueError when the file is damaged.

    `mapped` shares the memory between processes, for whole models, whose only run can hurt no other.
    """
    with _opened(path, limit) as name:
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
def open_tensors(path: Path, *, limit: int | None = None) -> Iterator[TensorFile]:
    """Reads the head of a file of at most `limit` bytes. Raises as `load_tensors` does, and so does the block."""
    with _opened(path, limit) as name, safe_open(name, framework="pt", backend="pread") as file:
        yield TensorFile(file)


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a file, by name; reads its head alone. Raises as `load_tensors` does."""
    with open_tensors(path) as file:
        return file.shapes


@contextlib.contextmanager
def _opened(path: Path, limit: int | None) -> Iterator[str]:
    """A name of the file that stays its name, whatever is put at `path` meanwhile."""
    fd = open_file(path)
    try:
        size = os.fstat(fd).st_size
        if limit is not None and size > limit:
            raise FileRefused(path, f"has {size} bytes, expected at most {limit}")
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


def misfit(found: Shapes, wanted: Shapes) -> str | None:
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
