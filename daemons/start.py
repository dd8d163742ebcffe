"""Entry of `prl`, which loads all commands; what ends them as Ctrl-C does. Imports next to nothing."""

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


def end_as_interrupted() -> None:
    """SIGTERM and the first SIGHUP of a closed terminal end the command as Ctrl-C does; below nohup SIGHUP is left."""

    def hang_up(*_: object) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # its shell sends another, a second Ctrl-C would unload nothing
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)


def main() -> None:
    """Load the commands, run the command line and exit with its code."""
    with quiet_interrupts():
        from daemons.cli import main as prl
    prl()
