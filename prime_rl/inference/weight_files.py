"""Checks of fit: whole weights before an engine takes them, the longest sequence. Only for engines."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.errors import ApiError
from prime_rl.lora.adapter_state import Shapes, misfit, read_shapes, shapes_of

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"


def meta_model(name: str) -> PreTrainedModel:
    """A model without weights, only for the names and shapes of its layers."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name, trust_remote_code=False))


def model_shapes(name: str) -> Shapes:
    """Names and shapes of a model's weights as a model folder has them; a tied weight is there once."""
    return shapes_of(dict(meta_model(name).named_parameters()))


def weights_label(output_dir: Path, folder: Path) -> str:
    """The name of the weights in `folder` for trainer, servers and orchestrators; both without links."""
    return folder.relative_to(output_dir).as_posix()


def check_weight_file(folder: Path, shapes: Shapes) -> None:
    """Raises ApiError (400) unless the weight file of `folder` holds exactly these names and shapes. Reads its head."""
    path = folder / WEIGHTS_FILE
    with readable(path):
        found = read_shapes(path)
    check_fit(str(path), found, shapes)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what goes wrong inside as `path` is read into an ApiError (400)."""
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


def max_model_len(config: InferenceConfig) -> int:
    """`model.max_model_len`, or the positions that the model has when those are fewer (vLLM would not start then)."""
    wanted = config.model.max_model_len
    model = AutoConfig.from_pretrained(config.model.name, trust_remote_code=False).get_text_config()
    positions = getattr(model, "max_position_embeddings", None)
    rope = getattr(model, "rope_parameters", None) or {}
    # Models with stretched positions (YaRN and similar) accept more than `max_position_embeddings`.
    stretched = isinstance(rope, dict) and rope.get("rope_type", "default") != "default"
    if positions is None or stretched or wanted <= positions:
        return wanted
    logger.warning("model.max_model_len: %d reduced to the %d positions of the model", wanted, positions)
    return int(positions)
