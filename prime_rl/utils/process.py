"""The process that a pid means: pids are used again, and clocks are set, so neither a pid nor a time proves anything.

On Linux a process is known by what never moves: the boot of the machine, the container whose pids these are, and the
ticks from the boot to its start. Where those are not available, it is identified by its start in Unix seconds, which
moves whenever the clock is set.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from dataclasses import dataclass

import psutil

# Starts in Unix seconds are derived from the boot time, which is whole seconds; pids do not come round this fast.
CREATE_TIME_TOLERANCE_S = 2.0
# The pid namespace of a machine itself, the same on all (PROC_PID_INIT_INO of Linux); a container has one of its own.
MACHINE_PIDS = 0xEFFFFFFC


@dataclass(frozen=True)
class ProcessId:
    """One process for good. Plain values: a record of a process for another one holds all three.

    `create_time` is its start in Unix seconds as the clock stood when this was taken, `start` the same as the kernel
    counts it ("" where it does not, and in what earlier versions wrote). Where both sides have `start`, that decides.
    """

    pid: int
    create_time: float = 0.0
    start: str = ""

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The process that has this pid now; without one, a process that never runs."""
        try:
            return cls(pid, psutil.Process(pid).create_time(), _kernel_stat(pid)[1])
        except (psutil.Error, ValueError):
            return cls(pid)

    def is_same(self, other: ProcessId) -> bool:
        """True when both mean one process; without `start` on both sides their times decide, to two seconds."""
        if self.pid != other.pid:
            return False
        if self.start and other.start:
            return self.start == other.start
        return abs(self.create_time - other.create_time) <= CREATE_TIME_TOLERANCE_S

    def is_running(self) -> bool:
        """True when this very process runs, and not as a zombie."""
        state, start = _kernel_stat(self.pid)
        if self.start and start:
            return self.start == start and state not in "ZX"
        try:
            is_zombie = psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except (psutil.Error, ValueError):
            return False
        return not is_zombie and self.is_same(ProcessId.of(self.pid))

    def is_of_another_boot(self) -> bool:
        """True when it ran on another machine or container, or before this was started: its pid means nothing here."""
        boot = self.start.partition("/")[0]
        return bool(boot and boot_id()) and boot != boot_id()

    def is_started_after(self, other: ProcessId) -> bool:
        """True when it is `other`, or started after it in the same boot of the same machine."""
        boot, _, ticks = self.start.partition("/")
        other_boot, _, other_ticks = other.start.partition("/")
        return bool(boot) and boot == other_boot and int(ticks) >= int(other_ticks)

    def send(self, signum: signal.Signals) -> None:
        """Send a signal if this process still is that process."""
        if self.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)


@functools.cache
def boot_id() -> str:
    """Changes with every boot of the machine, never with its clock; "" where it is not available.

    Containers of one machine share its boot, but not their pids: in one, the number of its pid namespace follows.
    """
    boot, pids = "", MACHINE_PIDS
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
        pids = os.stat("/proc/self/ns/pid").st_ino
    return boot if pids == MACHINE_PIDS else f"{boot}:{pids}"


def _kernel_stat(pid: int) -> tuple[str, str]:
    """(letter of its state, boot and ticks from there to its start) of a process; empty where not available."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            # The name before the state is in brackets and may hold anything, brackets too.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", ""
    boot = boot_id()
    return (fields[0], f"{boot}/{fields[19]}") if boot and len(fields) > 19 else ("", "")


def is_below(pid: int, ancestor: int) -> bool:
    """True when process `pid` was started by `ancestor` or by one that it started."""
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
