"""The engine: decodes all requests together (continuous batching), one round of the batch after the other.

All state belongs to the event loop. The model belongs to a thread of its own, which does one thing at a time: a round
of steps, or between two rounds what changes the weights. Waiting rows join as far as there is room. When the device is
out of memory, all rows wait again with the tokens that they have, and half as many run together; whenever so many have
ended, one more does. Collaborator: `Batch` (the rows).

An adapter has a name and a slot that holds its weights. A slot is given to another adapter only when its name was
unloaded and no job uses it, so a job is never served weights other than those its name meant when it came. Whether a
name may be loaded is decided before (`gateway`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from prime_rl.inference.embedded.batch import MAX_PREFILL_TOKENS, Batch, Decode, Job, Row, SamplingParams
from prime_rl.inference.embedded.model import BLOCK, PrefixCache, Served
from prime_rl.inference.guard import ApiError, adapter_refused
from prime_rl.inference.serve import Snapshot
from prime_rl.lora.adapter_state import served_parts
from prime_rl.utils.runtime import is_out_of_memory

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineDead(ApiError):
    """The engine has stopped, by a request or by the error `reason`."""

    def __init__(self, reason: BaseException | None) -> None:
        super().__init__(503, f"the engine has stopped: {reason or 'shutdown'}")


# Of prompts of a run that is a whole prefill ahead of another: about as much as a token of each of many rows costs.
AHEAD_PREFILL_TOKENS = 512


class Waiting:
    """Rows that wait for room, of each run in the order they came. `counts`: how many, by run.

    The next is of the run for which the fewest tokens were computed while others were there too. One that comes, or
    comes back, has at least as many as the fewest of those.
    """

    def __init__(self, prefixes: PrefixCache) -> None:
        self.counts: Counter[str] = Counter()
        self._prefixes = prefixes
        self._jobs: dict[str, OrderedDict[Job, deque[Row]]] = {}
        self._computed: Counter[str] = Counter()
        self._fewest = 0
        self._last: tuple[Any, ...] | None = None  # the `prefill_key` of the row before

    def __len__(self) -> int:
        return self.counts.total()

    def most_tokens(self, run_id: str) -> int:
        """Return how many tokens may be read at once while others wait for their next."""
        is_ahead = self._computed[run_id] - self._fewest > MAX_PREFILL_TOKENS
        return AHEAD_PREFILL_TOKENS if is_ahead else MAX_PREFILL_TOKENS

    def put(self, job: Job) -> None:
        """Add all rows of a request."""
        if job.run_id not in self._jobs:
            self._computed[job.run_id] = max(self._computed[job.run_id], self._fewest)
        self._jobs.setdefault(job.run_id, OrderedDict())[job] = deque(job.rows)
        self.counts[job.run_id] += len(job.rows)

    def put_back(self, row: Row) -> None:
        """Add a row that was taken, as the next of its run."""
        jobs = self._jobs.setdefault(row.job.run_id, OrderedDict())
        jobs.setdefault(row.job, deque()).appendleft(row)
        jobs.move_to_end(row.job, last=False)
        self.counts[row.job.run_id] += 1

    def first(self) -> Row:
        """Return the row that is next; there must be one."""
        jobs = self._jobs[min(self._jobs, key=self._computed.__getitem__)]
        return next(iter(jobs.values()))[0]

    def cost(self, row: Row) -> int:
        """Return the tokens to compute for its next: that one, and those before it that nothing shares."""
        if row.prefill_key == self._last:
            return 1
        num_known = 0 if row.is_scored else BLOCK * self._prefixes.num_known(row.keys)
        return 1 + len(row.all_ids) - num_known

    def take(self) -> Row:
        """Take the row that is next, and charge its run."""
        row = self.first()
        self._computed[row.job.run_id] += self.cost(row)
        self._last = row.prefill_key
        rows = self._jobs[row.job.run_id][row.job]
        rows.popleft()
        self._forget(row.job, 1, is_empty=not rows)
        return row

    def drop(self, job: Job) -> list[Row]:
        """Take all rows of a request."""
        jobs = self._jobs.get(job.run_id)
        rows = list(jobs.get(job, ())) if jobs else []
        if rows:
            self._forget(job, len(rows), is_empty=True)
        return rows

    def charge(self, computed: Mapping[str, int]) -> None:
        """Count tokens that were computed for each run which had rows in the batch."""
        present = computed.keys() | self._jobs.keys()
        self._computed.update(computed)
        self._fewest = min(self._computed[run_id] for run_id in present)
        for run_id in [each for each, num in self._computed.items() if num <= self._fewest and each not in present]:
            del self._computed[run_id]

    def _forget(self, job: Job, num_rows: int, *, is_empty: bool) -> None:
        self.counts -= Counter({job.run_id: num_rows})
        if is_empty:
            del self._jobs[job.run_id][job]
            if not self._jobs[job.run_id]:
                del self._jobs[job.run_id]


class Engine:
    """Decodes as long as `run` runs. Its methods belong to the event loop, but for `stats`.

    Args:
        max_num_seqs: rows that are decoded together.
        max_model_len: longest prompt and completion together, in tokens.
    """

    def __init__(
        self, served: Served, decode: Decode, *, max_num_seqs: int, max_model_len: int, raw_logprobs: bool = False
    ) -> None:
        self.served = served
        self.max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._max_rows: float = max_num_seqs  # fewer after the device was out of memory
        self._batch = Batch(served, decode, raw_logprobs=raw_logprobs)
        self._thread = ThreadPoolExecutor(1, "engine")
        self._has_news = asyncio.Event()  # for `run`: a request, a change, or the end
        self._waiting = Waiting(self._batch.prefixes)
        self._is_crowded = False  # more rows could join, after those whose prompts are read now
        self._open_jobs: set[Job] = set()
        self._adapters: dict[str, tuple[int, str]] = {}  # slot and path by name
        self._dead: EngineDead | None = None
        self._num_prompt_tokens = 0

    @property
    def alive(self) -> bool:
        """True when the engine takes requests: until `stop` or a failure."""
        return self._dead is None

    @property
    def lacks_memory(self) -> bool:
        """True when rows wait that the device had no memory for."""
        return self._max_rows < self._max_num_seqs and len(self._waiting) > 0

    async def run(self) -> None:
        """Decode until `stop`. Boundary of the engine: whatever ends it is logged and passed to every open job."""
        try:
            while self.alive:
                self._has_news.clear()
                joining = self._take_fitting()
                if joining or self._batch.num_rows:
                    running = Counter(row.job.run_id for row in (*self._batch.rows, *joining))
                    num_tokens = self._batch.num_generated_tokens
                    ended, preempted = await self._on_thread(partial(self._round, joining))
                    num_steps = (self._batch.num_generated_tokens - num_tokens) // running.total()
                    self._waiting.charge({run_id: num_steps * num_rows for run_id, num_rows in running.items()})
                    for row in reversed(preempted):
                        self._waiting.put_back(row)
                    self._max_rows = min(self._max_num_seqs, self._max_rows + len(ended) / self._max_rows)
                    self._end(ended)
                else:
                    await self._has_news.wait()
        except Exception as error:
            self._fail(error)

    def stop(self, reason: Exception | None = None) -> None:
        """Take no more; open jobs fail with EngineDead. A round that is under way goes on without them."""
        self._dead = self._dead or EngineDead(reason)
        for job in self._open_jobs:
            job.is_cancelled, job.error = True, self._dead
            job.ended.set()
        self._has_news.set()
        self._thread.shutdown(wait=False)

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        adapter: str | None = None,
        run_id: str = "",
    ) -> Job:
        """Queue a request of a run. Raises ApiError (404) for an unknown adapter, EngineDead when it has stopped."""
        self._refuse_when_dead()
        if adapter is not None and adapter not in self._adapters:
            raise ApiError(404, f"The model {adapter!r} does not exist.", param="model")
        slot = None if adapter is None else self._adapters[adapter][0]
        model = adapter or "the base model"
        job = Job(prompts, params, slot=slot, max_length=self.max_model_len, model=model, run_id=run_id)
        self._open_jobs.add(job)
        self._waiting.put(job)
        self._num_prompt_tokens += sum(map(len, job.prompts))
        self._has_news.set()
        return job

    def cancel(self, job: Job) -> None:
        """Its waiting rows end now, and those that run with their next token."""
        if job.ended.is_set():
            return
        job.is_cancelled = True
        self._end(self._waiting.drop(job))

    async def change(self, action: Callable[[], None], *, is_whole: bool = True) -> None:
        """Run `action` in the engine's thread while no forward runs.

        What it raises ends the engine, ValueError and OSError apart: bad weights are their loader's trouble. So is a
        lack of memory, unless the whole model `is_whole`: weights that are half of one version serve nothing, and
        nothing that was computed before is used after it.
        """
        self._refuse_when_dead()
        self._has_news.set()
        actions = [self._batch.prefixes.clear, action] if is_whole else [action]
        try:
            await self._on_thread(lambda: [each() for each in actions])
        except Exception as error:
            if isinstance(error, ValueError | OSError) or (is_out_of_memory(error) and not is_whole):
                raise
            self._fail(error)
        self._refuse_when_dead()

    def adapters(self) -> dict[str, str]:
        """Name to path of the adapters that can be used now."""
        return {name: path for name, (_, path) in self._adapters.items()}

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Check it, then read a part beside a round and copy it after that round, until it is in its slot.

        One adapter at a time. Raises ApiError, 400, 422 or 429, with one clear line; a later load fills that slot.
        """
        slot = await self._free_slot()
        # Not closed when this is cancelled: its thread still reads, and closes it by dropping it.
        parts = served_parts(self.served.layers, folder, base=self.served.model.name_or_path)
        try:
            while (part := await asyncio.to_thread(next, parts, None)) is not None:
                await self.change(partial(part.put, slot), is_whole=False)
                self.served.routing.scaling[slot] = part.config.scaling
        except (ValueError, OSError, RuntimeError, MemoryError) as error:
            parts.close()
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            torch.cuda.empty_cache()
            raise adapter_refused(name, error) from error
        self._adapters[name] = slot, str(folder)

    def unload_adapter(self, name: str) -> None:
        """Forget `name` at once; its slot is free when the last job that uses it has ended. Raises ApiError 404."""
        slot, _ = self._adapters.pop(name, (None, ""))
        if slot is None:
            raise ApiError(404, f"The lora adapter {name!r} cannot be found.", param="lora_name")
        for job in self._open_jobs:
            job.is_kept = job.is_kept and job.slot != slot
        if self.alive:
            self._has_news.set()
            self._thread.submit(self._batch.prefixes.drop, slot)

    def stats(self) -> Snapshot:
        """The figures of this moment."""
        num_running = self._batch.num_rows
        return Snapshot(
            adapters=sorted(self._adapters),
            num_running=num_running,
            num_waiting=len(self._waiting),
            num_prompt_tokens=self._num_prompt_tokens,
            num_tokens=self._batch.num_generated_tokens,
            num_prefix_queries=self._batch.num_prefix_queries,
            num_prefix_hits=self._batch.num_prefix_hits,
            kv_use=num_running / self._max_num_seqs,
        )

    async def _free_slot(self) -> int:
        """The first that is free, once jobs that were cancelled have left it. Raises ApiError when none will be."""
        slots = range(len(self.served.routing.scaling))
        while True:
            self._refuse_when_dead()
            named = {slot for slot, _ in self._adapters.values()}
            left = {job.slot: job for job in self._open_jobs if job.slot not in named and job.slot is not None}
            for slot in slots:
                if slot not in named and slot not in left:
                    return slot
            working = {job.slot for job in self._open_jobs if not job.is_cancelled}
            leaving = next((job for slot, job in left.items() if slot not in working), None)
            if leaving is None:
                message = (
                    f"All {len(slots)} adapter slots are in use, {len(left)} of them unloaded but still in use "
                    "by requests: unload an adapter first."
                )
                raise ApiError(400, message, param="lora_name")
            await leaving.ended.wait()

    def num_waiting_of(self, run_id: str) -> int:
        """Return the choices of a run that wait for room."""
        return self._waiting.counts[run_id]

    def _take_fitting(self) -> list[Row]:
        """Waiting rows that may join: by number, by what the cache may grow to, and by what others would wait for."""
        joining: list[Row] = []
        self._is_crowded = False
        num_rows, longest, num_tokens = self._batch.num_rows, self._batch.longest if self._waiting else 0, 0
        while self._waiting and num_rows < self._max_rows:
            row = self._waiting.first()
            longest = max(longest, row.max_length)
            # A row that is alone always runs: max_model_len bounds it.
            if num_rows and (num_rows + 1) * longest > self.served.cache_tokens:
                break
            num_tokens += self._waiting.cost(row)
            if joining and num_tokens > self._waiting.most_tokens(row.job.run_id):
                self._is_crowded = True
                break
            joining.append(self._waiting.take())
            num_rows += 1
        return joining

    def _end(self, rows: Iterable[Row]) -> None:
        """Count down the jobs of rows that have ended; deliver those that are complete."""
        for row in rows:
            row.job.num_open -= 1
            if row.job.error is not None and row.job.num_open:
                self.cancel(row.job)
            if row.job.num_open == 0:
                self._open_jobs.discard(row.job)
                row.job.ended.set()

    def _round(self, joining: Sequence[Row]) -> tuple[list[Row], list[Row]]:
        """Let rows join and decode until there is something to do elsewhere.

        Returns the rows that have ended, and those that must be computed again since the device is out of memory.
        """
        rows = [*self._batch.rows, *joining]
        try:
            ended = [*self._batch.add(joining), *self._batch.step()]
            while self._batch.num_rows and not ended and not self._has_news.is_set() and not self._is_crowded:
                ended = self._batch.step()
            return ended, []
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("out of memory with %d rows: they are computed again, fewer at a time: %s", len(rows), error)
        # Not in the handler: what it has still holds tensors.
        self._batch.release()
        self._batch.prefixes.shrink()
        torch.cuda.empty_cache()
        preempted = [row for row in rows if row.finish_reason is None]
        self._max_rows = max(1, len(preempted) // 2)
        if len(preempted) == 1:
            row = preempted.pop()
            row.fail(f"{len(row.all_ids)} tokens do not fit into the memory of inference: ask for fewer", status=400)
        return [row for row in rows if row.finish_reason is not None], preempted

    async def _on_thread(self, action: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, action)

    def _fail(self, error: Exception) -> None:
        logger.error("the engine has failed", exc_info=error)
        self.stop(error)

    def _refuse_when_dead(self) -> None:
        if self._dead is not None:
            raise self._dead
