"""The engine: one thread that owns the model and decodes all requests together (continuous batching).

Between two steps it applies adapters, drops rows of clients that went away, and lets waiting rows join as far as there
is room. Collaborators: `Batch` (the rows), `AdapterStore` (names to slots).
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from prime_rl.inference.embedded.adapters import AdapterStore
from prime_rl.inference.embedded.batch import Batch, Decode, Job, Row
from prime_rl.inference.embedded.model import Served
from prime_rl.inference.embedded.sampling import SamplingParams
from prime_rl.inference.errors import ApiError
from prime_rl.inference.reporting import Snapshot

logger = logging.getLogger(__name__)

# How long an idle engine sleeps before it looks again without having been woken.
IDLE_S = 1.0


class EngineDead(ApiError):
    """The engine has stopped, by a request or by the error `reason`."""

    def __init__(self, reason: BaseException | None) -> None:
        super().__init__(503, f"the engine has stopped: {reason or 'shutdown'}")


class Engine:
    """Start it once with `start`; `submit`, `cancel`, `run_between_steps` and `stats` may be called from any thread."""

    def __init__(self, served: Served, decode: Decode, *, max_num_seqs: int, raw_logprobs: bool = False) -> None:
        self.served = served
        self.adapters = AdapterStore(served.layers, served.routing, self.run_between_steps)
        self.error: BaseException | None = None
        self._batch = Batch(served.runner, served.eos_ids, decode, raw_logprobs=raw_logprobs)
        self._max_num_seqs = max_num_seqs
        self._wake = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._commands: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._open_jobs: set[Job] = set()
        self._any_cancelled = False
        self._stopping = False
        self._num_running = 0
        self._num_prompt_tokens = 0
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.error is None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread after the step it is in; open jobs fail with EngineDead."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        adapter: str | None = None,
        num_choices: int = 1,
        seed: int | None = None,
    ) -> Job:
        """Queue one prompt. Raises ApiError (404) for an unknown adapter and EngineDead when the engine has stopped."""
        slot = self.adapters.acquire(adapter) if adapter is not None else None
        seed = secrets.randbits(64) if seed is None else seed
        job = Job(prompt_ids, params, num_choices=num_choices, seed=seed, slot=slot)
        with self._wake:
            if self._stopping or self.error is not None:
                self._close(job)
                raise EngineDead(self.error)
            self._open_jobs.add(job)
            self._waiting.extend(job.rows)
            self._num_prompt_tokens += len(job.prompt_ids)
            self._wake.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Cancel `job`: its rows are removed at the next step."""
        with self._wake:
            job.cancelled = True
            self._any_cancelled = True
            self._wake.notify()

    def run_between_steps(self, action: Callable[[], None]) -> Future[None]:
        """Run `action` in the engine's thread while no forward runs; its exception is the future's."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # a caller that goes away must not take it from the engine
        with self._wake:
            if self._stopping or self.error is not None:
                raise EngineDead(self.error)
            self._commands.append((action, future))
            self._wake.notify()
        return future

    def stats(self) -> Snapshot:
        adapters = sorted(self.adapters.loaded())
        with self._wake:
            return Snapshot(
                adapters=adapters,
                num_running=self._num_running,
                num_waiting=len(self._waiting),
                num_prompt_tokens=self._num_prompt_tokens,
                num_tokens=self._batch.num_generated_tokens,
                kv_use=self._num_running / self._max_num_seqs,
            )

    def _main(self) -> None:
        """Boundary of the thread: whatever ends it is logged and passed to every waiting job."""
        try:
            while self._one_round():
                pass
        except BaseException as error:
            logger.exception("the engine has failed")
            self.error = error
        finally:
            self._fail_open_jobs()

    def _one_round(self) -> bool:
        with self._wake:
            if not self._busy():
                self._wake.wait(IDLE_S)
            if self._stopping:
                return False
            commands = list(self._commands)
            self._commands.clear()
            any_cancelled, self._any_cancelled = self._any_cancelled, False
            if any_cancelled:
                gone = [row for row in self._waiting if row.job.cancelled]
                self._waiting = deque(row for row in self._waiting if not row.job.cancelled)
            joining = self._take_fitting()
        _run(commands)
        if any_cancelled:
            self._end(gone + self._batch.drop_cancelled())
        finished = self._batch.step()
        if joining:
            finished += self._batch.add(joining)
        self._end(finished)
        with self._wake:
            self._num_running = self._batch.num_rows
        return True

    def _take_fitting(self) -> list[Row]:
        """Waiting rows that may join, in the order they came: by number, and by what the cache may grow to."""
        joining: list[Row] = []
        num_rows, longest = self._batch.num_rows, self._batch.longest if self._waiting else 0
        while self._waiting and num_rows < self._max_num_seqs:
            longest = max(longest, self._waiting[0].max_length)
            # A row that is alone always runs: max_model_len bounds it.
            if num_rows and (num_rows + 1) * longest > self.served.cache_tokens:
                break
            joining.append(self._waiting.popleft())
            num_rows += 1
        return joining

    def _busy(self) -> bool:
        return bool(self._stopping or self._commands or self._any_cancelled or self._waiting or self._batch.num_rows)

    def _end(self, rows: Iterable[Row]) -> None:
        """Count down the jobs of finished or dropped rows; deliver those that are complete."""
        for row in rows:
            row.job.num_open -= 1
            if row.job.num_open == 0:
                self._close(row.job)
                row.job.future.set_result(row.job.rows)

    def _close(self, job: Job) -> None:
        with self._wake:
            self._open_jobs.discard(job)
        if job.slot is not None:
            self.adapters.release(job.slot)

    def _fail_open_jobs(self) -> None:
        error = EngineDead(self.error)
        with self._wake:
            self._stopping = True
            jobs, commands = list(self._open_jobs), list(self._commands)
        for job in jobs:
            job.future.set_exception(error)
        for _, future in commands:
            future.set_exception(error)


def _run(commands: Iterable[tuple[Callable[[], None], Future[None]]]) -> None:
    for action, future in commands:
        try:
            action()
        except (ValueError, OSError) as error:  # a bad adapter is its loader's trouble, not the engine's
            future.set_exception(error)
        else:
            future.set_result(None)
