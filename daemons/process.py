"""Start a daemon in its own session, and end all of it: also what it started, also after its parent died.

A daemon is known by pid and start time, never by pid alone. What belongs to it is found three ways: same session,
descendants, and the marks `PRL_OUTPUT_DIR` and `PRL_DAEMON` in the environment, which children inherit. `decide`
chooses what is started and ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from prime_rl.contract.files import DEFAULT_POLL_S, WaitTimeout, make_folder, open_append, read_end, wait_for
from prime_rl.utils.process import ProcessId
from prime_rl.utils.secrets import handed_over

WORKSPACE_MARK = "PRL_OUTPUT_DIR"
DAEMON_MARK = "PRL_DAEMON"
# The mark of the version before: an updated supervisor still finds what the old one started.
_OLD_DAEMON_MARK = "PRL_PART"
# After SIGKILL the kernel needs moments; more means a process that hangs in the kernel (a dead file server).
KILL_WAIT_S = 10.0
CHILD_POLL_S = 0.1


def daemon_environment(output_dir: Path, name: str) -> dict[str, str]:
    """Environment of a daemon before keys are taken out: ours and the marks.

    SPT_NOENV: a changed process title must not overwrite the marks.
    """
    marks = {WORKSPACE_MARK: str(output_dir.resolve()), DAEMON_MARK: name}
    return {**os.environ, **marks, "SPT_NOENV": "1", "PYTHONUNBUFFERED": "1"}


def spawn(
    argv: Sequence[str],
    log: Path,
    output_dir: Path,
    name: str,
    *,
    pass_fds: Collection[int] = (),
    keys: Collection[str] = (),
) -> subprocess.Popen[bytes]:
    """Start `argv` in a new session, without a terminal, with its output appended to `log`.

    `keys` names the variables whose API keys it is handed, in files without a name; it gets no others.

    Raises OSError (FileRefused when the log or its folder is something else); the log's folder is made but not its
    parents, so the folder of a deleted run is not made again.
    """
    make_folder(log.parent)
    environ = daemon_environment(output_dir, name)
    with open_append(log) as output, handed_over(environ, keys) as (environ, key_fds):
        output.write(log_header(name, argv).encode())
        output.flush()
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environ,
            pass_fds=(*pass_fds, *key_fds),
        )


_HEADER = "=== start of "


def log_header(name: str, argv: Sequence[str]) -> str:
    return f"{_HEADER}{name} at {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}: {' '.join(argv)}\n"


def log_tail(log: Path, num_lines: int = 20, *, limit: int = 64_000, this_start_only: bool = True) -> list[str]:
    """The last lines of a log, of its last start only; [] without a log. Reads at most `limit` bytes."""
    try:
        lines = read_end(log, limit).decode(errors="replace").splitlines()
    except OSError:
        return []
    if this_start_only:
        starts = [number for number, line in enumerate(lines) if line.startswith(_HEADER)]
        lines = lines[starts[-1] + 1 :] if starts else lines
    return lines[-num_lines:] if num_lines else []


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
    own = _own_line()
    return {identity for identity in found if identity.pid not in own}


def _descendants(rows: Sequence[_Row], roots: set[int]) -> set[ProcessId]:
    found: set[ProcessId] = set()
    known = set(roots)
    while new := {row.identity for row in rows if row.parent in known and row.identity.pid not in known}:
        found |= new
        known |= {identity.pid for identity in new}
    return found


def _own_line() -> set[int]:
    """This process and its ancestors: a command typed in a daemon's own shell must not end itself."""
    me = psutil.Process()
    return {process.pid for process in [me, *me.parents()]}


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
        try:
            environ = process.environ()
        except (psutil.Error, OSError):
            environ = {}
        yield _Row(
            identity,
            parent,
            session,
            environ.get(WORKSPACE_MARK),
            environ.get(DAEMON_MARK, environ.get(_OLD_DAEMON_MARK)),
        )


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
        done = subprocess.run(command, capture_output=True, text=True, timeout=KILL_WAIT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return set()
    return {int(line) for line in done.stdout.split() if line.isdigit()}


def run_child(argv: Sequence[str], stop: Callable[[], bool], **options: Any) -> int | None:
    """Run `argv` to its end and return its exit code; None when `stop()` came first, which ends it.

    Args:
        options: of `subprocess.Popen`.
    """
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, **options)
    try:
        while child.poll() is None and not stop():
            time.sleep(CHILD_POLL_S)
    finally:
        if child.poll() is None:
            child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=KILL_WAIT_S)
        if child.poll() is None:
            child.kill()
            child.wait()
    return None if stop() else child.returncode


def python_module(module: str, *args: str) -> list[str]:
    """argv of `python -m module args`, with this very interpreter."""
    return [sys.executable, "-m", module, *args]
