"""How many tokens a pass may have where the config leaves it to the trainer: as many as fit into what is free."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.trainer.fit.capacity import FRAGMENTS, GIB, most_tokens
from prime_rl.trainer.fit.predict import predict, setting_of
from prime_rl.trainer.fit.shapes import UnknownModel
from prime_rl.trainer.model import ModelError

logger = logging.getLogger(__name__)

# Larger passes are no quicker, and a pass is how long a run waits that comes late.
MOST_TOKENS = 131_072
# Of what is free on a machine without a GPU, where others live too.
CPU_SHARE = 0.5


def with_a_budget(config: TrainerConfig, device: torch.device, num_ranks: int) -> TrainerConfig:
    """`config` with a number for `max_tokens_per_micro_batch`, before the model is loaded. Raises ModelError."""
    if config.max_tokens_per_micro_batch != "auto":
        return config
    try:
        setting = setting_of(config, device.type, num_ranks)
    except UnknownModel:
        return config  # loading it fails next, and says why
    usable = _free_bytes(device) * (1.0 - FRAGMENTS)
    tokens = min(MOST_TOKENS, most_tokens(setting, predict(setting), usable))
    if not tokens:
        raise ModelError(
            f"max_tokens_per_micro_batch = 'auto': a row of seq_len = {config.seq_len} does not fit into the "
            f"{usable / GIB:.1f} GiB that are free: lower seq_len, max_concurrent_runs or model.lora.rank"
        )
    logger.info("max_tokens_per_micro_batch: %d tokens fit into %.1f GiB", tokens, usable / GIB)
    return config.model_copy(update={"max_tokens_per_micro_batch": max(tokens, config.seq_len)})


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    assert found, "Linux has it since 3.14"
    return CPU_SHARE * 1024 * int(found.group(1))
