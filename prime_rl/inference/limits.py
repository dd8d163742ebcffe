"""How long a sequence the model itself allows. Imports transformers, so only the engines use it."""

from __future__ import annotations

import logging

from transformers import AutoConfig

from prime_rl.configs.inference import InferenceConfig

logger = logging.getLogger(__name__)


def max_model_len(config: InferenceConfig) -> int:
    """`model.max_model_len`, or the positions that the model has when those are fewer (vLLM would not start then)."""
    wanted = config.model.max_model_len
    model = AutoConfig.from_pretrained(config.model.name).get_text_config()
    positions = getattr(model, "max_position_embeddings", None)
    rope = getattr(model, "rope_parameters", None) or {}
    # Stretched positions (YaRN and its kin) reach further than the number says: whoever asks for them knows.
    stretched = isinstance(rope, dict) and rope.get("rope_type", "default") != "default"
    if positions is None or stretched or wanted <= positions:
        return wanted
    logger.warning("model.max_model_len: %d is cut to the %d positions of the model", wanted, positions)
    return int(positions)
