"""One supervisor a house: a lock held for life decides, a pid file beside it informs.

The kernel frees the lock when its holder dies, however it dies, so a stale pid file never blocks a start. The lock is
handed from `prl up` to the supervisor as an open file, without a moment in which nobody holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import time
from pathlib import Path

import msgspec

from daemons.process import Identity
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.process import process_create_time


class SupervisorInfo(msgspec.Struct, kw_only=True):
    """`daemons/supervisor.pid`: who holds the lock, for messages and for `prl down`. Never proof by itself."""

    pid: int
    create_time: float
    boot_id: str
    host: str
    argv: list[str]
    output_dir: str
    started_at: float

    @property
    def identity(self) -> Identity:
        return Identity(self.pid, self.create_time)

    def lives_here(self) -> bool:
        return self.host == socket.gethostname() and self.boot_id == boot_id() and self.identity.lives()

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.started_at))
        where = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"pid {self.pid}{where} since {since}, output_dir {self.output_dir}"


def boot_id() -> str:
    """Changes with every boot of the machine; "" where the system tells none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class SupervisorLock:
    """The lock of one house, held until `release` or the end of every process that has it open."""

    def __init__(self, output: OutputDir, fd: int) -> None:
        self.output = output
        self.fd = fd

    @classmethod
    def acquire(cls, output: OutputDir) -> SupervisorLock | None:
        """Take the lock now, or return None when somebody holds it. Raises OSError when the house is not writable."""
        output.daemons.mkdir(parents=True, exist_ok=True)
        fd = os.open(output.supervisor_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return cls(output, fd)

    @classmethod
    def inherit(cls, output: OutputDir, fd: int) -> SupervisorLock:
        """Take over the lock from the process that started this one; our own children do not get it."""
        os.set_inheritable(fd, False)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return cls(output, fd)

    def write_info(self, started_at: float) -> None:
        """Say in the pid file that this process holds the lock."""
        info = SupervisorInfo(
            pid=os.getpid(),
            create_time=process_create_time(os.getpid()),
            boot_id=boot_id(),
            host=socket.gethostname(),
            argv=[sys.executable, *sys.argv],
            output_dir=str(self.output.path.resolve()),
            started_at=started_at,
        )
        write_atomic(self.output.supervisor_pidfile, msgspec.json.encode(info))

    def is_in_place(self) -> bool:
        """Whether the lock file is still the one we hold; a house that was removed and made anew has another."""
        try:
            return os.path.samestat(os.fstat(self.fd), self.output.supervisor_lock.stat())
        except OSError:
            return False

    def hand_over(self) -> None:
        """Close our copy; the process that inherited the lock keeps it."""
        os.close(self.fd)

    def release(self) -> None:
        if self.is_in_place():
            self.output.supervisor_pidfile.unlink(missing_ok=True)
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        os.close(self.fd)


def read_info(output: OutputDir) -> SupervisorInfo | None:
    """The pid file, or None when there is none or it is damaged."""
    try:
        return msgspec.json.decode(output.supervisor_pidfile.read_bytes(), type=SupervisorInfo)
    except (OSError, msgspec.MsgspecError):
        return None
