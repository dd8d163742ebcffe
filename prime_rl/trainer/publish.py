"""What follows an update of a run: publish, checkpoint, metrics, prune, always in this order, off the critical path.

The main thread takes a snapshot and hands it to the background writer; it goes on training while the disk works.
Whatever fails there on behalf of one run (its folder is gone) evicts that run and no other; trouble of the whole file
system evicts none, and is waited for. A run keeps its slot until what it made is written, and nothing else waits for
that: so a run that comes back finds all of it.
Rank 0 only; holds no collective, so it may catch.

A policy version is a folder that appears complete at once: PEFT for an adapter, or a whole model. Versions that no
orchestrator can ask for again are removed. One that was published is not written again: inference may serve it under a
name that identifies exactly these weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from prime_rl.configs.shared import BroadcastConfig
from prime_rl.contract.disk import NotWritten, held, holding
from prime_rl.contract.files import make_folder, mark_stable, staged_dir
from prime_rl.contract.layout import RunDir, list_steps, stable_marker
from prime_rl.trainer.checkpoint import CheckpointManager, RunSnapshot, Snapshots, WeightsSnapshot, is_due
from prime_rl.trainer.metrics import MetricsWriter, PhaseTimer, StatusReporter
from prime_rl.trainer.retention import prune, remove_step
from prime_rl.trainer.runs import MultiRunManager, TrainerRun
from prime_rl.trainer.runs.run import FINISHED
from prime_rl.trainer.runs.sync import ReadyRun
from prime_rl.trainer.step import UpdateReport
from prime_rl.trainer.whole_run import ModelSnapshot
from prime_rl.trainer.writer import DISK_TIMEOUT_S, BackgroundWriter, FolderGone, WriteError, WriteJob
from prime_rl.transfer import WeightSender
from prime_rl.utils.text import error_text

logger = logging.getLogger(__name__)

# Beside the versions that rollouts may still lag behind by: the newest, the one that is being loaded, and one to spare.
NUM_SPARE_VERSIONS = 3


class Publisher:
    """See the module."""

    def __init__(
        self,
        manager: MultiRunManager,
        snapshots: Snapshots,
        broadcast: FileSystemWeightBroadcast,
        checkpoints: CheckpointManager,
        metrics: MetricsWriter,
        status: StatusReporter,
        writer: BackgroundWriter,
    ) -> None:
        self._manager = manager
        self._snapshots = snapshots
        self._broadcast = broadcast
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._status = status
        self._writer = writer

    def resume(self, run: TrainerRun) -> None:
        """A run has its slot: the version that it starts or resumes from is published if it is gone, and reported.

        The base model, which is version 0 of a run without `[init]`, is not.
        """
        report = partial(self._status.published, run, replace(run.progress))
        if run.progress.step or run.config.init.from_ is not None:
            snapshot = RunSnapshot.of(run, self._snapshots.weights(run), state=None)
            what = f"version {run.progress.step} of {run.run_id}"
            self._writer.submit(WriteJob(run.run_id, what, partial(self._publish, snapshot), report))
        else:
            report()
        if run.progress.step >= run.config.max_steps:
            self._manager.finish_run(run)

    def after_update(self, run: TrainerRun, ready: ReadyRun, report: UpdateReport, timer: PhaseTimer) -> None:
        """Make the update known. `timer` has the phases since the last update of any run."""
        if report.problem is not None:
            self._manager.evict_run(run.run_idx, report.problem)
        else:
            with self._manager.run_boundary(run, f"handing over version {report.step}"):
                self._hand_over(run, ready, report, timer)
            if report.step >= run.config.max_steps:
                self._manager.finish_run(run)

    def _hand_over(self, run: TrainerRun, ready: ReadyRun, report: UpdateReport, timer: PhaseTimer) -> None:
        with timer("broadcast"):
            weights = self._snapshots.weights(run)
        with timer("checkpoint"):
            state = self._snapshots.state(run) if is_due(run.config, report.step) else None
            snapshot = RunSnapshot.of(run, weights, state)
        self._writer.submit(
            WriteJob(
                run.run_id,
                f"version {report.step} of {run.run_id}",
                partial(self._write, run, snapshot, ready, report),
                partial(self._status.published, run, snapshot.progress),
            )
        )

    def full(self) -> dict[str, str]:
        """Takes in what the writer did; returns the runs that wait for the disk, each with what for, in words."""
        self.collect()
        leaving = {run.run_id: self._writer.waits_for(run.run_id) for run in self._manager.used if run.leaving}
        return self._writer.full() | {run_id: what for run_id, what in leaving.items() if what}

    def wait(self, timeout_s: float) -> None:
        """Until something was written, at most `timeout_s`."""
        self._writer.wait(timeout_s)

    def collect(self) -> None:
        """Take in what the writer did: report what was published, evict what could not be."""
        for result in self._writer.take_results():
            run = self._manager.run_of(result.job.run_id)
            if result.problem is None:
                result.job.then()
            elif result.problem and run is not None and (run.leaving in (None, FINISHED) or run.saves):
                self._manager.evict_run(run.run_idx, result.problem)

    def admitted(self, run: TrainerRun) -> None:
        """Raises ValueError while the disk has yet to take what the run made when it was here before."""
        if what := self._writer.waits_for(run.run_id):
            raise ValueError(f"it was here before and still waits for {what}: readmit it when the disk answers")
        self._writer.forget(run.run_id)

    def may_leave(self, run: TrainerRun) -> bool:
        """Whether what the run made is written, or the disk has had its time."""
        what, now = self._writer.waits_for(run.run_id), time.monotonic()
        self.collect()
        if what is None:
            return True
        run.waits_since = now if run.waits_since is None or holding() else run.waits_since
        if now - run.waits_since < DISK_TIMEOUT_S:
            return False
        logger.error("%s leaves its slot after %g s of waiting for %s", run.run_id, DISK_TIMEOUT_S, what)
        return True

    def save(self, run: TrainerRun) -> None:
        """Have the run saved after its last complete update. All ranks have collected it."""
        what = f"the last checkpoint of {run.run_id}"
        with self._manager.run_boundary(run, f"handing over {what}"):
            write = partial(self._write_checkpoint, self._snapshots.whole(run))
            self._writer.submit(WriteJob(run.run_id, what, write, lambda: None))

    def forgotten(self, run: TrainerRun) -> None:
        """Drop what the writer has not begun for a run that loses its slot, and its results."""
        self._writer.forget(run.run_id)

    def before_exit(self) -> None:
        """Save every run after its last complete update, so that a stop loses nothing that was done."""
        self._writer.finish(self._idle)
        self.collect()
        for run in self._manager.active:
            self.save(run)
            # One at a time, so that not all of them are in memory twice.
            self._writer.finish(self._idle)
        self.collect()
        self._broadcast.close()
        self._status.close()

    def _idle(self, what: str) -> None:
        self._manager.channel.beat()
        self._status.waiting(what)

    # The writer's thread

    def _write(self, run: TrainerRun, snapshot: RunSnapshot, ready: ReadyRun, report: UpdateReport) -> None:
        folder, step = snapshot.run, snapshot.progress.step
        timer = PhaseTimer()
        # A run has finished when its last version is published, and is not written again: its checkpoint comes first.
        is_last = step >= snapshot.config.max_steps
        if is_last:
            self._checkpoint(snapshot, timer)
        with timer("broadcast"):
            self._publish(snapshot)
        if not is_last:
            self._checkpoint(snapshot, timer)
        own_s = {phase: timer.seconds[phase] for phase in ("broadcast", "checkpoint")}
        metrics = partial(self._metrics.write, run, ready, report, own_s)
        self._do(snapshot, f"writing the metrics of step {step}", folder.trainer_metrics, metrics)
        self._do(snapshot, "removing what is old", folder.path, partial(prune, folder, snapshot.config.ckpt))

    def _publish(self, snapshot: RunSnapshot) -> None:
        step = snapshot.progress.step
        what, path = f"publishing version {step}", snapshot.run.broadcast_dir(step)
        self._do(snapshot, what, path, partial(self._broadcast.publish, snapshot))

    def _checkpoint(self, snapshot: RunSnapshot, timer: PhaseTimer) -> None:
        """Save the run if its config asks for that at this step."""
        if snapshot.state is not None:
            with timer("checkpoint"):
                self._write_checkpoint(snapshot)

    def _write_checkpoint(self, snapshot: RunSnapshot) -> None:
        run, step = snapshot.run, snapshot.progress.step
        self._do(snapshot, f"saving step {step}", run.checkpoint_dir(step), partial(self._checkpoints.save, snapshot))

    def _do(self, snapshot: RunSnapshot, what: str, path: Path, write: Callable[[], object]) -> None:
        """Write at `path` once the disk takes it. Raises WriteError, or FolderGone and NotWritten: no fault of the run.

        The message of a WriteError is what failed, where and why.
        """

        def at_home() -> None:
            if not snapshot.is_at_home():
                raise FolderGone(snapshot.run.run_id)
            write()

        try:
            held(at_home, snapshot.run.path, self._writer.gives_up)
        except (FolderGone, NotWritten):
            raise
        except Exception as error:
            if not snapshot.is_at_home():
                raise FolderGone(snapshot.run.run_id) from error
            raise WriteError(f"{what} failed: {path}: {error_text(error)}") from error


class FileSystemWeightBroadcast:
    """Writes `broadcast/step_N` of a run (rank 0)."""

    def publish(self, snapshot: RunSnapshot) -> Path:
        """Publish what was taken, from any thread; returns the folder. Raises OSError."""
        run, target = snapshot.run, snapshot.run.broadcast_dir(snapshot.progress.step)
        self._put(target, snapshot.weights)
        self._prune(run, keep=snapshot.config.max_async_level + NUM_SPARE_VERSIONS)
        return target

    def close(self) -> None:
        """Nothing is open."""

    def _put(self, target: Path, weights: WeightsSnapshot) -> None:
        if not stable_marker(target).exists():
            write_version(target, weights.published().save)

    @staticmethod
    def _prune(run: RunDir, keep: int) -> None:
        for old in list_steps(run.broadcast)[:-keep]:
            remove_step(run.broadcast_dir(old))


def write_version(target: Path, save: Callable[[Path], None]) -> None:
    """Let `save` fill a folder that then appears as `target`, complete at once. Raises OSError."""
    make_folder(target.parent)
    with staged_dir(target) as folder:
        save(folder)
        mark_stable(folder, sync=False)


def open_broadcast(config: BroadcastConfig) -> FileSystemWeightBroadcast:
    """What `config.type` names (rank 0). Raises OSError with address and reason when the sender cannot be opened."""
    if config.type == "filesystem":
        return FileSystemWeightBroadcast()
    try:
        sender = WeightSender(config.host, config.port, timeout_s=config.timeout_s)
    except (OSError, RuntimeError) as error:
        raise OSError(f"broadcast: cannot listen on {config.host} port {config.port}: {error}") from error
    return NCCLWeightBroadcast(sender)


class NCCLWeightBroadcast(FileSystemWeightBroadcast):
    """Offers a version of the whole model from memory (rank 0): the folder marks that it exists, without its weights.

    Inference sees the folder appear as always, and asks `sender` for the weights. They are kept until the next version,
    so a server that starts again, or a second one, gets them as often as it asks. Where the trainer has a GPU they are
    kept on it, in the type that the model computes in: beside the version that is trained, that one, and for a moment
    the next.
    """

    def __init__(self, sender: WeightSender) -> None:
        self._sender = sender

    def close(self) -> None:
        """Close the sender: no server gets weights from this process any more."""
        self._sender.close()

    def _put(self, target: Path, weights: WeightsSnapshot) -> None:
        published = weights.published()
        assert isinstance(published, ModelSnapshot), "adapters go through the disk: enforced by the config"
        # Also when the folder is there already, from before a restart of the trainer: the weights in memory were lost.
        self._sender.offer(label_of(target), published.tensors)
        if not stable_marker(target).exists():
            write_version(target, published.files.save)


def label_of(folder: Path) -> str:
    """What both sides call the version in `output_dir/run_X/broadcast/step_N`: the path below `output_dir`."""
    return folder.relative_to(folder.parent.parent.parent).as_posix()
