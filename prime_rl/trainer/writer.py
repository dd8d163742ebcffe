"""The trainer's writes, off the main thread: those of each run in order, in a thread of the run's own.

So a disk that is slow or hangs for one run's folder holds up that run alone. When a job fails, what the same run still
has to write is dropped and nothing more of it is taken. The main thread learns of each end in `take_results`, so every
decision stays with it. Independent of files and tensors.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from prime_rl.contract.disk import NotWritten
from prime_rl.contract.files import DEFAULT_POLL_S, WaitTimeout, wait_for
from prime_rl.utils.text import error_text

logger = logging.getLogger(__name__)

# Jobs of one run that may wait: one is being written, one is next. More would only be memory that waits for a disk.
MAX_WAITING_PER_RUN = 2
# A disk that takes nothing for so long (a network that is gone) holds up what needs it, with a message.
DISK_TIMEOUT_S = 300.0


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
    """See the module. All methods are for the main thread."""

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
        """What of the run is still to be written, in words; None when all is done."""
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
        """What ended since the last call, in order."""
        with self._changed:
            results, self._results = self._results, []
            return results

    def finish(self, idle: Callable[[str], None] = lambda what: None) -> None:
        """Wait until everything is done. `idle` is called meanwhile with what is waited for.

        Raises WaitTimeout after DISK_TIMEOUT_S; what has not begun by then is dropped.
        """
        self._ending.set()

        def is_done() -> bool:
            with self._changed:
                if self._queues:
                    self._changed.wait(DEFAULT_POLL_S)
                left = next(iter(self._queues.values()), None)
                what = _what(left) if left else None
            if what is not None:
                idle(what)
            return what is None

        try:
            wait_for(
                is_done, "the disk to take what the runs made", timeout_s=DISK_TIMEOUT_S, sleep=lambda poll_s: None
            )
        except WaitTimeout:
            for run_id in list(self._queues):
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
