"""Slots and tokens of a pass where the config leaves them to the trainer: as many as fit into what is free."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.trainer.fit.auto import CPU_SHARE, DoesNotFit, with_numbers
from prime_rl.trainer.fit.capacity import FRAGMENTS, GIB
from prime_rl.trainer.fit.shapes import UnknownModel
from prime_rl.trainer.model import ModelError
from prime_rl.trainer.world import World

logger = logging.getLogger(__name__)


def with_a_budget(config: TrainerConfig, world: World) -> TrainerConfig:
    """`config` with numbers in the place of "auto", before the model is loaded. A collective. Raises ModelError."""
    if "auto" not in (config.max_concurrent_runs, config.max_tokens_per_micro_batch):
        return config
    usable = _free_on_each(world) * (1.0 - FRAGMENTS)
    try:
        config = with_numbers(config, world.device.type, world.size, usable)
    except UnknownModel as error:
        raise ModelError(f"model.name: {error}") from error
    except DoesNotFit as error:
        raise ModelError(str(error)) from error
    logger.info(
        "slots: %d, tokens of a pass: %d, for the %.1f GiB that are free",
        config.num_slots,
        config.micro_batch_tokens,
        usable / GIB,
    )
    return config


def _free_on_each(world: World) -> float:
    """Bytes that are free on the rank that has the least: all ranks must come to the same numbers."""
    free = torch.tensor(_free_bytes(world.device), dtype=torch.float64, device=world.device)
    dist.all_reduce(free, dist.ReduceOp.MIN)
    return float(free)


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    assert found, "Linux has it since 3.14"
    return CPU_SHARE * 1024 * int(found.group(1)) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
