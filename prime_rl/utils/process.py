"""Processes: the one that a pid means, signals, and a keeper for a child.

Pids are used again, and clocks are set, so neither a pid nor a time proves anything. On Linux a process is known by
what never moves: the boot of the machine, the container whose pids these are, and the ticks from the boot to its start.
Where those are not available, it is identified by its start in Unix seconds, which moves whenever the clock is set.

Signals set flags, nothing else: the loop of an entry file looks at the flag and cleans up itself. A handler runs in the
middle of whatever the main thread does, also of a wait on the flag itself. So the flag is woken through a queue that
may be entered again, not through a lock that its own waiter may hold.

    python -m prime_rl.utils.process [--cpu SECONDS] [--memory BYTES] [--file BYTES] COMMAND...

keeps one child, with limits: it ends all of it on request, and when its own parent dies, even by SIGKILL (Linux); what
the child leaves behind becomes its own. So a killed node of a group leaves no server, no torchrun and no rank. Its exit
code is the child's, its standard input too. All below it is marked (`is_kept`), so that it is found when the keeper is
killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import queue
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

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
        is_known = ticks.isdecimal() and other_ticks.isdecimal() and boot == other_boot != ""
        return is_known and (len(ticks), ticks) >= (len(other_ticks), other_ticks)

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
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
        boot = file.read().strip()
        pids = os.stat("/proc/self/ns/pid").st_ino
    return boot if pids == MACHINE_PIDS else f"{boot}:{pids}"


def _kernel_stat(pid: int) -> tuple[str, str]:
    """(letter of its state, boot and ticks from there to its start) of a process; empty where not available."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name before the state is in brackets and may hold anything, brackets too.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", ""
    boot = boot_id()
    return (fields[0], f"{boot}/{fields[19]}") if boot and len(fields) > 19 else ("", "")


def send_kill(members: Iterable[ProcessId]) -> set[ProcessId]:
    """SIGKILL all of them, and wait for none; returns them. Those of other users are left alone."""
    targets = set(members)
    for identity in targets:
        with contextlib.suppress(PermissionError):
            identity.send(signal.SIGKILL)
    return targets


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


# A shell's exit code for a process that a signal ended; ours exit with the same code.
EXIT_TERMINAL_GONE = 128 + signal.SIGHUP
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


class StopFlag:
    """Set by SIGTERM, SIGINT or SIGHUP, which call `then` too. Calling it returns whether a stop was asked for."""

    def __init__(self) -> None:
        self._is_set = False
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.signal_name: str | None = None
        self.then: Callable[[], None] | None = None

    def __call__(self) -> bool:
        """True when a stop was asked for."""
        return self._is_set

    def set(self) -> None:
        """Ask for a stop, and wake all who wait; safe in a signal handler."""
        self._is_set = True
        self._wakes.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Sleep up to `timeout_s`; true as soon as a stop was asked for."""
        if not self._is_set:
            with contextlib.suppress(queue.Empty):
                self._wakes.get(timeout=timeout_s)
                self._wakes.put(None)  # wakes the other waiters
        return self._is_set

    def install(self) -> StopFlag:
        """Catch the signals. Call it first thing in an entry file, before slow imports. SIGHUP below nohup is left."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._on_signal)
        return self

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(signum).name
        self.set()
        if self.then is not None:
            self.then()


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
# Nothing that is kept here needs longer: what it has written survives SIGKILL.
GRACE_S = 1.5
POLL_S = 0.1
# How long processes are killed that start others as fast as they can.
ORPHANS_END_S = 5.0
ORPHANS_POLL_S = 0.001
LIMITS = {"--cpu": resource.RLIMIT_CPU, "--memory": resource.RLIMIT_AS, "--file": resource.RLIMIT_FSIZE}
# RLIMIT_LOCKS: Linux has it and obeys it no more. It is inherited, and only root can raise it: a mark.
_MARK, _MOST_MARKS = 10, 1 << 62


def main(argv: list[str]) -> int:
    """Run `argv` and return its exit code, 128 + N when signal N ended it.

    SIGTERM, SIGINT and SIGHUP end everything below this process.
    """
    told: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        told.append(signum)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, note)
    inherit_orphans()
    die_with_parent(signal.SIGTERM)
    limits, argv = _limits(argv)

    def limit() -> None:
        with contextlib.suppress(OSError, ValueError):  # some sandboxes do not have it
            resource.setrlimit(_MARK, (_mark(0) - 1,) * 2)
        for kind, value in limits.items():
            resource.setrlimit(kind, (value, value + 1))  # at the first it gets a signal that tells which limit it was

    child = subprocess.Popen(argv, preexec_fn=limit)  # noqa: PLW1509 - this process has one thread
    while child.poll() is None and not told:
        time.sleep(POLL_S)
    end_all(child)
    code = child.poll()
    return code if code is not None and code >= 0 else 128 - (code or -signal.SIGKILL)


def _limits(argv: list[str]) -> tuple[dict[int, int], list[str]]:
    """The limits that a command begins with, by kind, and the command."""
    limits: dict[int, int] = {}
    while argv[0] in LIMITS:
        kind, value, *argv = argv
        limits[LIMITS[kind]] = int(value)
    return limits, argv


def _mark(pid: int) -> int:
    """The mark of process `pid`, 0 for this one: the lower, the more keepers are above it."""
    most = (resource.prlimit(pid, _MARK) if pid else resource.getrlimit(_MARK))[1]
    return _MOST_MARKS if most == resource.RLIM_INFINITY else most


def is_kept(pid: int) -> bool:
    """True when there is a keeper between this process and that one, or was one that has been killed. Linux only."""
    try:
        return _mark(pid) < _mark(0)
    except (AttributeError, OSError, ValueError):
        return False


def end_all(child: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> None:
    """SIGTERM to everything below this process, then SIGKILL until nothing is there."""
    signum, deadline = signal.SIGTERM, time.monotonic() + grace_s
    while left := living(child):
        if signum == signal.SIGTERM or time.monotonic() > deadline:
            for process in left:
                send_signal(process, signum)
            signum = signal.SIGKILL
        time.sleep(POLL_S)


def living(child: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes below this one; orphans that became ours are reaped on the way."""
    child.poll()
    for process in psutil.Process().children():
        if process.pid != child.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
    return [each for each in psutil.Process().children(recursive=True) if ProcessId.of(each.pid).is_running()]


def send_signal(process: psutil.Process, signum: signal.Signals) -> None:
    """Send a signal; a process that has ended, or may not be signalled, is left alone."""
    with contextlib.suppress(psutil.Error):
        process.send_signal(signum)


def signal_at_parents_death(signum: signal.Signals) -> None:
    """Let the kernel send `signum` to this process when its parent dies. Linux only; elsewhere it does nothing."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def die_with_parent(signum: signal.Signals = signal.SIGKILL) -> None:
    """As `signal_at_parents_death`, and at once when the parent has died already."""
    signal_at_parents_death(signum)
    if sys.platform == "linux" and os.getppid() == 1:
        os.kill(os.getpid(), signum)


def inherit_orphans() -> None:
    """Whatever a process below this one leaves behind becomes this one's own. Linux only; elsewhere it does nothing."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _inherits_orphans() -> bool:
    found = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(found))
    return bool(found.value)


def _prctl(option: int, value: Any) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def orphans(own: Container[int] = (), *, kept: bool = False) -> dict[int, int]:
    """The children that this process inherited, pid -> session; those that have ended are reaped.

    A process may leave its session and clear its environment, but it cannot join a session of others: `own` are the
    pids that this process started, and whatever else is a child in another session was inherited. With `kept` it is
    only what the child of a keeper left, whatever others have started here (`is_kept`).
    """
    found: dict[int, int] = {}
    for pid in _children() if _inherits_orphans() else []:
        with contextlib.suppress(OSError):  # it has ended, and another thread has reaped it
            session = os.getsid(pid)
            is_own = pid in own or session == os.getsid(0) or (kept and not is_kept(pid))
            if not is_own and os.waitpid(pid, os.WNOHANG) == (0, 0):
                found[pid] = session
    return found


def end_orphans(
    own: Container[int] = (),
    doomed: Callable[[int], bool] = lambda session: True,
    patience_s: float = ORPHANS_END_S,
    *,
    kept: bool = False,
) -> list[int]:
    """SIGKILL the orphans whose session is `doomed`, and what they leave behind, until none is left.

    Returns the pids of those that are left after `patience_s`; with 0 each is killed once. What it does not return is
    gone: a process below this one becomes its child when its own parent is killed.
    """

    def find() -> list[int]:
        return [pid for pid, session in orphans(own, kept=kept).items() if doomed(session)]

    deadline = time.monotonic() + patience_s
    while left := find() or find():  # the first reaps one that has ended, whose children were not ours yet
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= deadline:
            break
        time.sleep(ORPHANS_POLL_S)
    return left


def _children() -> list[int]:
    pids: list[int] = []
    for thread in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += map(int, thread.read_text(encoding="utf-8").split())
    return pids


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
