"""How many GPUs a process on this machine may use. Without torch, for programs that only start others."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping

# A driver that wakes up many GPUs takes its time.
TIMEOUT_S = 60.0


def listed_gpus() -> int:
    """GPUs that the driver's own tool lists; 0 without the tool or the driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        done = subprocess.run(
            [tool, "-L"], capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def count_gpus(environment: Mapping[str, str], listed: Callable[[], int] = listed_gpus) -> int:
    """GPUs that CUDA shows to a process with that environment: `CUDA_VISIBLE_DEVICES` where it is set, else all.

    As for CUDA, the first entry that is not a GPU ends the list.
    """
    number = listed()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not number:
        return number
    count = 0
    for entry in map(str.strip, visible.split(",")):
        if not entry or entry.startswith("-") or (entry.isdecimal() and int(entry) >= number):
            break
        count += 1
    return count
