"""One supervisor per workspace: a lock held for life decides, a pid file beside it informs.

The kernel frees the lock when its holder dies, however it dies, so a stale pid file never blocks a start. The lock is
handed from `prl up` to the supervisor as an open file, so it is held without a gap.

On a folder that several machines share, each machine may grant the lock separately. So a pid file that names another
machine counts while that supervisor's heartbeat moves, by the time that passes here and by no clock of the
other; and a holder whose pid file now names another has lost the workspace.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable

import msgspec

from prime_rl.contract.files import WaitTimeout, open_lock, read_json, read_text, wait_for, write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import HEARTBEAT_S, MAX_STATUS_BYTES
from prime_rl.utils.process import ProcessId, boot_id

# Two heartbeats, and the time that a shared folder may take to show one.
RIVAL_S = 2.5 * HEARTBEAT_S
# Of a dead holder's threads, and of a child that it was starting: they let go of the lock as they end.
_LAST_HOLD_S = 5.0


class SupervisorInfo(msgspec.Struct, kw_only=True):
    """`daemons/supervisor.pid`: the holder of the lock, for messages and for `prl down`. Never proof by itself."""

    pid: int
    create_time: float
    boot_id: str
    host: str
    argv: list[str]
    output_dir: str
    started_at: float
    start: str = ""

    @property
    def process(self) -> ProcessId:
        """The process that wrote the file, for signals; on another machine it means nothing."""
        return ProcessId(self.pid, self.create_time, self.start)

    def lives_here(self) -> bool:
        """True when the holder still runs; false for one of another machine or an earlier boot."""
        return self.is_of_here() and self.process.is_running()

    def is_of_here(self) -> bool:
        """True when the holder was started on this machine since it booted."""
        return is_this_boot(self.host, self.boot_id)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.started_at))
        where = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"pid {self.pid}{where} since {since}, output_dir {self.output_dir}"


def is_this_boot(host: str, boot: str) -> bool:
    """True when pids that were written down on `host` since its boot `boot` can be those of processes here."""
    return host == socket.gethostname() and boot == boot_id()


def _is_taken(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def find_rival(
    output: OutputDir,
    *,
    patience_s: float = RIVAL_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> SupervisorInfo | None:
    """The supervisor of another machine that has this workspace and lives, or None.

    Only when the pid file names another machine does this take time: until its heartbeat moves, or `patience_s`.
    """
    info = read_info(output)
    if info is None or info.host == socket.gethostname():
        return None
    path = output.daemon_status("supervisor")
    before = read_text(path)
    try:
        wait_for(
            lambda: read_text(path) != before,
            f"a heartbeat of the supervisor on {info.host}",
            timeout_s=patience_s,
            poll_s=0.25,
            clock=clock,
            sleep=sleep,
        )
    except WaitTimeout:
        return None
    return read_info(output)


class SupervisorLock:
    """The lock of one workspace, held until `release` or the end of every process that has it open."""

    def __init__(self, output: OutputDir, fd: int) -> None:
        self.output = output
        self.fd = fd
        self._is_claimed = False
        self._info: SupervisorInfo | None = None
        self._info_stat: os.stat_result | None = None

    @classmethod
    def acquire(cls, output: OutputDir) -> SupervisorLock | None:
        """Take the lock, or return None when another process holds it; waits only for the rest of a dead holder.

        Raises OSError when the workspace is not writable.
        """
        output.daemons.mkdir(parents=True, exist_ok=True)
        fd = open_lock(output.supervisor_lock)
        deadline = time.monotonic() + _LAST_HOLD_S
        while not _is_taken(fd):
            info = read_info(output)
            if info is None or info.lives_here() or not info.is_of_here() or time.monotonic() > deadline:
                os.close(fd)
                return None
            time.sleep(0.02)
        return cls(output, fd)

    @classmethod
    def inherit(cls, output: OutputDir, fd: int) -> SupervisorLock:
        """Take over the lock from the process that started this one; our own children do not get it."""
        os.set_inheritable(fd, False)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return cls(output, fd)

    def write_info(self, started_at: float) -> None:
        """Write into the pid file that this process holds the lock."""
        process = ProcessId.of(os.getpid())
        info = SupervisorInfo(
            pid=process.pid,
            create_time=process.create_time,
            start=process.start,
            boot_id=boot_id(),
            host=socket.gethostname(),
            argv=[sys.executable, *sys.argv],
            output_dir=str(self.output.path.resolve()),
            started_at=started_at,
        )
        write_atomic(self.output.supervisor_pidfile, msgspec.json.encode(info))
        self._info, self._info_stat = info, None
        self.claim()

    def claim(self) -> None:
        """Have `release` remove the pid file: it is ours, no other supervisor has this workspace."""
        self._is_claimed = True

    def is_in_place(self) -> bool:
        """True when the workspace is still ours: we hold the lock file, and no other supervisor wrote the pid file.

        A workspace that was removed and created again has another lock file.
        """
        try:
            same = os.path.samestat(os.fstat(self.fd), self.output.supervisor_lock.stat())
        except OSError as error:
            return error.errno == errno.EIO  # a disk that fails has not lost the workspace
        return same and self._is_signed()

    def _is_signed(self) -> bool:
        """True when the pid file, if there is one, is what we wrote. It is read only when it has changed."""
        try:
            now = self.output.supervisor_pidfile.stat()
        except OSError:
            return True
        if self._info is None or (self._info_stat is not None and os.path.samestat(now, self._info_stat)):
            return True
        found = read_info(self.output)
        if found is not None and found != self._info:
            return False
        self._info_stat = now
        return True

    def hand_over(self) -> None:
        """Close our copy; the process that inherited the lock keeps it."""
        os.close(self.fd)

    def release(self) -> None:
        """Unlock the workspace; removes the pid file first where it was claimed and is still ours."""
        if self._is_claimed and self.is_in_place():
            self.output.supervisor_pidfile.unlink(missing_ok=True)
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        os.close(self.fd)


def read_info(output: OutputDir) -> SupervisorInfo | None:
    """The pid file, or None when it is missing or damaged."""
    return read_json(output.supervisor_pidfile, SupervisorInfo, limit=MAX_STATUS_BYTES)
