"""The trainer's entry: one frozen base model, `max_concurrent_runs` LoRA slots, runs that come and go.

    python -m prime_rl.trainer.train @ trainer.toml [--a.b value]
    torchrun --nproc-per-node N -m prime_rl.trainer.train @ trainer.toml

What is needed before torch is loaded, and how it ends; the trainer itself is in `loop`. Left to other processes:
making rollouts, loading adapters into inference, starting and restarting.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from prime_rl.configs.base import ConfigError, parse_argv
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.utils.process import StopFlag
from prime_rl.utils.runtime import complain, heavy_imports, set_up_memory, setup_logger

if TYPE_CHECKING:
    from prime_rl.trainer.world import World


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 stopped as asked, 1 failed, 2 wrong use."""
    # Before torch is loaded, which takes seconds: a stop that comes meanwhile must not be lost.
    stop = StopFlag().install()
    try:
        config = parse_argv(TrainerConfig, argv)
    except ConfigError as error:
        complain("trainer", error)
        return 2
    logger = setup_logger("trainer", config.log.level)
    # Before torch is loaded: threads that spin while they wait take the cores away from inference.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Passes of many sizes, each a little larger than the last, would leave a GPU's memory in pieces.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    set_up_memory()

    with heavy_imports():
        import prime_rl.trainer.loop  # noqa: F401 (what `train` needs)
        from prime_rl.trainer.model import ModelError
        from prime_rl.trainer.step import PassTooLarge
        from prime_rl.trainer.world import WorldError, setup_world

    try:
        config.output_dir.mkdir(parents=True, exist_ok=True)
        world = setup_world(config.device, config.dist_timeout_s, config.num_threads, stop)
        with world.guarded():
            train(config, world, stop)
        world.close()
    except (ModelError, PassTooLarge, WorldError, OSError) as error:
        logger.debug("the trainer failed", exc_info=True)
        complain("trainer", error)
        return 1
    logger.info("stopped%s", f" by {stop.signal_name}" if stop.signal_name else "")
    return 0


def train(config: TrainerConfig, world: World, stop: Callable[[], bool]) -> None:
    """Train every run that comes, until `stop`."""
    from prime_rl.trainer.loop import Trainer, open_status

    status = open_status(config) if world.is_master else None
    try:
        Trainer(config, world, stop, status).train()
    except BaseException:
        if status is not None:
            status.abandon()  # nobody trains any more, also where the process goes on
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
