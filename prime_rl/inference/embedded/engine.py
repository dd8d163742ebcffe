"""The engine: one thread that owns the model and decodes all requests together (continuous batching).

Between two steps it runs what others have for it (adapters, weights, the end of a job whose client went away), and lets
waiting rows join as far as there is room. Collaborator: `Batch` (the rows).

An adapter has a name and a slot that holds its weights. A slot is given to another adapter only when its name was
unloaded and no job uses it, so a job is never served weights other than those its name meant when it came. Whether a
name may be loaded is decided before (`front`).
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from prime_rl.inference.embedded.batch import Batch, Decode, Job, Row
from prime_rl.inference.embedded.model import Served
from prime_rl.inference.embedded.sampling import SamplingParams
from prime_rl.inference.errors import ApiError
from prime_rl.inference.reporting import Snapshot
from prime_rl.lora.adapter_state import load_peft, load_served_adapter

logger = logging.getLogger(__name__)

# How long an idle engine sleeps before it looks again without having been woken.
IDLE_S = 1.0
# A step of a model that this engine is for takes milliseconds, a long prefill seconds.
APPLY_TIMEOUT_S = 60.0


class EngineDead(ApiError):
    """The engine has stopped, by a request or by the error `reason`."""

    def __init__(self, reason: BaseException | None) -> None:
        super().__init__(503, f"the engine has stopped: {reason or 'shutdown'}")


class Engine:
    """Start it once with `start`. Other methods may be called from any thread, `load_adapter` from one at a time."""

    def __init__(self, served: Served, decode: Decode, *, max_num_seqs: int, raw_logprobs: bool = False) -> None:
        self.served = served
        self.error: BaseException | None = None
        self._batch = Batch(served, decode, raw_logprobs=raw_logprobs)
        self._max_num_seqs = max_num_seqs
        self._wake = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._commands: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._open_jobs: set[Job] = set()
        self._adapters: dict[str, tuple[int, str]] = {}  # slot and path by name
        self._num_users = [0] * len(served.routing.scaling)  # of each slot
        self._stopping = False
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
        seed = secrets.randbits(64) if seed is None else seed
        with self._wake:
            self._refuse_when_stopped()
            slot = None
            if adapter is not None:
                if adapter not in self._adapters:
                    raise ApiError(404, f"The model {adapter!r} does not exist.", param="model")
                slot, _ = self._adapters[adapter]
                self._num_users[slot] += 1
            job = Job(prompt_ids, params, num_choices=num_choices, seed=seed, slot=slot)
            self._open_jobs.add(job)
            self._waiting.extend(job.rows)
            self._num_prompt_tokens += len(job.prompt_ids)
            self._wake.notify()
        return job

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Take their rows out before the next step; the jobs end with what these have."""
        leaving = frozenset(jobs)
        with self._wake:
            self._commands.append((lambda: self._drop(leaving), Future()))
            self._wake.notify()

    def run_between_steps(self, action: Callable[[], None]) -> Future[None]:
        """Run `action` in the engine's thread while no forward runs; its exception is the future's."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # a caller that goes away must not take it from the engine
        with self._wake:
            self._refuse_when_stopped()
            self._commands.append((action, future))
            self._wake.notify()
        return future

    def adapters(self) -> dict[str, str]:
        """Name to path of the adapters that can be used now."""
        with self._wake:
            return {name: path for name, (_, path) in self._adapters.items()}

    def load_adapter(self, name: str, folder: Path) -> None:
        """Read and check it here, load it between steps. Raises ApiError 400 with one clear line."""
        slot = self._free_slot()

        def apply() -> None:
            load_served_adapter(self.served.layers, slot, tensors, config)
            self.served.routing.scaling[slot] = config.scaling

        try:
            tensors, config = load_peft(folder)
            self.run_between_steps(apply).result(APPLY_TIMEOUT_S)
        except (ValueError, OSError) as error:
            raise ApiError(400, f"adapter {name!r} is refused: {error}", param="lora_path") from error
        with self._wake:
            self._adapters[name] = slot, str(folder)

    def unload_adapter(self, name: str) -> None:
        """Forget `name` at once; its slot is free when the last job that uses it has ended. Raises ApiError 404."""
        with self._wake:
            if self._adapters.pop(name, None) is None:
                raise ApiError(404, f"The lora adapter {name!r} cannot be found.", param="lora_name")

    def stats(self) -> Snapshot:
        num_running = self._batch.num_rows
        return Snapshot(
            adapters=sorted(self.adapters()),
            num_running=num_running,
            num_waiting=len(self._waiting),
            num_prompt_tokens=self._num_prompt_tokens,
            num_tokens=self._batch.num_generated_tokens,
            kv_use=num_running / self._max_num_seqs,
        )

    def _free_slot(self) -> int:
        with self._wake:
            named = {slot for slot, _ in self._adapters.values()}
            draining = {slot for slot, num_users in enumerate(self._num_users) if num_users} - named
        for slot in range(len(self._num_users)):
            if slot not in named | draining:
                return slot
        message = (
            f"All {len(self._num_users)} adapter slots are in use, {len(draining)} of them unloaded but still in use "
            "by requests: unload an adapter first."
        )
        raise ApiError(400, message, param="lora_name")

    def _refuse_when_stopped(self) -> None:
        if self._stopping or self.error is not None:
            raise EngineDead(self.error)

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
            if not (self._stopping or self._commands or self._waiting or self._batch.num_rows):
                self._wake.wait(IDLE_S)
            if self._stopping:
                return False
        while self._commands:
            action, future = self._commands[0]  # it stays there if it ends the engine, so that its caller is told
            try:
                action()
            except (ValueError, OSError) as error:  # a bad adapter is its loader's trouble, not the engine's
                future.set_exception(error)
            else:
                future.set_result(None)
            self._commands.popleft()
        self._end(self._batch.step())
        with self._wake:
            joining = self._take_fitting()
        if joining:
            self._end(self._batch.add(joining))
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

    def _drop(self, jobs: frozenset[Job]) -> None:
        with self._wake:
            waiting = [row for row in self._waiting if row.job in jobs]
            self._waiting = deque(row for row in self._waiting if row.job not in jobs)
        self._end(waiting + self._batch.drop(jobs))

    def _end(self, rows: Iterable[Row]) -> None:
        """Count down the jobs of finished or dropped rows; deliver those that are complete."""
        for row in rows:
            job = row.job
            job.num_open -= 1
            if job.num_open == 0:
                with self._wake:
                    self._open_jobs.discard(job)
                    if job.slot is not None:
                        self._num_users[job.slot] -= 1
                job.future.set_result(job.rows)

    def _fail_open_jobs(self) -> None:
        with self._wake:
            self._stopping = True
            futures: list[Future[Any]] = [job.future for job in self._open_jobs]
            futures += [future for _, future in self._commands]
        for future in futures:
            future.set_exception(EngineDead(self.error))
