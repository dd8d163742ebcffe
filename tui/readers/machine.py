"""What a workspace uses of its machine and disk.

The first look has no shares of processors: they need the time between two looks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from daemons.machine import DiskReader, DiskView, MachineReader, MachineView
from daemons.workspace import Workspace, replica_name
from prime_rl.utils.process import ProcessId

INTERVAL_S = 2.0
# The step rate is of the last so many looks, a minute.
NUM_RATE_LOOKS = 30


@dataclass(frozen=True)
class SystemLook:
    """One look. `updates_per_s` is of the trainer's last minute, None while it is not known."""

    machine: MachineView
    disk: DiskView | None
    updates_per_s: float | None = None


class Probe(Protocol):
    """Measures what the workspace uses of the machine."""

    def read(self, workspace: Workspace) -> SystemLook:
        """Measure the machine and the disk; what is a rate needs an earlier look."""


class SystemProbe:
    """Measures the machine, the disk and the trainer's rate of updates. `clock`: monotonic seconds."""

    def __init__(self, output_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._machine = MachineReader()
        self._disk = DiskReader(output_dir)
        self._clock = clock
        self._updates: deque[tuple[float, int]] = deque(maxlen=NUM_RATE_LOOKS)

    def read(self, workspace: Workspace) -> SystemLook:
        """Measure all; the trainer's rate needs looks that are at least INTERVAL_S apart."""
        return SystemLook(self._machine.read(daemon_processes(workspace)), self._disk.read(), self._rate(workspace))

    def _rate(self, workspace: Workspace) -> float | None:
        if workspace.trainer is None:
            self._updates.clear()
            return None
        now, num = self._clock(), workspace.trainer.num_updates
        if self._updates and num < self._updates[-1][1]:  # another trainer, which counts from zero
            self._updates.clear()
        self._updates.append((now, num))
        then, before = self._updates[0]
        return (num - before) / (now - then) if now - then >= INTERVAL_S else None


def daemon_processes(workspace: Workspace) -> dict[str, ProcessId]:
    """The processes of the daemons that are known to live. Their own status is the newest."""
    found: dict[str, ProcessId] = {each.name: each.process for each in workspace.daemons if each.process is not None}
    servers = workspace.replicas or ((0, workspace.inference),)
    replicas = [(replica_name(number), status) for number, status in servers]
    for name, status in (("trainer", workspace.trainer), *replicas):
        if status is not None:
            found.setdefault(name, status.writer)
    return found
