"""Ends of a run from outside, reasons that keep it from starting, and its loops beside each other.

The guard looks at the disk every other second, and up to five times a second when something wakes it (a signal, a
change of what is waited for), so that fifty runs that wait cost next to nothing. It does not watch `control/`: the
status file is there too, and the events of the heartbeat of the run itself cost more than the looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Never, TypeVar

from prime_rl.contract.files import WaitStopped, WaitTimeout, wait_for
from prime_rl.contract.layout import RunDir
from prime_rl.contract.run_state import read_mark
from prime_rl.contract.status import LOST_AFTER_S, RunStatus, is_there, read_status
from prime_rl.utils.background import cancel_all, log_failure

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
