"""What torch and the model code cost to load."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
