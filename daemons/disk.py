"""The disk use of a workspace and the free space. Sizes are allocated sizes, as `du` counts.

A walk of a large workspace on a slow file server takes long, so it ends at a deadline and is marked as not complete; a
`DiskReader` that looks repeatedly walks rarely. Links are not followed. It changes nothing.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prime_rl.utils.mounts import file_system_type

# One walk may take so long, and is repeated after so long.
WALK_LIMIT_S = 2.0
WALK_EVERY_S = 30.0
# A forecast needs a while to mean something.
MIN_FORECAST_S = 60.0


@dataclass(frozen=True)
class Use:
    """`num_bytes` of everything below a folder; at least that when not `complete`."""

    num_bytes: int
    complete: bool = True


@dataclass(frozen=True)
class DiskView:
    """The disk of a workspace.

    `full_in_s` is None when unknown: the workspace does not grow, or was observed for less than a minute.
    """

    free_bytes: int
    total_bytes: int
    workspace_bytes: int
    workspace_complete: bool
    file_system: str | None
    full_in_s: float | None


def disk_use(folder: Path, *, limit_s: float = WALK_LIMIT_S, clock: Callable[[], float] = time.monotonic) -> Use:
    """The size of everything below `folder`. A folder that vanishes or cannot be read counts as 0."""
    deadline = clock() + limit_s
    total, todo = 0, [str(folder)]
    seen: set[tuple[int, int]] = set()
    while todo:
        if clock() > deadline:
            return Use(total, complete=False)
        try:
            entries = list(os.scandir(todo.pop()))
        except OSError:
            continue
        for entry in entries:
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if entry.is_dir(follow_symlinks=False):
                todo.append(entry.path)
            elif info.st_nlink > 1:  # a hard link is stored once
                if (info.st_dev, info.st_ino) in seen:
                    continue
                seen.add((info.st_dev, info.st_ino))
            total += info.st_blocks * 512
    return Use(total)


class DiskReader:
    """Looks at the disk of a workspace; measures the workspace itself at most once in WALK_EVERY_S.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, output_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._output_dir = output_dir
        self._clock = clock
        self._use: Use | None = None
        self._walked_at = 0.0
        self._first: tuple[float, int] | None = None

    def read(self, *, walk: bool = True) -> DiskView | None:
        """None when the folder does not exist or its file system gives no answer.

        Without `walk` the workspace's own size is not measured.
        """
        try:
            space = shutil.disk_usage(self._output_dir)
        except OSError:
            return None
        now = self._clock()
        if not walk:
            self._use = self._use or Use(0, complete=False)
        elif self._use is None or now - self._walked_at >= WALK_EVERY_S:
            self._use = disk_use(self._output_dir)
            self._walked_at = now
        return DiskView(
            free_bytes=space.free,
            total_bytes=space.total,
            workspace_bytes=self._use.num_bytes,
            workspace_complete=self._use.complete,
            file_system=file_system_type(self._output_dir),
            full_in_s=self._forecast(now, space.free),
        )

    def _forecast(self, now: float, free_bytes: int) -> float | None:
        """Seconds until the disk is full, by the loss of free space since the first look, whatever caused it."""
        if self._first is None:
            self._first = (now, free_bytes)
        passed_s, gone_bytes = now - self._first[0], self._first[1] - free_bytes
        if passed_s < MIN_FORECAST_S or gone_bytes <= 0:
            return None
        return free_bytes / (gone_bytes / passed_s)
