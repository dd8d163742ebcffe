"""A whole model with an adapter merged in: `python -m prime_rl.trainer.merge --base NAME --adapter DIR --out DIR`.

The base model's own weight files are copied tensor by tensor, in their order, shards and types; the weights of adapted
layers become W + scaling * B A on the way. So one tensor is in memory at a time, whatever the model's size. `--out`
must exist; that it appears complete is the caller's business (`daemons.exports`). Exit codes: 0 done, 1 failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prime_rl.lora.adapter_state import load_peft, peft_names
from prime_rl.trainer.whole_model import COMPANIONS, CONFIG_FILE, WEIGHTS_FILE, file_of
from prime_rl.utils.runtime import complain

INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
# A model of a million tensors has a header of about a hundred megabytes, the most that safetensors itself takes.
MAX_HEADER_BYTES = 100_000_000
COPY_BYTES = 16 << 20
# Types of safetensors that a sum can be rounded to.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
LENGTH_BYTES = 8


@dataclass(frozen=True)
class Delta:
    """The change of a weight `[out, in]` by an adapter: `scaling` times B `[out, rank]` times A `[rank, in]`."""

    lora_A: Tensor
    lora_B: Tensor
    scaling: float

    def merged(self, weight: Tensor) -> Tensor:
        """In the type of `weight`, computed in float32 at least."""
        if tuple(weight.shape) != (self.lora_B.shape[0], self.lora_A.shape[1]):
            shape = [self.lora_B.shape[0], self.lora_A.shape[1]]
            raise ValueError(f"the weight has shape {list(weight.shape)}, the adapter is for {shape}")
        exact = torch.promote_types(weight.dtype, torch.float32)
        total = weight.to(exact) + self.scaling * (self.lora_B.to(exact) @ self.lora_A.to(exact))
        result = total.to(weight.dtype)
        if not torch.isfinite(result).all():
            raise ValueError(f"the merged weight is not finite as {weight.dtype}")
        return result


def merge_into(out: Path, base: str, adapter: Path) -> None:
    """Write the merged model into the folder `out`. Raises ValueError or OSError."""
    tensors, config = load_peft(adapter)
    layers = sorted({key.removesuffix(".lora_A.weight") for key in tensors if key.endswith(".lora_A.weight")})
    deltas = {}
    for layer in layers:
        name = layer.removeprefix("base_model.model.")
        name_A, name_B = peft_names(name)
        if name_B not in tensors:
            raise ValueError(f"{adapter}: {name_B} is missing")
        deltas[f"{name}.weight"] = Delta(tensors[name_A], tensors[name_B], config.scaling)
    merged: set[str] = set()
    for path in weight_files(base):
        merged |= merge_file(path, out / path.name, deltas)
    if missing := sorted(deltas.keys() - merged):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{base}: its files have no {missing[0]}{more}, so nothing can be merged: leave --merge out")
    for name in (CONFIG_FILE, INDEX_FILE, *COMPANIONS):
        if (found := file_of(base, name)) is not None:
            shutil.copyfile(found, out / name)


def weight_files(base: str) -> list[Path]:
    """The safetensors files of a model folder or hub name. Raises ValueError when it has none."""
    if not Path(base).exists() and file_of(base, CONFIG_FILE) is None:
        raise ValueError(f"base model {base} not found (from {Path.cwd()}): put it back there, or leave --merge out")
    index = file_of(base, INDEX_FILE)
    names = [WEIGHTS_FILE]
    if index is not None:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    found = [file_of(base, name) for name in names]
    if None in found:
        missing = names[found.index(None)]
        raise ValueError(f"{base}: {missing} not found: only models in safetensors files can be merged")
    return [path for path in found if path is not None]


def merge_file(source: Path, target: Path, deltas: Mapping[str, Delta]) -> set[str]:
    """Copy one safetensors file with the deltas of its tensors added; returns the names of those.

    The header stays as it is, since no shape and no type changes.
    """
    merged = set()
    with source.open("rb") as file, target.open("xb") as out:
        length = file.read(LENGTH_BYTES)
        size = int.from_bytes(length, "little")
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"{source}: not a safetensors file")
        header = file.read(size)
        out.write(length + header)
        at = 0
        for name, entry in _in_order(source, header):
            start, stop = entry["data_offsets"]
            if start != at:
                raise ValueError(f"{source}: damaged at {name}")
            at = stop
            if (delta := deltas.get(name)) is None:
                _copy(file, out, stop - start)
                continue
            try:
                whole = delta.merged(_tensor(entry, _read(file, stop - start)))
                out.write(whole.contiguous().view(torch.uint8).numpy().reshape(-1).data)
            except ValueError as error:
                raise ValueError(f"{source}: {name}: {error}") from error
            merged.add(name)
    return merged


def _in_order(source: Path, header: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The tensors of a file, as they follow each other."""
    try:
        entries = json.loads(header)
        tensors = [(name, entry) for name, entry in entries.items() if name != "__metadata__"]
        return sorted(tensors, key=lambda item: tuple(item[1]["data_offsets"]))
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{source}: not a safetensors file") from error


def _read(file: BufferedReader, size: int) -> bytearray:
    data = bytearray(size)
    if file.readinto(data) != size:
        raise ValueError("the file ends early")
    return data


def _copy(file: BufferedReader, out: BufferedWriter, size: int) -> None:
    while size:
        chunk = _read(file, min(size, COPY_BYTES))
        out.write(chunk)
        size -= len(chunk)


def _tensor(entry: Mapping[str, Any], data: bytearray) -> Tensor:
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"an adapter cannot be merged into {entry['dtype']}: leave --merge out")
    return torch.frombuffer(data, dtype=dtype).reshape(entry["shape"])


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed."""
    parser = argparse.ArgumentParser(prog="python -m prime_rl.trainer.merge")
    parser.add_argument("--base", required=True)
    parser.add_argument("--adapter", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args(argv)
    try:
        merge_into(args.out, args.base, args.adapter)
    except (OSError, ValueError) as error:
        complain("merge", " ".join(str(error).split()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
