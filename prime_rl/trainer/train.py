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
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import StatusWriter, TrainerStatus
from prime_rl.utils.logger import setup_logger
from prime_rl.utils.signals import StopFlag

if TYPE_CHECKING:
    from prime_rl.trainer.world import World


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 stopped as asked, 1 failed, 2 wrong use."""
    # Before torch is loaded, which takes seconds: a stop that comes meanwhile must not be lost.
    stop = StopFlag().install()
    try:
        config = parse_argv(TrainerConfig, argv)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    logger = setup_logger("trainer", config.log.level)
    # Before torch is loaded: threads that spin while they wait take the cores away from inference.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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
        print(f"trainer: {error}", file=sys.stderr)
        return 1
    logger.info("stopped%s", f" by {stop.signal_name}" if stop.signal_name else "")
    return 0


def train(config: TrainerConfig, world: World, stop: Callable[[], bool]) -> None:
    """Train every run that comes, until `stop`."""
    from prime_rl.trainer.checkpoint import CheckpointManager, is_due
    from prime_rl.trainer.data import SETTLE_S, DataLoader, PackingSource, PackSource, ReceivingSource, Scout
    from prime_rl.trainer.metrics import MetricsWriter, PhaseTimer, StatusReporter
    from prime_rl.trainer.model import load_model
    from prime_rl.trainer.nccl_broadcast import open_broadcast
    from prime_rl.trainer.packer import Packer
    from prime_rl.trainer.publish import Publisher
    from prime_rl.trainer.runs import setup_multi_run_manager
    from prime_rl.trainer.runs.sync import Channel
    from prime_rl.trainer.scheduler import MultiLoRAScheduler
    from prime_rl.trainer.step import TrainStep
    from prime_rl.trainer.tenancy import set_up_weights
    from prime_rl.trainer.writer import BackgroundWriter
    from prime_rl.utils.watch import Watcher

    # The base model, and the runs that will share it (or, without adapters, the one that will change it).
    writer = _status_writer(config) if world.is_master else None
    model = load_model(config.model, config.model.lora, config.max_concurrent_runs, world)
    manager = setup_multi_run_manager(
        config.output_dir,
        config.max_concurrent_runs,
        limits=TrainerLimits.of(config),
        channel=Channel(world.store, world.rank, world.size, timeout_s=config.dist_timeout_s),
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

    def ends() -> bool:
        steps = [manager.progress[run_idx].step for run_idx in manager.used_idxs]
        return stop() or (config.stop_after_step is not None and min(steps, default=0) >= config.stop_after_step)

    # What rank 0 has besides: finding, packing, publishing, reporting.
    watcher = Watcher(rescan_s=config.watch.rescan_s, kind=config.watch.kind)
    publisher: Publisher | None = None
    source: PackSource = ReceivingSource(manager)
    if writer is not None:
        broadcast = open_broadcast(config.broadcast, manager, snapshots)
        metrics = MetricsWriter(manager)
        status = StatusReporter(writer, manager, optimizer)
        packer = Packer(manager, model.vocab_size, config.max_tokens_per_micro_batch, num_ranks=world.size)
        manager.register_discovered_hook(checkpoints.discovered_hook)
        manager.register_discovered_hook(packer.discovered_hook)
        manager.register_discovered_hook(metrics.discovered_hook)
        manager.register_forgotten_hook(packer.forgotten_hook)
        manager.register_creation_hook(broadcast.creation_hook)
        manager.register_creation_hook(status.creation_hook)
        publisher = Publisher(manager, snapshots, broadcast, checkpoints, metrics, status, BackgroundWriter())
        manager.register_forgotten_hook(publisher.forgotten_hook)
        source = PackingSource(manager, packer, Scout(manager, watcher), status, publisher.behind, ends)

    # The loop: one pass over rows of many runs, then an update of each run whose batch is complete.
    loader = DataLoader(manager, source)
    timer = PhaseTimer()
    while True:
        with timer("wait"):
            if not loader.wait_for_batch():
                break
        micro_batch, ready = loader.get_batch()
        with timer("forward_backward"):
            step.forward_backward(micro_batch)
        for run_idx in manager.ready_to_update_idxs:
            with timer("optim"):
                report = step.update(run_idx, ready[run_idx])
            if report.problem is None:
                with timer("broadcast"):
                    snapshots.collect(run_idx, with_state=is_due(manager.config[run_idx], report.step))
            if publisher is not None:
                publisher.after_update(run_idx, ready[run_idx], report, timer)

    # Only complete updates are saved; a batch that was cut short is trained on again.
    for run_idx in sorted(manager.used_idxs):
        snapshots.collect(run_idx, with_state=True)
    if publisher is not None:
        publisher.before_exit()
    watcher.close()


def _status_writer(config: TrainerConfig) -> StatusWriter:
    status = TrainerStatus(
        waiting_on=f"the base model {config.model.name} to be loaded",
        max_runs=config.max_concurrent_runs,
        model=config.model.name,
        max_rank=config.model.lora.rank if config.model.lora else None,
        max_seq_len=config.seq_len,
        max_async_level=config.max_async_level,
    )
    return StatusWriter(OutputDir(config.output_dir).trainer_status, status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
