"""The work after an update of a run: publish, checkpoint, metrics, prune, always in this order, off the critical path.

The main thread takes a snapshot and hands it to the background writer, which has a thread for each run; training goes
on while the disk works, and a disk that is slow or hangs for one run's folder holds up that run alone. Whatever fails
there on behalf of one run (its folder is gone) evicts that run and no other; trouble of the whole file system evicts
none, and is waited for. A run keeps its slot until what it made is written, so a run that comes back finds all of it.
Rank 0 only; holds no collective, so it may catch.

A policy version is a folder that appears complete at once: PEFT for an adapter, or a whole model. Versions that no
orchestrator can ask for again are removed. One that was published is not written again: inference may serve it under a
name that identifies exactly these weights.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from prime_rl.configs.base import BroadcastConfig
from prime_rl.contract.files import (
    DEFAULT_POLL_S,
    NotWritten,
    WaitTimeout,
    held,
    holding,
    make_folder,
    mark_stable,
    staged_dir,
    wait_for,
)
from prime_rl.contract.layout import list_steps, stable_marker
from prime_rl.trainer.checkpoint import (
    CheckpointManager,
    RunSnapshot,
    Snapshots,
    WeightsSnapshot,
    is_due,
    prune,
    remove_step,
    sweep,
)
from prime_rl.trainer.metrics import MetricsWriter, PhaseTimer, StatusReporter
from prime_rl.trainer.runs import MultiRunManager, TrainerRun
from prime_rl.trainer.runs.run import Leaving
from prime_rl.trainer.runs.sync import ReadyRun
from prime_rl.trainer.step import UpdateReport
from prime_rl.trainer.whole_model import ModelSnapshot
from prime_rl.transfer import WeightSender
from prime_rl.utils.text import error_text

logger = logging.getLogger(__name__)

# Beside the versions that rollouts may still lag behind by: the newest, the one that is being loaded, and one to spare.
NUM_SPARE_VERSIONS = 3
# Jobs of one run that may wait: one is being written, one is next. More would only be memory that waits for a disk.
MAX_WAITING_PER_RUN = 2
# A disk that takes nothing for so long (a network that is gone) holds up what needs it, with a message.
DISK_TIMEOUT_S = 300.0


class Publisher:
    """The order of the work after an update: publish, checkpoint, metrics, prune."""

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
        what = f"what was left of {run.run_id}"
        self._writer.submit(WriteJob(run.run_id, what, partial(sweep, run.dir), lambda: None))
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
        leaving = {run.run_id: self._writer.waits_for(run.run_id) for run in self._manager.used if run.is_leaving}
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
            elif result.problem and run is not None and run.leaving is not Leaving.AT_ONCE:
                self._manager.evict_run(run.run_idx, result.problem)

    def admitted(self, run: TrainerRun) -> None:
        """Raises ValueError while the disk has yet to take what the run made when it was here before."""
        if what := self._writer.waits_for(run.run_id):
            raise ValueError(f"it was here before and still waits for {what}: readmit it when the disk answers")
        self._writer.forget(run.run_id)

    def may_leave(self, run: TrainerRun) -> bool:
        """True when what the run made is written, or the disk has had its time."""
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
        """Save every run after its last complete update, so that a stop loses nothing that was done.

        One at a time, so that not all of them are in memory twice; those that wait for the disk are the last, and cost
        the others nothing. Raises WaitTimeout when all are through and it did not take what one made.
        """
        late = []
        for run in sorted(self._manager.used, key=lambda run: self._writer.waits_for(run.run_id) is not None):
            try:
                self._writer.finish(run.run_id, self._idle)
                self.collect()
                if not run.is_leaving:
                    self.save(run)
                    self._writer.finish(run.run_id, self._idle)
            except WaitTimeout as error:
                late.append(error)
        self.collect()
        self._broadcast.close()
        self._status.close()
        if late:
            raise late[0]

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
        for old in list_steps(run.broadcast)[: -(snapshot.config.max_async_level + NUM_SPARE_VERSIONS)]:
            remove_step(run.broadcast_dir(old))
        return target

    def close(self) -> None:
        """Nothing is open."""

    def _put(self, target: Path, weights: WeightsSnapshot) -> None:
        if not stable_marker(target).exists():
            write_version(target, weights.published().save)


def write_version(target: Path, save: Callable[[Path], None]) -> None:
    """Let `save` fill a folder that then appears as `target`, complete at once. Raises OSError."""
    make_folder(target.parent)
    with staged_dir(target) as folder:
        save(folder)
        mark_stable(folder, sync=False)


def open_broadcast(config: BroadcastConfig) -> FileSystemWeightBroadcast:
    """The broadcast of `config.type` (rank 0). Raises OSError with address and reason when its sender cannot open."""
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
    """The name on both sides of the version in `output_dir/run_X/broadcast/step_N`: the path below `output_dir`."""
    return folder.relative_to(folder.parent.parent.parent).as_posix()


class WriteError(RuntimeError):
    """A failed write; the message has what, where and why."""


class FolderGone(RuntimeError):
    """The run was deleted or replaced: nothing more is written for it. Not an error."""


@dataclass(frozen=True)
class WriteJob:
    """Work for one run. `what` names it in messages, `then` is for the main thread once it is done."""

    run_id: str
    what: str
    write: Callable[[], None]
    then: Callable[[], None]


@dataclass(frozen=True)
class Result:
    """The result of a job: `problem` is the error, "" if the run is gone or the trainer ends, null on success."""

    job: WriteJob
    problem: str | None


class BackgroundWriter:
    """One thread a run, which writes what the run made. All methods are for the main thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # By run, the first is being written; a run that has nothing to write has no queue and no thread.
        self._queues: dict[str, deque[WriteJob]] = {}
        self._results: list[Result] = []
        self._failed: set[str] = set()
        self._ending = threading.Event()
        # For a job: sleeps so many seconds; true when the trainer ends, so what the disk does not take is given up.
        self.gives_up = self._ending.wait

    def submit(self, job: WriteJob) -> None:
        """Queue a job; ignored if an earlier one of the run failed."""
        with self._changed:
            if job.run_id in self._failed:
                return
            if job.run_id in self._queues:
                self._queues[job.run_id].append(job)
                return
            self._queues[job.run_id] = deque([job])
        name = f"writer of {job.run_id}"
        threading.Thread(target=self._write, args=(self._queues[job.run_id],), name=name, daemon=True).start()

    def full(self) -> dict[str, str]:
        """The runs that may not hand over more for now, each with what its next update waits for."""
        with self._changed:
            return {run_id: _what(jobs) for run_id, jobs in self._queues.items() if len(jobs) >= MAX_WAITING_PER_RUN}

    def waits_for(self, run_id: str) -> str | None:
        """The write that the run still waits for, in words; None when all is done."""
        with self._changed:
            jobs = self._queues.get(run_id)
            return _what(jobs) if jobs else None

    def wait(self, timeout_s: float) -> None:
        """Until a job ends, at most `timeout_s`; at once when none is under way."""
        with self._changed:
            if self._queues:
                num_unfinished = self._num_unfinished()
                self._changed.wait_for(lambda: self._num_unfinished() < num_unfinished, timeout_s)

    def take_results(self) -> list[Result]:
        """The jobs that ended since the last call, in order."""
        with self._changed:
            results, self._results = self._results, []
            return results

    def finish(self, run_id: str, idle: Callable[[str], None] = lambda what: None) -> None:
        """Wait until all of a run is written, as the trainer ends; `idle` is called meanwhile with what is waited for.

        Raises WaitTimeout after DISK_TIMEOUT_S; what has not begun by then is dropped.
        """
        self._ending.set()

        def is_done() -> bool:
            with self._changed:
                if run_id in self._queues:
                    self._changed.wait(DEFAULT_POLL_S)
            what = self.waits_for(run_id)
            if what is not None:
                idle(what)
            return what is None

        what = f"the disk to take what {run_id} made"
        try:
            wait_for(is_done, what, timeout_s=DISK_TIMEOUT_S, sleep=lambda poll_s: None)
        except WaitTimeout:
            self.forget(run_id)
            raise

    def forget(self, run_id: str) -> None:
        """Drop what has not begun of a run that left, and its results; it may come back."""
        with self._changed:
            self._failed.discard(run_id)
            self._results = [result for result in self._results if result.job.run_id != run_id]
            jobs = self._queues.get(run_id)
            while jobs and len(jobs) > 1:
                jobs.pop()

    def _num_unfinished(self) -> int:
        return sum(map(len, self._queues.values()))

    # The thread of a run

    def _write(self, jobs: deque[WriteJob]) -> None:
        while jobs:
            job = jobs[0]
            problem = _problem_of(job)
            with self._changed:
                jobs.popleft()
                if problem is not None:
                    self._failed.add(job.run_id)
                    jobs.clear()
                self._results.append(Result(job, problem))
                if not jobs:
                    del self._queues[job.run_id]
                self._changed.notify_all()


def _what(jobs: deque[WriteJob]) -> str:
    return f"the disk to take {jobs[0].what}"


def _problem_of(job: WriteJob) -> str | None:
    try:
        job.write()
    except FolderGone:
        logger.info("%s: the folder of the run went away", job.what)
        return ""
    except NotWritten as error:
        logger.warning("%s is not written: %s", job.what, error)
        return ""
    except Exception as error:  # the boundary of a run: the main thread evicts it with these words
        logger.debug("%s failed", job.what, exc_info=True)
        return str(error) if isinstance(error, WriteError) else f"{job.what}: {error_text(error)}"
    return None
