"""The state of a workspace beside its runs: its machine and disk, its open alerts, and the warnings of `prl doctor`.

The first look at the machine has no shares of processors: they need the time between two looks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from daemons.machine import DiskReader, DiskView, MachineReader, MachineView
from daemons.workspace import Workspace, replica_name
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.process import ProcessId
from prime_rl.utils.text import CleanText, one_line

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


if TYPE_CHECKING:
    from daemons.quiet import Silence


@dataclass(frozen=True)
class Alert:
    """One open incident.

    Attributes:
        name: KIND:SUBJECT, as it is acknowledged and muted; `subject` is a run, a daemon, a node, "disk" or "clocks".
        since: Unix seconds.
        note: who acknowledged or muted it, and why; "" when no person has.
    """

    name: CleanText
    subject: CleanText
    text: CleanText
    since: float
    note: CleanText


def read_alerts(output: OutputDir, now: float) -> list[Alert]:
    """[] in a workspace without alerts, at the cost of one look for a file."""
    if not output.alerts_open.exists():
        return []
    from daemons import quiet
    from daemons.alerts.targets import sentence

    silences = quiet.read_silences(output, now)
    found = []
    for incident in quiet.read_open(output).values():
        said = quiet.acknowledgement(incident, silences), quiet.muting(incident, silences)
        name, subject = one_line(quiet.name_of(incident)), one_line(incident.subject)
        found.append(Alert(name, subject, one_line(sentence(incident)), incident.since, _note(filter(None, said))))
    return found


def _note(said: Iterable[Silence]) -> CleanText:
    reasons = ((each, f": {each.reason}" if each.reason else "") for each in said)
    return one_line("; ".join(f"{each.action} by {each.who}{reason}" for each, reason in reasons))


@dataclass(frozen=True)
class Finding:
    """One line: what is wrong and what to do. `is_broken`: the workspace will not start."""

    text: CleanText
    is_broken: bool


def find(output_dir: Path) -> Sequence[Finding]:
    """The broken first. Takes tenths of a second."""
    from daemons.doctor import examine

    checks = [each for each in examine(output_dir, say=lambda words: None, import_libraries=False) if each.advice]
    checks.sort(key=lambda each: each.level != "broken")
    return [Finding(one_line(f"{each.name}: {each.message}: {each.advice}"), each.level == "broken") for each in checks]
