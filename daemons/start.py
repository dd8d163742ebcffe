"""Entry of `prl`, which loads all commands: Ctrl-C meanwhile ends it as quietly as later. Imports next to nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def quiet_interrupts() -> Iterator[None]:
    """Import in here: Ctrl-C ends the process at once, with exit code 130. Where it is ignored it stays so."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda signum, frame: os._exit(EXIT_INTERRUPTED))
    yield
    signal.signal(signal.SIGINT, before)


def main() -> None:
    """Load the commands, run the command line and exit with its code."""
    with quiet_interrupts():
        from daemons.cli import main as prl
    prl()
