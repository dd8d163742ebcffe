"""The processes that belong to daemons of this machine: found, and ended with proof.

A daemon is known by pid and start time, never by pid alone. What belongs to it is found three ways: same session,
descendants, and the marks in the environment (`process`), which children inherit. The environment of a process that
holds a key cannot be read: `specs` tells what its command line means.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from daemons.process import DAEMON_MARK, KILL_WAIT_S, WORKSPACE_MARK
from daemons.specs import daemon_of
from prime_rl.contract.files import DEFAULT_POLL_S, WaitTimeout, wait_for
from prime_rl.utils.process import ProcessId

# The mark of the version before: an updated supervisor still finds what the old one started.
_OLD_DAEMON_MARK = "PRL_PART"


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
        return environ.get(WORKSPACE_MARK), environ.get(DAEMON_MARK, environ.get(_OLD_DAEMON_MARK))
    with contextlib.suppress(psutil.Error, OSError):
        if process.uids().real == os.getuid():  # another user's is not ours, whatever its command line is
            return daemon_of(process.cmdline())
    return None, None


def send_kill(members: Iterable[ProcessId]) -> set[ProcessId]:
    """SIGKILL all of them, and wait for none; returns them. Those of other users are left alone."""
    targets = set(members)
    for identity in targets:
        with contextlib.suppress(PermissionError):
            identity.send(signal.SIGKILL)
    return targets


def kill_all(members: Iterable[ProcessId], *, reap: Callable[[], None] = lambda: None) -> set[ProcessId]:
    """SIGKILL all of them and wait until they are gone, up to KILL_WAIT_S; returns those that are not."""
    targets = send_kill(members)

    def gone() -> bool:
        reap()
        return not any(identity.is_running() for identity in targets)

    with contextlib.suppress(WaitTimeout):
        wait_for(gone, "killed processes to be gone", timeout_s=KILL_WAIT_S)
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
        wait_for(gone, "processes to end after SIGTERM", timeout_s=timeout_s, poll_s=DEFAULT_POLL_S)


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
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return set()
    command = [tool, "--query-compute-apps=pid", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=KILL_WAIT_S, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return set()
    return {int(line) for line in done.stdout.split() if line.isdigit()}
