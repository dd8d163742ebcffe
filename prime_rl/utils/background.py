"""Tasks that run beside their owner and that nothing awaits: one that ends by an exception is logged, always."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

logger = logging.getLogger(__name__)


class Background:
    """The background tasks of one owner."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Run `work` from now on; `what` names it in the log."""
        task = asyncio.get_running_loop().create_task(work, name=what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(log_failure)
        return task

    async def cancel(self) -> None:
        """Cancel all of them and wait until they have ended."""
        await cancel_all(self._tasks)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel `tasks` and wait until they have ended, however they end."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def log_failure(task: asyncio.Task[Any]) -> None:
    """Write down the exception that ended `task`, if one did."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a background task failed: %s", task.get_name(), exc_info=error)
