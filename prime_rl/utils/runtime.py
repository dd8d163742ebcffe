"""Memory of the C library, what torch and the model code cost to load, and how many GPUs there are. Without torch."""

from __future__ import annotations

import atexit
import ctypes
import gc
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

# glibc's name for it in mallopt(3), and the most that it takes: larger blocks are always mappings of their own.
_M_MMAP_THRESHOLD = -3
_MOST_BYTES = 32 << 20


def set_up_memory() -> bool:
    """Choose how the memory of a pass's tensors is kept on a CPU. Call it before the first tensor is made.

    Left alone, glibc decides by what was freed last, and a block that goes back to the system is cleared when it comes
    again: a third of a pass. Here blocks of up to 32 MiB are in one heap and are used again. The tensors go in another
    order than they came, so the heap has holes; a pass that is to take little memory calls `give_back_holes` from time
    to time. What holes take is in `fit.predict`.

    Returns whether the C library has this setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _MOST_BYTES) == 1


# In the errors of torch that are no OutOfMemoryError: of its allocator on the host, and of cuBLAS.
_NO_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """True when `error` is that memory could not be had, on the host or on a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def give_back_holes() -> None:
    """Give free pages of the heap back to the system: a fraction of a millisecond, and each is cleared when used again.

    Left alone they add up: for an aligned block glibc looks for more than its size, so not in a hole of that size.
    """
    if trim := _trim():
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Import torch and the model code in here.

    They make some 400,000 objects that stay. Python's collector of cycles would look through them again and again while
    they are made (measured: a fifth of the time to load them), and at every full collection after (0.2 s and more, in
    which no token is made). So it rests meanwhile, and what is there at the end is left out of its rounds.
    """
    if not gc.isenabled():  # within another one, or switched off by a person
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
        # Some libraries report at the end what was not collected.
        atexit.register(gc.unfreeze)


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
