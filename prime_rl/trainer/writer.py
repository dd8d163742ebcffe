"""One thread that writes for the trainer, in the order in which work is handed to it, while the main thread trains.

Work belongs to a run. When a job fails, what the same run still has in the queue is dropped and nothing more of it is
taken; the others go on. The main thread learns of each end in `take_results`, so every decision stays with it. Knows no
files and no tensors.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from prime_rl.contract.files import DEFAULT_POLL_S, WaitTimeout, wait_for
from prime_rl.trainer.runs.hooks import error_text

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
    """The result of a job: `problem` is the error, "" if the run is gone, null on success."""

    job: WriteJob
    problem: str | None


class BackgroundWriter:
    """See the module. All methods are for the main thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[WriteJob] = deque()
        self._current: WriteJob | None = None
        self._results: list[Result] = []
        self._failed: set[str] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._write, name="writer", daemon=True)
        self._thread.start()

    def submit(self, job: WriteJob) -> None:
        """Queue a job; ignored if an earlier one of the run failed."""
        with self._changed:
            assert not self._closed, "the writer is closed"
            if job.run_id not in self._failed:
                self._queue.append(job)
                self._changed.notify_all()

    def full(self) -> dict[str, str]:
        """The runs that may not hand over more for now, each with what its next update waits for."""
        with self._changed:
            unfinished = self._unfinished()
            counts = Counter(job.run_id for job in unfinished)
            return {
                run_id: f"the disk to take {unfinished[0].what}"
                for run_id, num_jobs in counts.items()
                if num_jobs >= MAX_WAITING_PER_RUN
            }

    def wait(self, timeout_s: float) -> None:
        """Until a job ends, at most `timeout_s`; at once when none is under way."""
        with self._changed:
            num_unfinished = len(self._unfinished())
            self._changed.wait_for(lambda: len(self._unfinished()) < max(1, num_unfinished), timeout_s)

    def take_results(self) -> list[Result]:
        """What ended since the last call, in order."""
        with self._changed:
            results, self._results = self._results, []
            return results

    def finish(self, run_id: str | None = None, idle: Callable[[str], None] = lambda what: None) -> None:
        """Wait until everything (of one run) is done. `idle` is called meanwhile with what is waited for.

        Raises WaitTimeout after DISK_TIMEOUT_S; what has not begun by then is dropped.
        """

        def is_done() -> bool:
            with self._changed:
                if self._of(run_id):
                    self._changed.wait(DEFAULT_POLL_S)
                left = self._of(run_id)
            if left:
                idle(f"the disk to take {left[0].what}")
            return not left

        what = f"the disk to take what {run_id or 'the runs'} made"
        try:
            wait_for(is_done, what, timeout_s=DISK_TIMEOUT_S, sleep=lambda poll_s: None)
        except WaitTimeout:
            with self._changed:
                self._drop(run_id)
            raise

    def forget(self, run_id: str) -> None:
        """Drop the results of a run that left; it may come back."""
        with self._changed:
            self._failed.discard(run_id)
            self._results = [result for result in self._results if result.job.run_id != run_id]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _unfinished(self) -> list[WriteJob]:
        return [*([self._current] if self._current else []), *self._queue]

    def _of(self, run_id: str | None) -> list[WriteJob]:
        return [job for job in self._unfinished() if run_id in (None, job.run_id)]

    def _drop(self, run_id: str | None) -> None:
        self._queue = deque(job for job in self._queue if run_id not in (None, job.run_id))

    # The thread

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                job = self._current = self._queue.popleft()
            problem = self._do(job)
            with self._changed:
                if problem is not None:
                    self._failed.add(job.run_id)
                    self._drop(job.run_id)
                self._results.append(Result(job, problem))
                self._current = None
                self._changed.notify_all()

    @staticmethod
    def _do(job: WriteJob) -> str | None:
        try:
            job.write()
        except FolderGone:
            logger.info("%s: the folder of the run went away", job.what)
            return ""
        except Exception as error:  # the boundary of a run: the main thread evicts it with these words
            logger.debug("%s failed", job.what, exc_info=True)
            return str(error) if isinstance(error, WriteError) else f"{job.what}: {error_text(error)}"
        return None
