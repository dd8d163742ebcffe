"""Looks at `multinode/node_<rank>.json` again and again and remembers, by our own clock, when each last moved.

One thread calls it. `contract.nodes` judges what it has seen.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

from prime_rl.contract.layout import OutputDir
from prime_rl.contract.nodes import BeatWatch, SeenNode
from prime_rl.contract.status import NodeStatus, read_status
from prime_rl.utils.text import clean_strings, one_line

MAX_FILE_BYTES = 1_000_000


class NodeReader:
    """The nodes of one workspace. `clock` is any that never jumps, in seconds."""

    def __init__(self, output_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._output = OutputDir(output_dir)
        self._clock = clock
        self._watch = BeatWatch()
        self._host = socket.gethostname()
        self._known: dict[int, NodeStatus] = {}

    def read(self) -> list[SeenNode]:
        """Return what is known of each node, its text clean; a file that cannot be read just now counts as before."""
        ranks = self._output.list_nodes()
        self._watch.forget(ranks)
        self._known = {rank: status for rank, status in self._known.items() if rank in ranks}
        for rank in ranks:
            status = self._status(rank)
            if status is not None and status.rank == rank:
                self._known[rank] = status
        now_s = self._clock()
        return [self._watch.see(status, now_s, is_gone=self._is_gone(status)) for status in self._known.values()]

    def _status(self, rank: int) -> NodeStatus | None:
        path = self._output.node_status(rank)
        try:
            if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
                return None
            return clean_strings(read_status(path, NodeStatus), one_line)
        except (OSError, RecursionError):
            return None

    def _is_gone(self, status: NodeStatus) -> bool:
        """True when it ran here and its process no longer exists: found at once, without waiting for beats."""
        return status.host == self._host and status.pid > 0 and not status.writer.is_running()
