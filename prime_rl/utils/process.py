"""Whether a pid is still the process it was. Pids are used again, so a pid alone proves nothing."""

from __future__ import annotations

import contextlib

import psutil

# psutil derives the start from the boot time, which moves when the clock is set; pids do not come round this fast.
CREATE_TIME_TOLERANCE_S = 2.0


def process_create_time(pid: int) -> float:
    """Start of process `pid` in Unix seconds; 0.0 when there is none."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


def same_process(pid: int, create_time: float) -> bool:
    """Whether `pid` runs (not as a zombie) and started at `create_time` (Unix seconds)."""
    try:
        process = psutil.Process(pid)
        return (
            abs(process.create_time() - create_time) <= CREATE_TIME_TOLERANCE_S
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except (psutil.Error, ValueError):
        return False


def is_below(pid: int, ancestor: int) -> bool:
    """Whether process `pid` was started by `ancestor` or by one that it started."""
    try:
        return ancestor in [parent.pid for parent in psutil.Process(pid).parents()]
    except (psutil.Error, ValueError):
        return False


def kill_tree(pid: int) -> None:
    """SIGKILL all below process `pid`, whatever sessions those are in, and then itself: it may be this process."""
    try:
        root = psutil.Process(pid)
        victims = [*root.children(recursive=True), root]
    except psutil.Error:
        return
    for victim in victims:
        with contextlib.suppress(psutil.Error):
            victim.kill()
