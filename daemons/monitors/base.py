"""The interface of a monitor. Each has its own file and imports its library in `start`, so only when it is used."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from prime_rl.contract.files import read_text, write_atomic
from prime_rl.utils.extras import install_command

_IMPORTS = threading.Lock()
_ID = re.compile(r"[0-9a-f]{16}")


class MonitorError(RuntimeError):
    """A monitor that cannot work; the message has what is missing."""


class Monitor(Protocol):
    """Takes the metrics of one run, called by one thread. Any call may raise, which ends this monitor of this run."""

    name: str
    # Whether it gets every line once, over all starts; else the newest lines at each start.
    wants_all: bool

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Called once, before all else. `config` is the run's whole config, as plain data."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of a metrics file. Names begin with the writer: "orchestrator/reward/mean", "trainer/loss"."""
        ...

    def close(self) -> None:
        """Called once, also when `start` failed half way."""
        ...


@contextmanager
def importing(package: str) -> Iterator[None]:
    """Import a monitor's library in here, one after another: numpy, begun by two threads at once, is broken for good.

    Raises MonitorError when it is not installed.
    """
    with _IMPORTS:
        try:
            yield
        except ImportError as error:
            raise MonitorError(f"the package {package} is not installed: {install_command('monitors')}") from error


def kept_id(path: Path) -> str:
    """The random id in the file `path`, made when there is none: under it a service finds the run again."""
    known = read_text(path)
    if known and _ID.fullmatch(known.strip()):
        return known.strip()
    new = secrets.token_hex(8)
    write_atomic(path, new)
    return new
