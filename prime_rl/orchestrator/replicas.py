"""The inference servers of a workspace as their status files show them, for a run whose config names no address.

It only looks. What follows for the requests of the run is decided by `pool`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import LOST_AFTER_S, InferenceStatus, is_elsewhere, is_there, read_status
from prime_rl.orchestrator.client import Endpoint

logger = logging.getLogger(__name__)

# A server that dies is noticed by the next request to it; this is for those that come, leave, or hang.
LOOK_EVERY_S = 1.0


class Standing(Enum):
    """The state of a server as a status file shows it.

    It serves; it serves, but its heartbeat is old; it starts or takes no more requests; its process is gone; there is
    no file.
    """

    SERVING = "serving"
    SILENT = "silent"
    BUSY = "busy"
    DEAD = "dead"
    GONE = "gone"


class Replicas:
    """See the module. `clock` is monotonic: a heartbeat is as old as we have seen it unchanged."""

    def __init__(self, output_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._output = OutputDir(output_dir)
        self._clock = clock
        self._beats: dict[int, tuple[object, float]] = {}

    def endpoint(self, number: int) -> Endpoint:
        """The address of server `number`, by its status file."""
        return Endpoint(self._output.path, None, replica=number)

    def look(self) -> dict[int, Standing]:
        """All servers by number, also those that are no more; replica 0 always."""
        try:
            return {number: self._look_at(number, path) for number, path in self._output.inference_statuses().items()}
        except OSError as error:  # the next look may succeed
            logger.warning("cannot look for inference servers: %s", error)
            return {}

    def _look_at(self, number: int, path: Path) -> Standing:
        status = read_status(path, InferenceStatus)
        if status is None or status.state == "stopped":
            return Standing.GONE
        if not is_there(status):
            return Standing.SILENT if is_elsewhere(status) else Standing.DEAD
        if status.state != "serving":
            return Standing.BUSY
        beat, now_s = (status.pid, status.updated_at), self._clock()
        if self._beats.get(number, (None, 0.0))[0] != beat:
            self._beats[number] = (beat, now_s)
        return Standing.SILENT if now_s - self._beats[number][1] > LOST_AFTER_S else Standing.SERVING
