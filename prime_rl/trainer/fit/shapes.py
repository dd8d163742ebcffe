"""The shapes of models that are known by name, so that `prl fit` needs no download.

The figures are those of the models' own config.json on the Hugging Face Hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

_QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-6}
_LLAMA = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}


def _shape(family: dict[str, Any], width: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    return {"tie_word_embeddings": True, **family, **sizes, "num_attention_heads": heads, **more}


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _shape(_QWEN3, 1024, 3072, 28, 16),
    "qwen3-1.7b": _shape(_QWEN3, 2048, 6144, 28, 16),
    "qwen3-4b": _shape(_QWEN3, 2560, 9728, 36, 32),
    "qwen3-8b": _shape(_QWEN3, 4096, 12288, 36, 32, tie_word_embeddings=False),
    "llama3.2-1b": _shape(_LLAMA, 2048, 8192, 16, 32, head_dim=64),
    "llama3.2-3b": _shape(_LLAMA, 3072, 8192, 28, 24, head_dim=128),
    "smollm2-135m": _shape(_LLAMA, 576, 1536, 30, 9, head_dim=64, num_key_value_heads=3, vocab_size=49_152),
}


class UnknownModel(ValueError):
    """No such shape, folder or model; the message is one line that says what there is."""


def model_config(name: str) -> PretrainedConfig:
    """The config of a shape by name, of a model folder, or of a model id that was downloaded. Raises UnknownModel."""
    if (shape := SHAPES.get(name.lower())) is not None:
        # A table without the entry means no end of positions that matters here.
        return AutoConfig.for_model(**shape, max_position_embeddings=131_072)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        if Path(name).is_dir():
            raise UnknownModel(f"{name}: no readable config.json: {' '.join(str(error).split())}") from error
        raise UnknownModel(f"{name} not found: name a model folder, or one of {', '.join(SHAPES)}") from error
    return config
