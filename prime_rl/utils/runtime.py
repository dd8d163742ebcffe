"""How the C library hands out memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

# glibc's name for it in mallopt(3), and the most that it takes: larger blocks are always mappings of their own.
_M_MMAP_THRESHOLD = -3
_MOST_BYTES = 32 << 20


def set_up_memory() -> bool:
    """What happens to the memory of the tensors of a pass on a CPU. Call it before the first tensor is made.

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
    """Whether `error` is that memory could not be had, on the host or on a GPU."""
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
