"""A workspace stops on this machine: its supervisor first, then what is left of its daemons, and proof that none is.

What people ask for is `up_and_down`; a Slurm job is ended by `submit`.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

from daemons.launchers import launcher_of
from daemons.launchers.base import LaunchError
from daemons.leftovers import end_leftovers, is_anything_left
from daemons.pidfile import SupervisorLock, find_rival, read_info
from daemons.specs import saved_system
from daemons.workspace import SUPERVISOR
from prime_rl.configs.system import SupervisorConfig
from prime_rl.contract.condition import stall_text, stalled_since
from prime_rl.contract.files import WaitTimeout, wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import DaemonStatus, read_status
from prime_rl.utils.process import ProcessId


def down(
    output: OutputDir,
    *,
    timeout_s: float | None,
    say: Callable[[str], None],
    supervisor: subprocess.Popen[bytes] | None = None,
) -> bool:
    """Stop everything of a workspace and prove it; false when nothing was running. Raises LaunchError.

    Args:
        timeout_s: how long a living supervisor may take; then it is killed and its daemons are ended from here. None:
            as long as the workspace's own limits allow its daemons.
        supervisor: our own child, if it is one, to be reaped.
    """
    if not output.daemons.is_dir():
        return False
    limits = saved_system(output).supervisor
    lock = SupervisorLock.acquire(output)
    was_running = lock is None
    if lock is None:
        lock = _stop_supervisor(output, down_timeout_s(limits) if timeout_s is None else timeout_s, say, supervisor)
    try:
        refuse_rival(output)
        lock.claim()
        if timeout_s is not None:
            drain_s, grace_s = min(limits.drain_s, timeout_s), min(limits.grace_s, timeout_s)
            limits = limits.replace(drain_s=drain_s, grace_s=grace_s)
        launcher = launcher_of(saved_system(output).deployment, output)
        was_running = was_running or is_anything_left(output, launcher)
        left = end_leftovers(output, launcher, limits, say)
        if left:
            raise LaunchError(f"cannot end processes {left} (SIGKILL was sent): they hang in the kernel")
        return was_running
    finally:
        lock.release()


def down_timeout_s(limits: SupervisorConfig) -> float:
    """Orchestrators, trainer and monitors may finish, all may need the grace, and a margin."""
    return 2 * limits.drain_s + 5 * limits.grace_s + 30.0


def refuse_rival(output: OutputDir) -> None:
    """Raises LaunchError while a supervisor on another machine has this workspace."""
    rival = find_rival(output)
    if rival is not None:
        raise LaunchError(f"already running: {rival}; stop it with prl down on {rival.host}")


def _stop_supervisor(
    output: OutputDir, timeout_s: float, say: Callable[[str], None], child: subprocess.Popen[bytes] | None
) -> SupervisorLock:
    taken: list[SupervisorLock] = []

    def free() -> bool:
        if child is not None:
            child.poll()
        lock = SupervisorLock.acquire(output)
        taken.extend([lock] if lock else [])
        return lock is not None

    holder = ProcessId.of(child.pid) if child is not None else _holder(output)
    say(f"stopping the supervisor (pid {holder.pid})")
    status = read_status(output.daemon_status(SUPERVISOR), DaemonStatus)
    if status is not None and status.writer.is_same(holder) and (since := stalled_since(status)) is not None:
        timeout_s = min(timeout_s, saved_system(output).supervisor.grace_s)
        say(f"it is stalled, {stall_text(since)}: it has {timeout_s:g} s to stop")
    holder.send(signal.SIGTERM)
    holder.send(signal.SIGCONT)  # one that was stopped meets the signal once it is continued
    try:
        wait_for(free, "the supervisor to stop", timeout_s=timeout_s)
    except WaitTimeout:
        say(f"it did not stop within {timeout_s:g} s: SIGKILL")
        holder.send(signal.SIGKILL)

    def gone() -> bool:
        return bool(taken or free()) and not holder.is_running() and (child is None or child.poll() is not None)

    try:
        wait_for(gone, "the supervisor to be gone", timeout_s=10.0)
    except WaitTimeout as error:
        for lock in taken:
            lock.release()
        raise LaunchError(f"cannot end the supervisor (pid {holder.pid}): {error}") from error
    return taken[0]


def _holder(output: OutputDir) -> ProcessId:
    """The supervisor that the pid file names, if it can be ended from here."""
    info = read_info(output)
    if info is None:
        raise LaunchError(
            f"an unknown process holds {output.supervisor_lock}: find it with fuser {output.supervisor_lock} and end it"
        )
    if not info.lives_here():
        raise LaunchError(f"the supervisor runs on another machine or is unknown ({info}): run prl down there")
    if info.pid == os.getpid():  # the console, whose other thread starts the workspace
        raise LaunchError("the workspace is being started here: stop it when it is up")
    return info.process
