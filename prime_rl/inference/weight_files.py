"""Whether whole weights fit the model: checked before an engine takes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prime_rl.inference.errors import ApiError
from prime_rl.lora.misfit import Shapes, misfit, shapes_of
from prime_rl.lora.tensor_files import read_shapes

WEIGHTS_FILE = "model.safetensors"


def model_shapes(name: str) -> Shapes:
    """Names and shapes of a model's weights as a model folder has them; a tied weight is there once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name, trust_remote_code=False))
    return shapes_of(dict(model.named_parameters()))


def weights_label(output_dir: Path, folder: Path) -> str:
    """What trainer, servers and orchestrators call the weights in `folder`; both without links."""
    return folder.relative_to(output_dir).as_posix()


def check_weight_file(folder: Path, shapes: Shapes) -> None:
    """Raises ApiError (400) unless the weight file of `folder` holds exactly these names and shapes. Reads its head."""
    path = folder / WEIGHTS_FILE
    with readable(path):
        found = read_shapes(path)
    check_fit(str(path), found, shapes)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """What goes wrong inside as `path` is read becomes an ApiError (400)."""
    try:
        yield
    except FileNotFoundError as error:
        raise ApiError(400, f"{path} is missing.", param="weight_dir") from error
    except (ValueError, OSError) as error:
        raise ApiError(400, f"{path} cannot be read: {error}", param="weight_dir") from error


def check_fit(name: str, found: Shapes, shapes: Shapes) -> None:
    """Raises ApiError (400) unless the names and shapes of the weights that are called `name` are these."""
    if problem := misfit(found, shapes):
        raise ApiError(400, f"{name} does not fit the model: {problem}.", param="weight_dir")
