"""The trainer of one rank: it is built, it loops, runs come and go, it ends. It reads top to bottom.

Every rank runs the same loop. Rank 0 alone looks at the disk, packs, publishes and reports; what that needs is its
`Lead`, which the others do not have. They wait for its messages, which bring the next pass to each rank, and with it
every change of the runs. What a run that comes or goes means for each part is in `Trainer.admitted`,
`created` and `forgotten`, which the manager calls.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import torch

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.validate import TrainerLimits
from prime_rl.contract.files import WaitStopped, wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.notes import WorkNote
from prime_rl.contract.status import (
    TAKES_ITS_SHARE,
    InferenceStatus,
    StatusWriter,
    TrainerStatus,
    is_there,
    read_status,
)
from prime_rl.contract.types import MicroBatch
from prime_rl.contract.usage import UsageLog
from prime_rl.trainer.batches import BatchReader, Packer, noting
from prime_rl.trainer.capacity import with_a_budget
from prime_rl.trainer.checkpoint import AdapterSnapshots, CheckpointManager, Snapshots, is_due
from prime_rl.trainer.metrics import MetricsWriter, PhaseTimer, StatusReporter, TrainerUsage
from prime_rl.trainer.model import PolicyModel, dtype_on, load_model
from prime_rl.trainer.optim import FlatWeights, RunOptimizer, RunWeights
from prime_rl.trainer.publish import BackgroundWriter, Publisher, open_broadcast
from prime_rl.trainer.runs import MultiRunManager, TrainerRun, setup_multi_run_manager
from prime_rl.trainer.runs.manager import RunLife
from prime_rl.trainer.runs.run import Leaving
from prime_rl.trainer.runs.sync import (
    Channel,
    PackMessage,
    ReadyRun,
    SaveMessage,
    StateMessage,
    StopMessage,
)
from prime_rl.trainer.step import PassTooLarge, TrainStep, remember, remembered
from prime_rl.trainer.whole_model import ModelFiles, ModelSnapshots, ShardedWeights, WholeModel
from prime_rl.trainer.world import World
from prime_rl.utils.watch import Watcher

# How often an idle trainer looks for the next batch of its runs: unnoticed by people, microseconds of work.
POLL_S = 0.05
# Looks that find nothing new take at most a twentieth of one core: the status files of many runs change all the time.
LOOK_SHARE = 20
# But one look at a thousand new runs must not keep the next run waiting.
MAX_REST_S = 0.25
# As long as a server may take until its first status: the import of its libraries.
NO_SIGN_S = 60.0
# A config that is bad is reported when it has stayed so for this long: an editor may be about to write the rest.
SETTLE_S = 0.5


class Trainer(RunLife):
    """The base model, the runs that share it (or, without adapters, the one that changes it), and the loop.

    Args:
        stop: whether the trainer is to end; rank 0 decides that for all.
        status: of rank 0.
    """

    def __init__(
        self,
        config: TrainerConfig,
        world: World,
        stop: Callable[[], bool],
        status: StatusWriter | None,
    ) -> None:
        if config.gpu_share < 1.0:
            await_inference(OutputDir(config.output_dir), stop, config.servers_on_gpu)
        config = with_a_budget(config, world)
        if status is not None:
            waiting_on = f"the base model {config.model.name} to be loaded"
            status.update(waiting_on=waiting_on, max_runs=config.num_slots)
        model = load_model(config.model, config.model.lora, config.num_slots, world)
        self._config = config
        self._world = world
        self._manager = setup_multi_run_manager(
            config.output_dir,
            config.num_slots,
            limits=TrainerLimits.of(config),
            channel=Channel(world.store, world.rank, world.size, timeout_s=config.dist_timeout_s),
            settle_s=SETTLE_S,
        )
        self._manager.life = self
        self._snapshots = _set_up_weights(config, model, self._manager, world)
        self._checkpoints = CheckpointManager(self._snapshots)
        self._step = TrainStep(model, self._manager, world)
        self._lead: Lead | None = None
        if status is not None:
            self._lead = Lead(config, model, self._manager, self._snapshots, self._checkpoints, status, world, stop)
        self._source = self._lead or Follower(self._manager, self._collect)
        self._timer = PhaseTimer()

    def train(self) -> None:
        """One pass over rows of many runs, then an update of each run whose batch is complete; until the end."""
        while (message := self._wait()) is not None:
            self._train_step(message.micro_batch, message.ready)
            del message  # it is not kept while the next one is waited for
        # Only complete updates are saved; a batch that was cut short is trained on again.
        for run in self._manager.used:
            self._snapshots.collect(run, with_state=True)
            if self._lead:
                self._lead.usage.write(run)
        if self._lead:
            self._lead.reporter.spent(self._timer.take())
            self._lead.close()

    def _wait(self) -> PackMessage | None:
        with self._timer("wait"):
            return self._source.next()

    def _train_step(self, micro_batch: MicroBatch, ready: Sequence[ReadyRun]) -> None:
        batches = {batch.run_idx: batch for batch in ready}
        for run_idx in batches:
            self._manager.ready_to_update[run_idx] = True
        with self._timer("forward_backward"):
            try:
                unfit = self._step.forward_backward(micro_batch)
            except PassTooLarge as error:
                remember(error, self._config, self._world)
                raise
        for run, reason in unfit.items():
            run.ready = False
            self._manager.evict_run(run.run_idx, reason)
        if self._lead:
            self._lead.packer.limit(self._step.most_tokens)
            self._lead.usage.passed(self._timer.last_s)
        for run in self._manager.ready:
            batch = batches[run.run_idx]
            with self._timer("optim"):
                report = self._step.update(run, batch)
            if report.problem is None:
                with self._timer("broadcast"):
                    self._snapshots.collect(run, with_state=is_due(run.config, report.step))
            if self._lead:
                self._lead.publisher.after_update(run, batch, report, self._timer)
                time_s = self._timer.take()
                self._lead.usage.updated(run, batch.num_tokens, time_s)
                self._lead.reporter.updated(time_s, batch.num_tokens)

    # The life of a run

    def admitted(self, run: TrainerRun) -> None:
        """Rank 0: decide where the run starts. Raises ValueError when it cannot."""
        assert self._lead, "rank 0 admits"
        self._lead.publisher.admitted(run)
        self._checkpoints.admitted(run)
        self._lead.packer.admitted(run)
        self._lead.metrics.admitted(run)

    def created(self, run: TrainerRun) -> None:
        """All ranks: its optimizer, at the step where it starts, and what its checkpoint has."""
        named, served = self._manager.get_named_parameters_for_run(run.run_idx), self._snapshots.served
        weights: RunWeights = ShardedWeights(named) if self._config.model.lora is None else FlatWeights(named, run.rank)
        run.optimizer = RunOptimizer(run.config, weights, run.dtype, self._world, run.progress.step, served=served)
        self._checkpoints.load(run)
        if self._lead:
            self._lead.publisher.resume(run)

    def may_leave(self, run: TrainerRun) -> bool:
        """Rank 0: when what the run made is written, and the run saved if it is to be."""
        assert self._lead, "rank 0 decides"
        if run.leaving is Leaving.SAVED and run.waits_since is None and run.optimizer is not None:  # once
            self._manager.channel.send_all(SaveMessage(run.run_idx))
            self._collect(run.run_idx)
            self._lead.publisher.save(run)
        return self._lead.publisher.may_leave(run)

    def forgotten(self, run: TrainerRun) -> None:
        """Rank 0: what waits of the run is dropped."""
        assert self._lead, "rank 0 forgets"
        self._lead.usage.write(run)
        self._lead.packer.forgotten(run)
        self._lead.publisher.forgotten(run)

    def _collect(self, run_idx: int) -> None:
        self._snapshots.collect(self._manager.run(run_idx), with_state=True)


class Lead:
    """Rank 0 beside what every rank has: it looks, packs, and sends the others their passes.

    It decides for all when the trainer ends. A run of which the disk has yet to take too much trains nothing until it
    has; the others go on.

    Args:
        stop: whether the trainer is to end.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model: PolicyModel,
        manager: MultiRunManager,
        snapshots: Snapshots,
        checkpoints: CheckpointManager,
        status: StatusWriter,
        world: World,
        stop: Callable[[], bool],
    ) -> None:
        paths = OutputDir(config.output_dir)
        self._manager = manager
        self._stop = stop
        self._stop_after_step = config.stop_after_step
        self._watcher = Watcher(rescan_s=config.watch.rescan_s, kind=config.watch.kind)
        self._scout = Scout(manager, self._watcher)
        broadcast = open_broadcast(config.broadcast)
        self.metrics = MetricsWriter()
        self.reporter = StatusReporter(status, manager)
        self.usage = TrainerUsage(manager, UsageLog(paths.run_usage("trainer")))
        reader = BatchReader(noting(WorkNote(paths.trainer_work)))
        self.packer = Packer(manager, reader, model.vocab_size, config.micro_batch_tokens, world.size, model.packs)
        self.packer.limit(remembered(config, world))
        writer = BackgroundWriter()
        self.publisher = Publisher(manager, snapshots, broadcast, checkpoints, self.metrics, self.reporter, writer)

    def next(self) -> PackMessage | None:
        """The next pass of rank 0, after the other ranks got theirs; None once it ends, which they are sent too."""
        self._scout.wait(0)
        while not self._ends():
            self._scout.look()
            full = self.publisher.full()
            pack = self.packer.pack(full)
            if pack is not None:
                self.reporter.training()
                messages = [PackMessage(micro_batch, pack.ready) for micro_batch in pack.micro_batches]
                self._manager.channel.send(messages)
                return messages[0]
            self._manager.channel.beat()
            self.reporter.waiting(next(iter(full.values()), None) or self.packer.waits_for())
            if full:
                self.publisher.wait(POLL_S)
            self._scout.wait(0 if full else POLL_S)
        self._manager.channel.send_all(StopMessage())
        return None

    def _ends(self) -> bool:
        steps = [run.progress.step for run in self._manager.used]
        last = self._stop_after_step
        return self._stop() or (last is not None and min(steps, default=0) >= last)

    def close(self) -> None:
        """After the last update: what is still to be written is written."""
        self.publisher.before_exit()
        self.packer.close()
        self._watcher.close()


class Scout:
    """Finds changes of the runs on disk: when the watcher reports one, and at each rescan. Rests in between."""

    def __init__(self, manager: MultiRunManager, watcher: Watcher) -> None:
        self._manager = manager
        self._watcher = watcher
        self._hinted = False
        self._earliest = 0.0
        self._rescan_at = 0.0

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something to look at, at most `timeout_s`."""
        now = time.monotonic()
        due = min(self._rescan_at, self._manager.findings.due)
        # A hint that may not be followed yet must not keep this loop spinning.
        if self._hinted and timeout_s:
            time.sleep(max(0.0, min(timeout_s, self._earliest - now, due - now)))
        elif self._watcher.wait(max(0.0, min(timeout_s, due - now))):
            self._hinted = True

    def look(self) -> None:
        """Discover runs and inform all ranks, if it is time."""
        now = time.monotonic()
        everything = now >= self._rescan_at
        hinted = self._hinted and now >= self._earliest
        settled = now >= self._manager.findings.due
        if not (everything or hinted or settled or self._manager.needs_discovery):
            return
        self._hinted = False
        start_s = time.thread_time()
        changed = self._watcher.take_changed()
        everything |= changed is None
        self._manager.discover_runs(None if everything else changed)
        self._watcher.watch(self._manager.findings.folders)
        # Of this thread alone: on a machine with other work to do a look takes long and costs the same.
        rest_s = LOOK_SHARE * (time.thread_time() - start_s)
        done = time.monotonic()
        if everything:
            self._rescan_at = done + max(self._watcher.rescan_s, rest_s)
        if self._manager.has_changes:
            self._manager.synchronize_state()
        elif not everything:
            self._earliest = done + min(rest_s, MAX_REST_S)


class Follower:
    """The other ranks: follow rank 0's messages, in order. `collect` a run that is to be saved, by its slot."""

    def __init__(self, manager: MultiRunManager, collect: Callable[[int], None]) -> None:
        self._manager = manager
        self._collect = collect

    def next(self) -> PackMessage | None:
        """The next pass that rank 0 sent, or None when it ends; follows changes of runs and saves until then."""
        while True:
            if isinstance(self._manager.channel.peek(), StateMessage):
                self._manager.synchronize_state()
                continue
            message = self._manager.channel.receive()
            if not isinstance(message, SaveMessage):
                return message if isinstance(message, PackMessage) else None
            self._collect(message.run_idx)


def _set_up_weights(config: TrainerConfig, model: PolicyModel, manager: MultiRunManager, world: World) -> Snapshots:
    """Register with the manager what the runs train: an adapter each, or, without `model.lora`, the model itself."""
    if config.model.lora is not None:
        for name, layer in model.layers.items():
            layer.register_with_runs(manager, name)
        return AdapterSnapshots(manager, config.model.name, config.model.lora, dtype_on(config.model, world))
    weights = WholeModel(model.module, keeps=world.is_master)
    manager.register_model(weights)
    files = ModelFiles.of(config.model.name, model.module.config, dtype_on(config.model, world))
    from_memory = config.broadcast.type == "nccl" and world.is_master
    return ModelSnapshots(manager, weights, files, home=world.device if from_memory else torch.device("cpu"))


def await_inference(
    output: OutputDir, stop: Callable[[], bool], num_servers: int = 1, no_sign_s: float = NO_SIGN_S
) -> None:
    """Until `num_servers` of inference are ready, as they count the memory of the GPU that the trainer uses too.

    Without a sign of so many the trainer goes on after `no_sign_s`, once those that have begun are ready.
    """
    began = time.monotonic()

    def is_counted() -> bool:
        found = [read_status(path, InferenceStatus) for path in output.inference_statuses().values()]
        states = [each.state for each in found if each is not None and is_there(each)]
        return "starting" not in states and (len(states) >= num_servers or time.monotonic() - began > no_sign_s)

    with contextlib.suppress(WaitStopped):
        wait_for(is_counted, "inference", stop=stop)


def open_status(config: TrainerConfig) -> StatusWriter:
    """The trainer's status file, from before it takes memory."""
    status = TrainerStatus(
        waiting_on=TAKES_ITS_SHARE if config.gpu_share < 1.0 else None,
        max_runs=config.num_slots,
        model=config.model.name,
        max_rank=config.model.lora.rank if config.model.lora else None,
        max_seq_len=config.seq_len,
        max_async_level=config.max_async_level,
    )
    return StatusWriter(OutputDir(config.output_dir).trainer_status, status)
