"""Daemons as processes of this machine: each in a session of its own, known by pid and start time.

A start of this process is our child. One of an earlier supervisor is not: its end is seen (through a pidfd, where
supported), its exit code is not.

A daemon is known by pid and start time, never by pid alone. What belongs to it is found three ways, and ended with
proof: same session, descendants, and the marks in the environment (`process`), which children inherit. The environment
of a process that holds a key cannot be read: `specs` tells what its command line means.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from daemons.launchers.agent import log_of
from daemons.launchers.base import Alive, Ended, Handle, Left, new_start_id
from daemons.pidfile import is_this_boot
from daemons.process import DAEMON_MARK, KILL_WAIT_S, WORKSPACE_MARK, spawn
from daemons.specs import DaemonSpec, daemon_of, keys_of
from prime_rl.contract.files import WaitTimeout, wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import DaemonStatus
from prime_rl.utils.process import ProcessId, boot_id, end_orphans, send_kill
from prime_rl.utils.runtime import nvidia_smi


@dataclass(frozen=True)
class _Row:
    identity: ProcessId
    parent: int
    session: int
    workspace: str | None
    daemon: str | None


def find_members(
    output_dir: Path,
    leaders: Iterable[ProcessId],
    names: Collection[str] | None,
    *,
    but: Collection[str] = (),
    trust_sessions: bool = False,
) -> set[ProcessId]:
    """All living processes that belong to daemons.

    Args:
        leaders: the processes that the supervisor started. The session of one that lives is all its own.
        names: daemons whose marks count; None: any mark of this workspace, except those of the daemons in `but`.
        trust_sessions: we saw the leader die, so its session number cannot have been used again yet.
    """
    rows = list(_process_table())
    leaders = list(leaders)
    alive = {leader.pid for leader in leaders if leader.is_running()}
    sessions = alive | ({leader.pid for leader in leaders} if trust_sessions else set())
    workspace = str(output_dir.resolve())
    found = set()
    for row in rows:
        counts = row.daemon not in but if names is None else row.daemon in names
        marked = row.workspace == workspace and row.daemon is not None and counts
        if row.identity.pid in alive or row.session in sessions or marked:
            found.add(row.identity)
    found |= _descendants(rows, {each.pid for each in found})
    me = psutil.Process()
    # A command typed in a daemon's own shell must not end itself.
    own = {process.pid for process in [me, *me.parents()]}
    return {identity for identity in found if identity.pid not in own}


def _descendants(rows: Sequence[_Row], roots: set[int]) -> set[ProcessId]:
    found: set[ProcessId] = set()
    known = set(roots)
    while new := {row.identity for row in rows if row.parent in known and row.identity.pid not in known}:
        found |= new
        known |= {identity.pid for identity in new}
    return found


def _process_table() -> Iterable[_Row]:
    for pid in psutil.pids():
        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            identity = ProcessId.of(pid)
            parent, session = process.ppid(), os.getsid(pid)
        except (psutil.Error, OSError):
            continue
        yield _Row(identity, parent, session, *_marks(process))


def _marks(process: psutil.Process) -> tuple[str | None, str | None]:
    """(workspace, daemon) of a process. One that is sealed shows no environment: then by its command."""
    with contextlib.suppress(psutil.Error, OSError):
        environ = process.environ()
        return environ.get(WORKSPACE_MARK), environ.get(DAEMON_MARK)
    with contextlib.suppress(psutil.Error, OSError):
        if process.uids().real == os.getuid():  # another user's is not ours, whatever its command line is
            return daemon_of(process.cmdline())
    return None, None


def kill_all(members: Iterable[ProcessId], *, reap: Callable[[], None] = lambda: None) -> set[ProcessId]:
    """SIGKILL all of them and wait until they are gone, up to KILL_WAIT_S; returns those that are not."""
    targets = send_kill(members)
    _wait_until_gone(targets, KILL_WAIT_S, reap)
    return {identity for identity in targets if identity.is_running()}


def end_daemons(
    output_dir: Path,
    daemons: Sequence[tuple[str, ProcessId]],
    grace_s: float,
    *,
    drain_s: float | None = None,
    tick: Callable[[], None] = lambda: None,
    trust_sessions: bool = False,
) -> set[ProcessId]:
    """End daemons side by side, and prove it.

    SIGTERM to each: it may finish what it does and save, for `drain_s` at most (None: `grace_s`). Then SIGTERM to all
    that belongs to any of them, `grace_s` to end, SIGKILL. Returns what could not be ended or still holds memory of a
    GPU. `tick` is called while it waits (to reap children and keep status files fresh).
    """
    leaders = [leader for _, leader in daemons]
    names = {name for name, _ in daemons}
    members = find_members(output_dir, leaders, names, trust_sessions=trust_sessions)
    for leader in leaders:
        leader.send(signal.SIGTERM)
    _wait_until_gone(leaders, grace_s if drain_s is None else drain_s, tick)
    members |= find_members(output_dir, leaders, names, trust_sessions=trust_sessions)
    rest = [member for member in members if member.is_running()]
    for member in rest:
        with contextlib.suppress(PermissionError):
            member.send(signal.SIGTERM)
    _wait_until_gone(rest, grace_s, tick)
    members |= find_members(output_dir, leaders, names, trust_sessions=trust_sessions)
    left = kill_all((member for member in members if member.is_running()), reap=tick)
    return left | wait_for_gpus(members, tick)


def _wait_until_gone(processes: Iterable[ProcessId], timeout_s: float, tick: Callable[[], None]) -> None:
    waiting = list(processes)

    def gone() -> bool:
        tick()
        return not any(process.is_running() for process in waiting)

    with contextlib.suppress(WaitTimeout):
        wait_for(gone, "processes to end", timeout_s=timeout_s)


def wait_for_gpus(members: Collection[ProcessId], tick: Callable[[], None] = lambda: None) -> set[ProcessId]:
    """Wait until no GPU's memory is held by one of `members`, which have ended; returns those that still hold some."""
    pids = {member.pid for member in members}
    holders: set[int] = set()

    def free() -> bool:
        tick()
        holders.clear()
        holders.update(pids & gpu_processes())
        return not holders

    with contextlib.suppress(WaitTimeout):
        wait_for(free, "the GPUs' memory to be released", timeout_s=KILL_WAIT_S, poll_s=1.0)
    return {member for member in members if member.pid in holders}


def gpu_processes() -> set[int]:
    """Pids that hold memory of a GPU, as the driver's own tool lists them; none without the tool."""
    found = nvidia_smi("--query-compute-apps=pid", "--format=csv,noheader,nounits", timeout_s=KILL_WAIT_S)
    return {int(line) for line in found.split() if line.isdigit()}


ENGINE = "local"


class Local:
    """Launcher on this machine."""

    def __init__(self, output: OutputDir) -> None:
        self.output = output
        self._children: dict[Handle, Child] = {}
        self._deadlines: dict[Handle, float] = {}
        # What was sent SIGKILL after its daemon had ended, until it is gone.
        self._killed: dict[Handle, Left] = {}

    def start(self, spec: DaemonSpec) -> Handle:
        """Raises OSError and ValueError."""
        child = spawn(spec.argv, spec.log, self.output.path, spec.name, keys=keys_of(spec, self.output))
        handle = _handle(spec.name, ProcessId.of(child.pid), new_start_id())
        self._children[handle] = OwnChild(child)
        return handle

    def look(self, handle: Handle) -> Alive | Ended:
        """`Launcher.look`. It also sends the SIGKILL for which `stop` has set the time."""
        child = self._children.get(handle)
        if handle in self._killed:
            left = self._killed[handle] = {each for each in self._killed[handle] if each.is_running()}
            if not left:
                self._forget(handle)
            return Ended(child.exit_code if child else None, left=frozenset(each.pid for each in left))
        process = _process(handle)
        if child is None:  # of an earlier supervisor
            child = self._children[handle] = AdoptedChild(process)
        if not child.lives():
            return Ended(child.exit_code)
        if time.monotonic() >= self._deadlines.get(handle, float("inf")):
            self._kill_living(handle)
        return Alive(process)

    def has_news(self) -> bool:
        """`Launcher.has_news`. Orphans of daemons are reaped on the way, and killed when they left their session."""
        end_orphans(self._sessions(), lambda session: session not in self._sessions(), patience_s=0.0)
        own = frozenset(each.pid for each, child in self._children.items() if isinstance(child, OwnChild))
        return any_ended([child for each, child in self._children.items() if each not in self._killed], own)

    def stop(self, handle: Handle, grace_s: float) -> None:
        """`Launcher.stop`. The first process gets SIGTERM; a later `look` sends SIGKILL to all of the daemon."""
        if grace_s > 0:
            deadline = time.monotonic() + grace_s
            self._deadlines[handle] = min(deadline, self._deadlines.get(handle, deadline))
            _process(handle).send(signal.SIGTERM)
        elif (child := self._children.get(handle)) is not None and child.lives():
            self._kill_living(handle)
        else:
            self._kill_rest(handle)

    def end(self, handles: Sequence[Handle], grace_s: float, drain_s: float, tick: Callable[[], None]) -> Left:
        """`Launcher.end`. Our own children are reaped at every turn of the wait."""
        return end_daemons(
            self.output.path,
            [(handle.name, _process(handle)) for handle in handles],
            grace_s,
            drain_s=drain_s,
            tick=self._reaping(tick),
            trust_sessions=all(isinstance(self._children.get(handle), OwnChild) for handle in handles),
        )

    def adopt(self, record: DaemonStatus) -> Handle | None:
        """`Launcher.adopt`; None for a start of another engine or machine."""
        handle = record.handle
        if handle is None or handle.engine != ENGINE or not is_this_boot(handle.host, handle.boot_id):
            return None
        if not _process(handle).is_running():
            return None
        # Its start by the clock as it is now, which may have been set since.
        return _handle(record.name, ProcessId.of(handle.pid), handle.start_id)

    def logs(self, handle: Handle) -> Path:
        """`Launcher.logs`: all starts of the daemon append to it."""
        return log_of(self.output, handle.name)

    def strays(self, but: Collection[str] = ()) -> set[ProcessId]:
        """`Launcher.strays`: the processes of this machine with marks of the workspace, and what they started."""
        return find_members(self.output.path, [], None, but=but)

    def kill(self, strays: Collection[ProcessId], tick: Callable[[], None]) -> Left:
        """`Launcher.kill`, and all orphans. Our own children are reaped at every turn of the wait."""
        left = kill_all(strays, reap=self._reaping(tick))
        return left | {ProcessId.of(pid) for pid in end_orphans(self._sessions())}

    def _sessions(self) -> set[int]:
        """Of the daemons, each the first process of its own."""
        return {handle.pid for handle in self._children}

    def _kill_living(self, handle: Handle) -> None:
        send_kill(find_members(self.output.path, [_process(handle)], {handle.name}))

    def _kill_rest(self, handle: Handle) -> None:
        """Kill what a dead daemon left behind in its session."""
        child = self._children.get(handle)
        is_own = isinstance(child, OwnChild)
        if child is not None:
            child.close()
        members = find_members(self.output.path, [_process(handle)], {handle.name}, trust_sessions=is_own)
        self._killed[handle] = send_kill(members)

    def _forget(self, handle: Handle) -> None:
        for known in (self._children, self._deadlines, self._killed):
            known.pop(handle, None)

    def _reaping(self, tick: Callable[[], None]) -> Callable[[], None]:
        def turn() -> None:
            for child in self._children.values():
                child.lives()
            tick()

        return turn


def _handle(name: str, process: ProcessId, start_id: str) -> Handle:
    return Handle(
        engine=ENGINE,
        name=name,
        start_id=start_id,
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid=process.pid,
        create_time=process.create_time,
        start=process.start,
        ref=f"pid {process.pid}",
    )


def _process(handle: Handle) -> ProcessId:
    return ProcessId(handle.pid, handle.create_time, handle.start)


class OwnChild:
    """A process that this one has started. Asking whether it lives also reaps it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def exit_code(self) -> int | None:
        """The exit code that the last call of `lives` found, negative for a signal; None while the process ran."""
        return self._process.returncode

    def lives(self) -> bool:
        """True when the process runs; one that has ended is reaped, which sets `exit_code`."""
        return self._process.poll() is None

    def close(self) -> None:
        """Do nothing: a child of our own needs no file to be watched."""
        pass


class AdoptedChild:
    """A process that an earlier supervisor has started. Its `exit_code` is never known."""

    exit_code: int | None = None

    def __init__(self, process: ProcessId) -> None:
        self._process = process
        self._poll = select.poll()
        self._fd: int | None = None
        with contextlib.suppress(AttributeError, OSError):  # an old kernel, or too many open files
            self._fd = os.pidfd_open(process.pid)
            self._poll.register(self._fd, select.POLLIN)
        if not process.is_running():  # its number may have gone to another before the pidfd was there
            self.close()

    def lives(self) -> bool:
        """True when the process runs: by its pidfd, else by its pid and start time."""
        return not self._poll.poll(0) if self._fd is not None else self._process.is_running()

    def close(self) -> None:
        """Close the pidfd, if it is open; `lives` goes on without it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


Child = OwnChild | AdoptedChild


def any_ended(children: Iterable[Child], own_pids: frozenset[int]) -> bool:
    """True when one of `children` has ended, in one system call for all of our own.

    Reaps other processes too: as the first process of a container this one inherits every orphan.
    """
    while (ended := _ended_child()) is not None:
        if ended in own_pids:
            return True
        with contextlib.suppress(ChildProcessError):
            os.waitpid(ended, os.WNOHANG)
    return any(isinstance(child, AdoptedChild) and not child.lives() for child in children)


def _ended_child() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found is not None else None
