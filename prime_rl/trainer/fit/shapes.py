"""The config of the model that is asked about: of a folder, or by name, without a download."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from prime_rl.configs.fit_flags import SHAPES


class UnknownModel(ValueError):
    """No such shape, folder or model; the message is one line with the names that exist."""


def model_config(name: str) -> PretrainedConfig:
    """The config of a model folder, of a shape by name, or of a model id that was downloaded. Raises UnknownModel."""
    is_folder = Path(name).is_dir()
    if not is_folder and (shape := SHAPES.get(name.lower())) is not None:
        # No row is longer than the model's positions; how many it has costs nothing.
        return AutoConfig.for_model(**shape, max_position_embeddings=131_072)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if is_folder:
            raise UnknownModel(f"{name}: no readable config.json: {' '.join(str(error).split())}") from error
        raise UnknownModel(f"{name} not found: name a model folder, or one of {', '.join(SHAPES)}") from error
    return config
