"""What rank 0 does beside training: it finds runs, packs their batches, publishes, reports.

Everything here looks at or writes to the disk; the other ranks never do. Not here: what every rank does with a pass
(`step`), and what is sent between the ranks (`runs.sync`).
"""

from __future__ import annotations

from collections.abc import Callable

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import StatusWriter, TrainerStatus
from prime_rl.trainer.checkpoint import CheckpointManager
from prime_rl.trainer.data import PackingSource, Scout
from prime_rl.trainer.metrics import MetricsWriter, StatusReporter
from prime_rl.trainer.nccl_broadcast import open_broadcast
from prime_rl.trainer.optim import MultiLoRAOptimizer
from prime_rl.trainer.packer import Packer
from prime_rl.trainer.publish import Publisher
from prime_rl.trainer.runs import MultiRunManager
from prime_rl.trainer.snapshot import Snapshots
from prime_rl.trainer.writer import BackgroundWriter
from prime_rl.utils.watch import Watcher


class Lead:
    """Rank 0 of the trainer. `source` gives its passes, `publisher` takes its updates.

    Its hooks are called after those that were registered before it was made.

    Args:
        stop: whether the trainer is to end; rank 0 decides that for all.
    """

    def __init__(
        self,
        config: TrainerConfig,
        status: StatusWriter,
        manager: MultiRunManager,
        optimizer: MultiLoRAOptimizer,
        snapshots: Snapshots,
        checkpoints: CheckpointManager,
        *,
        vocab_size: int,
        num_ranks: int,
        packs: bool,
        stop: Callable[[], bool],
    ) -> None:
        self._manager = manager
        self._stop = stop
        self._stop_after_step = config.stop_after_step
        self._watcher = Watcher(rescan_s=config.watch.rescan_s, kind=config.watch.kind)
        broadcast = open_broadcast(config.broadcast, manager, snapshots)
        metrics = MetricsWriter(manager)
        reporter = StatusReporter(status, manager, optimizer)
        packer = Packer(manager, vocab_size, config.micro_batch_tokens, num_ranks, packs)
        manager.register_discovered_hook(checkpoints.discovered_hook)
        manager.register_discovered_hook(packer.discovered_hook)
        manager.register_discovered_hook(metrics.discovered_hook)
        manager.register_forgotten_hook(packer.forgotten_hook)
        manager.register_creation_hook(broadcast.creation_hook)
        manager.register_creation_hook(reporter.creation_hook)
        self.publisher = Publisher(manager, snapshots, broadcast, checkpoints, metrics, reporter, BackgroundWriter())
        manager.register_forgotten_hook(self.publisher.forgotten_hook)
        scout = Scout(manager, self._watcher)
        self.source = PackingSource(manager, packer, scout, reporter, self.publisher, self._ends)

    def close(self) -> None:
        """After the last update: what is still to be written is written."""
        self.publisher.before_exit()
        self._watcher.close()

    def _ends(self) -> bool:
        if self._stop_after_step is None:
            return self._stop()
        steps = [self._manager.progress[run_idx].step for run_idx in self._manager.used_idxs]
        return self._stop() or min(steps, default=0) >= self._stop_after_step


def open_status(config: TrainerConfig) -> StatusWriter:
    """The trainer's status file, from before the base model is loaded."""
    status = TrainerStatus(
        waiting_on=f"the base model {config.model.name} to be loaded",
        max_runs=config.max_concurrent_runs,
        model=config.model.name,
        max_rank=config.model.lora.rank if config.model.lora else None,
        max_seq_len=config.seq_len,
        max_async_level=config.max_async_level,
    )
    return StatusWriter(OutputDir(config.output_dir).trainer_status, status)
