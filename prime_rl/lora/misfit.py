"""Whether tensors fit a model, by name and shape. Pure; reads no files.

A name that does not match would leave a part of the model as it was, without an error: so all of them are
compared before any is taken.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]

# In a foreign file every name is wrong and may be long: the first few are enough to recognize it.
MAX_PROBLEMS = 3
MAX_NAME_CHARS = 200


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """The shape of each tensor, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def misfit(found: Shapes, wanted: Shapes) -> str | None:
    """What is wrong with `found`, the first few of it; None when names and shapes are exactly as expected."""
    problems = [f"{name[:MAX_NAME_CHARS]} is not in the model" for name in sorted(found.keys() - wanted.keys())]
    problems += [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    problems += [
        f"{name} has shape {list(found[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    more = f" (and {len(problems) - MAX_PROBLEMS} more)" if len(problems) > MAX_PROBLEMS else ""
    return "; ".join(problems[:MAX_PROBLEMS]) + more if problems else None
