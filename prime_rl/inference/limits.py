"""What model and memory allow: the longest sequence, room for adapters. Imports transformers: only engines use it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from transformers import AutoConfig

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.checks import StartError

logger = logging.getLogger(__name__)

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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


def adapter_bytes(config: InferenceConfig, shapes: Mapping[str, tuple[int, ...]], device_type: str) -> int:
    """Memory of one adapter of the largest rank on all its target modules, on a device of type "cuda" or "cpu"."""
    lora = config.model.lora
    if lora is None:
        return 0
    targets = [
        shape for name, shape in shapes.items() if name.split(".")[-2:-1] and name.split(".")[-2] in lora.target_modules
    ]
    each = BYTES[config.model.dtype_on(device_type)]
    return sum(lora.rank * sum(shape) for shape in targets if len(shape) == 2) * each


def check_adapter_room(config: InferenceConfig, each: int, num_copies: int, available: int) -> None:
    """Raises StartError when `num_copies` of all adapters, of `each` bytes, do not fit into the `available` memory."""
    needed = num_copies * config.max_loras * each
    if needed > available:
        raise StartError(
            f"max_concurrent_runs: {config.max_concurrent_runs} runs of {config.max_versions_per_run} versions need "
            f"{needed / 2**30:.2f} GiB for adapters of rank {config.model.lora.rank if config.model.lora else 0}, "
            f"{available / 2**30:.2f} GiB free: lower max_concurrent_runs, max_versions_per_run or model.lora.rank",
            exit_code=2,
        )
