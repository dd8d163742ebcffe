"""The trainer's entry: one frozen base model, `max_concurrent_runs` LoRA slots, runs that come and go.

    python -m prime_rl.trainer.train @ trainer.toml [--a.b value]
    torchrun --nproc-per-node N -m prime_rl.trainer.train @ trainer.toml

It reads top to bottom: parse, build, loop, clean up. Every rank runs the same loop; rank 0 alone looks at the disk,
packs, and writes. Left to other processes: making rollouts, loading adapters into inference, starting and restarting.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from prime_rl.configs.base import ConfigError, parse_argv
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.validate import TrainerLimits
from prime_rl.utils.allocator import give_back_large_blocks
from prime_rl.utils.logger import complain, setup_logger
from prime_rl.utils.signals import StopFlag

if TYPE_CHECKING:
    from prime_rl.trainer.data import DataLoader
    from prime_rl.trainer.lead import Lead
    from prime_rl.trainer.runs import MultiRunManager
    from prime_rl.trainer.snapshot import Snapshots
    from prime_rl.trainer.step import TrainStep
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
    give_back_large_blocks()

    from prime_rl.trainer.model import ModelError
    from prime_rl.trainer.world import WorldError, setup_world

    try:
        config.output_dir.mkdir(parents=True, exist_ok=True)
        world = setup_world(config.device, config.dist_timeout_s, config.num_threads, stop)
        with world.guarded():
            train(config, world, stop)
        world.close()
    except (ModelError, WorldError, OSError) as error:
        logger.debug("the trainer failed", exc_info=True)
        complain("trainer", error)
        return 1
    logger.info("stopped%s", f" by {stop.signal_name}" if stop.signal_name else "")
    return 0


def train(config: TrainerConfig, world: World, stop: Callable[[], bool]) -> None:
    """Train every run that comes, until `stop`."""
    from prime_rl.trainer.budget import with_a_budget
    from prime_rl.trainer.checkpoint import CheckpointManager
    from prime_rl.trainer.data import SETTLE_S, DataLoader, ReceivingSource
    from prime_rl.trainer.lead import Lead, open_status
    from prime_rl.trainer.model import load_model
    from prime_rl.trainer.runs import setup_multi_run_manager
    from prime_rl.trainer.runs.sync import Channel
    from prime_rl.trainer.scheduler import MultiLoRAScheduler
    from prime_rl.trainer.step import TrainStep
    from prime_rl.trainer.tenancy import set_up_weights

    # The base model, and the runs that will share it (or, without adapters, the one that will change it).
    status = open_status(config) if world.is_master else None
    if world.is_master:
        config = with_a_budget(config, world.device, world.size)
    model = load_model(config.model, config.model.lora, config.max_concurrent_runs, world)
    channel = Channel(world.store, world.rank, world.size, timeout_s=config.dist_timeout_s)
    manager = setup_multi_run_manager(
        config.output_dir,
        config.max_concurrent_runs,
        limits=TrainerLimits.of(config),
        channel=channel,
        settle_s=SETTLE_S,
    )

    # What every rank has for each run. Hooks are called in this order.
    scheduler = MultiLoRAScheduler(manager)
    optimizer, snapshots = set_up_weights(config.model, model, manager, scheduler, world)
    optimizer.register_post_creation_callback(scheduler.scheduler_creation_hook)
    checkpoints = CheckpointManager(manager, snapshots)
    step = TrainStep(model, manager, optimizer, scheduler, world)
    manager.register_deletion_hook(step.deletion_hook)
    manager.register_deletion_hook(optimizer.deletion_hook)
    manager.register_deletion_hook(scheduler.deletion_hook)
    manager.register_creation_hook(optimizer.creation_hook)
    manager.register_creation_hook(checkpoints.creation_hook)
    lead: Lead | None = None
    if status is not None:
        sizes = {"vocab_size": model.vocab_size, "num_ranks": world.size}
        lead = Lead(config, status, manager, optimizer, snapshots, checkpoints, **sizes, packs=model.packs, stop=stop)

    loader = DataLoader(manager, lead.source if lead else ReceivingSource(manager))
    loop(manager, loader, step, snapshots, lead)
    # Only complete updates are saved; a batch that was cut short is trained on again.
    for run_idx in sorted(manager.used_idxs):
        snapshots.collect(run_idx, with_state=True)
    if lead:
        lead.close()


def loop(
    manager: MultiRunManager, loader: DataLoader, step: TrainStep, snapshots: Snapshots, lead: Lead | None
) -> None:
    """One pass over rows of many runs, then an update of each run whose batch is complete; until the trainer ends."""
    from prime_rl.trainer.checkpoint import is_due
    from prime_rl.trainer.metrics import PhaseTimer

    timer = PhaseTimer()
    while True:
        with timer("wait"):
            if not loader.wait_for_batch():
                return
        micro_batch, ready = loader.get_batch()
        with timer("forward_backward"):
            step.forward_backward(micro_batch)
        for run_idx in manager.ready_to_update_idxs:
            with timer("optim"):
                report = step.update(run_idx, ready[run_idx])
            if report.problem is None:
                with timer("broadcast"):
                    snapshots.collect(run_idx, with_state=is_due(manager.config[run_idx], report.step))
            if lead:
                lead.publisher.after_update(run_idx, ready[run_idx], report, timer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
