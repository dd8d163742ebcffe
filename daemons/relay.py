"""The logs of all daemons as one stream of lines, for `prl up --foreground`: a container's logs, systemd's journal.

It reads the log files from their ends at its start.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TextIO

from prime_rl.utils.tail import FileTail
from prime_rl.utils.text import clean_text

_UNKNOWN = -1


class LogRelay:
    """Writes `name | line` for each new line of each daemon's log."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._tails: dict[str, tuple[FileTail, int]] = {}

    def follow(self, name: str, log: Path) -> None:
        """Add a daemon. Call it before the daemon is started."""
        if name not in self._tails:
            self._tails[name] = (FileTail(log, position=_size(log)), _size(log))

    def pump(self) -> None:
        """Write what is new; of each log at most what one look takes, so one that grows quickly holds up no other."""
        for name, (tail, size) in self._tails.items():
            now = _size(tail.path)
            if now == size:
                continue
            read = tail.read()
            self._tails[name] = (tail, _UNKNOWN if read.more else now)
            for line in read.lines:
                self._out.write(f"{name} | {clean_text(line.decode(errors='replace'))}\n")
        self._out.flush()


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0
