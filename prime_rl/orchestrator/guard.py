"""What ends a run from outside, and how its parts run beside each other. Looks at the disk five times a second."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Never

from prime_rl.contract.files import read_text
from prime_rl.contract.layout import RunDir

# How soon an eviction, a deletion or a signal is noticed; a look costs two stat calls.
GUARD_POLL_S = 0.2


class RunEvicted(RuntimeError):
    """`control/evicted.txt` is there; the message is its text."""


class RunGone(RuntimeError):
    """The run's folder was removed."""


class StopRequested(RuntimeError):
    """SIGTERM or SIGINT came."""


def check_run(run: RunDir) -> None:
    """Raises RunEvicted or RunGone when the run is not to go on."""
    if not run.path.is_dir():
        raise RunGone(f"{run.path} is gone")
    reason = read_text(run.evicted)
    if reason is not None:
        raise RunEvicted(" ".join(reason.split()) or "no reason given")


async def guard(run: RunDir, stop: Callable[[], bool], tick: Callable[[], None]) -> Never:
    """Raises as soon as the run is not to go on; calls `tick` meanwhile."""
    while True:
        if stop():
            raise StopRequested
        check_run(run)
        tick()
        await asyncio.sleep(GUARD_POLL_S)


async def run_beside(main: Coroutine[Any, Any, None], *loops: Awaitable[None]) -> None:
    """Run `main` with `loops` beside it until `main` has ended or one of them raises; then cancel the rest."""
    main_task = asyncio.ensure_future(main)
    tasks = {main_task, *(asyncio.ensure_future(loop) for loop in loops)}
    pending = set(tasks)
    try:
        while not main_task.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
