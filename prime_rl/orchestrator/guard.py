"""Ends of a run: from outside, by its budget and its stop rule; reasons that keep it from starting; its loops together.

The guard looks at the disk every other second, and up to five times a second when something wakes it (a signal, a
change of what is waited for), so that fifty runs that wait cost next to nothing. It does not watch `control/`: the
status file is there too, and the events of the heartbeat of the run itself cost more than the looks.

`RunMeter` adds up what the run uses and writes it down after every step; `Ending` decides after every batch whether
there is another one. Both take up where an earlier process of the run ended.

`TrainerWatch` has the trainer's state by its status file, and the message of a run that waits for its next policy. A
look costs one `stat` as long as the heartbeat comes: fifty runs that wait look several times a second. The file is read
when it changed, and the process is looked for only when a heartbeat is late. It starts nothing: the supervisor does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Never, TypeVar

from prime_rl.configs.admitted import config_in_effect
from prime_rl.configs.base import ConfigError
from prime_rl.configs.orchestrator import BudgetConfig, OrchestratorConfig
from prime_rl.contract.files import WaitStopped, WaitTimeout, read_end, wait_for, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.metrics import OF_TEXTS, EarlyStop, metric_value, parse_metrics, series
from prime_rl.contract.notes import audit_run
from prime_rl.contract.status import (
    HEARTBEAT_S,
    LOST_AFTER_S,
    RunStatus,
    TrainerStatus,
    is_alive,
    is_there,
    read_mark,
    read_status,
    stall_text,
    stalled_since,
)
from prime_rl.contract.usage import UsageLog, budget_reason, life_of
from prime_rl.orchestrator.envs.agent_judge import Judge
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.utils.runtime import cancel_all, log_failure
from prime_rl.utils.tail import FileTail

# Between two looks: at least, whatever wakes it, and at most.
MIN_LOOK_S = 0.2
MAX_LOOK_S = 2.0

ResultT = TypeVar("ResultT")


class RunFailed(RuntimeError):
    """The run cannot continue, and a restart would not help. The message has the reason."""


class RunEvicted(RuntimeError):
    """`control/evicted.txt` is there; the message is its text."""


class RunEnded(RuntimeError):
    """`control/finished.txt` is there, so the run ends before `max_steps`; the message is its text."""


class RunPaused(RuntimeError):
    """`control/paused.txt` is there, or the trainer's `preempted.txt`; the message is its text."""


class RunGone(RuntimeError):
    """The run's folder was removed."""


class StopRequested(RuntimeError):
    """SIGTERM or SIGINT came."""


def check_run(run: RunDir) -> None:
    """Raises RunEvicted, RunEnded, RunPaused or RunGone when the run is not to go on."""
    if not run.path.is_dir():
        raise RunGone(f"{run.path} is gone")
    if (reason := read_mark(run.evicted)) is not None:
        raise RunEvicted(reason)
    if (reason := read_mark(run.finished)) is not None:
        raise RunEnded(reason)
    for mark in (run.paused, run.preempted):
        if (reason := read_mark(mark, empty="paused")) is not None:
            raise RunPaused(reason)


def find_other(run: RunDir, stop: Callable[[], bool], beat_s: float = LOST_AFTER_S) -> str | None:
    """The living orchestrator of the run, if there is one, in words.

    One on another machine is judged by its heartbeat, for `beat_s` and without comparing clocks.
    """
    status = read_status(run.status, RunStatus)
    if status is None:
        return None
    if not status.writer.is_of_another_boot():
        return f"pid {status.pid}" if is_there(status) and status.pid != os.getpid() else None
    if status.state not in ("starting", "running"):
        return None
    seen = status.updated_at

    def has_beaten() -> bool:
        status = read_status(run.status, RunStatus)
        return status is not None and status.updated_at != seen

    with contextlib.suppress(WaitTimeout, WaitStopped):
        wait_for(has_beaten, f"a heartbeat of {run.status}", timeout_s=beat_s, stop=stop)
        return f"pid {status.pid} on another machine"
    return None


class Wake:
    """Wakes the guard before its next look is due."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """End the present wait, or the next one at once."""
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait until it is set or `timeout_s` have passed, then clear it. True when it was set."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        was_set = self._event.is_set()
        self._event.clear()
        return was_set


async def guard(run: RunDir, stop: Callable[[], bool], tick: Callable[[], None], wake: Wake) -> Never:
    """Raises as soon as the run is not to go on; calls `tick` meanwhile."""
    while True:
        if stop():
            raise StopRequested
        check_run(run)
        tick()
        if await wake.wait(MAX_LOOK_S):
            await asyncio.sleep(MIN_LOOK_S)


@contextlib.contextmanager
def woken_by_signals(wake: Wake) -> Iterator[None]:
    """While this lasts a signal ends the sleep of the event loop; a handler that only sets a flag does not."""
    reading, writing = socket.socketpair()
    for end in (reading, writing):
        end.setblocking(False)
    loop = asyncio.get_running_loop()

    def drain() -> None:
        reading.recv(4096)
        wake.set()

    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    loop.add_reader(reading, drain)
    try:
        yield
    finally:
        loop.remove_reader(reading)
        signal.set_wakeup_fd(before)
        reading.close()
        writing.close()


async def run_beside(main: Coroutine[Any, Any, ResultT], *loops: Awaitable[None]) -> ResultT:
    """The result of `main`, with `loops` beside it until it has ended or one of them raises; then cancel the rest."""
    main_task = asyncio.ensure_future(main)
    tasks: set[asyncio.Task[Any]] = {main_task, *(asyncio.ensure_future(loop) for loop in loops)}
    unread = set(tasks)
    try:
        while not main_task.done():
            done, _ = await asyncio.wait(unread, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                unread.discard(task)
                task.result()
    finally:
        await cancel_all(tasks)
        for task in unread:  # one that failed at the same time, or while it was cancelled
            log_failure(task)
    return main_task.result()


logger = logging.getLogger("orchestrator")

# The end of the metrics file from which the stop rule is brought up to date: tens of thousands of steps.
MAX_HISTORY_BYTES = 64_000_000


class RunMeter:
    """Tokens, also those of `judges`, seconds of inference and hours at work of one run, over all its starts.

    `num_learned`: tokens of texts, which count like those that are sampled. `num_taught`: those that teachers read.
    """

    def __init__(
        self,
        run: RunDir,
        config: OrchestratorConfig,
        client: InferenceClient,
        judges: Sequence[Judge] = (),
        num_learned: Callable[[], int] = lambda: 0,
        num_taught: Callable[[], int] = lambda: 0,
    ) -> None:
        self._num_learned = num_learned
        self._num_taught = num_taught
        self._run_id = run.run_id
        self._tags = config.tags
        self._client = client
        self._judges = judges
        self._life = _life(run)
        self._log = UsageLog(OutputDir(run.path.parent).run_usage(run.run_id))
        self._written = self._counters()

    def note(self, step: int) -> None:
        """Write down what was used since the last call."""
        now = self._counters()
        used = {name: now[name] - self._written[name] for name in now}
        self._written = now
        self._log.add(self._run_id, life=self._life, step=step, tags=self._tags, used=used)

    def used(self) -> tuple[int, float]:
        """(tokens, hours) up to the last `note`, also of earlier processes."""
        lines = self._log.of_life(self._run_id, self._life)
        return sum(line.tokens for line in lines), sum(line.work_s for line in lines) / 3600

    def _counters(self) -> dict[str, float]:
        client = self._client
        return {
            "tokens": client.num_sampled_tokens + self._num_learned(),
            "inference_s": client.request_s,
            "work_s": time.monotonic(),
            "judge_prompt_tokens": sum(judge.num_prompt_tokens for judge in self._judges),
            "judge_completion_tokens": sum(judge.num_completion_tokens for judge in self._judges),
            "teacher_tokens": self._num_taught(),
        }


class Ending:
    """The rule by which the run ends before `max_steps`. The budget is read again when the config in effect changes.

    Args:
        step: where the run goes on; figures of later steps are void.
    """

    def __init__(self, run: RunDir, config: OrchestratorConfig, meter: RunMeter, *, step: int) -> None:
        self._run = run
        self._meter = meter
        self._budget = config.budget
        self._stamps = self._stamps_now()
        if any(stamp and stamp[0] / 1e9 >= _LOADED_AT for stamp in self._stamps):
            self._stamps = []  # `config` may have been read before
        self._trained = FileTail(run.trainer_metrics)
        self._rule = EarlyStop(**config.stop.model_dump()) if config.stop else None
        if self._rule is not None:
            if self._rule.metric.startswith("eval/") and config.eval is None:
                logger.warning("stop.metric = %r, but the run has no [eval]: it never stops early", self._rule.metric)
            lines = read_end(run.orchestrator_metrics, MAX_HISTORY_BYTES).splitlines()
            for at, value in series([*lines, *self._of_texts()], self._rule.metric, at_most=step):
                self._rule.feed(at, value)

    def note(self, step: int) -> None:
        """Write down what the run has used up to here."""
        self._meter.note(step)

    def feed(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of a batch or of an evaluation."""
        value = metric_value(values, self._rule.metric) if self._rule else None
        if self._rule is not None and value is not None:
            self._rule.feed(step, value)

    def reason(self) -> str | None:
        """Why the run ends now; None: it goes on."""
        for step, values in filter(None, map(parse_metrics, self._of_texts())):
            self.feed(step, values)
        if stopped := self._rule.reason if self._rule else None:
            return stopped
        self._read_budget()
        tokens, hours = self._meter.used()
        return budget_reason(tokens, hours, max_tokens=self._budget.max_tokens, max_hours=self._budget.max_hours)

    def write(self, reason: str) -> None:
        """Write `finished.txt`: the trainer saves the run and frees its slot."""
        logger.info("ending the run: %s", reason)
        with contextlib.suppress(FileExistsError):
            write_atomic(self._run.finished, reason, exclusive=True)
            audit_run(self._run, "orchestrator", "finish", reason)

    def _of_texts(self) -> Iterable[bytes]:
        """The trainer's lines since the last look, where the rule is about its figures of texts."""
        return self._trained.lines() if self._rule and self._rule.metric.startswith(OF_TEXTS) else ()

    def _read_budget(self) -> None:
        stamps = self._stamps_now()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            budget: BudgetConfig = config_in_effect(self._run).budget
        except ConfigError as error:
            logger.warning("the budget stays as it is: %s", error)
            return
        if budget != self._budget:
            logger.info("new budget: %s", budget.model_dump(exclude_none=True) or "none")
        self._budget = budget

    def _stamps_now(self) -> list[tuple[int, int, int] | None]:
        """Of both files that the config in effect comes from."""
        return [_stamp(path) for path in (self._run.orch_toml, self._run.admitted)]


# Before the config of this process was read.
_LOADED_AT = time.time()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """When the file was changed last, in ns, and what else differs then; None where it is not there."""
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_ctime_ns, info.st_size, info.st_ino


def _life(run: RunDir) -> str:
    try:
        return life_of(run)
    except OSError as error:
        logger.warning("%s cannot be used, so a new run of this id has the usage of this one: %s", run.life, error)
        return ""


# A heartbeat that is later than this is looked into; below it the writer lived a moment ago.
LATE_AFTER_S = HEARTBEAT_S + 1.0


async def trainer_status(run: RunDir, say: Callable[[str | None], None], what: str) -> TrainerStatus:
    """The trainer's status, once it has what it trains. `what` is needed of it; `say` gets what is waited for."""
    path = OutputDir(run.path.parent).trainer_status
    while (status := read_status(path, TrainerStatus)) is None or not status.max_seq_len:
        say(f"{path} (for {what})")
        await asyncio.sleep(MAX_LOOK_S)
    return status


class TrainerWatch:
    """The trainer's state, by its status file at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._status: TrainerStatus | None = None

    def is_known(self) -> bool:
        """True when a trainer ever started in this workspace."""
        return self._read() is not None

    def trouble(self, now: float) -> str | None:
        """Why no update will come, e.g. "the trainer is down: it stopped 40 s ago"; None while it runs.

        `now` is Unix seconds. A workspace without a status file has no trainer that could be down.
        """
        status = self._read()
        if status is None:
            return None
        age_s = now - status.updated_at
        if status.state == "stopped":
            return f"the trainer is down: it stopped {ago(age_s)}"
        if age_s <= LATE_AFTER_S or is_alive(status, now):
            since = stalled_since(status)
            return None if since is None else f"the trainer is stalled: {stall_text(since)}"
        return f"the trainer is down: process {status.pid} gave its last sign of life {ago(age_s)}"

    def _read(self) -> TrainerStatus | None:
        try:
            info = self._path.stat()
        except OSError:
            self._stamp = self._status = None
            return None
        stamp = (info.st_mtime_ns, info.st_ino)  # a clock of files may tick only every 10 ms
        if stamp != self._stamp:
            self._status = read_status(self._path, TrainerStatus) or self._status  # None for another format version
            self._stamp = stamp
        return self._status


def describe_policy_wait(
    needed: int, have: int, published_at: float | None, now: float, trouble: str | None = None, *, started: bool = True
) -> str:
    """E.g. "policy version 7 (have 6), trainer last updated 40 s ago"; `trouble` is from `TrainerWatch`."""
    sentence = f"policy version {needed} (have {have if have >= 0 else 'none'})"
    if trouble is not None:
        return f"{sentence}; {trouble}"
    if published_at is None:
        return f"{sentence}, trainer has not {'updated' if started else 'started'} yet"
    return f"{sentence}, trainer last updated {ago(now - published_at)}"


def ago(age_s: float) -> str:
    """Coarse, and coarser the longer it is, as every new sentence is a write and a line of log."""
    if age_s < 10:
        return "under 10 s ago"
    return f"{int(age_s) // 10 * 10} s ago" if age_s < 120 else f"{int(age_s) // 60} min ago"
